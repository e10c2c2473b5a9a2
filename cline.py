"""CLINE: Contrastive Learning with Semantic Negative Examples for Natural Language Understanding. Wang, Ding,
Li, Zheng, ACL 2021, arXiv 2107.00440.

Each text gets two copies in which words are replaced: a synonym text, which keeps the meaning, and an antonym
text, which changes the meaning. One encoder learns three tasks: predict masked tokens of the original (MLM,
masked language modelling), detect the replaced tokens in both copies (RTD, replaced token detection), and
embed the original nearer to its synonym text than to its antonym text (CTS, the contrastive loss). h is the
[CLS] vector of a text, h_t is the vector of token t, w is a learned vector, σ is the sigmoid, and s_i is a
learned number for each loss L_i:

    L_CTS = mean over originals of −log( exp(h·h_syn) / ( exp(h·h_syn) + exp(h·h_ant) ) )
    L_RTD = mean over tokens t of the copies of −log σ(w·h_t) if t was replaced, else −log(1 − σ(w·h_t))
    L     = Σ over i in (MLM, RTD, CTS) of exp(−s_i) L_i + max(s_i, 0)

    python cline.py --model scratch --data tests/data/sentences.txt --wordnet tests/data/wordnet
    python cline.py --data wikipedia.txt --wordnet /usr/share/wordnet --out out/cline
    torchrun --nproc-per-node 4 cline.py --data triples.csv --out out/triples

Data: a .txt file has one text per line; .csv .tsv .json .jsonl .parquet files have columns, chosen by
--columns, else by a header (original, synonym, antonym ...), else by their order:
    1 column   text. --tagger finds nouns, verbs, adjectives, adverbs; WordNet gives words that replace them
    3 columns  original, synonym text, antonym text, as --save-triples writes them. Words that differ from the
               original count as replaced

Expected: training raises two scores on the held-out rows. "hits" is the percentage of originals that are
nearer to their synonym text than to their antonym text; "margin" is the mean of h·h_syn − h·h_ant.
Published result after fine-tuning (see docs/more/finetune.py): CLINE scores on average 1.6 points more than
RoBERTa-base on four contrast sets, and 0.5 points more on four adversarial test sets. The authors trained
with our defaults, a spaCy model as --tagger, and Wikipedia and BookCorpus as --data. No result is published
for --form code.

Departures from the released code, for both values of --form:
- The released code cuts the joined texts into blocks of 254 tokens; this script takes each row as one text.
- The released code puts one space between any two words; this script keeps the spaces as they are.
- The released code takes inflected and random words from other packages; this script takes them from WordNet.
- The released code keeps rows in which a copy equals the original; this script skips them.
- The released code averages losses over each GPU's tokens; this script averages over the tokens of all GPUs.
- The released script starts from random weights; this script starts from --model.
--form code follows the released code in all other points:
    vector of a text    tanh(W h + b) instead of h
    CTS                 two logistic losses, of h·h_syn / D and of h·h_ant / D, where D is the dimension of h
    RTD                 a deeper head with three classes (kept, synonym, antonym), trained only on words that
                        could be replaced (if the data have 3 columns, on all words)
"""
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoModelForMaskedLM

from kernels import check_rows, checks, own_rows
from kernels.training.data import describe_table, empty_cell, log_first_row, read_table
from kernels.training.errors import command, fail, log
from kernels.training.flags import ScriptParser, at_least, fill_defaults, ratio, run_flags
from kernels.training.loop import all_reduce_gradients, decay_groups, set_lr, steps_per_epoch, warmup_linear
from kernels.training.papers import cline_triples as triple_files
from kernels.training.papers.cline_triples import ROLES, label_copies, make_triples, tokenise_triples
from kernels.training.progress import progress
from kernels.training.run import Run
from kernels.training.text.checkpoint import load_hint, save
from kernels.training.text.encoders import build_encoder, describe_model, init_linear
from kernels.training.text.mlm import decoder_loss, encoder_and_mlm_states, mask_tokens
from kernels.training.text.tokens import group_by_length, pad, restore_order

# ── flags ───────────────────────────────────────────────────────────────────────────────────────────────────


