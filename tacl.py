"""TaCL: Improving BERT Pre-training with Token-aware Contrastive Learning. Su, Liu, Meng, Lan, Shu, Shareghi,
Collier, Findings of NAACL 2022, arXiv 2111.04198.

A pretrained BERT, the student, continues with its masked-LM and next-sentence losses. A frozen copy of it,
the teacher, reads the same sequence without masks. Where the student reads a mask at place i, its token is
pulled to the teacher's token at place i and pushed from the teacher's other tokens of that sequence. So the
tokens of a sentence move apart. With s of the student, t of the teacher, sim = cos, M the places chosen for
masking, and j all places of i's sequence,

    L = L_MLM + L_NSP + mean over i in M of −log( exp(sim(s_i, t_i) / τ) / Σ_j exp(sim(s_i, t_j) / τ) )

Data: one sentence per line, a blank line between documents. The file is read as a stream, --buffer documents
at a time. --dev is such a file too. It gives the losses; how often the nearest of the teacher's tokens is the
one at the same place; and the mean cosine of a sentence's tokens in each layer. The last comes twice: without
[CLS] and [SEP], as the mean over sentences, which kernels.training.plot draws; and with both, over all pairs
of tokens, as in the paper's figure.

    awk '{print $0 (NR % 8 ? "" : ORS) > (NR > 520 ? "dev.txt" : "train.txt")}' tests/data/sentences.txt
    python tacl.py --model scratch --data train.txt --dev dev.txt
    torchrun --nproc-per-node 8 tacl.py --data wikipedia.txt --dev held-out.txt --out out/tacl

Expected: from BERT, token similarity falls strongly in the top layers. The published numbers are of
bert-base-uncased after 150,000 steps of 256 pairs of up to 256 tokens (our defaults) on English Wikipedia,
then fine-tuned with transformers' example scripts (childtuning.py fine-tunes on labelled texts): GLUE 79.6 →
81.2, SQuAD 1.1 80.8/88.5 → 81.6/89.0, SQuAD 2.0 73.4/76.8 → 74.4/77.5 (EM/F1). They are the released code's,
so --form code comes nearest; --form paper, the default, has none of its own.

Departures: the released code pads every sequence to --max-length, and its denominator holds the teacher's
output there too, as ours does with --form code. In both forms the mean is over the chosen tokens of the
global batch (the paper prints a sum, the code has a mean of the GPUs' means), the teacher has no dropout (the
author agrees), and pairs come from a stream, drawn anew in every pass (in the code once, all in memory).
"""
from kernels.training.cli import Flags, answer_early, at_least, command, fail, fill, say

# ── flags ───────────────────────────────────────────────────────────────────────────────────────────────────


def make_parser():
    parser = Flags(__doc__)
    add, common = parser.add_argument, parser.common
    common("--form", "paper", "paper; whether padding is in the denominator")
    add("--contrast", type=at_least(0), default=1.0,
        help="weight of the contrastive term; default 1 (paper), 0: without it, the released code's switch")
    add("--teacher", reads="model",
        help="hub name or local folder of equal width and vocabulary; default --model (paper)")
    add("--similarity", choices=("cosine", "dot"), default="cosine", help="dot: no τ; default cosine (paper)")
    add("--whole-word", action="store_true", help="choose whole words for masking (released code's option)")
    add("--accumulate", type=at_least(1, int), default=1, help="parts a batch is computed in; default 1")
    add("--buffer", type=at_least(2, int), default=10_000, help="documents in memory; default 10000")
    add("--dev-pairs", type=at_least(1, int), default=1000, help="and sentences, of --dev; default 1000")
    parser.plain("--evaluate", "--data", "--dev")
    common("--model", "bert-base-uncased")
    common("--out", "out/tacl")
    common("--batch-size", said="256 (paper), scratch 32")
    common("--steps", said="150000 (paper), scratch 300")
    common("--lr", said="1e-4 (paper), scratch 2e-3")
    common("--temperature", 0.01, "0.01 (paper)")
    common("--max-length", said="256 (paper), scratch 64, of a pair with [CLS] and both [SEP]")
    common("--seed", 42)
    common("--eval-every", 10_000, "10000 (released script)")
    common("--impl", "auto")
    parser.plain("--resume", "--keep-state", "--log", "--precision")
    return parser


