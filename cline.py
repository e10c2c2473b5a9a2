"""CLINE: Contrastive Learning with Semantic Negative Examples for Natural Language Understanding. Wang, Ding,
Li, Zheng, ACL 2021, arXiv 2107.00440.

Words of every text are replaced in two ways: a synonym text keeps its meaning, an antonym text changes it.
One encoder learns to guess masked tokens of the original (MLM), to tell replaced tokens of the two others
from kept ones (RTD), and to put the original nearer to its synonym text than to its antonym text (CTS). With
h the [CLS] vector of a text, h_t the vector of a token and s a learned number of each loss:

    L_CTS = mean over originals of −log( exp(h·h_syn) / ( exp(h·h_syn) + exp(h·h_ant) ) )
    L_RTD = mean over tokens of the others of the binary cross entropy of σ(w·h_t) against "t was replaced"
    L     = Σ over MLM, RTD, CTS of exp(−s) L + max(s, 0)

Data, one row a line; .txt is one text a line, .csv .tsv .json .jsonl .parquet have columns, by --columns, by
a header original, synonym, antonym ..., or by their order:
    1 column   text; WordNet (--wordnet) has the words that replace its nouns, verbs, adjectives and adverbs,
               which spaCy tells (--tagger) or, where that is not installed, WordNet
    3 columns  original, synonym text, antonym text; a word that the original does not have there is replaced
    5 columns  what --save-triples writes: besides, start:end:kind of each word that could have been replaced

    python cline.py --model scratch --data tests/data/sentences.txt --wordnet tests/data/wordnet
    python cline.py --data wikipedia.txt --wordnet /usr/share/wordnet --out out/cline
    torchrun --nproc-per-node 4 cline.py --data triples.csv --out out/triples

Expected: on held-out triples the hits (how often the original is nearer to its synonym text) rise, and the
mean margin h·h_syn − h·h_ant. The paper's own numbers come after fine-tuning (childtuning.py does it, and
scores contrast sets): 1.6 points over RoBERTa-base as the mean of four of these, 0.5 of four adversarial
ones. They belong to --form paper with its defaults (roberta-base, 30,000 steps of 256 texts of up to 512
tokens), --tagger a spaCy model, and Wikipedia and BookCorpus as --data. --form code has none.

Departures from the released code: a row is a text, there a block of 254 tokens; spaces stay as they are;
WordNet's own forms and rules inflect words; rows in which a text stays as it is are left out; means are over
the tokens of all GPUs. --form code brings back what else differs: the vector is tanh(W h + b); CTS is two
logistic losses of mean products; RTD has three classes, a deeper head, and scores only words that could have
been replaced; rates, batch, length and steps are those of its script, which starts from random weights.
"""
from kernels.training.cli import Flags, answer_early, at_least, command, fail, fill, ratio, say, written

# ── flags ───────────────────────────────────────────────────────────────────────────────────────────────────


def make_parser():
    parser = Flags(__doc__)
    add, common = parser.add_argument, parser.common
    parser.set_defaults(pooling="cls")                         # what a text's vector is here
    common("--form", "paper")
    add("--wordnet", reads="words", help="folder of a WordNet database (data.noun and so on), for texts")
    add("--tagger", reads="model",
        help="a spaCy model, or lexicon: WordNet; default en_core_web_sm, without spaCy lexicon")
    add("--synonym-rate", type=ratio, help="of a text's words, replaced; default 0.4 (paper), code 0.5")
    add("--antonym-rate", type=ratio, help="of a text's words, replaced; default 0.2 (paper), code 0.5")
    add("--save-triples", help="a .csv to write the texts to; --data reads it")
    add("--held-out", type=at_least(0, int), help="last rows, to evaluate on; default a 20th, at most 1000")
    common("--warmup-steps", said="a 60th (paper), code a 100th, scratch a 10th of all")
    parser.plain("--evaluate", "--data")
    common("--columns", said="by the header, else all")
    common("--model", "roberta-base")
    common("--out", "out/cline")
    common("--batch-size", said="256 (paper), code 128, scratch 32")
    common("--epochs", said="by --steps")
    common("--steps", said="30000 (paper), code 1000000, scratch 300, or by --epochs")
    common("--lr", said="1e-4 (paper), scratch 2e-3, rising, then falling linearly to 0")
    common("--max-length", said="512 (paper), code 256")
    common("--seed", 42)
    common("--eval-every", 1000, "1000 (released scripts)")
    common("--impl", "auto")
    parser.plain("--resume", "--keep-state", "--log", "--precision")
    return parser


