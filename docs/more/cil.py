"""CIL: Contrastive Instance Learning Framework for Distantly Supervised Relation Extraction. Chen, Shi, Tang,
Chen, Wu, Zhuang, ACL 2021, arXiv 2106.10855.

A bag is the set of all sentences about the same two entities. A database names the relation of the entities,
but some sentences do not express this relation. Therefore the classifier (loss L_bag) reads only the vector
B_b of bag b, a weighted mean of the vectors x_i of its sentences. CIL also trains each sentence: it pulls x_i
to the vector a_i of an edited copy, and pushes x_i away from the vectors of other bags. b(i) is the bag of
sentence i, s(u, v) = cos(u, v) / τ, t the step, w the number of warm-up steps. L_MLM is a masked-LM loss:

    L_C = mean over i of −log( exp s(x_i, a_i) / ( exp s(x_i, a_i) + Σ_{b ≠ b(i)} exp s(x_i, B_b) ) )
    L   = L_bag + 10 · tanh(t / 2w) · L_C + 0.1 · L_MLM

    python docs/more/cil.py --model scratch --data tests/data/relations.jsonl \\
        --dev tests/data/relations_dev.jsonl
    torchrun --nproc-per-node 2 docs/more/cil.py --data nyt10d_train.txt --dev nyt10d_val.txt --out out/cil
    python docs/more/cil.py --evaluate --model out/cil --data nyt10d_test.txt

Data: OpenNRE's JSON lines, one sentence each, with a head entity h and a tail entity t; pos is [start, end):
    {"text": "Ada was born in Ulm.", "relation": "born_in",
     "h": {"id": "Q1", "name": "Ada", "pos": [0, 3]}, "t": {"id": "Q2", "name": "Ulm", "pos": [16, 19]}}
The relation NA (or no_relation) means that no relation is known. In training, the sentences of a bag
have the same ids and the same relation. In evaluation, they have the same ids, and any relations.

Expected: scores on --dev rise. Evaluation ranks (bag, relation) pairs except NA by probability. In percent:
auc is the area under the precision-recall curve, f1 the best F1, p@100 the precision of the first 100 pairs.
Published: auc 50.8 on NYT10-D (label of a curve in the released code, whose nearest match is --form code).

Where the paper is silent, both forms follow the released code (antct/cil). --form code also follows it here:
    L_C       s(B_b(i), x_j) replaces s(x_i, B_b); x_i and x_j have the same place in their bags b(i) and b
    copies    edits only replace words (paper: also insert words), and drop punctuation and one-letter words
    MLM       may mask entities, not start marks (released code: nor tokens at these positions in other rows)
    p@N       the precision of the first N + 1 pairs
Departures from the released code, in both forms:
- Negatives are the bags of all GPUs, not of one GPU. L_C skips a sentence's own bag.
- The learning rate falls to 0. With the released code on 2 GPUs, it falls only to half its peak.
- New tokens mark the entities. A sentence is left out if --max-length cuts off the start mark of an entity.
"""
import math
import os
import random
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))  # where kernels/ is
import cil_bags
from kernels import check_rows, checks, embed_in_chunks, own_rows, similarity_lse
from kernels.losses import upcast
from kernels.training.errors import command, fail, log
from kernels.training.flags import ScriptParser, at_least, check_batch_size, fill_defaults, ratio, run_flags
from kernels.training.loop import all_reduce_gradients, decay_groups, set_lr, steps_per_epoch, warmup_linear
from kernels.training.precision import gather_keys, loss_autocast
from kernels.training.progress import progress
from kernels.training.run import Run
from kernels.training.text.checkpoint import save_transformer
from kernels.training.text.encoders import build_encoder, describe_model, init_linear, set_dropout
from kernels.training.text.mlm import masked_lm_loss
from kernels.training.text.tokens import restore_order
from uncorrected_adamw import UncorrectedAdamW

# ── flags ───────────────────────────────────────────────────────────────────────────────────────────────────


