"""A WordNet database: the words that can replace a word, and which words of a text are such words."""
import functools
import os
import re
from pathlib import Path

from ..cli import fail
from ..files import opened, pieces

# Words of other parts of speech that WordNet has as nouns, verbs, adjectives or adverbs: "he" is helium.
CLOSED = frozenset("""a about above across after all along am an another any are around as at be been before
behind being below beneath beside besides between beyond both but by can despite did do does doing done down
each eight either eleven every except few five four had has have having he here hundred i in inside is it its
least less like many may me might million mine more most much must near neither nine no none not off on one or
other out outside over past same seven several six so some such ten then there though thousand three through
throughout till twelve two under up us was were whatever while who why will within yet zero""".split())
COARSE = dict(NOUN="noun", VERB="verb", ADJ="adj", ADV="adv")  # spaCy's names, WordNet's
WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*|[^\w\s]|_")
WANTED = "wanted the folder of a WordNet database"
DAMAGED = "is damaged, copy it anew"


class WordNet:
    """A database in Princeton's format.

    folder    holds data.noun, data.verb, data.adj, data.adv and, if any, their .exc of irregular forms
    synsets   {(part of speech, offset in its file): (words, pointers to hypernyms "@" and antonyms "!")}
    """
    LETTERS = dict(n="noun", v="verb", a="adj", s="adj", r="adv")              # in pointers
    # The end of a form, and what its lemma has there: WordNet's morphy.
    ENDINGS = dict(noun="s- ses-s ves-f xes-x zes-z ches-ch shes-sh men-man ies-y",
                   verb="s- ies-y es-e es- ed-e ed- ing-e ing-", adj="er- est- er-e est-e", adv="")
    # Lemmas with regular forms (not "news", not "beautiful"), their endings, and known forms that stand for a
    # regular one.
    REGULAR = dict(noun=("([^s]|[isu]s)$", {"s": ""}),
                   verb=("", {"es": "s$", "ing": "ing$", "ed": "[^s]$"}),
                   adj=("^[^aeiouy]*[aeiouy]+[^aeiouy]+e?$", {"er": "(?<!st)$", "est": "st$"}), adv=("", {}))

    def __init__(self, folder):
        self.folder, self.synsets = Path(folder), {}
        self.senses, self.lemma_of, self.forms_of = ({pos: {} for pos in self.ENDINGS} for _ in range(3))
        for pos in self.ENDINGS:
            self.read_file(f"data.{pos}", self.add_synset, pos)
            self.read_file(f"{pos}.exc", self.add_irregular, pos)
            if not self.senses[pos]:
                fail(f"--wordnet {folder}: data.{pos} is empty; {WANTED}")
        self.check_pointers()
        words = (word for words, _ in self.synsets.values() for word in words)
        self.words = sorted({word for word in words if word.isalpha() and word.islower()})

    def check_pointers(self):
        """Fail if a pointer leads nowhere: a file that was cut between two lines looks whole otherwise."""
        for (pos, offset), (_, targets) in self.synsets.items():
            for key, number in targets["@"] + targets["!"]:
                if key not in self.synsets or not 0 <= number <= len(self.synsets[key][0]):
                    fail(f"{self.folder / f'data.{pos}'}: synset {offset:08} points to word {number} of "
                         f"{key[1]:08} in data.{key[0]}, which is not there; the database {DAMAGED}")

    def read_file(self, name, add, pos):
        """Call add(line, offset, pos) for each line of a file. Files of irregular forms may be missing."""
        path, offset = self.folder / name, 0
        if not os.path.lexists(path):
            if not name.startswith("data."):
                return
            fail(f"--wordnet {self.folder}: {name}: No such file or directory; {WANTED}")
        with opened(path) as file:
            for i, line in enumerate(pieces(file), 1):
                try:
                    add(line.decode(), offset, pos)
                except (ValueError, IndexError, KeyError):
                    fail(f"{path} line {i}: not what a WordNet database has at this place; it {DAMAGED}")
                offset += len(line)

    def add_synset(self, line, offset, pos):
        """00358432 00 a 02 hot 0 torrid 1 001 ! 00363100 a 0101 | gloss: two words, one pointer, from the
        first of them to the first of another synset."""
        if line.startswith("  "):                              # the licence
            return
        fields = line.split(" | ")[0].split()
        size = 4 + 2 * int(fields[3], 16)
        words = [re.sub(r"\(\w+\)$", "", word).replace("_", " ") for word in fields[4:size:2]]
        pointers = fields[size + 1 : size + 1 + 4 * int(fields[size])]
        if int(fields[0]) != offset or len(pointers) != 4 * int(fields[size]) or not line.endswith("\n"):
            raise ValueError
        targets = {"@": [], "!": []}  # hypernyms, antonyms: (synset, number of its word, 0 for all)
        for symbol, other, letter, numbers in zip(*[iter(pointers)] * 4):
            if symbol in targets:
                targets[symbol].append(((self.LETTERS[letter], int(other)), int(numbers[2:], 16)))
        self.synsets[pos, offset] = words, targets
        for word in words:
            self.senses[pos].setdefault(word.lower(), []).append((pos, offset))

    def add_irregular(self, line, _, pos):
        """went go"""
        form, *lemmas = (word.replace("_", " ") for word in line.split())
        self.lemma_of[pos][form] = lemmas
        for lemma in lemmas:
            self.forms_of[pos].setdefault(lemma, []).append(form)

    @functools.cache
    def lemmas(self, word, pos):
        """The lemmas that a word may be a form of: "dogs" of "dog"."""
        forms = self.lemma_of[pos].get(word)
        if forms is None:
            endings = (pair.split("-") for pair in self.ENDINGS[pos].split())
            forms = [word.removesuffix(old) + new for old, new in endings if word.endswith(old)]
        return [form for form in dict.fromkeys([word, *forms]) if form in self.senses[pos]]

    @functools.cache
    def part_of_speech(self, word):
        """The part of speech with most senses; None for words of closed classes and for unknown words."""
        if word in CLOSED or word.upper() == word:
            return None
        senses = {pos: sum(len(self.senses[pos][lemma]) for lemma in self.lemmas(word, pos))
                  for pos in self.ENDINGS}
        return max(senses, key=senses.get) if any(senses.values()) else None

    def inflections(self, lemma, pos):
        """A lemma and its forms: WordNet's irregular ones, else regular ones."""
        known, (fits, endings) = self.forms_of[pos].get(lemma, []), self.REGULAR[pos]
        if not known and not re.search(fits, lemma):
            return {lemma}
        missing = (ending for ending, kind in endings.items()
                   if not any(re.search(kind, form) for form in known))
        return {lemma, *known, *(inflect(lemma, ending) for ending in missing)}

    @functools.cache
    def options(self, kind, word, pos):
        """The sorted words that may replace a word (in lower case): its "synonym", "hypernym", "antonym" or
        "inflected" words, or all words for "random"."""
        if kind == "random":
            return self.words
        lemmas = self.lemmas(word, pos)
        if kind == "inflected":
            return sorted(set().union(*(self.inflections(lemma, pos) for lemma in lemmas)) - {word})
        synsets = [self.synsets[key] for lemma in lemmas for key in self.senses[pos][lemma]]
        if kind == "hypernym":
            synsets = [self.synsets[key] for _, targets in synsets for key, _ in targets["@"]]
        found = {other for words, _ in synsets for other in words}
        if kind == "antonym":                                  # of any word of the synsets
            pointers = (pointer for _, targets in synsets for pointer in targets["!"])
            found = {self.synsets[key][0][number - 1] for key, number in pointers if number}
        return sorted(other for other in found if other.lower() not in (word, *lemmas))