def make_parser():
    parser = ScriptParser(__doc__)
    add = parser.add_argument
    run_flags(
        parser, model="roberta-base", out="out/cline", form="paper", impl="auto",
        columns=(None, "by header, else all"),
        max_length=(None, "512 (paper), or 256 with --form code"),
        batch_size=(None, "256 (paper), 128 with --form code, or 32 with --model scratch"),
        epochs=(None, "from --steps"),
        steps=(None, "30000 (paper), 1000000 with --form code, or 300 with --model scratch"),
        lr=(None, "1e-4 (paper), or 2e-3 with --model scratch; linear decay to 0"),
        warmup_steps=(None, "1/60 of all steps (paper), 1/100 for --form code, 1/10 for scratch"),
        eval_every=(1000, "1000 (released scripts)"))
    parser.set_defaults(pooling="cls")                         # the [CLS] vector represents a text
    add("--wordnet", group="data", reads="words", help="folder of a WordNet database (data.noun etc.)")
    add("--tagger", group="data", reads="model",
        help="part-of-speech tagger: the name of a spaCy model, or lexicon, which looks words up in "
             "WordNet; default en_core_web_sm, or lexicon if spaCy or this model is missing")
    add("--save-triples", group="data", metavar="PATH",
        help="save the generated triples to this new .csv file, which can later be used as --data")
    add("--synonym-rate", type=ratio,
        help="largest share of words replaced in synonym texts; default 0.4 (paper), or 0.5 with --form code")
    add("--antonym-rate", type=ratio,
        help="largest share of words replaced in antonym texts; default 0.2 (paper), or 0.5 with --form code")
    add("--held-out-rows", group="evaluation", type=at_least(0, int),
        help="number of last rows of --data, for evaluation only; default 1/20 of all rows, at most 1000")
    return parser


# Flags that are not on the command line get these values. With --model scratch, SCRATCH overrides FORMS.
# length is the number of steps. A run of n steps has n // warmup_part steps of warm-up.
FORMS = {"paper": dict(synonym_rate=0.4, antonym_rate=0.2, batch_size=256, length=30_000, lr=1e-4,
                       max_length=512, warmup_part=60, eps=1e-8),
         "code": dict(synonym_rate=0.5, antonym_rate=0.5, batch_size=128, length=1_000_000, lr=1e-4,
                      max_length=256, warmup_part=100, eps=1e-6)}
SCRATCH = dict(batch_size=32, length=300, lr=2e-3, warmup_part=10)


# ── data and model ──────────────────────────────────────────────────────────────────────────────────────────


def load_data(path, args):
    """Return (texts, WordNet) for one column, else (triples, None). Set the flags that were not given."""
    header, table = read_table(path, empty_cell, roles=ROLES, columns=args.columns)
    place, cells = next(iter(table))
    if len(cells) not in (1, 3):
        fail(f"{path} {place}: {len(cells)} columns, expected 1 (text) or 3 (original, synonym, antonym)")
    for name in ("wordnet", "tagger", "save_triples", "synonym_rate", "antonym_rate"):
        if len(cells) > 1 and getattr(args, name) is not None:
            fail(f"--{name.replace('_', '-')}: {path} already holds triples; leave the flag out")
    fill_defaults(args, FORMS[args.form] | (SCRATCH if args.model == "scratch" else {}))
    log("cline", f"{args.form}: {describe_table(table, header)}")
    log_first_row(table)
    if len(cells) == 1:
        return [cells[0] for _, cells in table], triple_files.load_wordnet(path, args)
    return [label_copies(cells) for _, cells in table], None