# What a flag is where it was not given: by the form (paper, released script), and for a small random BERT.
FORMS = {"paper": dict(synonym_rate=0.4, antonym_rate=0.2, batch_size=256, length=30_000, lr=1e-4,
                       max_length=512, warmup_part=60, eps=1e-8),
         "code": dict(synonym_rate=0.5, antonym_rate=0.5, batch_size=128, length=1_000_000, lr=1e-4,
                      max_length=256, warmup_part=100, eps=1e-6)}
SCRATCH = dict(batch_size=32, length=300, lr=2e-3, warmup_part=10)


if __name__ == "__main__":
    answer_early(make_parser)  # --help, and wrong flags, before the seconds that torch takes

import csv
import difflib
import os
import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoModelForMaskedLM

from kernels import check_rows, checks, own_rows
from kernels.training.extras.wordnet import (
    WORD,
    WordNet,
    inflect,  # noqa: F401 - for those who import it from here
    load_tagger,
    tag_words,
)
from kernels.training.loop import epoch_steps, set_lr, sum_gradients, warmup_linear
from kernels.training.output_dir import new_file
from kernels.training.progress import progress
from kernels.training.run import Run
from kernels.training.tables import describe_table, empty_cell, plain, read_table
from kernels.training.text.checkpoint import load_line, save
from kernels.training.text.encoders import begin_linear, build_encoder, describe_model
from kernels.training.text.mlm import decoder_loss, lm_states, mask_tokens
from kernels.training.text.tokens import grouped, in_order, letters_of, pad, portions

# ── data and model ──────────────────────────────────────────────────────────────────────────────────────────

TRIPLE = "original", "synonym", "antonym", "synonym_words", "antonym_words"    # columns of --save-triples
ROLES = {name: [plain(name)] for name in TRIPLE} | {"original": ["original", "text", "sentence"]}
# Each side of a text draws one of its kinds; the next is taken where that finds no word (released code).
KINDS = {"synonym": ("hypernym", "synonym", "inflected"), "antonym": ("antonym", "random")}
CODES = dict(inflected=1, synonym=2, hypernym=3, antonym=4, random=5)          # 0: kept


def load_data(path, args):
    """(texts, what makes triples of them) or (triples, None); fills the flags that --form decides (FORMS)."""
    check = lambda cells: empty_cell(cells[:3])
    header, table = read_table(path, check, roles=ROLES, columns=args.columns)
    place, cells = next(iter(table))
    if (columns := len(cells)) not in (1, 3, 5):
        wanted = f"1 (text), 3 ({', '.join(TRIPLE[:3])}) or 5 (and {', '.join(TRIPLE[3:])})"
        fail(f"{path} {place}: {columns} columns, wanted {wanted}")
    fill(args, FORMS[args.form] | (SCRATCH if args.model == "scratch" else {}))
    say("cline", f"{args.form}: {describe_table(table, header)}")
    save_to = args.save_triples and Path(args.save_triples)
    if columns > 1:
        if save_to:
            fail(f"--save-triples {save_to}: {path} holds triples already")
        return [read_triple(cells, f"{path} {place}") for place, cells in table], None
    if not args.wordnet:
        fail(f"{path} holds texts, which want --wordnet, a WordNet folder: "
             "Debian's package wordnet-base has /usr/share/wordnet")
    taken = save_to and save_to.exists() and not args.resume
    if save_to and (taken or save_to.suffix != ".csv" or not save_to.absolute().parent.is_dir()):
        fail(f"--save-triples {save_to}: wanted a .csv that does not exist, in a folder that does")
    return [cells[0] for _, cells in table], WordNet(args.wordnet)


