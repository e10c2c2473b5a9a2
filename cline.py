"""CLINE: Contrastive Learning with Semantic Negative Examples for Natural Language Understanding. Wang, Ding, Li, Zheng, ACL 2021,
arXiv 2107.00440.

Words of every text are replaced in two ways: a synonym text keeps its meaning, an antonym text changes it. One encoder learns to
guess masked tokens of the original (MLM), to tell replaced tokens of the two others from kept ones (RTD), and to put the original
nearer to its synonym text than to its antonym text (CTS). With h the [CLS] vector of a text, h_t the vector of a token and s a
learned number of each loss:

    L_CTS = mean over originals of −log( exp(h·h_syn) / ( exp(h·h_syn) + exp(h·h_ant) ) )
    L_RTD = mean over tokens of the other texts of the binary cross entropy of σ(w·h_t) against "t was replaced"
    L     = Σ over MLM, RTD, CTS of exp(−s) L + max(s, 0)

Data, one row a line; .txt is one text a line, .csv .tsv .json .jsonl have columns whose order alone counts:
    1 column   text; WordNet (--wordnet) has the words that replace its nouns, verbs, adjectives and adverbs. These are told by
               spaCy (--tagger) or, where that is not installed, by WordNet
    3 columns  original, synonym text, antonym text; words that the original does not have at their place count as replaced
    5 columns  what --save-triples writes: besides, start:end:kind of each word that could have been replaced

    python cline.py --model scratch --data tests/data/sentences.txt --wordnet tests/data/wordnet
    python cline.py --data wikipedia.txt --wordnet /usr/share/wordnet --out out/cline
    torchrun --nproc-per-node 4 cline.py --data triples.csv --out out/triples

Expected: on held-out triples the hits (how often the original is nearer to its synonym text) rise, and the mean margin
h·h_syn − h·h_ant. The paper fine-tunes: 1.6 points over RoBERTa on four contrast sets, 0.5 on four adversarial ones.

Departures from the released code: a row is a text, there a block of 254 tokens; spaces stay as they are; WordNet's own forms and
rules inflect words; rows in which a text stays as it is are left out; means are over the tokens of all GPUs. --form code brings
back what else differs: the vector is tanh(W h + b); CTS is two logistic losses of mean products; RTD has three classes, a deeper
head, and scores only words that could have been replaced; rates, batch, length and steps are those of its script.
"""
import argparse, csv, datetime, difflib, functools, hashlib, itertools, json, logging, math, os, random, re, shutil, signal, sys, time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file             # comes with transformers
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tqdm import tqdm
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer, BertConfig, BertTokenizer

from kernels import choose_impl, linear_cross_entropy, own_rows, similarity_lse

# ── flags ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def make_parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error, add = fail, parser.add_argument
    add("--form", choices=("paper", "code"), default="paper", help="default paper; code: see above")
    add("--wordnet", help="folder of a WordNet database (data.noun and so on), for texts")
    add("--tagger", help="a spaCy model, or lexicon (WordNet); default en_core_web_sm if installed, else lexicon")
    add("--synonym-rate", type=at_least(0), help="share of words to replace in a synonym text; default 0.4 (paper), code 0.5")
    add("--antonym-rate", type=at_least(0), help="share of words to replace in an antonym text; default 0.2 (paper), code 0.5")
    add("--save-triples", help="a .csv to write the texts to; --data reads it")
    add("--held-out", type=at_least(0, int), help="rows, the last of --data, to evaluate on; default a 20th, at most 1000")
    add("--warmup-steps", type=at_least(0, int), help="default a 60th of all: 500 of 30000 (paper), code a 100th, scratch a 10th")
    add("--data", required=True, help="training data; see above")
    add("--model", default="roberta-base", help="hub name, local folder, or from scratch; default roberta-base, from scratch: scratch")
    add("--out", default="out/cline", help="folder to write; default out/cline")
    add("--batch-size", type=at_least(1, int), help="over all GPUs; default 256 (paper), code 128, scratch 32")
    add("--epochs", type=at_least(1, int), help="default 30000 steps (paper), code 1000000, scratch 300")
    add("--steps", type=at_least(1, int), help="length of the training in steps instead of epochs")
    add("--lr", type=at_least(0), help="learning rate; default 1e-4 (paper), scratch 2e-3, rising, then falling linearly to 0")
    add("--max-length", type=at_least(3, int), help="tokens a training sentence keeps; default 512 (paper), code 256")
    add("--seed", type=at_least(0, int), default=42, help="default 42")
    add("--eval-every", type=at_least(1, int), default=1000, help="steps between evaluations; default 1000 (released scripts)")
    add("--resume", action="store_true", help="continue the run in --out from its last evaluation, with the same flags")
    add("--impl", default="auto", choices=("auto", "triton", "blockwise", "eager"), help="kernels; default auto")
    add("--precision", choices=["bf16", "fp32"], help="of the encoder, by default bf16 on a GPU and fp32 on a CPU; newer CPUs are fast in bf16")
    return parser


# What a flag is where it was not given: by the form (paper, released script), and for a small random BERT.
FORMS = {"paper": dict(synonym_rate=0.4, antonym_rate=0.2, batch_size=256, length=30_000, lr=1e-4, max_length=512, warmup_part=60,
                       eps=1e-8, pooling="cls_before_pooler"),
         "code": dict(synonym_rate=0.5, antonym_rate=0.5, batch_size=128, length=1_000_000, lr=1e-4, max_length=256, warmup_part=100,
                      eps=1e-6, pooling="cls")}
SCRATCH = dict(batch_size=32, length=300, lr=2e-3, warmup_part=10)


# ── data ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────

TRIPLE = "original", "synonym", "antonym", "synonym_words", "antonym_words"    # the columns that --save-triples writes
# Each side of a text draws one kind of replacement; the next one is taken where that finds nothing (released code).
KINDS = {"synonym": ("hypernym", "synonym", "inflected"), "antonym": ("antonym", "random")}
CODES = dict(inflected=1, synonym=2, hypernym=3, antonym=4, random=5)          # 0: kept
COARSE = dict(NOUN="noun", VERB="verb", ADJ="adj", ADV="adv")                  # spaCy's names, WordNet's
WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*|[^\w\s]|_")
# Words of other parts of speech that WordNet has as nouns, verbs, adjectives or adverbs: "he" is helium.
CLOSED = frozenset("""a about above across after all along am an another any are around as at be been before behind being below beneath
beside besides between beyond both but by can despite did do does doing done down each eight either eleven every except few five four
had has have having he here hundred i in inside is it its least less like many may me might million mine more most much must near
neither nine no none not off on one or other out outside over past same seven several six so some such ten then there though thousand
three through throughout till twelve two under up us was were whatever while who why will within yet zero""".split())


def load_data(path, args):
    """(rows, wordnet): texts and what makes triples of them, or triples and None; fills the flags that --form decides (FORMS)."""
    header, table = read_table(path, lambda cells: empty_cell(cells[:3]))
    place, cells = next(iter(table))
    if (columns := len(cells)) not in (1, 3, 5):
        fail(f"{path} {place}: {columns} columns, wanted 1 (text), 3 ({', '.join(TRIPLE[:3])}) or 5 (and {', '.join(TRIPLE[3:])})")
    for name, value in (FORMS[args.form] | (SCRATCH if args.model == "scratch" else {})).items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    names = f"header {', '.join(header)}" if header else "no header"
    say(Path(__file__).stem, f"{args.form}: {len(table):,} rows of {columns} columns ({names}) from {path}")
    save = args.save_triples and Path(args.save_triples)
    if columns > 1:
        if save:
            fail(f"--save-triples {save}: {path} holds triples already")
        return [read_triple(cells, f"{path} {place}") for place, cells in table], None
    if not args.wordnet:
        fail(f"{path} holds texts, which want --wordnet, a WordNet folder: Debian's package wordnet-base has /usr/share/wordnet")
    if save and (save.suffix != ".csv" or not save.absolute().parent.is_dir() or save.exists() and not args.resume):
        fail(f"--save-triples {save}: wanted a .csv that does not exist, in a folder that does")
    return [cells[0] for _, cells in table], WordNet(args.wordnet)


