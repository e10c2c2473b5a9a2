"""TaCL: Improving BERT Pre-training with Token-aware Contrastive Learning. Su, Liu, Meng, Lan, Shu, Shareghi,
Collier, Findings of NAACL 2022, arXiv 2111.04198.

A pretrained BERT, the student, is trained further with its masked-LM and next-sentence losses (L_MLM, L_NSP)
and a contrastive loss. A frozen copy, the teacher, reads the same text without masks. At a masked position i,
the student's vector s_i is pulled towards the teacher's vector t_i and pushed away from the teacher's other
vectors of the sequence. This makes the tokens of a sentence less similar to each other. M is the set of
positions chosen for masking, j runs over all positions of the sequence of i, and sim is the cosine:

    L = L_MLM + L_NSP + mean over i in M of −log( exp(sim(s_i, t_i) / τ) / Σ_j exp(sim(s_i, t_j) / τ) )

    awk '{print} NR % 8 == 0 {print ""}' tests/data/sentences.txt > documents.txt
    head -n 585 documents.txt > train.txt && tail -n +586 documents.txt > dev.txt
    python tacl.py --model scratch --data train.txt --dev dev.txt
    torchrun --nproc-per-node 8 tacl.py --data wikipedia.txt --dev held-out.txt --out out/tacl

Data (--data, --dev): one sentence per line, a blank line between documents. The first two commands make
such files. An evaluation on --dev reports the three losses and two other scores:
    accuracy            percentage of masked positions i where t_i is the teacher's vector nearest to s_i
    token similarity    mean cosine of two tokens of a sentence, for each layer. First without [CLS] and
                        [SEP], a mean over sentences; then with both, a mean over token pairs (released code)

Expected: starting from BERT, token similarity falls strongly in the top layers.
Published results of bert-base-uncased, before → after TaCL's training on English Wikipedia (the defaults of
--form code). Each model was fine-tuned with the example scripts of transformers. EM: rate of exact matches.
    GLUE                 79.6      → 81.2
    SQuAD 1.1 (EM/F1)    80.8/88.5 → 81.6/89.0
    SQuAD 2.0 (EM/F1)    73.4/76.8 → 74.4/77.5
No result is published for --form paper.

Departures:
- In the released code, j also runs over padding up to --max-length; here, j does so only with --form code.
- The paper sums over i; the released code averages on each GPU; this script averages over the whole batch.
- The released code's teacher has dropout; this script's teacher has none (see docs/fidelity.md).
- The released code makes all pairs once, in memory; this script makes new pairs in every pass over the data.
"""
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
from kernels.training.errors import command, fail, log
from kernels.training.flags import ScriptParser, at_least, fill_defaults, run_flags
from kernels.training.loop import all_reduce_gradients, set_lr, warmup_linear
from kernels.training.papers import tacl_documents as corpus
from kernels.training.precision import loss_autocast
from kernels.training.progress import progress
from kernels.training.run import Run
from kernels.training.text.checkpoint import save_transformer
from kernels.training.text.mlm import decoder_loss
from kernels.training.text.models import load_text_model, longest_input
from kernels.training.text.tokens import pad

# ── flags ───────────────────────────────────────────────────────────────────────────────────────────────────