def replace_words(text, words, kinds, rate, wordnet, draw):
    """(new text, [(start, end, code of CODES)] of its words that could have been replaced): at most rate ·
    words are, all by the drawn kind or by the first after it that finds any."""
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
    for text, tagged in zip(progress(texts, "replacing words", " texts"), tag_words(texts, tagger, wordnet)):
        sides = (replace_words(text, tagged, KINDS[side], rates[side], wordnet, draw) for side in KINDS)
        new, labels = zip(*sides)
        triples.append((text, *new, *labels))
        words += len(tagged)
        replaced.update(code for side in labels for *_, code in side)
    share = {kind: 100 * replaced[code] / words for kind, code in CODES.items()}
    told = []
    for side, kinds in KINDS.items():
        each = " ".join(f"{kind} {share[kind]:.1f}" for kind in kinds)
        told.append(f"{sum(share[kind] for kind in kinds):.1f} % of words on the {side} side ({each})")
    say("triples", f"words tagged by {args.tagger}; replaced: {', '.join(told)}")
    return triples


def save_triples(triples, path):
    """A .csv that read_triple reads; labels are start:end:code, in letters of their text."""
    aside = Path(f"{path}.saving")
    with written(path), new_file(aside) as file:
        rows = ((*row[:3], *map(spell_labels, row[3:])) for row in triples)
        csv.writer(file).writerows([TRIPLE, *rows])
    os.replace(aside, path)


def spell_labels(labels):
    return " ".join(f"{start}:{end}:{code}" for start, end, code in labels)


def read_triple(cells, place):
    """A row of make_triples from 5 cells, or from 3, whose labels are those of new_words."""
    if len(cells) == 3:
        return *cells, *(new_words(cells[0], text) for text in cells[1:])
    found = [re.findall(r"(\d{1,9}):(\d{1,9}):([0-5])", cell) for cell in cells[3:]]
    labels = [[tuple(map(int, word)) for word in words] for words in found]
    for text, cell, words in zip(cells[1:], cells[3:], labels):
        ends = [letter for word in words for letter in word[:2]]
        if cell != spell_labels(words) or ends != sorted(ends) or max(ends, default=0) > len(text):
            fail(f"{place}: {cell[:40]!r}, wanted start:end:code (0 kept, 1 to 5 replaced) of words of the "
                 "text, in order")
    return *cells[:3], *labels


def new_words(original, text):
    """Labels of all words of the text, 1 where an alignment with the original finds no equal word."""
    words = list(WORD.finditer(text))
    matcher = difflib.SequenceMatcher(None, WORD.findall(original), WORD.findall(text), autojunk=False)
    return [(*words[i].span(), int(kind != "equal"))
            for kind, _, _, first, last in matcher.get_opcodes() for i in range(first, last)]


def token_labels(text, words, encoding, replaced, args):
    """(L,) int8: RTD's class of each token, that of the word in which it starts: `replaced`, or 0. Tokens of
    all other words count as kept (paper), or not at all, −100 (code); special ones never do."""
    letters = np.full(len(text) + 1, -100 if args.form == "code" else 0, np.int8)
    for start, end, code in words:
        letters[start:end] = replaced if code else 0
    starts = [end - len(text[start:end].lstrip()) for start, end in encoding.offsets]      # of some a space
    return np.where(encoding.special_tokens_mask, -100, letters[starts]).astype(np.int8)


def tokenise_triples(triples, model, args):
    """([(ids, ids, ids, labels, labels, place in triples)], how many texts were cut). Rows of which two texts
    are equal are left out."""
    rows, cut, first, how = [], 0, 0, dict(truncation=True, max_length=args.max_length)
    for part in portions(triples, lambda row: letters_of(row[:3])):
        views = [model.tokenizer([row[i] for row in part], **how).encodings for i in range(3)]
        for place, (row, *encodings) in enumerate(zip(part, *views), first):
            ids = [np.array(encoding.ids, np.int32) for encoding in encodings]
            cut += sum(bool(encoding.overflowing) for encoding in encodings)
            if any(np.array_equal(ids[0], other) for other in ids[1:]):
                continue
            labels = (token_labels(row[i], row[i + 2], encodings[i], i, args) for i in (1, 2))
            rows.append((*ids, *labels, place))
        first += len(part)
    return rows, cut