def make_parser():
    parser = ScriptParser(__doc__)
    add = parser.add_argument
    run_flags(
        parser, model="bert-base-uncased", dev=None, out="out/cil", form="paper", impl="auto",
        max_length=(128, "128 (released code)"), temperature=(0.05, "0.05 (released scripts)"),
        batch_size=(None, "32 bags (released scripts: 2 GPUs × 16), 16 with --model scratch"),
        epochs=(None, "3 (released scripts), 40 with --model scratch"),
        lr=(None, "2e-5 (released scripts), 5e-4 with --model scratch; linear decay to 0"),
        warmup_steps=(None, "500 (NYT10-D; NYT10-M 400, KBP 250, GDS 20), 40 with --model scratch"),
        eval_every=(None, "1000 (released script for NYT10-D), 20 with --model scratch"))
    parser.add_shared_flags("--chunk-size")
    add("--bag-size", type=at_least(1, int), default=3,
        help="number of sentences drawn per bag; smaller bags repeat some; default 3 (released scripts)")
    add("--classifier-dropout", type=ratio, group="model", default=0.5,
        help="dropout probability of bag vectors before the classifier; default 0.5 (released code)")
    return parser


RELEASED = dict(batch_size=32, epochs=3, lr=2e-5, warmup_steps=500, eval_every=1000)   # defaults of flags
SCRATCH = dict(batch_size=16, epochs=40, lr=5e-4, warmup_steps=40, eval_every=20)


# ── data and model ──────────────────────────────────────────────────────────────────────────────────────────


def load_data(path, args):
    """Return the result of cil_bags.load_sentences for --data. Set the defaults of flags not given."""
    fill_defaults(args, SCRATCH if args.model == "scratch" else RELEASED)
    rows, names = cil_bags.load_sentences(path)
    log("cil", f"{args.form}: {len(rows):,} sentences, {len(names) - 1} relations besides NA, from {path}")
    return rows, names


def build_model(args, run, relations, texts=None):
    """Load the encoder and its masked-LM head. Add the layer W (see encode) and the classifier of bags."""
    heads = Path("" if args.model == "scratch" else args.model, "heads.safetensors")
    if args.evaluate and not heads.is_file():
        fail(f"--model {args.model}: no heads.safetensors, expected a model that this script has trained")
    model = build_encoder(args, run, "cls", None, AutoModelForMaskedLM, texts=texts)
    cil_bags.add_marks(model)
    set_dropout(model.encoder, 0.0, args.model)                # the released scripts use no dropout
    config, width = model.encoder.config, 2 * model.encoder.config.hidden_size
    saved = [*config.id2label.values()] if heads.is_file() else None
    relations = saved if args.evaluate else relations
    config.id2label, config.label2id = dict(enumerate(relations)), {x: i for i, x in enumerate(relations)}
    layers = torch.nn.Linear(width, width), torch.nn.Linear(width, len(relations))
    model.heads = torch.nn.ModuleList(init_linear(layer, config) for layer in layers)
    model.sentence, model.classifier = model.heads
    if saved == relations:
        model.heads.load_state_dict(load_file(heads))
    kind = "saved" if saved == relations else "new"
    log("model", f"{describe_model(model, args)}, {kind} heads for {len(relations)} relations, including NA")
    return model.to(run.device)


def make_batch(bags, tokens, step, model, args):
    """Draw --bag-size sentences of each bag. Return (token ids of sentences, token ids of their copies, bags'
    relations). bags: this rank's bags, [((head id, tail id, relation), [indices of sentences])]."""
    rows, size, number_of = [], args.bag_size, model.encoder.config.label2id
    for _, bag in bags:
        rng = random.Random(f"{args.seed} {step} {bag[0]}")
        rows += rng.sample(bag, size) if len(bag) > size else bag + rng.choices(bag, k=size - len(bag))
    sentences, copies = zip(*(tokens[row] for row in rows))
    numbers = [number_of.get(relation, 0) for (_, _, relation), _ in bags]     # "no_relation" counts as NA
    return sentences, copies, torch.tensor(numbers, device=model.device)


# ── the paper ───────────────────────────────────────────────────────────────────────────────────────────────