class WordNet:
    """A database in Princeton's format: what can replace a word. A synset is known by its part of speech and its offset."""
    LETTERS = dict(n="noun", v="verb", a="adj", s="adj", r="adv")              # in pointers
    ENDINGS = dict(noun="s- ses-s ves-f xes-x zes-z ches-ch shes-sh men-man ies-y", verb="s- ies-y es-e es- ed-e ed- ing-e ing-",
                   adj="er- est- er-e est-e", adv="")                          # of a form and of its lemma: WordNet's morphy
    # Lemmas with regular forms (not "news", not "beautiful"), their endings, and known forms that stand for a regular one.
    REGULAR = dict(noun=("([^s]|[isu]s)$", {"s": ""}), verb=("", {"es": "s$", "ing": "ing$", "ed": "[^s]$"}),
                   adj=("^[^aeiouy]*[aeiouy]+[^aeiouy]+e?$", {"er": "(?<!st)$", "est": "st$"}), adv=("", {}))

    def __init__(self, folder):
        self.folder, self.synsets = Path(folder), {}                     # (part of speech, offset): (words, pointers)
        self.senses, self.lemma_of, self.forms_of = ({pos: {} for pos in self.ENDINGS} for _ in range(3))
        for pos in self.ENDINGS:
            self.read(f"data.{pos}", self.add_synset, pos)
            self.read(f"{pos}.exc", self.add_irregular, pos)
            if not self.senses[pos]:
                fail(f"--wordnet {folder}: data.{pos} is empty; wanted the folder of a WordNet database")
        for (pos, offset), (_, targets) in self.synsets.items():
            for key, number in targets["@"] + targets["!"]:
                if key not in self.synsets or number > len(self.synsets[key][0]):
                    fail(f"{self.folder / f'data.{pos}'}: synset {offset:08} points to word {number} of {key[1]:08} in data.{key[0]}, "
                         "which is not there; the database is damaged, copy it anew")
        self.words = sorted({word for words, _ in self.synsets.values() for word in words if word.isalpha() and word.islower()})

    def read(self, name, add, pos):
        """Hands each line of a file to `add`. Irregular forms, which some copies lack, may be missing."""
        path, offset = self.folder / name, 0
        try:
            lines = path.read_bytes().splitlines(keepends=True)
        except OSError as error:
            if not name.startswith("data."):
                return
            fail(f"--wordnet {self.folder}: {name}: {error.strerror}; wanted the folder of a WordNet database")
        for i, line in enumerate(lines, 1):
            try:
                add(line.decode(), offset, pos)
            except (ValueError, IndexError, KeyError):
                fail(f"{path} line {i}: not what a WordNet database has at this place; it is damaged, copy it anew")
            offset += len(line)

    def add_synset(self, line, offset, pos):
        """00358432 00 a 02 hot 0 torrid 1 001 ! 00363100 a 0101 | gloss: two words, one pointer, from the first to another's first."""
        if line.startswith("  "):                              # the licence
            return
        fields = line.split(" | ")[0].split()
        size = 4 + 2 * int(fields[3], 16)
        words = [re.sub(r"\(\w+\)$", "", word).replace("_", " ") for word in fields[4:size:2]]
        pointers = fields[size + 1 : size + 1 + 4 * int(fields[size])]
        if int(fields[0]) != offset or len(pointers) != 4 * int(fields[size]) or not line.endswith("\n"):
            raise ValueError
        targets = {"@": [], "!": []}                           # hypernyms, antonyms: (synset, number of its word, 0 for all)
        for symbol, other, letter, numbers in zip(*[iter(pointers)] * 4):
            if symbol in targets:
                targets[symbol].append(((self.LETTERS[letter], int(other)), int(numbers[2:], 16)))
        self.synsets[pos, offset] = words, targets
        for word in words:
            self.senses[pos].setdefault(word.lower(), []).append((pos, offset))

    def add_irregular(self, line, _, pos):
        form, *lemmas = (word.replace("_", " ") for word in line.split())                  # went go
        self.lemma_of[pos][form] = lemmas
        for lemma in lemmas:
            self.forms_of[pos].setdefault(lemma, []).append(form)

    @functools.cache
    def lemmas(self, word, pos):
        """The base forms that a word may have: dogs, dog."""
        forms = self.lemma_of[pos].get(word)
        if forms is None:
            endings = (pair.split("-") for pair in self.ENDINGS[pos].split())
            forms = [word.removesuffix(old) + new for old, new in endings if word.endswith(old)]
        return [form for form in dict.fromkeys([word, *forms]) if form in self.senses[pos]]

    @functools.cache
    def part_of_speech(self, word):
        """The one with most senses; None for a word of a closed class and for what WordNet does not know."""
        senses = {pos: sum(len(self.senses[pos][lemma]) for lemma in self.lemmas(word, pos)) for pos in self.ENDINGS}
        return max(senses, key=senses.get) if any(senses.values()) and word not in CLOSED and word.upper() != word else None

    def inflections(self, lemma, pos):
        """Its forms and itself: WordNet's irregular ones, and regular ones in place of those it does not have."""
        known, (fits, endings) = self.forms_of[pos].get(lemma, []), self.REGULAR[pos]
        regular = [inflect(lemma, ending) for ending, kind in endings.items() if not any(re.search(kind, form) for form in known)]
        return {lemma, *known, *(regular if known or re.search(fits, lemma) else [])}

    @functools.cache
    def options(self, kind, word, pos):
        """What may replace a word (in lower case), sorted; a kind of KINDS."""
        lemmas = self.lemmas(word, pos)
        synsets = [self.synsets[key] for lemma in lemmas for key in self.senses[pos][lemma]]
        if kind == "random":
            return self.words
        if kind == "inflected":
            return sorted(set().union(*(self.inflections(lemma, pos) for lemma in lemmas)) - {word})
        if kind == "hypernym":
            synsets = [self.synsets[key] for _, targets in synsets for key, _ in targets["@"]]
        found = {other for words, _ in synsets for other in words}
        if kind == "antonym":                                  # of any word of the synsets (released code)
            found = {self.synsets[key][0][number - 1] for _, targets in synsets for key, number in targets["!"] if number}
        return sorted(other for other in found if other.lower() not in (word, *lemmas))


def inflect(word, ending):
    """The regular form: tries, trying, tried, wider; WordNet lists the others (stopped, potatoes)."""
    if ending == "ing":
        return re.sub("([^eoy])e$", r"\1", word) + ending
    if ending in ("s", "es"):                                  # of nouns, of verbs: photos, echoes
        word = re.sub("([^aeiou])y$", r"\1ie", word)
        return word + ("es" if re.search("(s|x|z|ch|sh)$" if ending == "s" else "(s|x|z|ch|sh|[^aeiou]o)$", word) else "s")
    return (word[:-1] if word.endswith("e") else re.sub("([^aeiou])y$", r"\1i", word)) + ending