def make_batch(rows, model):
    """[(places (n,), ids, mask, labels, targets (n, L))]: originals, synonym texts, antonym texts, in groups
    of similar length. labels are RTD's classes, targets the ids of masked tokens, −100 elsewhere. In training
    the originals are masked."""
    originals, synonyms, antonyms, *classes, _ = zip(*rows)
    flat, batch = [*originals, *synonyms, *antonyms], []
    labels = [np.full(len(ids), -100) for ids in originals] + [row for side in classes for row in side]
    special = torch.tensor(model.tokenizer.all_special_ids)    # padding is one of them
    for group in grouped([len(ids) for ids in flat], model.device):
        places, lengths = torch.tensor(group), torch.tensor([len(flat[i]) for i in group])
        ids = pad([flat[i] for i in group], model.tokenizer.pad_token_id or 0)
        real = torch.arange(ids.shape[1]) < lengths[:, None]
        targets = torch.full_like(ids, -100)
        if model.training:
            may = real & (places < len(rows))[:, None] & ~torch.isin(ids, special)
            masked, chosen = mask_tokens(ids, may, model.tokenizer)
            ids, targets = masked, torch.where(chosen, ids, -100)
        tensors = places, ids, real.long(), pad([labels[i] for i in group], -100), targets
        batch.append([x.to(model.device) for x in tensors])
    return batch


def build_model(args, run):
    """The encoder, and what is trained beside it: masked-LM head, pooler (code), RTD's head, weights."""
    model = build_encoder(args, run, "cls", "keep" if args.form == "code" else None, AutoModelForMaskedLM)
    config, size = model.encoder.config, model.encoder.config.hidden_size
    if model.tokenizer.mask_token_id is None:
        fail(f"--model {args.model}: its tokenizer has no mask; wanted a masked language model like BERT")
    model.rtd = torch.nn.Linear(size, 1, bias=False)
    if args.form == "code":
        linear, norm = torch.nn.Linear(size, size), torch.nn.LayerNorm(size)
        model.rtd = torch.nn.Sequential(linear, torch.nn.GELU(), norm, torch.nn.Linear(size, 3))
    for part in model.rtd.modules():
        if isinstance(part, torch.nn.Linear):
            begin_linear(part, config)
    model.log_variances = torch.nn.Parameter(torch.zeros(3))   # s of MLM, RTD, CTS
    return model.to(run.device)


# ── the paper ───────────────────────────────────────────────────────────────────────────────────────────────


def compute_loss(model, batch, rows, args):
    """This rank's part of the loss of a batch of `rows` rows: MLM of the masked originals, RTD of the other
    texts, CTS of all three, weighed."""
    vectors, logits, labels, states, targets = encode(model, batch)
    own = len(vectors) // 3
    with torch.autocast(model.device.type, torch.bfloat16, enabled=model.bf16):
        mlm = decoder_loss(states, model.lm.get_output_embeddings(), targets, impl=args.impl)
    rtd = replaced_token_loss(logits, labels, args.form)
    cts = contrastive_loss(*vectors.chunk(3), args.form)
    parts = own_parts((mlm, rtd, cts), (len(targets), len(labels), own))
    share = own / rows  # max(s, 0), which is no mean, counts once over all ranks
    loss = share * total_loss([part / share for part in parts], model.log_variances)
    values = dict(zip(("loss", "mlm", "rtd", "cts"), (loss, *parts)))
    return loss, {name: value.detach() for name, value in values.items()}


def own_parts(means, counts):
    """This rank's means over so many tokens or rows as its parts of the means over those of all ranks."""
    own = torch.tensor(counts, dtype=torch.float32, device=means[0].device)
    total = own.clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    return [mean * share for mean, share in zip(means, own / total.clamp(min=1))]


def encode(model, batch):
    """What the losses need of a batch, float32: (vectors (rows, H) in the order of the rows, RTD's logits and
    classes of the tokens that count, what the masked-LM decoder reads at masked tokens and their targets)."""
    vectors, logits, states = [], [], []
    for _, ids, mask, labels, targets in batch:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=model.bf16):
            hidden, state = lm_states(model.lm, model.encoder, ids, mask, targets != -100)
            vectors.append(model.pool_states(hidden, mask))
            logits.append(model.rtd(hidden[labels != -100]).float())
            states.append(state.float())
    *_, labels, targets = zip(*batch)
    labels, targets = (torch.cat([x[x != -100] for x in parts]) for parts in (labels, targets))
    vectors, logits = in_order(torch.cat(vectors), batch), torch.cat(logits).squeeze(-1)
    return vectors, logits, labels, torch.cat(states), targets


