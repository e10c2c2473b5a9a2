"""CLINE: Contrastive Learning with Semantic Negative Examples for Natural Language Understanding. Wang, Ding,
Li, Zheng, ACL 2021, arXiv 2107.00440.

Each text gets two copies in which words are replaced: a synonym text, which keeps the meaning, and an antonym
text, which changes it. One encoder learns to guess masked tokens of the original (MLM), to tell replaced from
kept tokens in the copies (RTD), and to put the original nearer to its synonym text than to its antonym text
(CTS). With h the [CLS] vector of a text, h_t the vector of a token, and s a learned number for each loss:

    L_CTS = mean over originals of −log( exp(h·h_syn) / ( exp(h·h_syn) + exp(h·h_ant) ) )
    L_RTD = mean over tokens of the copies of the binary cross entropy of σ(w·h_t) against "t was replaced"
    L     = Σ over MLM, RTD, CTS of exp(−s) L + max(s, 0)

Data, one row per line: .txt has one text per line; .csv .tsv .json .jsonl .parquet have columns, chosen by
--columns, by a header (original, synonym, antonym ...) or by their order:
    1 column   text. WordNet (--wordnet) gives the words that replace nouns, verbs, adjectives and adverbs.
               spaCy (--tagger) finds these, or WordNet where spaCy is not installed
    3 columns  original, synonym text, antonym text. Words that differ from the original count as replaced
    5 columns  what --save-triples writes: also start:end:kind of each word that could have been replaced

    python cline.py --model scratch --data tests/data/sentences.txt --wordnet tests/data/wordnet
    python cline.py --data wikipedia.txt --wordnet /usr/share/wordnet --out out/cline
    torchrun --nproc-per-node 4 cline.py --data triples.csv --out out/triples

Expected: on held-out triples the hits (how often the original is nearer to its synonym text) rise, and so
does the mean margin h·h_syn − h·h_ant. The paper reports numbers after fine-tuning, which childtuning.py does
(it scores contrast sets too): 1.6 points over RoBERTa-base as the mean of four of these, 0.5 of four
adversarial ones. They belong to --form paper with its defaults (roberta-base, 30,000 steps of 256 texts of up
to 512 tokens), --tagger a spaCy model, and Wikipedia and BookCorpus as --data. --form code has none.

Departures from the released code: a row is a text, there a block of 254 tokens; spaces stay as they are;
WordNet's own forms and rules inflect words; rows in which a text stays as it is are left out; means are over
the tokens of all GPUs. --form code brings back what else differs: the vector is tanh(W h + b); CTS is two
logistic losses of mean products; RTD has three classes, a deeper head, and scores only words that could have
been replaced; rates, batch, length and steps are those of its script, which starts from random weights.
"""
from kernels.training.cli import Flags, answer_early, at_least, command, fail, fill, ratio, say

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


# Defaults by --form, and for a small random BERT; length is the number of steps, warmup_part a share of it.
FORMS = {"paper": dict(synonym_rate=0.4, antonym_rate=0.2, batch_size=256, length=30_000, lr=1e-4,
                       max_length=512, warmup_part=60, eps=1e-8),
         "code": dict(synonym_rate=0.5, antonym_rate=0.5, batch_size=128, length=1_000_000, lr=1e-4,
                      max_length=256, warmup_part=100, eps=1e-6)}
SCRATCH = dict(batch_size=32, length=300, lr=2e-3, warmup_part=10)


if __name__ == "__main__":
    answer_early(make_parser)  # --help, and wrong flags, before the seconds that torch takes

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoModelForMaskedLM

from kernels import check_rows, checks, own_rows
from kernels.training.extras.triples import (
    ROLES,
    load_wordnet,
    make_triples,
    read_triple,
    save_triples,
    tokenise_triples,
)
from kernels.training.loop import epoch_steps, set_lr, sum_gradients, warmup_linear
from kernels.training.progress import progress
from kernels.training.run import Run
from kernels.training.tables import describe_table, empty_cell, read_table
from kernels.training.text.checkpoint import load_line, save
from kernels.training.text.encoders import begin_linear, build_encoder, describe_model
from kernels.training.text.mlm import decoder_loss, lm_states, mask_tokens
from kernels.training.text.tokens import grouped, in_order, pad