def load_tagger(args):
    """spaCy's tagger; None where WordNet tells parts of speech."""
    if args.tagger != "lexicon":
        try:
            import spacy
            tagger = spacy.load(args.tagger or "en_core_web_sm", exclude=["parser", "ner", "lemmatizer"])
            args.tagger = f"{tagger.meta['lang']}_{tagger.meta['name']} {tagger.meta['version']}"
            return tagger
        except (ImportError, OSError) as error:                # spaCy is missing, or the model is
            if args.tagger:
                fail(f"--tagger {args.tagger}: {error}".splitlines()[0][:150] + "; install it, or take lexicon")
            args.tagger = "lexicon"


def tag_words(texts, tagger, wordnet):
    """Yields for each text its words and marks as (start, end, part of speech); None for what is not replaced."""
    if tagger:
        for doc in tagger.pipe(texts):
            yield [(word.idx, word.idx + len(word), COARSE.get(word.pos_)) for word in doc if not word.is_space]
    else:
        for text in texts:
            words = list(WORD.finditer(text))
            names = [word.group() != word.group().lower() and word is not words[0] for word in words]      # a guess
            yield [(*word.span(), None if name else wordnet.part_of_speech(word.group().lower())) for word, name in zip(words, names)]


def replace_words(text, words, kinds, rate, wordnet, draw):
    """(new text, [(start, end, code of CODES)] of the words in it that could have been replaced): at most rate · words are.

    All replacements of a text are of one kind, the drawn one or the first after it that finds any (released code).
    """
    candidates, budget = [word for word in words if word[2]], int(rate * len(words))
    draw.shuffle(candidates)
    for kind in kinds[int(draw.random() * len(kinds)) :]:
        new = {}
        for start, end, pos in candidates:
            if len(new) == budget:
                break
            word = text[start:end].lower()
            choice = draw.choice(wordnet.options(kind, word, pos) or [word])
            if choice.lower() != word:
                new[start] = choice
        if new:
            break
    result, done, labels = "", 0, []
    for start, end, _ in sorted(candidates):
        result, word = result + text[done:start], new.get(start, text[start:end])
        labels.append((len(result), len(result) + len(word), CODES[kind] if start in new else 0))
        result, done = result + word, end
    return result + text[done:], labels


def make_triples(texts, wordnet, args):
    """[(original, synonym text, antonym text, labels, labels)], labels as of replace_words."""
    tagger, draw, triples, words, replaced = load_tagger(args), random.Random(args.seed), [], 0, Counter()
    rates = dict(synonym=args.synonym_rate, antonym=args.antonym_rate)
    bar = tqdm(texts, "triples", disable=not sys.stderr.isatty() or args.rank > 0, leave=False)
    for text, tagged in zip(bar, tag_words(texts, tagger, wordnet)):
        new, labels = zip(*(replace_words(text, tagged, KINDS[side], rates[side], wordnet, draw) for side in KINDS))
        triples.append((text, *new, *labels))
        words += len(tagged)
        replaced.update(code for side in labels for *_, code in side)
    share = {kind: 100 * replaced[code] / words for kind, code in CODES.items()}
    say("triples", f"words tagged by {args.tagger}; replaced: " + ", ".join(
        f"{sum(share[kind] for kind in kinds):.1f} % of words on the {side} side ({' '.join(f'{kind} {share[kind]:.1f}' for kind in kinds)})"
        for side, kinds in KINDS.items()))
    return triples


def save_triples(triples, path):
    """A .csv that read_triple reads: the words that could have been replaced are start:end:code, in letters of their text."""
    aside = Path(f"{path}.saving")
    with open(aside, "w", encoding="utf-8", newline="") as file:
        rows = ((*row[:3], *(" ".join("%d:%d:%d" % word for word in labels) for labels in row[3:])) for row in triples)
        csv.writer(file).writerows([TRIPLE, *rows])
    os.replace(aside, path)


def read_triple(cells, place):
    """A row of make_triples from 5 cells; from 3, where a word is replaced if the original does not have it at its place."""
    if len(cells) == 3:
        return *cells, *(new_words(cells[0], text) for text in cells[1:])
    labels = [re.findall(r"(\d+):(\d+):([0-5])", cell) for cell in cells[3:]]
    labels = [[tuple(map(int, word)) for word in words] for words in labels]
    for text, cell, words in zip(cells[1:], cells[3:], labels):
        ends = [letter for word in words for letter in word[:2]]
        if cell != " ".join("%d:%d:%d" % word for word in words) or ends != sorted(ends) or max(ends, default=0) > len(text):
            fail(f"{place}: {cell[:40]!r}, wanted start:end:code (0 kept, 1 to 5 replaced) of words of the text, in order")
    return *cells[:3], *labels


def new_words(original, text):
    """Labels of all words of the text, 1 where an alignment with the original finds no equal word."""
    words = list(WORD.finditer(text))
    matcher = difflib.SequenceMatcher(None, WORD.findall(original), WORD.findall(text), autojunk=False)
    return [(*words[i].span(), int(kind != "equal")) for kind, _, _, first, last in matcher.get_opcodes() for i in range(first, last)]


def token_labels(text, words, encoding, replaced, args):
    """(L,) int8: RTD's class of each token, the one of the word in which it starts: replaced (1 synonym, 2 antonym text) or 0.

    The tokens of all other words count as kept (paper), or not at all, −100 (code); the special ones never do.
    """
    letters = np.full(len(text) + 1, -100 if args.form == "code" else 0, np.int8)
    for start, end, code in words:
        letters[start:end] = replaced if code else 0
    starts = [end - len(text[start:end].lstrip()) for start, end in encoding.offsets]        # some tokens begin with a space
    return np.where(encoding.special_tokens_mask, -100, letters[starts]).astype(np.int8)


def tokenise_triples(triples, model, args):
    """([(ids, ids, ids, labels, labels, place in triples)], how many texts were cut), without rows of which two texts are equal."""
    rows, cut = [], 0
    for first in range(0, len(triples), 10_000):
        part = triples[first : first + 10_000]
        views = [model.tokenizer([row[i] for row in part], truncation=True, max_length=args.max_length).encodings for i in range(3)]
        for place, (row, *encodings) in enumerate(zip(part, *views), first):
            ids = [np.array(encoding.ids, np.int32) for encoding in encodings]
            cut += sum(bool(encoding.overflowing) for encoding in encodings)
            if not any(np.array_equal(ids[0], other) for other in ids[1:]):
                rows.append((*ids, *(token_labels(row[i], row[i + 2], encodings[i], i, args) for i in (1, 2)), place))
    return rows, cut


# What one more group costs, in tokens: its launches, and a pass over all gradients. CPU: measured (2 layers of 768, from 25
# to 400 alike); CUDA: an estimate.
GROUP_COST = {"cpu": 100, "cuda": 8192}


def make_batch(rows, model, args):
    """[(places (n,), ids, mask, labels, targets (n, L))]: originals, synonym texts, antonym texts, in groups of similar length.

    labels are RTD's classes, targets the ids of masked tokens, −100 elsewhere. In training the originals are masked.
    """
    views = list(zip(*rows))
    flat = [ids for view in views[:3] for ids in view]
    labels = [np.full(len(ids), -100, np.int8) for ids in views[0]] + [classes for view in views[3:5] for classes in view]
    order = sorted(range(len(flat)), key=lambda i: len(flat[i]))
    special, batch = torch.tensor(model.tokenizer.all_special_ids), []                     # padding is one of them
    for start, end in length_groups([len(flat[i]) for i in order], GROUP_COST[model.device.type]):
        places = torch.tensor(order[start:end])
        ids, classes, mask = (
            torch.nn.utils.rnn.pad_sequence([torch.from_numpy(x[i]).long() for i in order[start:end]], True, padding)
            for x, padding in ((flat, model.tokenizer.pad_token_id or 0), (labels, -100), ([np.ones(len(x)) for x in flat], 0)))
        targets = torch.full_like(ids, -100)
        if model.training:
            may = (mask > 0) & (places < len(rows))[:, None] & ~torch.isin(ids, special)
            ids, targets = mask_tokens(ids, may, model.tokenizer)
        batch.append([x.to(model.device) for x in (places, ids, mask, classes, targets)])
    return batch