def make_parser():
    parser = ScriptParser(__doc__)
    add = parser.add_argument
    run_flags(
        parser, model="bert-base-uncased", dev=None, out="out/tacl", impl="auto",
        temperature=(0.01, "0.01 (paper)"),
        form=("paper", "paper; code: the denominator includes padding"),
        max_length=(None, "256 (paper), or 64 with --model scratch, for both texts of a pair together"),
        batch_size=(None, "256 (paper), or 32 with --model scratch"),
        steps=(None, "150000 (paper), or 300 with --model scratch"),
        lr=(None, "1e-4 (paper), or 2e-3 for scratch; warm-up for a tenth of the steps, linear decay to 0"),
        eval_every=(10_000, "10000 (released script)"))
    add("--shuffle-buffer", group="data", type=at_least(2, int), default=10_000,
        help="number of documents whose sentence pairs are shuffled together; default 10000")
    add("--teacher", group="model", reads="model",
        help="teacher model; default --model (paper); both need the same hidden size and the same vocabulary")
    add("--contrastive-weight", type=at_least(0), default=1.0,
        help="weight of the contrastive loss; 0: off; default 1 (paper)")
    add("--similarity", choices=("cosine", "dot"), default="cosine",
        help="similarity of token vectors; dot: dot product, not divided by τ; default cosine (paper)")
    add("--grad-accum", group="training", type=at_least(1, int), default=1,
        help="number of micro-batches that each batch is split into; default 1")
    add("--dev-pairs", group="evaluation", type=at_least(1, int), default=1000,
        help="largest number of --dev pairs (for losses) and --dev sentences (for similarity); default 1000")
    return parser


# Flags that are not on the command line get the values of PAPER or, with --model scratch, of SCRATCH.
PAPER = dict(batch_size=256, steps=150_000, lr=1e-4, max_length=256)
SCRATCH = dict(batch_size=32, steps=300, lr=2e-3, max_length=64)


# ── data and model ──────────────────────────────────────────────────────────────────────────────────────────


def load_data(path, args):
    """Return the number of documents with two or more sentences. Set the flags that were not given."""
    fill_defaults(args, SCRATCH if args.model == "scratch" else PAPER)
    if args.max_length < 5:
        fail(f"--max-length {args.max_length}: expected at least 5 ([CLS], two [SEP], a token per sentence)")
    bar = progress(corpus.read_documents(path), path)
    sizes = Counter(min(len(sentences), 2) for sentences, _ in bar)
    if sizes[2] < 2:
        fail(f"{path}: {sizes[2]} documents of two or more sentences, expected at least 2; "
             "write one sentence per line and a blank line between documents")
    log("tacl", f"{args.form}: {sizes[2]:,} documents from {path}; {sizes[1]:,} of one sentence are left out")
    return sizes[2]


def make_batch(rows, model, args):
    """Sort rows by length, and divide them into --grad-accum micro-batches. Pad a micro-batch to its
    longest row (--form paper) or to --max-length (--form code).

    rows      [(ids, segments, label, masked ids, is_masked)]; label: True if the second text is random
    returns   [(ids, masked ids, segments, real, is_masked (n, L), labels (n,))]; real is False at padding
    """
    rows = sorted(rows, key=lambda row: len(row[0]))
    size, padding = math.ceil(len(rows) / args.grad_accum), model.tokenizer.pad_token_id
    micro_batches = []
    for i in range(0, len(rows), size):
        ids, segments, labels, masked_ids, is_masked = zip(*rows[i : i + size])
        lengths = torch.tensor([len(row) for row in ids])
        extra = args.max_length - len(ids[-1]) if args.form == "code" else 0
        ids = F.pad(pad(ids, padding), (0, extra), value=padding)
        masked_ids = F.pad(pad(masked_ids, padding), (0, extra), value=padding)
        segments = F.pad(pad(segments, 0), (0, extra), value=0)
        is_masked = F.pad(pad(is_masked, 0), (0, extra), value=0)
        real = torch.arange(ids.shape[1]) < lengths[:, None]
        tensors = ids, masked_ids, segments, real, is_masked.bool(), torch.tensor(labels, dtype=torch.int64)
        micro_batches.append([x.to(model.device) for x in tensors])
    return micro_batches


def mean_weights(rows):
    """Return (1 / number of masked tokens, 1 / number of pairs): factors that turn sums into means."""
    tokens = sum(int(is_masked.sum()) for *_, is_masked in rows)
    return 1 / max(1, tokens), 1 / len(rows)