def contrastive_loss(original, synonym, antonym, form="paper"):
    """CTS: mean over rows. paper: −log softmax of o·s against o·a. code: logistic losses of both mean
    products, their mean.

    original, synonym, antonym   (B, D) raw vectors of the texts, any float type; nothing is normalised
    form        "paper": softplus(o·a − o·s); "code": ( softplus(−o·s / D) + softplus(o·a / D) ) / 2
    returns     scalar float32, float64 for float64; equal texts: ln 2 (paper)
    raises      ValueError naming the argument, what it was and what is wanted
    source      Wang et al. 2021, L_CTS; kandorm/CLINE
    """
    checks.check_choice("form", form, "paper", "code")
    check_rows(original=(original, "B D"), synonym=(synonym, "B D"), antonym=(antonym, "B D"))
    texts = original, synonym, antonym
    original, synonym, antonym = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in texts)
    if form == "code":
        near, far = (original * synonym).mean(1), (original * antonym).mean(1)
        return -(F.logsigmoid(near) + F.logsigmoid(-far)).mean() / 2
    return -F.logsigmoid((original * (synonym - antonym)).sum(1)).mean()


def replaced_token_loss(logits, labels, form="paper"):
    """RTD: mean over the tokens that count of the cross entropy of "was it replaced?".

    logits      (rows, L) one logit of "replaced" a token (paper), (rows, L, 3) of kept, replaced in a synonym
                text, replaced in an antonym text (code); any float type
    labels      (rows, L) integers: −100 does not count, 0 kept, above 0 replaced (code: the class, 0 to 2)
    returns     scalar float32, float64 for float64; 0, with gradient 0, where no token counts
    raises      ValueError naming the argument, what it was and what is wanted
    source      Wang et al. 2021, L_RTD; kandorm/CLINE
    """
    checks.check_choice("form", form, "paper", "code")
    tokens = " ".join("abcdefgh"[: max(1, labels.ndim) if torch.is_tensor(labels) else 2])
    wanted = f"{tokens} three" if form == "code" else tokens
    check_rows(labels=(labels, tokens, int), logits=(logits, wanted), three=3)
    if form == "code":
        checks.check_index("labels", labels, 3, -100)
    labels = labels.long()                                     # -100 would be uint8's 156
    counts = labels != -100
    logits, labels = logits[counts].to(torch.promote_types(logits.dtype, torch.float32)), labels[counts]
    if form == "code":
        total = F.cross_entropy(logits, labels, reduction="sum")
    else:
        replaced = (labels > 0).to(logits.dtype)
        total = F.binary_cross_entropy_with_logits(logits, replaced, reduction="sum")
    return total / max(1, len(labels))


def total_loss(losses, log_variances):
    """Σ_t exp(−s_t) L_t + max(s_t, 0): losses weighed by learned numbers; the best s_t is ln max(L_t, 1).

    losses          L_t: a sequence or tensor of T scalars (here MLM, RTD, CTS)
    log_variances   s_t: T scalar tensors, or (T,); at 0 the derivative of max(s, 0) is 1 (released code)
    returns         scalar, differentiable in both
    raises          ValueError naming the argument, what it was and what is wanted
    source          kandorm/CLINE
    """
    checks.check_scalars("losses", losses)
    checks.check_scalars("log_variances", log_variances)
    if len(losses) != len(log_variances):
        raise ValueError(f"log_variances: found {len(log_variances)}, wanted {len(losses)}, one a loss")
    floored = [s.where(s >= 0, 0) for s in log_variances]      # since torch 2.15 clamp's slope at 0 is 0
    return sum(torch.exp(-s) * loss + f for loss, s, f in zip(losses, log_variances, floored))


# ── evaluation ──────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def sentence_probe(model, rows, args):
    """Of held-out rows, unmasked: hits (%), the originals nearer to their synonym than to their antonym text;
    margin, the mean of h·h_syn − h·h_ant; RTD's and CTS's losses."""
    model.eval()
    rows = sorted(rows, key=lambda row: len(row[0]))
    starts = progress(range(0, len(rows), 64), "held-out rows", " batches")
    parts = (encode(model, make_batch(rows[i : i + 64], model)) for i in starts)
    vectors, logits, labels, *_ = zip(*parts)
    model.train()
    original, synonym, antonym = (torch.cat(views) for views in zip(*(z.chunk(3) for z in vectors)))
    margin = (original * (synonym - antonym)).double().sum(1)
    cts = contrastive_loss(original, synonym, antonym, args.form)
    rtd = replaced_token_loss(torch.cat(logits), torch.cat(labels), args.form)
    return {"hits": 100 * (margin > 0).double().mean().item(), "margin": margin.mean().item(),
            "cts": cts.item(), "rtd": rtd.item()}