def mask_tokens(ids, may, tokenizer):
    """(ids, targets): 15 % of the tokens that may be are chosen, of which 80 % are masked and 10 % replaced (BERT)."""
    chosen, dice = torch.rand(ids.shape) < 0.15, torch.rand(ids.shape)
    chosen &= may
    masked = torch.where(chosen & (dice < 0.8), tokenizer.mask_token_id, ids)
    masked = torch.where(chosen & (dice >= 0.9), torch.randint(len(tokenizer), ids.shape), masked)
    return masked, torch.where(chosen, ids, -100)


# ── model ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def build_model(args):
    """The encoder with its masked-LM head, its tokenizer, and what is trained beside it: RTD's head, weights, a pooler (code)."""
    model = torch.nn.Module()
    model.device = torch.device(args.device)
    model.bf16 = args.precision == "bf16"
    model.lm, model.tokenizer = load_encoder(args, AutoModelForMaskedLM)
    model.encoder, config = model.lm.base_model, model.lm.config
    if not hasattr(model.encoder, "embeddings") or model.tokenizer.mask_token_id is None:
        fail(f"--model {args.model}: {type(model.encoder).__name__} is no masked-LM encoder like BERT, RoBERTa or DistilBERT")
    size = config.hidden_size
    model.has_pooler = hasattr(model.encoder, "pooler")        # BERT, RoBERTa: save_model can write the head there
    model.keep_head = args.form == "code"
    model.head = torch.nn.Linear(size, size) if model.keep_head else None
    model.rtd = torch.nn.Linear(size, 1, bias=False)
    if args.form == "code":
        linear, norm = torch.nn.Linear(size, size), torch.nn.LayerNorm(size)
        model.rtd = torch.nn.Sequential(linear, torch.nn.GELU(), norm, torch.nn.Linear(size, 3))
    for name, weights in [*model.rtd.named_parameters(), *(model.head.named_parameters() if model.head else [])]:
        if weights.ndim > 1:
            torch.nn.init.normal_(weights, std=config.initializer_range)
        elif name.endswith("bias"):
            torch.nn.init.zeros_(weights)
    model.log_variances = torch.nn.Parameter(torch.zeros(3))   # s of MLM, RTD, CTS
    table = getattr(model.encoder.embeddings, "position_embeddings", None)
    reserved = 0 if getattr(table, "padding_idx", None) is None else table.padding_idx + 1     # as RoBERTa's
    model.longest = min(model.tokenizer.model_max_length, config.max_position_embeddings - reserved)
    if args.max_length > model.longest:
        fail(f"--max-length {args.max_length}: {args.model} reads at most {model.longest} tokens")
    return model.to(model.device)


def load_encoder(args, auto=AutoModel):
    """(model, tokenizer) of a folder or a hub name; scratch is a small random BERT with word pieces of the data file."""
    if args.model == "scratch":
        words = Counter()
        for _, cells in itertools.islice(Table(Path(args.data)), 100_000):
            words.update(word for word, _ in BertPreTokenizer().pre_tokenize_str(BertNormalizer().normalize_str("\n".join(cells))))
        letters = sorted(set("".join(words)))                  # tokenizers' own trainer breaks ties anew in every process
        pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *("##" + letter for letter in letters)]
        pieces += [word for word, times in words.most_common(8000) if times > 1 and len(word) > 1]
        tokenizer = BertTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, model_max_length=512)
        shape = dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512)
        config = BertConfig(vocab_size=len(tokenizer), **shape)
        return auto.from_config(config, attn_implementation="sdpa"), tokenizer
    local = Path(args.model).is_dir()
    if local and not (Path(args.model) / "config.json").is_file():
        fail(f"--model {args.model}: no config.json in this folder, so it is no transformers model")
    if not local:
        say("hub", f"{args.model} is fetched, unless it is in the cache")
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model, info = auto.from_pretrained(args.model, attn_implementation="sdpa", dtype=torch.float32,
                                           output_loading_info=True, ignore_mismatched_sizes=True)
    except Exception as error:                                 # whatever the network or a damaged file makes of it
        if local:
            fail(f"--model {args.model}: {type(error).__name__}: {str(error).strip()}".splitlines()[0])
        fail(f"--model {args.model}: no such folder, and the hub does not give it; name a local folder, or take scratch")
    if not tokenizer.is_fast:
        fail(f"--model {args.model}: {type(tokenizer).__name__} is a slow tokenizer; wanted one with a tokenizer.json")
    lost = [name for name in (*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"]))     # would be random
            if name.removeprefix(f"{model.base_model_prefix}.") in model.base_model.state_dict() and "pooler" not in name]
    what = f"{len(lost)} weights, such as {min(lost)}," if lost else "the words of its tokenizer"
    if lost or len(tokenizer) <= len(tokenizer.all_special_ids):
        fail(f"--model {args.model}: {what} are missing or do not fit its config.json")
    return model, tokenizer


# ── the paper ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def encode(model, batch):
    """All that the losses need of a batch, float32: (vectors (rows, H) in the order of the rows, RTD's logits and classes of the
    tokens that count, the masked-LM head's states before its decoder and the targets of the masked tokens)."""
    vectors, logits, states = [], [], []
    for _, ids, mask, labels, targets in batch:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=model.bf16):
            hidden, state = lm_states(model, ids, mask, targets != -100)
            z = hidden[:, 0]                                   # [CLS]
            vectors.append((z if model.head is None else torch.tanh(model.head(z))).float())
            logits.append(model.rtd(hidden[labels != -100]).float())
            states.append(state.float())
    places, _, _, labels, targets = zip(*batch)
    labels, targets = (torch.cat([x[x != -100] for x in parts]) for parts in (labels, targets))
    return torch.cat(vectors)[torch.cat(places).argsort()], torch.cat(logits).squeeze(-1), labels, torch.cat(states), targets


def lm_states(model, ids, mask, masked):
    """(hidden states (n, L, H) of the encoder, states (masked, H) of the masked-LM head before its decoder), in one pass.

    The head is handed the masked tokens alone, and its decoder, by far the widest layer, none.
    """
    found = []

    def narrow(_, __, output):
        found.append(output.last_hidden_state)
        output.last_hidden_state = found[0][masked][None]
        return output

    def skip(_, inputs):
        found.append(inputs[0][0])
        return inputs[0][:, :0]

    with model.encoder.register_forward_hook(narrow), model.lm.get_output_embeddings().register_forward_pre_hook(skip):
        model.lm(input_ids=ids, attention_mask=mask)
    return found