def cil_loss(x, a, bags, bag_of, temperature=0.05, form="paper", *, all_x=None, all_bag_of=None, impl="auto"):
    """Return the loss L_C, a mean over N sentences. Vectors may have any norm and float type.

    x, a         (N, D) vectors of sentences and of their edited copies; cosines of a zero vector are 0
    bags         (B, D) vectors of all bags of the batch
    bag_of       (N,) integers from 0 to B − 1: the bag of each sentence
    form         "paper" | "code"; "code" requires the same number of sentences in all bags
    all_x        (L, D) sentence vectors of all ranks, for form="code"; default x. Ranks must share no bag
    all_bag_of   (L,) integers: the bag of each sentence in all_x; default bag_of
    returns      scalar float32 (float64 for float64 vectors); 0 if there is only one bag
    """
    checks.check_choice("form", form, "paper", "code")
    all_x = x if all_x is None else all_x
    all_bag_of = bag_of if all_bag_of is None else all_bag_of
    check_rows(x=(x, "N D"), a=(a, "N D"), bags=(bags, "B D"), bag_of=(bag_of, "N", int),
               all_x=(all_x, "L D"), all_bag_of=(all_bag_of, "L", int))
    checks.check_index("bag_of", bag_of, len(bags))
    bag_of, all_bag_of = bag_of.long(), all_bag_of.long()
    x, a, bags, all_x = (F.normalize(z, dim=1, eps=1e-8) for z in upcast(x, a, bags, all_x))
    queries, keys, ids, places = x, bags, torch.arange(len(bags), device=x.device), None
    if form == "code":
        queries, keys, ids = bags[bag_of], all_x, all_bag_of
        size = len(all_x) // len(bags)
        if (all_bag_of.bincount(minlength=len(bags)) != size).any():
            raise ValueError("bag_of: expected the same number of sentences in each bag")
        # Sort all sentences by bag. A sentence's place in this order, modulo `size`, is its place in its bag.
        places = [rows.argsort(stable=True).argsort() % size for rows in (bag_of, all_bag_of)]
    negatives = similarity_lse(queries, keys, temperature, exclude=(bag_of, ids), within=places, impl=impl)
    positive = (x * a).sum(1) / temperature
    return -F.logsigmoid(positive - negatives).mean()         # = log(e^positive + e^negatives) − positive


def bag_attention(x, bag_of, queries):
    """Return (B, D) bag vectors Σ_i α_i x_i, where α is the softmax of x_i·query over the bag's sentences.

    x, bag_of   (N, D) sentence vectors; (N,) integers from 0 to B − 1: bag of each; no bag is empty
    queries     (B, D) query of each bag: in training, the detached classifier weights of the bag's relation
    """
    check_rows(x=(x, "N D"), bag_of=(bag_of, "N", int), queries=(queries, "B D"))
    checks.check_index("bag_of", bag_of, len(queries))
    return attend((x * queries[bag_of.long()]).sum(1), bag_of, len(queries)) @ x


def attend(scores, bag_of, count):
    """Return (B, N) weights: row b is the softmax of scores (N,) over bag b's sentences, and 0 elsewhere."""
    is_member = bag_of == torch.arange(count, device=bag_of.device)[:, None]
    return scores.where(is_member, -torch.inf).softmax(1)


def bag_scores(x, bag_of, weight, bias):
    """Return (B, R) scores. Score (b, r) is the probability of relation r if weight[r] is the query of bag b.

    x, bag_of      (N, D) sentence vectors; (N,) integers from 0 to B − 1: bag of each; no bag is empty
    weight, bias   (R, D) and (R,) parameters of the classifier
    """
    products, count = x @ weight.T, int(bag_of.max()) + 1      # multiplying first avoids a (B, R, D) tensor
    logits = [attend(scores, bag_of, count) @ products + bias for scores in products.T]
    return torch.stack([row.softmax(1)[:, r] for r, row in enumerate(logits)], 1)


def encode(model, batch):
    """Return (rows, 2H) sentence vectors: the last states at both start marks, concatenated, then layer W."""
    def embed(group):
        _, ids, mask = group
        with torch.autocast(model.device.type, torch.bfloat16, enabled=model.bf16):
            hidden = model.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
            rows = torch.arange(len(ids), device=ids.device)
            starts = [(ids == mark).int().argmax(1) for mark in model.marks[::2]]
            return model.sentence(torch.cat([hidden[rows, start] for start in starts], 1)).float()

    return restore_order(embed_in_chunks(embed, batch, model if model.chunk_size else None), batch)