# ── data and model ──────────────────────────────────────────────────────────────────────────────────────────


def load_data(path, args):
    """(texts, the WordNet that makes triples of them) or (triples, None); fills the flags of FORMS."""
    header, table = read_table(path, lambda cells: empty_cell(cells[:3]), roles=ROLES, columns=args.columns)
    place, cells = next(iter(table))
    if len(cells) not in (1, 3, 5):
        wanted = "1 (text), 3 (original, synonym, antonym) or 5 (and synonym_words, antonym_words)"
        fail(f"{path} {place}: {len(cells)} columns, wanted {wanted}")
    fill(args, FORMS[args.form] | (SCRATCH if args.model == "scratch" else {}))
    say("cline", f"{args.form}: {describe_table(table, header)}")
    if len(cells) == 1:
        return [cells[0] for _, cells in table], load_wordnet(path, args)
    if args.save_triples:
        fail(f"--save-triples {args.save_triples}: {path} holds triples already")
    return [read_triple(cells, f"{path} {place}") for place, cells in table], None


def make_batch(rows, model):
    """[(places (n,), ids, mask, labels, targets (n, L))]: originals, synonym texts and antonym texts, in
    groups of similar length. labels are RTD's classes; targets are the ids of masked tokens, −100 elsewhere.
    Originals are masked in training only."""
    originals, synonyms, antonyms, *classes, _ = zip(*rows)
    texts, batch = [*originals, *synonyms, *antonyms], []
    labels = [np.full(len(ids), -100) for ids in originals] + [row for side in classes for row in side]
    special = torch.tensor(model.tokenizer.all_special_ids)    # padding is one of them
    for group in grouped([len(ids) for ids in texts], model.device):
        places, lengths = torch.tensor(group), torch.tensor([len(texts[i]) for i in group])
        ids = pad([texts[i] for i in group], model.tokenizer.pad_token_id or 0)
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
    """The encoder with its masked-LM head, RTD's head, the weights of the losses and a pooler (code)."""
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


def contrastive_loss(original, synonym, antonym, form="paper"):
    """CTS, a mean over rows: −log softmax of o·s against o·a (paper), or two logistic losses (code).

    original, synonym, antonym   (B, D) raw vectors of the texts, any float type; nothing is normalised
    form        "paper": softplus(o·a − o·s) | "code": ( softplus(−o·s / D) + softplus(o·a / D) ) / 2
    returns     scalar float32, float64 for float64; equal texts: ln 2 (paper)
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
    """RTD: mean cross entropy of "was this token replaced?" over the tokens that count.

    logits      (rows, L) a logit of "replaced" (paper) | (rows, L, 3) logits of kept, replaced in a synonym
                text, replaced in an antonym text (code); any float type
    labels      (rows, L) integers: −100 does not count, 0 kept, above 0 replaced (code: the class, 0 to 2)
    returns     scalar float32, float64 for float64; 0, with gradient 0, where no token counts
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
    """Σ_t exp(−s_t) L_t + max(s_t, 0): losses with learned weights; the best s_t is ln max(L_t, 1).

    losses          L_t: a sequence or tensor of T scalars (here MLM, RTD, CTS)
    log_variances   s_t: T scalar tensors, or (T,); at 0 the derivative of max(s, 0) is 1 (released code)
    returns         scalar, differentiable in both
    source          kandorm/CLINE
    """
    checks.check_scalars("losses", losses)
    checks.check_scalars("log_variances", log_variances)
    if len(losses) != len(log_variances):
        raise ValueError(f"log_variances: found {len(log_variances)}, wanted {len(losses)}, one a loss")
    floored = [s.where(s >= 0, 0) for s in log_variances]      # since torch 2.15 clamp's slope at 0 is 0
    return sum(torch.exp(-s) * loss + f for loss, s, f in zip(losses, log_variances, floored))


def compute_loss(model, batch, rows, args):
    """This rank's part of the weighted sum of MLM (masked originals), RTD (the other texts) and CTS (all
    three), for a batch of `rows` rows over all ranks."""
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


def encode(model, batch):
    """Encode a batch for the losses, in float32.

    returns   vectors (3 · rows, H) in the order of the rows; RTD's logits and classes of the tokens that
              count; what the masked-LM decoder reads at the masked tokens, and their ids
    """
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