def compute_loss(model, batch, args):
    """MLM of the masked originals, RTD of the other texts, CTS of all three, weighed by their learned weights."""
    vectors, logits, labels, states, targets = encode(model, batch)
    mlm = global_mean(masked_lm_loss(states, targets, model, args), len(targets), args)
    rtd = global_mean(replaced_token_loss(logits, labels, args.form), len(labels), args)
    cts = global_mean(contrastive_loss(*vectors.chunk(3), args.form), len(vectors) // 3, args)
    loss = total_loss((mlm, rtd, cts), model.log_variances)
    return loss, dict(zip(("loss", "mlm", "rtd", "cts"), (x.detach() for x in (loss, mlm, rtd, cts))))


def contrastive_loss(original, synonym, antonym, form="paper"):
    """CTS: mean over rows. paper: −log softmax of o·s against o·a. code: logistic losses of both mean products, their mean.

    original, synonym, antonym   (B, D) raw vectors of the texts, any float type; nothing is normalised
    form        "paper": softplus(o·a − o·s); "code": ( softplus(−o·s / D) + softplus(o·a / D) ) / 2
    returns     scalar float32, float64 for float64; equal texts: ln 2 (paper)
    raises      ValueError naming the argument, what it was and what is wanted
    source      Wang et al. 2021, L_CTS; kandorm/CLINE
    """
    check_form(form)
    if original.dim() != 2 or not original.shape == synonym.shape == antonym.shape:
        raise ValueError(f"original, synonym, antonym: found {[tuple(x.shape) for x in (original, synonym, antonym)]}, wanted (B, D) thrice")
    original, synonym, antonym = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (original, synonym, antonym))
    if form == "code":
        return -(F.logsigmoid((original * synonym).mean(1)) + F.logsigmoid(-(original * antonym).mean(1))).mean() / 2
    return -F.logsigmoid((original * (synonym - antonym)).sum(1)).mean()


def replaced_token_loss(logits, labels, form="paper"):
    """RTD: mean over the tokens that count of the cross entropy of "was it replaced?".

    logits      (rows, L) one logit of "replaced" a token (paper), (rows, L, 3) of kept, replaced in a synonym text, replaced in an
                antonym text (code); any float type
    labels      (rows, L) integers: −100 does not count, 0 kept, above 0 replaced (code: the class, 0 to 2)
    returns     scalar float32, float64 for float64; 0, with gradient 0, where no token counts
    raises      ValueError naming the argument, what it was and what is wanted
    source      Wang et al. 2021, L_RTD; kandorm/CLINE
    """
    check_form(form)
    wanted = (*labels.shape, 3) if form == "code" else labels.shape
    if logits.shape != wanted:
        raise ValueError(f"logits: found {tuple(logits.shape)}, wanted {tuple(wanted)} for these labels and form {form!r}")
    counts = labels != -100
    logits, labels = logits[counts].to(torch.promote_types(logits.dtype, torch.float32)), labels[counts]
    if form == "code":
        total = F.cross_entropy(logits, labels.long(), reduction="sum")
    else:
        total = F.binary_cross_entropy_with_logits(logits, (labels > 0).to(logits.dtype), reduction="sum")
    return total / max(1, len(labels))


def total_loss(losses, log_variances):
    """Σ_t exp(−s_t) L_t + max(s_t, 0): losses weighed by learned numbers; the best s_t is ln max(L_t, 1).

    losses          L_t: a sequence or tensor of T scalars (here MLM, RTD, CTS)
    log_variances   s_t: T scalar tensors, or (T,); at 0 the derivative of max(s, 0) is 1 (released code)
    returns         scalar, differentiable in both
    raises          ValueError where their numbers differ
    source          kandorm/CLINE
    """
    return sum(torch.exp(-s) * loss + s.clamp(min=0) for loss, s in zip(losses, log_variances, strict=True))


def check_form(form):
    if form not in ("paper", "code"):
        raise ValueError(f"form: found {form!r}, wanted 'paper' or 'code'")


def masked_lm_loss(states, targets, model, args):
    """Mean cross entropy of the masked tokens over the vocabulary; the logits are never stored."""
    decoder = model.lm.get_output_embeddings()
    if not len(targets):
        return 0 * states.sum()
    weight = decoder.weight
    if decoder.bias is not None:                               # one more feature, always 1, and 15 of 0: rows stay aligned
        states = torch.cat([states, F.pad(states.new_ones(len(states), 1), (0, 15))], 1)
        weight = torch.cat([weight, F.pad(decoder.bias[:, None], (0, 15))], 1)
    with torch.autocast(model.device.type, torch.bfloat16, enabled=model.bf16):
        return linear_cross_entropy(states, weight, targets, impl=args.impl)


def global_mean(mean, count, args):
    """This rank's mean over `count` tokens or rows, scaled so that its mean over ranks is the mean over those of all ranks."""
    if args.world == 1:
        return mean
    total = torch.tensor(float(count), device=mean.device)
    dist.all_reduce(total)
    return mean * count * args.world / total.clamp(min=1)


# ── evaluation ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def sentence_probe(model, rows, args):
    """Of held-out rows, unmasked: hits (%), the originals nearer to their synonym than to their antonym text; margin, the mean of
    h·h_syn − h·h_ant; RTD's and CTS's losses."""
    model.eval()
    rows = sorted(rows, key=lambda row: len(row[0]))
    vectors, logits, labels, *_ = zip(*(encode(model, make_batch(rows[i : i + 64], model, args)) for i in range(0, len(rows), 64)))
    model.train()
    original, synonym, antonym = (torch.cat(parts) for parts in zip(*(z.chunk(3) for z in vectors)))
    margin = (original * (synonym - antonym)).double().sum(1)
    losses = contrastive_loss(original, synonym, antonym, args.form), replaced_token_loss(torch.cat(logits), torch.cat(labels), args.form)
    return {"hits": 100 * (margin > 0).double().mean().item(), "margin": margin.mean().item(),
            "cts": losses[0].item(), "rtd": losses[1].item()}


# ── plumbing ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_table(path, check=None, lists=False):
    """(header or None, Table) of a data file. check(cells) says what is wrong with a row, or nothing; all wrong rows are counted.

    With lists, a list of texts in JSON is one cell, joined by |.
    """
    path, header, length, wrong = Path(path), None, 0, []
    if path.suffix.lower() not in (".txt", ".csv", ".tsv", ".json", ".jsonl") and not path.is_dir():
        fail(f"{path}: wanted a name that ends in .txt, .csv, .tsv, .json or .jsonl")
    try:
        for place, cells, fault in read_cells(path, lists):
            if place is None:
                header = cells
            elif fault := fault or check and check(cells):
                wrong.append(f"{place}: {fault}"[:300] if len(wrong) < 7 else None)         # of the others only how many
            else:
                length += 1
    except OSError as error:
        fail(f"{path}: {error.strerror}")
    if wrong:
        more = ", ".join(text.split(":")[0] for text in wrong[1:6]) + ", ..." * (len(wrong) > 6)
        fail(f"{path} {wrong[0]}" + (f" ({len(wrong) - 1:,} more rows are wrong: {more})" if more else ""))
    if length == 0:
        fail(f"{path}: no rows")
    return header, Table(path, lists, length)


class Table:
    """The rows of a data file, (place, cells), place what a message calls the row: "line 7". They are read anew each time they are gone
    through, so that no file has to fit in memory."""

    def __init__(self, path, lists=False, length=None):
        self.path, self.lists, self.length = path, lists, length

    def __len__(self):
        return self.length

    def __iter__(self):
        return ((place, cells) for place, cells, _ in read_cells(self.path, self.lists) if place is not None)