def compute_loss(model, batch, rows, args, schedule=1.0):
    """Return this rank's part of the loss of the global batch of `rows` bags, and the values to log. batch:
    this rank's result of make_batch. schedule: the factor tanh(t / 2w) of L_C."""
    sentences, copies, relations = batch
    n, own = len(relations), own_rows(rows)
    bag_of = torch.arange(n, device=model.device).repeat_interleave(args.bag_size)
    x, a = encode(model, model.batch(sentences, copies)).chunk(2)
    bags = bag_attention(x, bag_of, model.classifier.weight.detach()[relations])
    logits = model.classifier(F.dropout(bags, args.classifier_dropout, model.training))
    all_bags, all_x, all_bag_of = gather_keys(bags, rows, args), None, None
    if args.form == "code":
        all_x = gather_keys(x.unflatten(0, (n, -1)), rows, args).flatten(0, 1)
        all_bag_of = torch.arange(rows, device=model.device).repeat_interleave(args.bag_size)
    with loss_autocast(x, args):
        contrast = cil_loss(x, a, all_bags, bag_of + own.start, args.temperature, args.form,
                            all_x=all_x, all_bag_of=all_bag_of, impl=args.impl) * (n / rows)
    bag = F.cross_entropy(logits, relations) * (n / rows)
    mlm = masked_lm_loss(model, model.batch(sentences), args.impl,
                         lambda ids: cil_bags.protected(ids, model.marks, args.form))
    loss = bag + 10 * schedule * contrast + 0.1 * mlm
    values = {"loss": loss, "bag": bag, "contrast": contrast, "mlm": mlm}
    return loss, {name: value.detach() for name, value in values.items()}


# ── evaluation ──────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def evaluate(model, dev, args):
    """Score the bags of `dev`, the result of cil_bags.load_bags. Return the metrics of precision_recall."""
    tokens, bags, facts, total = dev
    scores = []
    model.eval()
    for i in progress(range(0, len(bags), 16), "held-out bags", " groups"):
        sizes = torch.tensor([len(bag) for bag in bags[i : i + 16]], device=model.device)
        ids = [tokens[row] for bag in bags[i : i + 16] for row in bag]
        x = torch.cat([encode(model, model.batch(ids[j : j + 128])) for j in range(0, len(ids), 128)])
        bag_of = torch.arange(len(sizes), device=model.device).repeat_interleave(sizes)
        scores.append(bag_scores(x, bag_of, model.classifier.weight, model.classifier.bias).cpu())
    model.train()
    return cil_bags.precision_recall(torch.cat(scores), facts, total, args.form)


# ── main ────────────────────────────────────────────────────────────────────────────────────────────────────


@command
def main(argv=None):
    args = make_parser().parse_args(argv)
    if args.evaluate:
        model = build_model(args, Run(args, __file__), None)
        bags = cil_bags.load_bags(args.dev or args.data, model, args)
        scores = evaluate(model, bags, args)
        return log("test", ", ".join(f"{name} {score:.2f}" for name, score in scores.items()))
    rows, relations = load_data(args.data, args)
    run = Run(args, __file__)
    texts = [row["text"] for row in rows]
    model = build_model(args, run, relations, texts)
    rows, tokens = cil_bags.tokenise_sentences(rows, model, args, cil_bags.WordEditor(texts, args.form))
    bags = [*cil_bags.group_rows(rows, "relation").items()]
    check_batch_size(len(bags), args.data, args.batch_size, "bags")
    dev = cil_bags.load_bags(args.dev, model, args) if args.dev else None
    optimizer = UncorrectedAdamW(decay_groups(model, 1e-5), args.lr)               # as in released code
    warmup = args.warmup_steps
    total = args.steps or args.epochs * steps_per_epoch(len(bags), args.batch_size)
    run.begin(model, optimizer, total, warmup)
    if dev and run.step == 0:
        run.log_initial_scores(evaluate(model, dev, args))
    model.train()
    for step, picked in run.steps(total, len(bags)):
        set_lr(optimizer, warmup_linear(step - 1, total, warmup, args.lr))
        batch = make_batch([bags[i] for i in picked[own_rows(len(picked))]], tokens, step, model, args)
        schedule = math.tanh(step / (2 * warmup)) if warmup else 1.0
        loss, values = compute_loss(model, batch, len(picked), args, schedule)
        optimizer.zero_grad()
        loss.backward()
        all_reduce_gradients(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        run.log_metrics(values, lr=optimizer.param_groups[0]["lr"])
        if run.eval_due:
            scores = evaluate(model, dev, args) if dev else {}
            if run.should_save(scores, "auc", f"{scores['auc']:.2f}" if dev else ""):
                save_transformer(run, model.lm, model.tokenizer,
                                 {"heads.safetensors": model.heads.state_dict()})
    before, after = run.extra_state["before"], run.extra_state["saved"]
    run.finish(f"auc {before['auc']:.2f} → {after['auc']:.2f}, " if dev else "")
    log("load", f'AutoModel.from_pretrained("{args.out}")')


if __name__ == "__main__":
    main()