# Defaults for flags that were not given: the paper's, and for a small random BERT.
PAPER = dict(batch_size=256, steps=150_000, lr=1e-4, max_length=256)
SCRATCH = dict(batch_size=32, steps=300, lr=2e-3, max_length=64)


if __name__ == "__main__":
    answer_early(make_parser)  # --help, and wrong flags, before the seconds that torch takes

import contextlib
import copy
import itertools
import math
import random
from collections import Counter

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForPreTraining

from kernels import check_rows, checks, own_rows, similarity_lse, similarity_topk
from kernels.training.loop import half_products, set_lr, sum_gradients, warmup_linear
from kernels.training.output_dir import model_card, new_files, save_tokenizer
from kernels.training.progress import progress
from kernels.training.run import Run
from kernels.training.text.documents import mask_pair, next_documents, read_documents, sentence_pairs, stream
from kernels.training.text.mlm import decoder_loss
from kernels.training.text.models import has_decoder, load_text_model, longest_input
from kernels.training.text.tokens import pad

# ── data and model ──────────────────────────────────────────────────────────────────────────────────────────


def load_data(path, args):
    """How many documents of two or more sentences a file holds. Reads it once, to check it; keeps nothing."""
    fill(args, SCRATCH if args.model == "scratch" else PAPER)
    if args.max_length < 5:
        fail(f"--max-length {args.max_length}: wanted 5 or more: [CLS], both [SEP], a token of each sentence")
    bar = progress(read_documents(path), path)
    try:
        sizes = Counter(min(len(sentences), 2) for sentences, _ in bar)
    except OSError as error:
        fail(f"{path}: {error.strerror}")
    if sizes[2] < 2:
        fail(f"{path}: {sizes[2]} documents of two or more sentences, wanted at least 2; "
             "a sentence a line, a blank line between documents")
    say("tacl", f"{args.form}: {sizes[2]:,} documents from {path}; {sizes[1]:,} of one sentence are left out")
    return sizes[2]


def make_batch(rows, model, args):
    """[(ids, masked ids, segments, real, chosen (n, L), labels (n,))]: rows in --accumulate parts of similar
    length. A row is (ids, segments, label, masked ids, chosen). The paper's form pads to a part's longest
    row, the code's to --max-length."""
    rows, parts = sorted(rows, key=lambda row: len(row[0])), []
    size, blank = math.ceil(len(rows) / args.accumulate), model.tokenizer.pad_token_id
    for i in range(0, len(rows), size):
        ids, segments, labels, masked, chosen = zip(*rows[i : i + size])
        lengths = torch.tensor([len(row) for row in ids])
        more = args.max_length - len(ids[-1]) if args.form == "code" else 0
        ids, masked, segments, chosen = (
            F.pad(pad(column, value), (0, more), value=value)
            for column, value in ((ids, blank), (masked, blank), (segments, 0), (chosen, 0)))
        real = torch.arange(ids.shape[1]) < lengths[:, None]
        part = ids, masked, segments, real, chosen.bool(), torch.tensor(labels, dtype=torch.int64)
        parts.append([x.to(model.device) for x in part])
    return parts


def row_weights(rows):
    """The weights of a chosen token and of a pair in the means over these rows."""
    return 1 / max(1, sum(int(chosen.sum()) for *_, chosen in rows)), 1 / len(rows)