def build_model(args, run):
    """Return the student with its heads, and the teacher, a frozen encoder without heads."""
    model = torch.nn.Module()
    model.device, model.bf16 = run.device, run.bf16
    model.lm, model.tokenizer, model.missing_heads = load_pretraining_model("--model", args.model, args)
    model.encoder, width = model.lm.base_model, model.lm.config.hidden_size
    model.nsp = None                                    # None means that the next-sentence head of lm is used
    if not hasattr(getattr(model.lm, "cls", None), "seq_relationship"):
        layers = torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, 2)
        model.nsp = torch.nn.Sequential(*layers).apply(model.lm._init_weights)
        model.missing_heads.append("next sentence")
    teacher = load_teacher(model, args) if args.teacher else copy.deepcopy(model.encoder)
    teacher.eval().requires_grad_(False).to(model.device)
    longest = min(longest_input(encoder, model.tokenizer) for encoder in (model.encoder, teacher))
    if args.max_length > longest:
        both = f"{args.model} with its teacher" if args.teacher else args.model
        fail(f"--max-length {args.max_length}: {both} reads at most {longest} tokens")
    names = model.tokenizer.convert_ids_to_tokens(range(len(model.tokenizer)))
    model.special_ids = set(model.tokenizer.all_special_ids)
    model.regular_ids = [token for token in range(1, len(names)) if token not in model.special_ids]
    heads = f", new heads: {', '.join(model.missing_heads)}" if model.missing_heads else ""
    size = sum(p.numel() for p in model.encoder.parameters()) / 1e6
    log("model", f"{args.model}, {size:.1f} M parameters{heads}; teacher {args.teacher or 'a frozen copy'}")
    return model.to(model.device), teacher


def load_teacher(model, args):
    """Return the encoder of --teacher. Raise UserError if its size or vocabulary is not the student's."""
    lm, tokenizer, _ = load_pretraining_model("--teacher", args.teacher, args)
    found, expected = lm.config.hidden_size, model.lm.config.hidden_size
    if found != expected:
        fail(f"--teacher {args.teacher}: its hidden size is {found}, expected {expected}, as in {args.model}")
    if tokenizer.get_vocab() != model.tokenizer.get_vocab():
        fail(f"--teacher {args.teacher}: found another vocabulary, expected the vocabulary of {args.model}")
    return lm.base_model


def load_pretraining_model(flag, name, args):
    """Return a model with a masked-LM head, its tokenizer, and names of heads without saved weights."""
    texts = None if args.evaluate else ("\n".join(lines) for lines, _ in corpus.read_documents(args.data))
    model, tokenizer = load_text_model(name, texts, AutoModelForPreTraining, flag)
    has_decoder = isinstance(model.get_output_embeddings(), torch.nn.Linear)
    like_bert = hasattr(model.base_model, "embeddings") and has_decoder
    special = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.mask_token_id, tokenizer.pad_token_id
    if not like_bert or None in special:
        fail(f"{flag} {name}: found {type(model).__name__}, expected a masked language model like BERT")
    missing = {part.removeprefix(f"{model.base_model_prefix}.").rpartition(".")[0] for part in model.missing}
    return model, tokenizer, sorted(missing)


# ── the paper ───────────────────────────────────────────────────────────────────────────────────────────────


def tacl_loss(student, teacher, masked, attention_mask=None, temperature=0.01, form="paper", *,
              similarity="cosine", impl="auto"):
    """Return the contrastive loss: at each masked position i, find t_i by its similarity to s_i among all of
    the teacher's vectors t_j of the sequence. The loss is the mean cross entropy over the positions i.

    student, teacher   (B, L, D) hidden states s and t, any float type. The student reads the masked text. A
                       zero vector has cosine 0 with all vectors. The teacher gets no gradient
    masked             (B, L) bool or numbers: non-zero at masked positions
    attention_mask     (B, L) bool or numbers: 0 at padding, which never counts as masked; None: no padding
    form               "paper": the denominator excludes padding | "code": it includes padding
    similarity         "cosine" | "dot": dot product, not divided by the temperature (released code)
    returns            scalar, float32 (float64 for float64 input); 0 with gradient 0 if nothing is masked
    memory             copies of t and of the masked s; "auto" stores similarities only if they are few
    source             Su et al. 2022; the mean instead of the sum is from the released code
    """
    q, k, groups, own = pack_tokens(student, teacher, masked, attention_mask, form, similarity)
    checks.check_temperature(temperature, q.device)
    checks.check_choice("impl", impl, *checks.IMPLS)
    if not len(q):
        return q.sum(dtype=torch.promote_types(q.dtype, torch.float32))
    temperature = temperature if similarity == "cosine" else 1.0
    positives = own, torch.arange(len(k), device=k.device)
    # log Σ_j exp s(q_i, k_j) over all tokens j of the sequence of i, except for the positive of i
    others = similarity_lse(q, k, temperature, exclude=positives, within=groups, impl=impl)
    positive = (q.to(others.dtype) * k[own].to(others.dtype)).sum(1) / temperature
    return -F.logsigmoid(positive - others).mean()             # = log(exp positive + exp others) - positive