def read_cells(path, lists):
    """Yields (place, cells, what is wrong with them) of a data file; a header comes first, its place None."""
    kind, header, width, place, number = path.suffix.lower(), None, None, "line 0", 0

    def lines():
        nonlocal number
        bar = tqdm(total=path.stat().st_size, desc=f"reading {path.name}", unit="B", unit_scale=True, leave=False, delay=1, disable=None)
        with open(path, "rb") as file, bar:
            for number, raw in enumerate(file, 1):
                bar.update(len(raw))
                yield raw.decode("utf-8-sig" if number == 1 else "utf-8")

    try:
        for place, row in read_rows(kind, lines()):
            names = row if place == "line 1" and kind in (".csv", ".tsv") else []
            if names and len(set(names)) == len(names) and all(re.fullmatch("[a-z][a-z0-9_]*", name) for name in names):
                header = names
                yield None, header, None
                continue
            if isinstance(row, dict):
                if header is None:
                    header = list(row)
                    yield None, header, None
                row = [row.pop(name, "") for name in header] + list(row.values())
            if lists and isinstance(row, list):
                row = ["|".join(x) if isinstance(x, list) and all(isinstance(text, str) for text in x) else x for x in row]
            if isinstance(row, Exception):
                fault = f"not JSON: {getattr(row, 'msg', row)}"
            elif not isinstance(row, list) or not all(isinstance(cell, (str, int, float)) for cell in row):
                fault = f"wanted a row of texts, found {str(row)[:60]!r}"
            else:
                row, width = [str(cell) for cell in row], width or len(header or row)
                fault = f"{len(row)} columns, wanted {width}" if len(row) != width else None
            yield place, row, fault
    except UnicodeDecodeError:
        fail(f"{path} line {number}: not UTF-8; convert it, for example with iconv")
    except csv.Error as error:
        fail(f'{path} after {place}: {error}; close every ", and write "" for one inside a cell')


def read_rows(kind, lines):
    """Yields (place, row) of lines; a row of JSON may be a dict, or the error in it."""
    def parse(text):
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            return error

    if kind == ".txt":
        yield from ((f"line {i}", [line.rstrip("\r\n")]) for i, line in enumerate(lines, 1))
    elif kind == ".jsonl":
        yield from ((f"line {i}", parse(line)) for i, line in enumerate(lines, 1))
    elif kind == ".json":                                      # one list, or a row a line
        text = "".join(lines)
        whole = parse(text) if text.lstrip().startswith("[") else None
        if isinstance(whole, Exception):
            yield f"line {getattr(whole, 'lineno', 1)}", whole
        elif whole:
            yield from ((f"item {i}", row) for i, row in enumerate(whole, 1))
        else:
            yield from read_rows(".jsonl", text.split("\n")[: None if text[-1:] != "\n" else -1])
    else:
        rules = dict(strict=True) if kind == ".csv" else dict(delimiter="\t", quoting=csv.QUOTE_NONE)
        reader, line = csv.reader(lines, **rules), 1
        for cells in reader:
            yield f"line {line}", cells
            line = reader.line_num + 1                         # a quoted cell may hold newlines


def length_groups(lengths, cost, most=None):
    """Cuts (start, end) of ascending lengths into groups: the least Σ (rows · longest + cost), by dynamic programming. No group has
    more than `most` rows."""
    best = {0: (0, 0)}                                         # the first n rows: (least cost, start of their last group)
    for end in range(1, len(lengths) + 1):
        if end == len(lengths) or lengths[end - 1] < lengths[end]:
            best[end] = min((best[start][0] + (end - start) * lengths[end - 1] + cost, start) for start in best)
    cuts, end = [], len(lengths)
    while end:
        cuts.append((best[end][1], end))
        end = best[end][1]
    most = most or len(lengths)
    return [(first, min(first + most, end)) for start, end in cuts[::-1] for first in range(start, end, most)]


def start(args):
    """Rank, world and device; refuses an --out that cannot be, or must not be, written."""
    args.rank, args.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    args.device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    args.precision = args.precision or ("fp32" if args.device == "cpu" else "bf16")
    args.rows, args.fingerprint = args.batch_size, fingerprint(Path(args.data))
    if args.batch_size < args.world:
        fail(f"--batch-size {args.batch_size} is less than a row for each of {args.world} processes")
    out = Path(args.out).absolute()
    existing = next(folder for folder in (out, *out.parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        fail(f"--out {args.out}: {existing} is no folder that can be written")
    if args.resume and not (out / "state.pt").is_file():
        fail(f"--out {args.out}: no state.pt to resume from")
    if not args.resume and existing == out and any(out.iterdir()):
        kept = "another run: continue it with --resume" if (out / "state.pt").is_file() else "files but no checkpoint: empty it"
        fail(f"--out {args.out} holds {kept}, or name another folder")
    if "RANK" in os.environ:
        if args.device != "cpu":
            torch.cuda.set_device(args.device)
        timeout = datetime.timedelta(minutes=30)               # rank 0 evaluates alone meanwhile
        dist.init_process_group("gloo" if args.device == "cpu" else "nccl", timeout=timeout)
    if args.device != "cpu" and args.precision == "bf16":             # tensor cores also for what autocast leaves in float32
        torch.set_float32_matmul_precision("high")
    torch.manual_seed(args.seed)
    try:                                                       # before anything is read or written
        similarity_lse(torch.zeros(1, 16, device=args.device), impl=args.impl)
    except ValueError as error:
        fail(f"--{error}")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def fingerprint(path):
    """Tells whether data changed between runs: of a file its size and up to 256 places in it, of a folder its names and sizes."""
    digest, size = hashlib.sha1(), path.stat().st_size
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        digest.update("".join(f"{file.relative_to(path)} {file.stat().st_size}\n" for file in files).encode())
    else:
        digest.update(str(size).encode())
        with open(path, "rb") as file:
            for place in range(0, size, max(2**16, size // 256)):
                file.seek(place)
                digest.update(file.read(2**16))
    return digest.hexdigest()


def begin_out(args):
    """The folder of a new run, with its flags and the code that ran."""
    if args.resume or args.rank:
        return
    flags = {name: value for name, value in vars(args).items() if name not in ("resume", "out", "rank", "rows", "device")}
    try:
        Path(args.out).mkdir(parents=True, exist_ok=True)
        (Path(args.out) / "args.json").write_text(json.dumps(flags, indent=1))
        shutil.copy(__file__, args.out)
    except OSError as error:
        fail(f"--out {args.out}: {error.strerror}")


def average_gradients(model, args):
    """The mean over ranks; with gather_rows it is the gradient of the mean loss over the global batch."""
    if args.world > 1:
        for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= args.world


def warmup_linear(step, total, warmup, lr):
    """From 0 up to lr in `warmup` steps, then straight down to 0 at `total`; step counts from 0."""
    return lr * min(step / warmup if warmup else 1.0, (total - step) / max(1, total - warmup))


def epoch_steps(rows, args):
    """Steps of an epoch. Its last batch is short, and left out where it has less than a row for each rank."""
    return len(rows) // args.batch_size + (len(rows) % args.batch_size >= args.world)


def batches(rows, step, args):
    """This rank's rows of each step after `step`, endlessly. The order depends on the seed and the epoch alone."""
    epoch, done = divmod(step, epoch_steps(rows, args))
    while True:
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(args.seed + 1_000_003 * epoch))
        for batch in order.split(args.batch_size)[done : epoch_steps(rows, args)]:
            args.rows = len(batch)
            yield [rows[i] for i in batch[own_rows(args.rows)].tolist()]
        epoch, done = epoch + 1, 0


SIGNALS = []                                                   # Ctrl-C and SIGTERM that came during a step


def command(main):
    """main, telling the faults of the machine in one line; during training Ctrl-C and SIGTERM wait for the end of a step."""
    @functools.wraps(main)
    def run(argv=None):
        kept = "; a checkpoint that --out holds is whole, and --resume continues from it"
        handlers = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)}
        try:
            main(argv)
        except KeyboardInterrupt:                              # asked_to_stop takes it from then on
            say("stopped", "before the first step")
            sys.exit(130)
        except torch.OutOfMemoryError:
            flags = [flag for flag in ("--chunk-size", "--batch-size", "--max-length") if flag in make_parser().format_usage()]
            fail(f"the GPU's memory is full; lower {' or '.join(flags)}{kept}", every_rank=True)
        except (OSError, SafetensorError) as error:
            fail(f"{getattr(error, 'strerror', None) or error}" + kept, every_rank=True)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):         # what torch.save makes of a full disk
                fail(f"{error.__context__.strerror}{kept}", every_rank=True)
            if not dist.is_initialized() or not re.search("gloo|NCCL|[Cc]onnection|[Tt]imed? ?out", str(error)):
                raise
            fail(f"another process of this run has died or hangs ({str(error).splitlines()[0][:80]})" + kept, every_rank=True)
        finally:
            SIGNALS.clear()
            for kind, handler in handlers.items():
                signal.signal(kind, handler)
    return run