def build_model(args, run):
    """The student with its heads, and the teacher, which is hidden from train(), optimizer and state.pt."""
    model = torch.nn.Module()
    model.device, model.bf16 = run.device, run.bf16
    model.lm, model.tokenizer, model.fresh = load_pretraining("--model", args.model, args)
    model.encoder, width = model.lm.base_model, model.lm.config.hidden_size
    model.nsp = None                                           # BERT has its own
    if not hasattr(getattr(model.lm, "cls", None), "seq_relationship"):
        layers = torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, 2)
        model.nsp = torch.nn.Sequential(*layers).apply(model.lm._init_weights)
        model.fresh.append("next sentence")
    teacher = load_teacher(model, args) if args.teacher else copy.deepcopy(model.encoder)
    model.teacher = (teacher.eval().requires_grad_(False).to(model.device),)   # a tuple hides it
    longest = min(longest_input(encoder, model.tokenizer) for encoder in (model.encoder, teacher))
    if args.max_length > longest:
        both = f"{args.model} with its teacher" if args.teacher else args.model
        fail(f"--max-length {args.max_length}: {both} reads at most {longest} tokens")
    names = model.tokenizer.convert_ids_to_tokens(range(len(model.tokenizer)))
    model.special = set(model.tokenizer.all_special_ids)
    model.ordinary = [token for token in range(1, len(names)) if token not in model.special]
    model.continuing = {token for token, name in enumerate(names) if name.startswith("##")}
    if args.whole_word and not model.continuing:
        fail(f"--whole-word: the tokenizer of {args.model} has no pieces that begin with ##")
    fresh = f", fresh heads (not in the checkpoint): {', '.join(model.fresh)}" if model.fresh else ""
    size, teacher = sum(p.numel() for p in model.encoder.parameters()), args.teacher or "the same, frozen"
    say("model", f"{args.model}, {size / 1e6:.1f} M parameters{fresh}; teacher {teacher}")
    return model.to(model.device)


def load_teacher(model, args):
    """The encoder that --teacher names; fails if the student cannot learn from it."""
    lm, tokenizer, _ = load_pretraining("--teacher", args.teacher, args)
    found, wanted = lm.config.hidden_size, model.lm.config.hidden_size
    if found != wanted:
        widths = f"its vectors have {found} numbers, those of {args.model} {wanted}"
        fail(f"--teacher {args.teacher}: {widths}; wanted equal widths")
    if tokenizer.get_vocab() != model.tokenizer.get_vocab():
        other = f"its vocabulary is not that of {args.model}"
        fail(f"--teacher {args.teacher}: {other}; wanted one tokenizer for both")
    return lm.base_model


def load_pretraining(flag, name, args):
    """(model with a masked-LM head, tokenizer, names of the head layers that the checkpoint lacks)."""
    texts = None if args.evaluate else ("\n".join(lines) for lines, _ in read_documents(args.data))
    model, tokenizer = load_text_model(name, texts, AutoModelForPreTraining, flag)
    like_bert = hasattr(model.base_model, "embeddings") and has_decoder(model)
    marks = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.mask_token_id, tokenizer.pad_token_id
    if not like_bert or None in marks:
        fail(f"{flag} {name}: {type(model).__name__} is no masked language model like BERT or DistilBERT")
    fresh = {part.removeprefix(f"{model.base_model_prefix}.").rpartition(".")[0] for part in model.missing}
    return model, tokenizer, sorted(fresh)


# ── the paper ───────────────────────────────────────────────────────────────────────────────────────────────


def tacl_loss(student, teacher, masked, attention_mask=None, temperature=0.01, form="paper", *,
              similarity="cosine", impl="auto"):
    """Mean over masked tokens, the anchors, of −log softmax of the teacher's token at the same place among
    the teacher's tokens of the same sequence.

    student, teacher   (B, L, D) raw hidden states of the masked and of the plain sequences, any float type;
                       normalised here, a zero vector has cosine 0 with all; the teacher gets no gradient
    masked             (B, L) bool or integers: the chosen tokens, which are the anchors
    attention_mask     (B, L) bool or integers, 0 at padding, which is never an anchor; None: no padding
    form               "paper": the denominator holds a sequence's tokens | "code": and its padding
    similarity         "cosine" | "dot": plain products, not divided by the temperature (released code)
    returns            scalar float32, float64 for float64; no anchor: 0 with gradient 0
    memory             copies of the anchors and of the teacher's tokens; no (B, L, L) similarities
    source             Su et al. 2022, the token-aware contrastive objective; the mean instead of the sum is
                       the released code's
    """
    q, k, groups, own = pack(student, teacher, masked, attention_mask, form, similarity)
    checks.check_temperature(temperature, q.device)
    checks.check_impl(impl)
    if not len(q):
        return q.sum(dtype=torch.promote_types(q.dtype, torch.float32))
    temperature = temperature if similarity == "cosine" else 1.0
    positives = own, torch.arange(len(k), device=k.device)
    # log Σ_j exp s(q_i, k_j) over the tokens of i's sequence, but its own
    others = similarity_lse(q, k, temperature, exclude=positives, within=groups, impl=impl)
    positive = (q.to(others.dtype) * k[own].to(others.dtype)).sum(1) / temperature
    return -F.logsigmoid(positive - others).mean()             # = log(exp positive + exp others) - positive