def judge(model, held_out, run, args):
    """Probes the held-out rows and saves the model; the last one is kept (paper)."""
    scores = sentence_probe(model, held_out, args) if held_out else {}
    if run.keeps(scores):
        save(model, run)
    if held_out:
        told = "hits {hits:.2f} %, margin {margin:.3f}, RTD {rtd:.4f}, CTS {cts:.4f}"
        say("held out", told.format(**scores))


# ── main ────────────────────────────────────────────────────────────────────────────────────────────────────


def name_rows(tokens, numbers):
    """What a message calls rows of tokens: their numbers in --data, of which some were left out."""
    return f"rows {', '.join(str(tokens[i][-1] + 1) for i in numbers[:20])}, ..."


@command
def main(argv=None):
    args = make_parser().parse_args(argv)
    triples, wordnet = load_data(args.data, args)
    run = Run(args, __file__)
    model = build_model(args, run)
    if wordnet:
        triples = make_triples(triples, wordnet, args)
    args.max_length = min(args.max_length, model.longest)      # which matters with --evaluate alone
    tokens, cut = tokenise_triples(triples, model, args)
    if args.evaluate:  # RTD is left out, as no folder has its head
        if not tokens:
            fail(f"{args.data}: no row has replaced words on both sides")
        scores = sentence_probe(model, tokens, args)
        told = f"hits {scores['hits']:.2f} %, margin {scores['margin']:.3f}, CTS {scores['cts']:.4f}"
        return say("test", f"{told}, {len(tokens):,} triples of {args.data}")
    count = min(1000, len(tokens) // 20) if args.held_out is None else args.held_out
    if len(tokens) - count < args.batch_size:
        fail(f"{args.data}: {len(tokens)} rows have replaced words on both sides, wanted at least "
             f"--batch-size + --held-out, which are {args.batch_size} + {count}")
    left_out = len(triples) - len(tokens)
    tokens, held_out = tokens[: len(tokens) - count], tokens[len(tokens) - count :]
    say("data", f"{len(tokens):,} triples, {count:,} held out, {left_out:,} left out: nothing replaced; "
                f"{cut:,} of {3 * len(triples):,} texts cut to {args.max_length} tokens")
    say("model", describe_model(model, args))
    total = args.steps or args.length
    if args.epochs and not args.steps:
        total = args.epochs * epoch_steps(len(tokens), args.batch_size, run.world)
    warmup = total // args.warmup_part if args.warmup_steps is None else args.warmup_steps
    matrices, others = ([p for p in model.parameters() if (p.ndim > 1) == wide] for wide in (True, False))
    groups = [dict(params=matrices, weight_decay=0.01), dict(params=others, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, eps=args.eps, fused=True)
    run.begin(model, optimizer, total, warmup)
    # not by --resume: a run folder that was downloaded could name any path
    if run.rank == 0 and args.save_triples and not args.resume and not Path(args.save_triples).exists():
        save_triples(triples, args.save_triples)
    if held_out and run.step == 0:
        run.note_before(sentence_probe(model, held_out, args))
    if held_out:
        say("before", "hits {hits:.2f} %, margin {margin:.3f}".format(**run.progress["before"]))
    model.train()
    run.where = lambda step: name_rows(tokens, next(run.order(step - 1)))
    for step, rows in run.steps(total, len(tokens)):
        set_lr(optimizer, warmup_linear(step - 1, total, warmup, args.lr))
        batch = make_batch([tokens[i] for i in rows[own_rows(len(rows))]], model)
        loss, values = compute_loss(model, batch, len(rows), args)
        optimizer.zero_grad()
        loss.backward()
        sum_gradients(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.note(values, lr=optimizer.param_groups[0]["lr"])
        if run.due:
            judge(model, held_out, run, args)
    before, best, rise = run.progress["before"], run.progress["saved"], ""
    if held_out:
        rise = "".join(f"{name} {before[name]:.3f} → {best[name]:.3f}, " for name in ("hits", "margin"))
    weights = torch.exp(-model.log_variances).tolist()
    run.done("{}weights of MLM {:.2f}, RTD {:.2f}, CTS {:.2f}, ".format(rise, *weights))
    say("load", load_line(model, run))


if __name__ == "__main__":
    main()