def inflect(word, ending):
    """The regular form of a word: tries, trying, tried, wider. WordNet lists the irregular ones."""
    if ending == "ing":
        return re.sub("([^eoy])e$", r"\1", word) + ending
    if ending in ("s", "es"):                                  # of nouns, of verbs: photos, echoes
        word = re.sub("([^aeiou])y$", r"\1ie", word)
        hisses = "(s|x|z|ch|sh)$" if ending == "s" else "(s|x|z|ch|sh|[^aeiou]o)$"
        return word + ("es" if re.search(hisses, word) else "s")
    return (word[:-1] if word.endswith("e") else re.sub("([^aeiou])y$", r"\1i", word)) + ending


def load_tagger(args):
    """spaCy's tagger, or None for WordNet's parts of speech. Sets args.tagger to its name."""
    if args.tagger == "lexicon":
        return None
    try:
        import spacy
        tagger = spacy.load(args.tagger or "en_core_web_sm", exclude=["parser", "ner", "lemmatizer"])
    except (ImportError, OSError) as error:                    # spaCy is missing, or the model is
        if args.tagger:
            found = f"--tagger {args.tagger}: {error}".splitlines()[0][:150]
            fail(f"{found}; install it, or take lexicon")
        args.tagger = "lexicon"
        return None
    args.tagger = f"{tagger.meta['lang']}_{tagger.meta['name']} {tagger.meta['version']}"
    return tagger


def tag_words(texts, tagger, wordnet):
    """Yield each text's words and marks as (start, end, part of speech or None). None are not replaced."""
    if tagger:
        for doc in tagger.pipe(texts):
            words = (word for word in doc if not word.is_space)
            yield [(word.idx, word.idx + len(word), COARSE.get(word.pos_)) for word in words]
        return
    for text in texts:
        tagged = []
        for word in WORD.finditer(text):
            lower = word.group().lower()
            is_name = tagged and word.group() != lower         # a guess
            tagged.append((*word.span(), None if is_name else wordnet.part_of_speech(lower)))
        yield tagged