def pack_tokens(student, teacher, masked, attention_mask, form, similarity):
    """Select queries (the student's masked tokens) and keys (the teacher's tokens) for tacl_loss.

    returns   queries (N, D); keys (M, D), including padding only for form "code"; groups: sequence numbers of
              the queries (N,) and of the keys (M,); own (N,): index in keys of each query's positive
    """
    check_rows(masked=(masked, "B L", bool, int, float), student=(student, "B L D"),
               teacher=(teacher, "B L D"), attention_mask=(attention_mask, "B L", bool, int, float, None))
    checks.check_same_dtype(student=student, teacher=teacher)
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


def compute_loss(model, micro_batch, weights, args, teacher):
    """Return this rank's part of the loss for a micro-batch, and the values to log. weights: mean_weights of
    the global batch. The teacher does not run in training with --contrastive-weight 0."""
    ids, masked_ids, segments, real, is_masked, labels = micro_batch
    token_weight, pair_weight = weights
    contrast = None
    with torch.autocast(model.device.type, torch.bfloat16, enabled=model.bf16):
        student, decoder_inputs, next_logits = forward_student(model, masked_ids, segments, real, is_masked)
        if args.contrastive_weight or not model.training:
            with torch.no_grad():
                targets = run_encoder(teacher, ids, segments, real, layers=False).last_hidden_state.float()
            normalised = args.similarity == "cosine"           # dot products could overflow in float16
            with loss_autocast(student, args) if normalised else contextlib.nullcontext():
                contrast = tacl_loss(student, targets, is_masked, real, args.temperature, args.form,
                                     similarity=args.similarity, impl=args.impl)
        mlm = decoder_loss(decoder_inputs, model.lm.get_output_embeddings(), ids[is_masked], impl=args.impl)
    nsp = F.cross_entropy(next_logits.float(), labels)
    tokens = len(decoder_inputs) * token_weight
    values = {"mlm": mlm * tokens, "nsp": nsp * len(labels) * pair_weight}
    loss = sum(values.values())
    if contrast is not None:
        values["contrast"] = contrast * tokens
        loss = loss + args.contrastive_weight * values["contrast"]
    values = {"loss": loss.detach()} | {name: value.detach() for name, value in values.items()}
    if not model.training:
        q, k, groups, own = pack_tokens(student, targets, is_masked, real, args.form, args.similarity)
        nearest = own
        if len(q):
            nearest = similarity_topk(q, k, 1, within=groups, impl=args.impl)[1][:, 0]
        values["accuracy"] = 100 * (nearest == own).sum() * token_weight
    return loss, values


def forward_student(model, masked_ids, segments, real, is_masked):
    """Run the student. Return its last hidden states (n, L, H) float32, the masked-LM decoder's inputs at
    masked tokens, and next-sentence logits (n, 2). The decoder does not run here: decoder_loss applies it."""
    decoder_inputs = []

    def take_inputs(_, inputs):
        decoder_inputs.append(inputs[0][is_masked].float())
        return inputs[0][:0]                                   # without rows, the decoder computes nothing

    with model.lm.get_output_embeddings().register_forward_pre_hook(take_inputs):
        output = run_encoder(model.lm, masked_ids, segments, real)
    hidden = output.hidden_states[-1]
    next_logits = output.seq_relationship_logits if model.nsp is None else model.nsp(hidden[:, 0])
    return hidden.float(), decoder_inputs[0], next_logits