def make_batch(rows, model):
    """Divide the texts of rows (from tokenise_triples) into groups of similar length, and pad each group.

    Return [(places (n,), ids, mask, labels, targets (n, L))], one entry per group of n texts. places:
    indices in [*originals, *synonym texts, *antonym texts]. labels: RTD class of each token; −100: ignored.
    targets: original ids of masked tokens, else −100. Only originals are masked, and only in training.
    """
    originals, synonyms, antonyms, synonym_labels, antonym_labels = zip(*rows)
    texts = [*originals, *synonyms, *antonyms]
    labels = [*(np.full(len(ids), -100) for ids in originals), *synonym_labels, *antonym_labels]
    special = torch.tensor(model.tokenizer.all_special_ids)
    batch = []
    for group in group_by_length([len(ids) for ids in texts], model.device):
        places = torch.tensor(group)
        lengths = torch.tensor([len(texts[i]) for i in group])
        ids = pad([texts[i] for i in group], model.tokenizer.pad_token_id or 0)
        real = torch.arange(ids.shape[1]) < lengths[:, None]
        targets = torch.full_like(ids, -100)
        if model.training:
            maskable = real & (places < len(rows))[:, None] & ~torch.isin(ids, special)
            masked_ids, is_masked = mask_tokens(ids, maskable, model.tokenizer)
            targets = torch.where(is_masked, ids, -100)
            ids = masked_ids
        tensors = places, ids, real.long(), pad([labels[i] for i in group], -100), targets
        batch.append([x.to(model.device) for x in tensors])
    return batch


def build_model(args, run):
    """Return the encoder with MLM and RTD heads and the s_i of L. --form code adds a layer tanh(W h + b)."""
    model = build_encoder(args, run, "cls", "keep" if args.form == "code" else None, AutoModelForMaskedLM)
    config, size = model.encoder.config, model.encoder.config.hidden_size
    model.rtd = torch.nn.Linear(size, 1, bias=False)
    if args.form == "code":
        linear, norm = torch.nn.Linear(size, size), torch.nn.LayerNorm(size)
        model.rtd = torch.nn.Sequential(linear, torch.nn.GELU(), norm, torch.nn.Linear(size, 3))
    for part in model.rtd.modules():
        if isinstance(part, torch.nn.Linear):
            init_linear(part, config)
    model.log_variances = torch.nn.Parameter(torch.zeros(3))   # s_i of L_MLM, L_RTD and L_CTS, in this order
    return model.to(run.device)


# ── the paper ───────────────────────────────────────────────────────────────────────────────────────────────


def contrastive_loss(original, synonym, antonym, form="paper"):
    """Return L_CTS, a mean over B rows. It pulls originals to synonym texts, and away from antonym texts.

    original, synonym, antonym   (B, D) vectors o, s, a of the texts, any float type; they are not normalised
    form        "paper": softplus(o·a − o·s) | "code": ( softplus(−o·s / D) + softplus(o·a / D) ) / 2
    returns     scalar, float32 (float64 for float64 input). "paper" gives ln 2 if s and a are equal
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
    """Return L_RTD, the mean cross entropy of classifying tokens as kept or replaced.

    logits      any float type. "paper": (rows, L), the logit of "this token was replaced" | "code": (rows,
                L, 3), logits of kept, replaced in a synonym text, replaced in an antonym text
    labels      integers (rows, L), or another shape of up to 8 dimensions: −100 for tokens that do not count,
                0 for kept tokens, above 0 for replaced tokens; "code" needs the classes 0 to 2
    returns     scalar, float32 (float64 for float64 input); 0 with gradient 0 if no token counts
    source      Wang et al. 2021, L_RTD; kandorm/CLINE
    """
    checks.check_choice("form", form, "paper", "code")
    dimensions = max(1, labels.ndim) if torch.is_tensor(labels) else 2
    letters = " ".join("abcdefgh"[:dimensions])
    shape = f"{letters} three" if form == "code" else letters
    check_rows(labels=(labels, letters, int), logits=(logits, shape), three=3)
    if form == "code":
        checks.check_index("labels", labels, 3, -100)
    labels = labels.long()                                     # in uint8, −100 would become 156
    counts = labels != -100
    logits, labels = logits[counts].to(torch.promote_types(logits.dtype, torch.float32)), labels[counts]
    if form == "code":
        total = F.cross_entropy(logits, labels, reduction="sum")
    else:
        replaced = (labels > 0).to(logits.dtype)
        total = F.binary_cross_entropy_with_logits(logits, replaced, reduction="sum")
    return total / max(1, len(labels))


def total_loss(losses, log_variances, share=1.0):
    """Return the total loss L = Σ_i exp(−s_i) L_i + max(s_i, 0). It is smallest if s_i = ln max(L_i, 1).

    losses          L_i: a sequence or tensor of T scalars (in this script L_MLM, L_RTD, L_CTS)
    log_variances   s_i: T 0-dim tensors or a tensor (T,). At s = 0, max(s, 0) has slope 1 (released code)
    share           factor of max(s_i, 0). On several ranks, pass the fraction of the batch that this rank has
    returns         scalar, differentiable in losses and log_variances
    source          kandorm/CLINE
    """
    if len(losses) != len(log_variances):
        raise ValueError(f"log_variances: found {len(log_variances)}, expected {len(losses)}, one per loss")
    floored = [s.where(s >= 0, 0) for s in log_variances]  # the slope at 0 is 1; clamp has 0 since torch 2.14
    return sum(torch.exp(-s) * loss + share * f for loss, s, f in zip(losses, log_variances, floored))


def compute_loss(model, batch, rows, args):
    """Return this rank's part of the loss L of a global batch of `rows` rows, and the values to log."""
    vectors, logits, labels, states, targets = encode(model, batch)
    own = len(vectors) // 3                                    # number of rows of this rank
    with torch.autocast(model.device.type, torch.bfloat16, enabled=model.bf16):
        mlm = decoder_loss(states, model.lm.get_output_embeddings(), targets, impl=args.impl)
    rtd = replaced_token_loss(logits, labels, args.form)
    cts = contrastive_loss(*vectors.chunk(3), args.form)
    mlm, rtd, cts = scale_to_global_means((mlm, rtd, cts), (len(targets), len(labels), own))
    loss = total_loss((mlm, rtd, cts), model.log_variances, share=own / rows)
    return loss, {"loss": loss.detach(), "mlm": mlm.detach(), "rtd": rtd.detach(), "cts": cts.detach()}


