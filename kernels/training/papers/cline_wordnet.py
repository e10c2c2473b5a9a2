"""Read a WordNet database, find replacements of words in it, and find the parts of speech of words."""
import functools
import os
import re
from pathlib import Path

from ..errors import fail

# Function words that WordNet also lists as nouns, verbs, adjectives or adverbs ("he" for helium). --tagger
# lexicon, which looks up parts of speech in WordNet, keeps these words as they are.
FUNCTION_WORDS = frozenset("""a about above across after all along am an another any are around as at be been
before behind being below beneath beside besides between beyond both but by can despite did do does doing done
down each eight either eleven every except few five four had has have having he here hundred i in inside is it
its least less like many may me might million mine more most much must near neither nine no none not off on
one or other out outside over past same seven several six so some such ten then there though thousand three
through throughout till twelve two under up us was were whatever while who why will within yet zero
""".split())
POS_NAMES = dict(NOUN="noun", VERB="verb", ADJ="adj", ADV="adv")              # {spaCy's name: WordNet's name}
WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*|[^\w\s]|_")
EXPECTED_FOLDER = "expected the folder of a WordNet database"
COPY_AGAIN = "the database is damaged; copy it again"


class WordNet:
    """A WordNet database in Princeton's format.

    folder      holds data.noun, data.verb, data.adj, data.adv and, optionally, irregular forms (noun.exc ...)
    synsets     sets of synonyms: {(part of speech, offset in its data file): (words, {"@": pointers to
                hypernyms, "!": pointers to antonyms})}
    senses      {part of speech: {lemma (base form): keys in `synsets`}}
    lemma_of    {part of speech: {irregular form: its lemmas}}
    forms_of    {part of speech: {lemma: its irregular forms}}
    words       sorted list of lower-case words, used as random replacements
    """
    POS_BY_LETTER = dict(n="noun", v="verb", a="adj", s="adj", r="adv")     # the keys are letters in pointers
    # "ses-s": if a word ends in "ses", its lemma may end in "s" instead (as in WordNet's morphy)
    ENDINGS = dict(noun="s- ses-s ves-f xes-x zes-z ches-ch shes-sh men-man ies-y",
                   verb="s- ies-y es-e es- ed-e ed- ing-e ing-", adj="er- est- er-e est-e", adv="")
    # {part of speech: (pattern, {ending: pattern})}. A lemma without irregular forms gets the endings only if
    # it matches the first pattern ("news" and "beautiful" do not match). A lemma with irregular forms gets an
    # ending only if none of them matches the ending's pattern: "went" matches "[^s]$", so there is no "goed".
    REGULAR_FORMS = dict(noun=("([^s]|[isu]s)$", {"s": ""}),
                   verb=("", {"es": "s$", "ing": "ing$", "ed": "[^s]$"}),
                   adj=("^[^aeiouy]*[aeiouy]+[^aeiouy]+e?$", {"er": "(?<!st)$", "est": "st$"}), adv=("", {}))

    def __init__(self, folder):
        self.folder, self.synsets = Path(folder), {}
        self.senses = {pos: {} for pos in self.ENDINGS}
        self.lemma_of = {pos: {} for pos in self.ENDINGS}
        self.forms_of = {pos: {} for pos in self.ENDINGS}
        for pos in self.ENDINGS:
            self.read_file(f"data.{pos}", self.add_synset, pos)
            self.read_file(f"{pos}.exc", self.add_irregular, pos)
            if not self.senses[pos]:
                fail(f"--wordnet {folder}: data.{pos} is empty; {EXPECTED_FOLDER}")
        self.check_pointers()
        words = (word for words, _ in self.synsets.values() for word in words)
        self.words = sorted({word for word in words if word.isalpha() and word.islower()})

    def check_pointers(self):
        """Raise UserError if a pointer's target is missing, as in a file cut off after a complete line."""
        for (pos, offset), (_, targets) in self.synsets.items():
            for key, number in targets["@"] + targets["!"]:
                if key not in self.synsets or not 0 <= number <= len(self.synsets[key][0]):
                    fail(f"{self.folder / f'data.{pos}'}: synset {offset:08} points to word {number} of "
                         f"{key[1]:08} in data.{key[0]}, which does not exist; {COPY_AGAIN}")

    def read_file(self, name, add, pos):
        """Call add(line, byte offset of the line, pos) for each line of a file. A *.exc file is optional."""
        path, offset = self.folder / name, 0
        if not os.path.lexists(path):
            if not name.startswith("data."):
                return
            fail(f"--wordnet {self.folder}: {name}: No such file or directory; {EXPECTED_FOLDER}")
        with open(path, "rb") as file:
            for i, line in enumerate(file, 1):
                try:
                    add(line.decode(), offset, pos)
                except (ValueError, IndexError, KeyError):
                    fail(f"{path} line {i}: not a valid line of a WordNet database; {COPY_AGAIN}")
                offset += len(line)

    def add_synset(self, line, offset, pos):
        """Add the synset of a line of a data file. For example, in

            00358432 00 a 02 hot 0 torrid 1 001 ! 00363100 a 0101 | gloss

        the synset has 02 words, hot and torrid, and 001 pointer. This pointer leads from word 01 (hot) to
        word 01 of the adjective synset 00363100, which is the antonym (!) of hot.
        """
        if line.startswith("  "):                              # the line belongs to the licence
            return
        fields = line.split(" | ")[0].split()
        size = 4 + 2 * int(fields[3], 16)
        words = [re.sub(r"\(\w+\)$", "", word).replace("_", " ") for word in fields[4:size:2]]
        pointers = fields[size + 1 : size + 1 + 4 * int(fields[size])]
        if int(fields[0]) != offset or len(pointers) != 4 * int(fields[size]) or not line.endswith("\n"):
            raise ValueError
        # {"@": hypernyms, "!": antonyms}: lists of (key of a synset, number of a word in it; 0: all words)
        targets = {"@": [], "!": []}
        for i in range(0, len(pointers), 4):
            symbol, other, letter, numbers = pointers[i : i + 4]
            if symbol in targets:
                targets[symbol].append(((self.POS_BY_LETTER[letter], int(other)), int(numbers[2:], 16)))
        self.synsets[pos, offset] = words, targets
        for word in words:
            self.senses[pos].setdefault(word.lower(), []).append((pos, offset))

    def add_irregular(self, line, _, pos):
        """Add the irregular form of a line such as "went go": first the form, then its lemmas."""
        form, *lemmas = (word.replace("_", " ") for word in line.split())
        self.lemma_of[pos][form] = lemmas
        for lemma in lemmas:
            self.forms_of[pos].setdefault(lemma, []).append(form)

    @functools.cache
    def lemmas(self, word, pos):
        """Return the possible lemmas (base forms) of a word: ["dog"] for "dogs"."""
        forms = self.lemma_of[pos].get(word)
        if forms is None:
            endings = (pair.split("-") for pair in self.ENDINGS[pos].split())
            forms = [word.removesuffix(old) + new for old, new in endings if word.endswith(old)]
        return [form for form in dict.fromkeys([word, *forms]) if form in self.senses[pos]]

    @functools.cache
    def part_of_speech(self, word):
        """Return the part of speech with the most senses of a word; None for function or unknown words."""
        if word in FUNCTION_WORDS or word.upper() == word:
            return None
        senses = {pos: sum(len(self.senses[pos][lemma]) for lemma in self.lemmas(word, pos))
                  for pos in self.ENDINGS}
        return max(senses, key=senses.get) if any(senses.values()) else None

    def inflections(self, lemma, pos):
        """Return a set: a lemma, its irregular forms in WordNet, and its regular forms (REGULAR_FORMS)."""
        irregular = self.forms_of[pos].get(lemma, [])
        has_regular_forms, endings = self.REGULAR_FORMS[pos]
        if not irregular and not re.search(has_regular_forms, lemma):
            return {lemma}
        missing = (ending for ending, replaced_by in endings.items()
                   if not any(re.search(replaced_by, form) for form in irregular))
        return {lemma, *irregular, *(inflect(lemma, ending) for ending in missing)}

    @functools.cache
    def replacements(self, kind, word, pos):
        """Return the sorted words that may replace a word.

        kind   "synonym", "hypernym", "antonym", "inflected" (other forms of the word) or "random" (any word)
        word   the word to replace, in lower case
        pos    part of speech of the word to replace
        """
        if kind == "random":
            return self.words
        lemmas = self.lemmas(word, pos)
        if kind == "inflected":
            return sorted(set().union(*(self.inflections(lemma, pos) for lemma in lemmas)) - {word})
        synsets = [self.synsets[key] for lemma in lemmas for key in self.senses[pos][lemma]]
        if kind == "hypernym":
            synsets = [self.synsets[key] for _, targets in synsets for key, _ in targets["@"]]
        found = {other for words, _ in synsets for other in words}
        if kind == "antonym":                                  # antonyms of the word or of a synonym
            pointers = (pointer for _, targets in synsets for pointer in targets["!"])
            found = {self.synsets[key][0][number - 1] for key, number in pointers if number}
        return sorted(other for other in found if other.lower() not in (word, *lemmas))