def run_encoder(model, ids, segments, real, layers=True):
    """Run an encoder with or without heads. layers: also return the hidden states of all layers."""
    types = {"token_type_ids": segments} if getattr(model.config, "type_vocab_size", 0) > 1 else {}
    return model(input_ids=ids, attention_mask=real, output_hidden_states=layers, **types)


# ── evaluation ──────────────────────────────────────────────────────────────────────────────────────────────


def load_dev(path, documents, model, args):
    """Return two lists of rows for make_batch: sentence pairs and single sentences of a file. For sentences,
    is_masked marks all tokens except [CLS] and [SEP]. documents: number of documents in the file."""
    rng = random.Random(f"{args.seed} dev")
    cls, sep = [model.tokenizer.cls_token_id], [model.tokenizer.sep_token_id]
    documents, _ = corpus.next_documents(path, 0, min(documents, args.dev_pairs), model)
    pairs = corpus.sentence_pairs(documents, model, args, rng)[: args.dev_pairs]
    texts = [text[: args.max_length - 2] for document in documents for text in document][: args.dev_pairs]
    sentences = []
    for ids in sorted((np.concatenate([cls, text, sep]) for text in texts), key=len):
        is_inner = ~np.isin(np.arange(len(ids)), [0, len(ids) - 1])
        sentences.append((ids, np.zeros(len(ids), bool), 0, ids, is_inner))
    return [(*pair, *corpus.mask_pair(pair[0], model, args, rng)) for pair in pairs], sentences


def token_similarity(hidden, mask):
    """Return (B,), the mean cosine of two different tokens of each sequence; NaN for fewer than two tokens.
    hidden: (B, L, D) vectors of the tokens; mask: (B, L) bool, True for the tokens that count."""
    # For unit vectors u_i, Σ_{i≠j} u_i·u_j = |Σ u_i|² − Σ |u_i|². This needs no (L, L) similarities.
    unit = F.normalize(hidden, dim=2, eps=1e-8) * mask[:, :, None]
    count = mask.sum(1)
    return (unit.sum(1).square().sum(1) - unit.square().sum((1, 2))) / (count * (count - 1))


@torch.no_grad()
def evaluate(model, dev, args, teacher):
    """Return the losses, "accuracy", and two lists of token similarities (embedding layer, then each layer):
    "similarity" without [CLS] and [SEP], "similarity_special" with both (released code)."""
    model.eval()
    rows, sentences = dev
    weights, totals = mean_weights(rows), Counter()
    for i in progress(range(0, len(rows), 32), "held-out pairs", " batches"):
        for micro_batch in make_batch(rows[i : i + 32], model, args):
            _, values = compute_loss(model, micro_batch, weights, args, teacher)
            totals.update({name: value.item() for name, value in values.items()})
    inner, special, pairs = [], [], []       # each batch adds (layers, n) to inner and special, (n,) to pairs
    for i in progress(range(0, len(sentences), 64), "token similarity", " batches"):
        for ids, _, segments, real, is_inner, _ in make_batch(sentences[i : i + 64], model, args):
            with torch.autocast(model.device.type, torch.bfloat16, enabled=model.bf16):
                states = run_encoder(model.encoder, ids, segments, real).hidden_states
            inner.append(torch.stack([token_similarity(hidden.float(), is_inner) for hidden in states]))
            special.append(torch.stack([token_similarity(hidden.float(), real) for hidden in states]))
            pairs.append(real.sum(1) * (real.sum(1) - 1))
    model.train()
    inner, special, pairs = torch.cat(inner, 1), torch.cat(special, 1), torch.cat(pairs)
    return dict(totals) | {"similarity": inner.nanmean(1).tolist(),
                           "similarity_special": ((special * pairs).sum(1) / pairs.sum()).tolist()}