def encode(model, batch):
    """Encode a batch from make_batch. Return the inputs of the three losses; float tensors are float32.

    returns   vectors (3 · rows, H) of [*originals, *synonym texts, *antonym texts]; RTD's logits and labels
              where labels are not −100; the MLM decoder's inputs at masked tokens, and their original ids
    """
    vectors, logits, states = [], [], []
    for _, ids, mask, labels, targets in batch:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=model.bf16):
            hidden, _, state = encoder_and_mlm_states(model.lm, model.encoder, ids, mask, targets != -100)
            vectors.append(model.pool_states(hidden, mask))
            logits.append(model.rtd(hidden[labels != -100]).float())
            states.append(state.float())
    labels = torch.cat([labels[labels != -100] for _, _, _, labels, _ in batch])
    targets = torch.cat([targets[targets != -100] for _, _, _, _, targets in batch])
    vectors, logits = restore_order(torch.cat(vectors), batch), torch.cat(logits).squeeze(-1)
    return vectors, logits, labels, torch.cat(states), targets


def scale_to_global_means(means, counts):
    """Multiply each mean by this rank's count / all ranks' count. The sum over ranks is the global mean."""
    own = torch.tensor(counts, dtype=torch.float32, device=means[0].device)
    total = own.clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    return [mean * share for mean, share in zip(means, own / total.clamp(min=1))]


# ── evaluation ──────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def evaluate_triples(model, rows, args):
    """Score triples without masking any token.

    returns   {"hits": percentage of originals that are nearer to their synonym text than to their antonym
              text, "margin": mean of h·h_syn − h·h_ant, "cts": L_CTS, "rtd": L_RTD}
    """
    model.eval()
    rows = sorted(rows, key=lambda row: len(row[0]))
    vectors, logits, labels = [], [], []
    for i in progress(range(0, len(rows), 64), "held-out rows", " batches"):
        z, rtd_logits, rtd_labels, _, _ = encode(model, make_batch(rows[i : i + 64], model))
        vectors.append(z.chunk(3))
        logits.append(rtd_logits)
        labels.append(rtd_labels)
    model.train()
    original, synonym, antonym = (torch.cat(parts) for parts in zip(*vectors))
    margin = (original * (synonym - antonym)).double().sum(1)
    cts = contrastive_loss(original, synonym, antonym, args.form)
    rtd = replaced_token_loss(torch.cat(logits), torch.cat(labels), args.form)
    return {"hits": 100 * (margin > 0).double().mean().item(), "margin": margin.mean().item(),
            "cts": cts.item(), "rtd": rtd.item()}