def asked_to_stop(step, args):
    """Whether Ctrl-C or SIGTERM came on any rank. Ranks agree every tenth step; a second signal ends the run at once."""
    def heard(number, _):
        if SIGNALS:
            sys.exit(128 + number)
        SIGNALS.append(number)
        if args.rank == 0:                                     # print is not reentrant
            os.write(1, b"\n" * sys.stdout.isatty() + b"stopping when this step is done and saved; once more, and at once\n")

    if step == 0:
        for kind in (signal.SIGINT, signal.SIGTERM):
            signal.signal(kind, heard)
    if args.world == 1 or step % 10:
        return bool(SIGNALS) and args.world == 1
    asked = torch.tensor(float(bool(SIGNALS)), device=args.device)
    dist.all_reduce(asked)
    return asked.item() > 0


def refuse_bad_loss(first_bad, where, progress, args):
    """Ends the run if a loss was not finite: at which step, where in the data (a text for a step), and what is left."""
    if args.world > 1:
        dist.all_reduce(first_bad, dist.ReduceOp.MAX)
    if step := int(first_bad):
        left = f"the checkpoint of step {progress['step']} in {args.out} is whole" if progress["step"] else "there is no checkpoint yet"
        fail(f"step {step}: the loss is not finite; {where(step)} of --data; {left}; try a lower --lr")


def named(batches):
    return f"rows {', '.join(str(row + 1) for row in next(batches)[:20])}, ..."