def pack(student, teacher, masked, attention_mask, form, similarity):
    """Lay the tokens of all sequences one after the other; the paper's form leaves padding out.

    returns   anchors (N, D), the teacher's tokens (M, D), (the sequence of each anchor, of each token), and
              the place of each anchor's own token (N,)
    """
    check_rows(masked=(masked, "B L", bool, int, float), student=(student, "B L D"),
               teacher=(teacher, "B L D"), attention_mask=(attention_mask, "B L", bool, int, float, None))
    checks.check_alike(student=student, teacher=teacher)
    checks.check_choice("form", form, "paper", "code")
    checks.check_choice("similarity", similarity, "cosine", "dot")
    real = torch.ones_like(masked, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    anchors = masked.bool() & real
    columns = real if form == "paper" else torch.ones_like(real)
    own = (columns.flatten().cumsum(0) - 1)[anchors.flatten()]
    sequence = torch.arange(len(real), device=real.device)[:, None].expand_as(real)
    q, k = student[anchors], teacher.detach()[columns]
    if similarity == "cosine":
        eps = max(1e-8, torch.finfo(k.dtype).tiny)
        q = F.normalize(q, dim=1, eps=eps)
        F.normalize(k, dim=1, eps=eps, out=k)
    return q, k, (sequence[anchors], sequence[columns]), own


def compute_loss(model, part, weights, args):
    """This rank's share of the three losses, for one part of a batch. weights are those of row_weights, of
    the whole batch. With --contrast 0 training leaves out the teacher and the contrast."""
    (ids, masked, segments, real, chosen, labels), (token_weight, pair_weight) = part, weights
    contrast = None
    with torch.autocast(model.device.type, torch.bfloat16, enabled=model.bf16):
        student, at_chosen, next_logits = run_student(model, masked, segments, real, chosen)
        if args.contrast or not model.training:
            with torch.no_grad():
                output = run_encoder(model.teacher[0], ids, segments, real, layers=False)
            teacher = output.last_hidden_state.float()
            unit = args.similarity == "cosine"                 # other rows may leave float16's range
            with half_products(student, args) if unit else contextlib.nullcontext():
                contrast = tacl_loss(student, teacher, chosen, real, args.temperature, args.form,
                                     similarity=args.similarity, impl=args.impl)
        mlm = decoder_loss(at_chosen, model.lm.get_output_embeddings(), ids[chosen], impl=args.impl)
    nsp = F.cross_entropy(next_logits.float(), labels)
    tokens = len(at_chosen) * token_weight
    values = {"mlm": mlm * tokens, "nsp": nsp * len(labels) * pair_weight}
    loss = sum(values.values())
    if contrast is not None:
        values["contrast"] = contrast * tokens
        loss = loss + args.contrast * values["contrast"]
    values = {"loss": loss.detach()} | {name: value.detach() for name, value in values.items()}
    if not model.training:
        q, k, groups, own = pack(student, teacher, chosen, real, args.form, args.similarity)
        nearest = similarity_topk(q, k, 1, within=groups, impl=args.impl)[1][:, 0] if len(q) else own
        values["accuracy"] = 100 * (nearest == own).sum() * token_weight
    return loss, values


def run_student(model, ids, segments, real, chosen):
    """(last hidden states (n, L, H) float32, what the decoder would read at the chosen tokens, next-sentence
    logits (n, 2)). The decoder, by far the widest layer, gets no tokens here: decoder_loss runs it."""
    taken = []

    def skip(_, inputs):
        taken.append(inputs[0][chosen].float())
        return inputs[0][:0]

    with model.lm.get_output_embeddings().register_forward_pre_hook(skip):
        output = run_encoder(model.lm, ids, segments, real)
    hidden = output.hidden_states[-1]
    next_logits = output.seq_relationship_logits if model.nsp is None else model.nsp(hidden[:, 0])
    return hidden.float(), taken[0], next_logits


def run_encoder(model, ids, segments, real, layers=True):
    """The output of an encoder or of a model around it; layers: with the hidden states of each layer."""
    known = {"token_type_ids": segments} if getattr(model.config, "type_vocab_size", 0) > 1 else {}
    return model(input_ids=ids, attention_mask=real, output_hidden_states=layers, **known)


# ── evaluation ──────────────────────────────────────────────────────────────────────────────────────────────


def load_dev(path, documents, model, args):
    """(rows of pairs, rows of sentences) for make_batch, the same at every evaluation. In a sentence,
    "chosen" marks all tokens but [CLS] and [SEP]."""
    rng = random.Random(f"{args.seed} dev")
    cls, sep = [model.tokenizer.cls_token_id], [model.tokenizer.sep_token_id]
    documents, _ = next_documents(path, 0, min(documents, args.dev_pairs), model)
    pairs = sentence_pairs(documents, model, args, rng)[: args.dev_pairs]
    sentences = [row[: args.max_length - 2] for document in documents for row in document][: args.dev_pairs]
    sentences = sorted((np.concatenate([cls, row, sep]) for row in sentences), key=len)
    return ([(*pair, *mask_pair(pair[0], model, args, rng)) for pair in pairs],
            [(ids, ids < 0, 0, ids, np.arange(len(ids)) % (len(ids) - 1) > 0) for ids in sentences])


def token_similarity(hidden, mask):
    """(B,) mean cosine of two different tokens of each sequence, NaN if it has fewer: hidden (B, L, D), mask
    (B, L) bool."""
    # without (L, L) similarities: Σ_{i≠j} u_i·u_j = |Σ u_i|² − Σ |u_i|²
    unit = F.normalize(hidden, dim=2, eps=1e-8) * mask[:, :, None]
    count = mask.sum(1)
    return (unit.sum(1).square().sum(1) - unit.square().sum((1, 2))) / (count * (count - 1))


@torch.no_grad()
def evaluate(model, dev, args):
    """Held-out losses, accuracy of the contrast in percent, and the token similarity of each layer, 0 being
    the word embeddings: without [CLS] and [SEP], and "special", with both, over all pairs (released code)."""
    model.eval()
    rows, sentences = dev
    weights, totals, layers, pairs = row_weights(rows), Counter(), [], []
    for i in progress(range(0, len(rows), 32), "held-out pairs", " batches"):
        for part in make_batch(rows[i : i + 32], model, args):
            _, values = compute_loss(model, part, weights, args)
            totals.update({name: value.item() for name, value in values.items()})
    for i in progress(range(0, len(sentences), 64), "token similarity", " batches"):
        for ids, _, segments, real, inner, _ in make_batch(sentences[i : i + 64], model, args):
            with torch.autocast(model.device.type, torch.bfloat16, enabled=model.bf16):
                states = run_encoder(model.encoder, ids, segments, real).hidden_states
            layers.append(torch.stack([token_similarity(hidden.float(), mask)
                                       for mask in (inner, real) for hidden in states]))
            pairs.append(real.sum(1) * (real.sum(1) - 1))
    model.train()
    (inner, every), pairs = torch.cat(layers, 1).chunk(2), torch.cat(pairs)
    return dict(totals) | {"similarity": inner.nanmean(1).tolist(),
                           "similarity_special": ((every * pairs).sum(1) / pairs.sum()).tolist()}


def evaluate_only(args):
    """--evaluate: score the documents of --dev, without the losses of heads that the model lacks."""
    path, run = args.dev or args.data, Run(args, __file__)
    documents, model = load_data(path, args), build_model(args, run)
    scores = evaluate(model, load_dev(path, documents, model, args), args)
    lost = {"nsp" if "seq_" in name or "next" in name else "mlm" for name in model.fresh}
    say("test", summary({name: value for name, value in scores.items() if name not in lost}))


def summary(scores):
    """The scores of evaluate in one line; empty without scores."""
    if "contrast" not in scores:
        return ""
    losses = ", ".join(f"{name} {scores[name]:.4f}" for name in ("mlm", "nsp", "contrast") if name in scores)
    layers = [" ".join(f"{x:.3f}" for x in scores[name]) for name in ("similarity", "similarity_special")]
    layers = ", with [CLS] and [SEP] ".join(layers)
    return f"{losses}, accuracy {scores['accuracy']:.2f} %, token similarity by layer {layers}"


def save_student(model, run):
    """Write the encoder to --out as transformers reads it, without heads and teacher."""
    if run.rank:
        return
    tokenizer = copy.deepcopy(model.tokenizer)  # the original may be at work in stream's thread
    text = f"An encoder to fine-tune. {summary(run.progress['saved'])}".strip()
    card = model_card(run, "feature-extraction", ["transformers"], text, load_command(run))
    with new_files(run) as aside:
        model.encoder.save_pretrained(aside)
        save_tokenizer(tokenizer, aside)
        (aside / "README.md").write_text(card, encoding="utf-8")


def load_command(run):
    """The line of Python that loads what was saved."""
    return f'AutoModel.from_pretrained("{run.args.out}")'


# ── main ────────────────────────────────────────────────────────────────────────────────────────────────────


@command
def main(argv=None):
    args = make_parser().parse_args(argv)
    if args.evaluate:
        return evaluate_only(args)
    documents = load_data(args.data, args)
    held_out = load_data(args.dev, args) if args.dev else 0
    run = Run(args, __file__)
    model = build_model(args, run)
    dev = load_dev(args.dev, held_out, model, args) if args.dev else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, eps=1e-6, weight_decay=0.0, fused=True)
    run.progress["place"] = [0, 0, 0]                          # in the stream
    run.begin(model, optimizer, args.steps)
    if dev and run.step == 0:
        run.note_before(evaluate(model, dev, args))
    if dev:
        say("before", summary(run.progress["before"]))
    model.train()
    run.where = lambda step: f"documents about byte {run.progress['place'][0]:,}"
    pairs, rise = stream(documents, run.progress["place"], model, args), args.steps // 10
    for step, _ in run.steps(args.steps):
        set_lr(optimizer, warmup_linear(step - 1, args.steps, rise, args.lr))  # from 0, as released
        batch, places = zip(*itertools.islice(pairs, args.batch_size))
        run.progress["place"] = places[-1]
        rng = random.Random(f"{args.seed} masks {step}")
        rows = [(*pair, *mask_pair(pair[0], model, args, rng)) for pair in batch]
        weights, values = row_weights(rows), Counter()
        optimizer.zero_grad()
        for part in make_batch(rows[own_rows(len(rows))], model, args):
            loss, terms = compute_loss(model, part, weights, args)
            loss.backward()
            values.update(terms)
        sum_gradients(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.note(dict(values), lr=optimizer.param_groups[0]["lr"])
        if run.due and run.keeps(evaluate(model, dev, args) if dev else {}):   # the last one is kept (paper)
            save_student(model, run)
    before, after, change = run.progress["before"], run.progress["saved"], ""
    if dev:
        say("after", summary(after))
        top = [f"{before[x][-1]:.3f} → {after[x][-1]:.3f}" for x in ("similarity", "similarity_special")]
        change = (f"contrast accuracy {before['accuracy']:.2f} → {after['accuracy']:.2f} %, token similarity "
                  f"of the top layer {', with [CLS] and [SEP] '.join(top)}, ")
    run.done(change)
    say("load", load_command(run))


if __name__ == "__main__":
    main()