def evaluate_and_save(model, held_out, run, args):
    """Score the held-out rows, and save the model. The last model is kept, not the best (released code)."""
    scores = evaluate_triples(model, held_out, args) if held_out else {}
    if run.should_save(scores):
        save(model, run)
    if held_out:
        text = "hits {hits:.2f} %, margin {margin:.3f}, RTD {rtd:.4f}, CTS {cts:.4f}"
        log("held out", text.format(**scores))


def run_evaluation(model, tokens, args):
    """--evaluate: score all triples of --data. There is no RTD score, because the RTD head is never saved."""
    if not tokens:
        fail(f"{args.data}: no row has a replaced word both in the synonym copy and in the antonym copy")
    scores = evaluate_triples(model, tokens, args)
    text = "hits {hits:.2f} %, margin {margin:.3f}, CTS {cts:.4f}".format(**scores)
    log("test", f"{text}, {len(tokens):,} triples of {args.data}")


# ── main ────────────────────────────────────────────────────────────────────────────────────────────────────


def split_held_out(tokens, args):
    """Return (training rows, held-out rows); the held-out rows are the last ones."""
    count = min(1000, len(tokens) // 20) if args.held_out_rows is None else args.held_out_rows
    if len(tokens) - count < args.batch_size:
        fail(f"{args.data}: {len(tokens)} rows have replaced words in both copies, expected at least "
             f"--batch-size + --held-out-rows, which are {args.batch_size} + {count}")
    return tokens[: len(tokens) - count], tokens[len(tokens) - count :]


@command
def main(argv=None):
    args = make_parser().parse_args(argv)
    triples, wordnet = load_data(args.data, args)
    run = Run(args, __file__)
    model = build_model(args, run)
    if wordnet:
        triples = make_triples(triples, wordnet, args)
    args.max_length = min(args.max_length, model.max_length)  # with --evaluate, only this limits --max-length
    tokens, cut = tokenise_triples(triples, model, args)
    if args.evaluate:
        return run_evaluation(model, tokens, args)
    left_out = len(triples) - len(tokens)
    tokens, held_out = split_held_out(tokens, args)
    log("data", f"{len(tokens):,} triples, {len(held_out):,} held out, {left_out:,} left out: a copy "
                f"equals the original; {cut:,} of {3 * len(triples):,} texts cut to {args.max_length} tokens")
    log("model", describe_model(model, args))
    total = args.steps or args.length
    if args.epochs and not args.steps:
        total = args.epochs * steps_per_epoch(len(tokens), args.batch_size)
    warmup = total // args.warmup_part if args.warmup_steps is None else args.warmup_steps
    optimizer = torch.optim.AdamW(decay_groups(model, 0.01), lr=args.lr, eps=args.eps, fused=True)
    run.begin(model, optimizer, total, warmup)
    triple_files.save_triples(triples, run)
    if held_out and run.step == 0:
        run.log_initial_scores(evaluate_triples(model, held_out, args))
    if held_out:
        log("before", "hits {hits:.2f} %, margin {margin:.3f}".format(**run.extra_state["before"]))
    model.train()
    for step, picked in run.steps(total, len(tokens)):
        set_lr(optimizer, warmup_linear(step - 1, total, warmup, args.lr))
        batch = make_batch([tokens[i] for i in picked[own_rows(len(picked))]], model)
        loss, values = compute_loss(model, batch, len(picked), args)
        optimizer.zero_grad()
        loss.backward()
        all_reduce_gradients(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.log_metrics(values, lr=optimizer.param_groups[0]["lr"])
        if run.eval_due:
            evaluate_and_save(model, held_out, run, args)
    text = ""
    if held_out:
        before, after = run.extra_state["before"], run.extra_state["saved"]
        text = "".join(f"{name} {before[name]:.3f} → {after[name]:.3f}, " for name in ("hits", "margin"))
    weights = torch.exp(-model.log_variances).tolist()
    run.finish("{}weights of MLM {:.2f}, RTD {:.2f}, CTS {:.2f}, ".format(text, *weights))
    log("load", load_hint(model, run))


if __name__ == "__main__":
    main()