def report(step, total, values, began, args):
    """A row of metrics.jsonl, and a bar on a terminal or a line in a log. Tensors become means over the ranks."""
    for name in values:
        if torch.is_tensor(values[name]):
            if args.world > 1:
                dist.all_reduce(values[name])
            values[name] = values[name].item() / args.world
    if args.rank == 0:
        first, clock = began
        seconds = time.perf_counter() - clock
        with open(Path(args.out) / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": step, **values, "seconds": round(seconds, 3)}) + "\n")
        left, done = round(seconds / (step - first) * (total - step)), 16 * step // total
        line = (f"{step:7,}/{total:,} {'━' * done}{'─' * (16 - done)}  loss {values['loss']:.4f}  lr {values['lr']:.1e}  "
                f"{(step - first) * args.batch_size / seconds:,.0f} rows/s  left {left // 60}:{left % 60:02}")
        for score in (values[name] for name in ("dev_spearman", "dev_knn") if name in values):
            line += f"  dev {score:.2f}{' best' if values['best'] else ''}"
        bar = sys.stdout.isatty()
        print(f"\r\x1b[K{line}" if bar else line, end="" if bar and "best" not in values else "\n", flush=True)


def save_model(model, scores, args):
    """The encoder as transformers and sentence-transformers read it: written aside, then renamed file by file."""
    out, aside = Path(args.out), Path(args.out) / ".saving"
    shutil.rmtree(aside, ignore_errors=True)
    weights, config = model.encoder.state_dict(), model.encoder.config
    head = model.head.state_dict() if model.keep_head else {}
    if model.has_pooler:                                       # plain transformers finds the head as its pooler_output
        weights |= {f"pooler.dense.{name}": tensor for name, tensor in head.items()}
    model.encoder.save_pretrained(aside, state_dict=weights)
    model.tokenizer.backend_tokenizer.no_truncation()          # tokenise's, which would be saved
    model.tokenizer.save_pretrained(aside)

    size, by_cls = dict(word_embedding_dimension=config.hidden_size), args.pooling.startswith("cls")
    modules = [("Pooling", size | dict(pooling_mode_cls_token=by_cls, pooling_mode_mean_tokens=not by_cls), {})]
    if config.output_hidden_states:
        mix = torch.zeros(config.num_hidden_layers + 1)        # weights of the word embeddings and of each layer
        mix[[-2 if args.pooling == "avg_top2" else 1, -1]] = 1
        settings = size | dict(layer_start=0, num_hidden_layers=config.num_hidden_layers)
        modules.insert(0, ("WeightedLayerPooling", settings, {"layer_weights": mix}))
    if head:
        settings = dict(in_features=config.hidden_size, out_features=config.hidden_size, bias=True,
                        activation_function="torch.nn.modules.activation.Tanh")
        modules.append(("Dense", settings, {f"linear.{name}": tensor.cpu() for name, tensor in head.items()}))
    index = [dict(idx=0, name="0", path="", type="sentence_transformers.models.Transformer")]
    for i, (kind, settings, tensors) in enumerate(modules, 1):
        folder = aside / f"{i}_{kind}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(settings, indent=1))
        if tensors:
            save_file(tensors, folder / "model.safetensors")
        index.append(dict(idx=i, name=str(i), path=folder.name, type=f"sentence_transformers.models.{kind}"))
    (aside / "modules.json").write_text(json.dumps(index, indent=1))
    (aside / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": model.longest, "do_lower_case": False}))
    (aside / "README.md").write_text(model_card(model, scores, args), encoding="utf-8")
    for file in [path for path in aside.rglob("*") if path.is_file()]:
        target = out / file.relative_to(aside)
        target.parent.mkdir(exist_ok=True)
        os.replace(file, target)
    shutil.rmtree(aside)


def model_card(model, scores, args):
    return f"""---
library_name: sentence-transformers
pipeline_tag: sentence-similarity
tags: [sentence-transformers, sentence-similarity, feature-extraction]
---
# {Path(args.out).name}

Sentence embeddings of {model.encoder.config.hidden_size} numbers, compared by cosine, trained by {Path(__file__).name}
from {args.model} on {Path(args.data).name}: {", ".join(f"{name} {value:.4g}" for name, value in scores.items())}.
Every setting is in args.json, the course of the training in metrics.jsonl. Pooling: {args.pooling}.

    {load_line(model, args)}
"""


def load_line(model, args):
    """How others load the folder; a BERT saved without head must not get a random pooler."""
    bare = ", add_pooling_layer=False" if model.has_pooler and not model.keep_head else ""
    return f'SentenceTransformer("{args.out}")  or  AutoModel.from_pretrained("{args.out}"{bare})'


def load_best(model, args):
    """Puts the saved checkpoint back into the model."""
    weights = load_file(Path(args.out) / "model.safetensors")
    model.encoder.load_state_dict({name: tensor for name, tensor in weights.items() if not name.startswith("pooler.")})
    for file in Path(args.out).glob("*_Dense/model.safetensors"):
        model.head.load_state_dict({name.removeprefix("linear."): tensor for name, tensor in load_file(file).items()})


def save_state(model, optimizer, progress, args):
    """All that the next step depends on, the random numbers of every rank included: written aside, then renamed."""
    cuda = model.device.type == "cuda"
    random = [[torch.get_rng_state(), torch.cuda.get_rng_state() if cuda else None]] * args.world
    if args.world > 1:
        dist.all_gather_object(random, random[0])
    if args.rank == 0:
        state = dict(progress=progress, random=random, model=model.state_dict(), optimizer=optimizer.state_dict())
        with open(Path(args.out) / "state.tmp", "wb") as file:
            torch.save(state, file)
            os.fsync(file.fileno())                            # whole on the disk before it takes the old one's place
        os.replace(Path(args.out) / "state.tmp", Path(args.out) / "state.pt")


def load_state(model, optimizer, args):
    """Continues the run in --out: its progress; metrics of later steps are dropped, other flags than it had refused."""
    out = Path(args.out)
    try:
        for name, value in json.loads((out / "args.json").read_text()).items():
            if getattr(args, name, None) != value:
                what = "the content of --data, by its checksum," if name == "fingerprint" else name
                fail(f"--resume: {what} was {value} in {out}, now it is {getattr(args, name, None)}")
        state = torch.load(out / "state.pt", map_location=model.device, weights_only=True)
        if state["progress"]["best"]:
            load_best(model, args)                             # would be missed at the end only
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"][args.rank][0].cpu())
        if model.device.type == "cuda":
            torch.cuda.set_rng_state(state["random"][args.rank][1].cpu())
        rows = [row for row in open(out / "metrics.jsonl") if row.endswith("\n") and json.loads(row)["step"] <= state["progress"]["step"]]
    except Exception as error:                                 # a damaged file has many ways to fail
        fail(f"--resume: {out} holds a damaged state.pt, model, args.json or metrics.jsonl ({type(error).__name__})")
    if args.rank == 0:
        (out / "metrics.jsonl").write_text("".join(rows))
    return state["progress"]


def peak_gb(device):
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    try:
        import resource
    except ImportError:                                        # Windows
        return math.nan
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


def empty_cell(cells):
    """What is wrong with a row that has one."""
    return None if all(map(str.strip, cells)) else "an empty cell; fill it or delete the row"


def at_least(least, kind=float):
    """An argparse type: a finite number from least up."""
    def convert(text):
        value = kind(text)
        if not least <= value < 2**63:                         # no infinity, no NaN, no seed too long for PyTorch
            raise argparse.ArgumentTypeError(f"{text}: wanted a number of at least {least}")
        return value
    convert.__name__ = kind.__name__                           # argparse names it where the text is no number
    return convert


def say(label, text):
    if os.environ.get("RANK", "0") == "0":
        print("\r\x1b[K" * sys.stdout.isatty() + f"{label:<8} {text}", flush=True)          # in the place of a bar


def fail(message, every_rank=False):
    """Ends the run with one line for the person who started it; mostly the ranks of a run find the same fault."""
    if every_rank or os.environ.get("RANK", "0") == "0":
        print("\r\x1b[K" * sys.stderr.isatty() + f"{Path(__file__).name}: {message}", file=sys.stderr, flush=True)
    if dist.is_initialized():                                  # with another rank gone, a group makes an ordinary exit abort now and then
        sys.stdout.flush()
        os._exit(2)
    sys.exit(2)


# ── main ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@command
def main(argv=None):
    args = make_parser().parse_args(argv)
    triples, wordnet = load_data(args.data, args)
    start(args)
    model = build_model(args)
    if wordnet:
        triples = make_triples(triples, wordnet, args)
    rows, cut = tokenise_triples(triples, model, args)
    count = min(1000, len(rows) // 20) if args.held_out is None else args.held_out
    if len(rows) - count < args.batch_size:
        fail(f"{args.data}: {len(rows)} rows have replaced words on both sides, wanted at least --batch-size + --held-out, which are "
             f"{args.batch_size} + {count}")
    rows, held_out = rows[: len(rows) - count], rows[len(rows) - count :]
    total = args.steps or (args.epochs * epoch_steps(rows, args) if args.epochs else args.length)
    warmup = total // args.warmup_part if args.warmup_steps is None else args.warmup_steps
    matrices, others = ([p for p in model.parameters() if (p.ndim > 1) == wide] for wide in (True, False))         # alone decay
    optimizer = torch.optim.AdamW([dict(params=matrices, weight_decay=0.01), dict(params=others, weight_decay=0.0)],
                                  lr=args.lr, eps=args.eps, fused=True)
    torch.manual_seed(args.seed + args.rank)                   # ranks have equal weights and different dropout
    say("data", f"{len(rows):,} triples, {len(held_out):,} held out, {len(triples) - len(rows) - count:,} left out: nothing replaced; "
                f"{cut:,} of {3 * len(triples):,} texts cut to {args.max_length} tokens")
    size = sum(p.numel() for p in model.encoder.parameters()) / 1e6
    say("model", f"{args.model}, {size:.1f} M parameters")
    say("run", f"seed {args.seed}, {args.world} × {model.device.type}, {args.precision}, "
               f"kernels {choose_impl(args.impl, torch.empty(0, device=model.device))}, "
               f"{total:,} steps of {args.batch_size}, writing {args.out}")

    begin_out(args)
    progress = {"step": 0, "before": None, "best": None}
    if args.resume:
        progress = load_state(model, optimizer, args)
    elif args.rank == 0:
        if args.save_triples:
            save_triples(triples, args.save_triples)
        progress["before"] = sentence_probe(model, held_out, args) if held_out else None
    if held_out and args.rank == 0:
        say("before", "hits {hits:.2f} %, margin {margin:.3f}".format(**progress["before"]))
    model.train()
    asked_to_stop(0, args)
    began, first_bad = (progress["step"], time.perf_counter()), torch.zeros((), dtype=torch.int64, device=model.device)
    for step, batch in zip(range(progress["step"] + 1, total + 1), batches(rows, progress["step"], args)):
        for group in optimizer.param_groups:
            group["lr"] = warmup_linear(step - 1, total, warmup, args.lr)
        loss, values = compute_loss(model, make_batch(batch, model, args), args)
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model, args)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        values["lr"] = group["lr"]
        first_bad = torch.where((first_bad == 0) & ~values["loss"].isfinite(), step, first_bad)
        stop, due = asked_to_stop(step, args), step % args.eval_every == 0 or step == total
        shown = due or stop or step % (1 + total // 40) == 0
        if shown:
            refuse_bad_loss(first_bad, lambda step: [row[-1] for row in next(batches(rows, step - 1, args))], progress, args)
        if due and args.rank == 0:
            scores = sentence_probe(model, held_out, args) if held_out else {}
            values |= {f"dev_{name}": value for name, value in scores.items()} | {"best": True}
            progress["best"] = {"step": step, **scores}        # the last one is kept (paper)
            save_model(model, progress["best"], args)
        if shown:
            report(step, total, values, began, args)
        if due and held_out and args.rank == 0:
            say("held out", "hits {hits:.2f} %, margin {margin:.3f}, RTD {rtd:.4f}, CTS {cts:.4f}".format(**scores))
        if due or stop:
            progress["step"] = step
            save_state(model, optimizer, progress, args)
        if stop:
            say("stopped", f"at step {step}, saved; --resume continues")
            sys.exit(130)

    if args.rank == 0:
        minutes, seconds = divmod(round(time.perf_counter() - began[1]), 60)
        before, best = progress["before"], progress["best"]
        rise = "".join(f"{name} {before[name]:.3f} → {best[name]:.3f}, " for name in ("hits", "margin") if held_out)
        weights = "weights of MLM {:.2f}, RTD {:.2f}, CTS {:.2f}".format(*torch.exp(-model.log_variances).tolist())
        say("done", f"{rise}{weights}, {minutes} min {seconds} s, peak {peak_gb(model.device):.1f} GB")
        say("load", load_line(model, args))
    if args.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