def run_evaluation(args):
    """--evaluate: score --dev or, if not given, --data. Leave out losses of heads with random weights."""
    path, run = args.dev or args.data, Run(args, __file__)
    documents, (model, teacher) = load_data(path, args), build_model(args, run)
    scores = evaluate(model, load_dev(path, documents, model, args), args, teacher)
    if model.missing_heads:
        del scores["mlm"], scores["nsp"]
    log("test", format_scores(scores))


def format_scores(scores):
    """Return the scores of evaluate as one line, or an empty text if there are none."""
    if "contrast" not in scores:
        return ""
    losses = ", ".join(f"{name} {scores[name]:.4f}" for name in ("mlm", "nsp", "contrast") if name in scores)
    layers = [" ".join(f"{x:.3f}" for x in scores[name]) for name in ("similarity", "similarity_special")]
    layers = ", with [CLS] and [SEP] ".join(layers)
    return f"{losses}, accuracy {scores['accuracy']:.2f} %, token similarity by layer {layers}"


def save_student(model, run):
    """Write the encoder to --out in transformers' format, without heads and teacher."""
    tokenizer = copy.deepcopy(model.tokenizer)  # stream_pairs may be using the original in another thread
    save_transformer(run, model.encoder, tokenizer)


# ── main ────────────────────────────────────────────────────────────────────────────────────────────────────


@command
def main(argv=None):
    args = make_parser().parse_args(argv)
    if args.evaluate:
        return run_evaluation(args)
    documents = load_data(args.data, args)
    dev_documents = load_data(args.dev, args) if args.dev else 0
    run = Run(args, __file__)
    model, teacher = build_model(args, run)
    dev = load_dev(args.dev, dev_documents, model, args) if args.dev else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, eps=1e-6, weight_decay=0.0, fused=True)
    run.extra_state["place"] = [0, 0, 0]                       # stream_pairs starts reading at this place
    run.begin(model, optimizer, args.steps)
    load_command = f'AutoModel.from_pretrained("{args.out}")'
    if dev and run.step == 0:
        run.log_initial_scores(evaluate(model, dev, args, teacher))
    if dev:
        log("before", format_scores(run.extra_state["before"]))
    model.train()
    stream = corpus.stream_pairs(documents, run.extra_state["place"], model, args)
    for step, _ in run.steps(args.steps):
        set_lr(optimizer, warmup_linear(step - 1, args.steps, args.steps // 10, args.lr))
        batch, places = zip(*itertools.islice(stream, args.batch_size))
        run.extra_state["place"] = places[-1]
        rng = random.Random(f"{args.seed} masks {step}")
        rows = [(*pair, *corpus.mask_pair(pair[0], model, args, rng)) for pair in batch]
        weights, values = mean_weights(rows), Counter()
        optimizer.zero_grad()
        for micro_batch in make_batch(rows[own_rows(len(rows))], model, args):
            loss, terms = compute_loss(model, micro_batch, weights, args, teacher)
            loss.backward()
            values.update(terms)
        all_reduce_gradients(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.log_metrics(dict(values), lr=optimizer.param_groups[0]["lr"])
        if run.eval_due and run.should_save(evaluate(model, dev, args, teacher) if dev else {}):
            save_student(model, run)                        # the last model is kept, not the best one (paper)
    change = ""
    if dev:
        before, after = run.extra_state["before"], run.extra_state["saved"]
        log("after", format_scores(after))
        top = [f"{before[x][-1]:.3f} → {after[x][-1]:.3f}" for x in ("similarity", "similarity_special")]
        change = (f"contrast accuracy {before['accuracy']:.2f} → {after['accuracy']:.2f} %, token similarity "
                  f"of the top layer {', with [CLS] and [SEP] '.join(top)}, ")
    run.finish(change)
    log("load", load_command)


if __name__ == "__main__":
    main()