def inflect(word, ending):
    """Add an ending to a word by the regular rules: "try" and "es" give "tries", "wide" and "er" give
    "wider"."""
    if ending == "ing":
        return re.sub("([^eoy])e$", r"\1", word) + ending
    if ending in ("s", "es"):                                  # s means a noun (photos), es a verb (echoes)
        word = re.sub("([^aeiou])y$", r"\1ie", word)
        takes_es = "(s|x|z|ch|sh)$" if ending == "s" else "(s|x|z|ch|sh|[^aeiou]o)$"
        return word + ("es" if re.search(takes_es, word) else "s")
    return (word[:-1] if word.endswith("e") else re.sub("([^aeiou])y$", r"\1i", word)) + ending


def load_tagger(args):
    """Load spaCy's tagger. Return None with --tagger lexicon. If spaCy or its model is missing, raise
    UserError with --tagger, and return None without --tagger. Set args.tagger to the tagger's name."""
    if args.tagger == "lexicon":
        return None
    try:
        import spacy
        tagger = spacy.load(args.tagger or "en_core_web_sm", exclude=["parser", "ner", "lemmatizer"])
    except (ImportError, OSError) as error:                    # spaCy or the model is not installed
        if args.tagger:
            found = f"--tagger {args.tagger}: {error}".splitlines()[0][:150]
            fail(f"{found}; install it, or use --tagger lexicon")
        args.tagger = "lexicon"
        return None
    args.tagger = f"{tagger.meta['lang']}_{tagger.meta['name']} {tagger.meta['version']}"
    return tagger


def tag_words(texts, tagger, wordnet):
    """Yield for each text [(start, end, part of speech)] of its words and punctuation marks. The part of
    speech is None for words and marks that may not be replaced."""
    if tagger:
        for doc in tagger.pipe(texts):
            words = (word for word in doc if not word.is_space)
            yield [(word.idx, word.idx + len(word), POS_NAMES.get(word.pos_)) for word in words]
        return
    for text in texts:
        tagged = []
        for word in WORD.finditer(text):
            lower = word.group().lower()
            is_name = tagged and word.group() != lower         # a capitalised later word is likely a name
            tagged.append((*word.span(), None if is_name else wordnet.part_of_speech(lower)))
        yield tagged