def own_parts(means, counts):
    """Turn means over this rank's `counts` tokens or rows into its parts of the means over all ranks."""
    own = torch.tensor(counts, dtype=torch.float32, device=means[0].device)
    total = own.clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    return [mean * share for mean, share in zip(means, own / total.clamp(min=1))]


# ── evaluation ──────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def sentence_probe(model, rows, args):
    """Scores of held-out rows, unmasked: hits, how many originals are nearer to their synonym than to their
    antonym text (%); margin, the mean of h·h_syn − h·h_ant; the losses RTD and CTS."""
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


def evaluate_and_save(model, held_out, run, args):
    """Probe the held-out rows and save the model; the last one is kept (paper)."""
    scores = sentence_probe(model, held_out, args) if held_out else {}
    if run.keeps(scores):
        save(model, run)
    if held_out:
        told = "hits {hits:.2f} %, margin {margin:.3f}, RTD {rtd:.4f}, CTS {cts:.4f}"
        say("held out", told.format(**scores))


def evaluate_only(model, tokens, args):
    """--evaluate: probe all triples, without RTD, whose head is in no saved folder."""
    if not tokens:
        fail(f"{args.data}: no row has replaced words on both sides")
    scores = sentence_probe(model, tokens, args)
    told = "hits {hits:.2f} %, margin {margin:.3f}, CTS {cts:.4f}".format(**scores)
    say("test", f"{told}, {len(tokens):,} triples of {args.data}")


# ── main ────────────────────────────────────────────────────────────────────────────────────────────────────


def hold_out(tokens, args):
    """(training rows, held-out rows): the last rows are held out."""
    count = min(1000, len(tokens) // 20) if args.held_out is None else args.held_out
    if len(tokens) - count < args.batch_size:
        fail(f"{args.data}: {len(tokens)} rows have replaced words on both sides, wanted at least "
             f"--batch-size + --held-out, which are {args.batch_size} + {count}")
    return tokens[: len(tokens) - count], tokens[len(tokens) - count :]


def make_optimizer(model, args):
    """AdamW; biases, layer norms and the weights of the losses do not decay."""
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    others = [weight for weight in model.parameters() if weight.ndim <= 1]
    groups = [dict(params=matrices, weight_decay=0.01), dict(params=others, weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=args.lr, eps=args.eps, fused=True)


def name_rows(tokens, numbers):
    """How a message names rows of tokens: by their numbers in --data, of which some were left out."""
    return f"rows {', '.join(str(tokens[i][-1] + 1) for i in numbers[:20])}, ..."


@command
def main(argv=None):
    args = make_parser().parse_args(argv)
    triples, wordnet = load_data(args.data, args)
    run = Run(args, __file__)
    model = build_model(args, run)
    if wordnet:
        triples = make_triples(triples, wordnet, args)
    args.max_length = min(args.max_length, model.longest)      # matters for --evaluate only
    tokens, cut = tokenise_triples(triples, model, args)
    if args.evaluate:
        return evaluate_only(model, tokens, args)
    left_out = len(triples) - len(tokens)
    tokens, held_out = hold_out(tokens, args)
    say("data", f"{len(tokens):,} triples, {len(held_out):,} held out, {left_out:,} left out: nothing "
                f"replaced; {cut:,} of {3 * len(triples):,} texts cut to {args.max_length} tokens")
    say("model", describe_model(model, args))
    by_epochs = (args.epochs or 0) * epoch_steps(len(tokens), args.batch_size, run.world)
    total = args.steps or by_epochs or args.length
    warmup = total // args.warmup_part if args.warmup_steps is None else args.warmup_steps
    optimizer = make_optimizer(model, args)
    run.begin(model, optimizer, total, warmup)
    save_triples(triples, run)
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
            evaluate_and_save(model, held_out, run, args)
    before, best, rise = run.progress["before"], run.progress["saved"], ""
    if held_out:
        rise = "".join(f"{name} {before[name]:.3f} → {best[name]:.3f}, " for name in ("hits", "margin"))
    weights = torch.exp(-model.log_variances).tolist()
    run.done("{}weights of MLM {:.2f}, RTD {:.2f}, CTS {:.2f}, ".format(rise, *weights))
    say("load", load_line(model, run))


if __name__ == "__main__":
    main()
