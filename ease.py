"""EASE: Entity-Aware Contrastive Learning of Sentence Embedding. Nishikawa et al., NAACL 2022, arXiv
2205.04260.

EASE adds an entity loss to SimCSE's loss. Each sentence links to a Wikipedia entity. The entity loss pulls
the sentence towards the vector of this entity, and pushes it away from the entities of other sentences and
from hard negatives: entities of this entity's type to which the sentence's page does not link. All
languages share the entities, which aligns sentences of different languages. Sentence i has embeddings z_i and
z'_i (two dropout masks), an entity vector e_i = W E[entity], and hard negatives h_ik = W E[negative]:

    L = L_sim + λ L_ent,     L_sim = SimCSE's loss of anchors z_i and positives z'_i
    L_ent = −1/N Σ_i log( exp(cos(z_i, e_i) / τ)
                          / Σ_j [ exp(cos(z_i, e_j) / τ) + Σ_k exp(cos(z_i, h_jk) / τ + w [i = j]) ] )

The table E has a trained vector for each entity. With its gradient and AdamW's state, E needs 12 GB for a
million entities of 768 numbers. W maps these vectors to the space of the sentences. E and W are dropped after
training. [i = j] is 1 if i = j and 0 if not, so w is added only to the logits of a sentence's own hard
negatives. With the paper's temperature τ = 100 and weight λ = 0.01, the entity loss has a small effect. By
default, the sentence's own entity is never used as a negative (--equal-entities).

    python ease.py --model scratch --data tests/data/entities.tsv --dev tests/data/sts.tsv
    python ease.py --data ease-dataset-en.json --entity-vectors enwiki_768d.txt --dev stsb-dev.tsv
    torchrun --nproc-per-node 4 ease.py --data ease-dataset-18-langs.json --entity-vectors enwiki_768d.txt \\
        --dev stsb-dev.tsv --model bert-base-multilingual-cased --pooling avg --entity-temperature 10 \\
        --batch-size 256 --lr 5e-5 --out out/18

Data: .json .jsonl .csv .tsv .parquet, one row per sentence and entity. Columns (other names in parentheses):
    text (sentence)                  required
    positive_entity (entity)         required
    negative_entity                  candidates for hard negatives: a JSON list, or titles separated by |
    entity_type                      types of the entity, separated by |. Without negative_entity, candidates
                                     are the entities of one of these types (random) that are not on the page
    page (article, origin_entity)    page of the sentence; without this column, each text is its own page
--dev and --test: sentence pairs with scores (sentence1, sentence2, score) or retrieval data (query, positive,
optional hard negatives; MRR@10). The best checkpoint on --dev is kept; without --dev, the last checkpoint.

Published results of the released code (second command with --form code), mean Spearman of seven STS sets:
BERT-base 77.0 (SimCSE 76.25), RoBERTa-base 76.8 (SimCSE 76.57). No result is published for --form paper.

Departures from the released code:
  - Under torchrun the released code fails because it does not gather the entities; this script gathers them.
  - The released code keeps the last checkpoint; this script keeps the one with the best --dev score.
--form code follows the released code in all other points: W has a bias and is followed by tanh; w is 1; the
rows of each GPU are divided into groups of 8, and all negatives come from the sentence's own group; an entity
that equals the sentence's entity is a negative; hard negatives are sampled once, not in every epoch.
"""
import math
import random

import torch
import torch.nn.functional as F

from kernels import check_rows, checks, gather_rows, info_nce, own_rows, similarity_lse
from kernels.training.data import normalise_name, read_table
from kernels.training.errors import command, fail, log
from kernels.training.flags import ScriptParser, at_least, check_batch_size, fill_defaults, text_flags
from kernels.training.loop import all_reduce_gradients, set_lr, steps_per_epoch, warmup_linear
from kernels.training.papers.ease_entities import load_entity_vectors, make_records
from kernels.training.precision import gather_keys, loss_autocast, unit_rows
from kernels.training.run import Run
from kernels.training.text.encoders import build_encoder, describe_model, init_linear
from kernels.training.text.evaluation import Evaluator, evaluate_model
from kernels.training.text.tokens import tokenise_table

# ── flags ───────────────────────────────────────────────────────────────────────────────────────────────────


def make_parser():
    parser = ScriptParser(__doc__)
    add = parser.add_argument
    text_flags(
        parser, model="bert-base-uncased", out="out/ease", form="paper", eval_every=(125, "125 (paper)"),
        temperature=(0.05, "0.05 (paper); the entity loss has --entity-temperature"),
        pooling=(None, "as saved with --model, else cls (paper), avg for scratch, last for a decoder"),
        head=(None, "as saved with --model, else train-only with cls pooling (paper), else none"),
        batch_size=(None, "128 (paper), 64 with --model scratch"),
        epochs=(None, "1 (paper), 8 with --model scratch"),
        lr=(None, "3e-5 (paper), 2e-3 with --model scratch; linear decay to 0 after the warm-up"),
        warmup_steps=(None, "500 (paper), 5 with --model scratch"))
    add("--simcse-weight", type=at_least(0), default=1.0, help="weight of SimCSE's loss; default 1 (paper)")
    add("--entity-weight", type=at_least(0),
        help="λ, weight of the entity loss; default 0.01 (paper), 1 with --model scratch")
    add("--entity-temperature", type=at_least(1e-4),
        help="τ, temperature of the entity loss; default 100 (paper), 0.1 with --model scratch")
    add("--hard-negatives", type=at_least(0, int),
        help="number of hard negatives per sentence; default 1 (paper), or 0 if the data have none")
    parser.add_shared("--hard-negative-weight", shown="0 (paper), 1 with --form code",
                      type=at_least(-5, most=80))              # exp(weight) must not overflow
    add("--equal-entities", choices=("mask", "keep"),
        help="mask or keep negatives equal to the sentence's own entity; default mask, keep with --form code")
    add("--negative-group-size", type=at_least(1, int),
        help="number of rows in a group: each GPU divides its rows into groups, and negatives come from the "
             "sentence's own group; default the whole batch, 8 with --form code")
    add("--entity-vectors", group="model", reads="vectors",
        help="initial entity vectors E: a text file of Wikipedia2Vec, also .gz or .bz2; default random")
    add("--entity-map", group="model", choices=("linear", "tanh", "none"),
        help="map W from entity vectors to sentence space; tanh: linear with a bias, then tanh; none: no "
             "map; default linear (paper), tanh with --form code")
    return parser


# Flags not on the command line get these values; --form code and --model scratch replace some of them.
PAPER_DEFAULTS = dict(entity_map="linear", entity_temperature=100.0, entity_weight=0.01,
                      hard_negative_weight=0.0, equal_entities="mask", warmup_steps=500, batch_size=128,
                      epochs=1, lr=3e-5)
CODE_DEFAULTS = dict(entity_map="tanh", hard_negative_weight=1.0, equal_entities="keep",
                     negative_group_size=8)
SCRATCH_DEFAULTS = dict(entity_temperature=0.1, entity_weight=1.0, pooling="avg", warmup_steps=5,
                        batch_size=64, epochs=8, lr=2e-3)


# ── data and model ──────────────────────────────────────────────────────────────────────────────────────────

# This maps each accepted column name to what the column holds.
COLUMNS = {"text": "text", "sentence": "text", "positive_entity": "entity", "entity": "entity",
           "negative_entity": "negatives", "entity_type": "type",
           "page": "page", "article": "page", "origin_entity": "page"}


def load_data(path, args):
    """Return [(place, (text,))], records and titles (see make_records). Set the flags that were not given."""
    header, table = read_table(path, join=True)
    names = [normalise_name(name) for name in header or []]
    column_of = {kind: names.index(normalise_name(name)) for name, kind in COLUMNS.items()
                 if normalise_name(name) in names}
    if "text" not in column_of or "entity" not in column_of:
        found = f"columns {', '.join(header)}" if header else "no header"
        fail(f"{path}: {found}; expected the columns text (or sentence) and positive_entity (or entity)")
    source = next((kind for kind in ("negatives", "type") if kind in column_of), None)
    code = CODE_DEFAULTS if args.form == "code" else {}
    scratch = SCRATCH_DEFAULTS if args.model == "scratch" else {}
    fill_defaults(args, PAPER_DEFAULTS | code | scratch | dict(hard_negatives=1 if source else 0))
    if args.hard_negatives and not source:
        fail(f"--hard-negatives {args.hard_negatives}: {path} has no column negative_entity or entity_type")
    check_batch_size(len(table), path, args.batch_size)
    rows = [dict(place=place, **{kind: cells[column].strip() for kind, column in column_of.items()})
            for place, cells in table]
    required = ("text", "entity", "type") if source == "type" else ("text", "entity")
    for row in rows:
        for kind in required:
            if not row[kind].strip("| "):
                fail(f"{path} {row['place']}: no {header[column_of[kind]]}; fill the cell or delete the row")
    records, titles = make_records(path, rows, args)
    names = ", ".join(header[column] for column in column_of.values())
    log("ease", f"{args.form}: {len(rows):,} sentences, {len(titles):,} entities, {args.hard_negatives} hard "
                f"negatives per sentence (columns {names}) from {path}")
    return [(row["place"], (row["text"],)) for row in rows], records, titles


def sample_entities(records, epoch, args):
    """Return (n, 1 + m) int64: for each of n records its entity and m different, random hard negatives. The
    choice depends only on the seed, the epoch and the row, not on --resume or the number of GPUs."""
    samples = []
    for row, entity, candidates, excluded in records:
        rng = random.Random(f"{args.seed} {epoch} {row}")
        picks = [entity]
        while len(picks) <= args.hard_negatives:
            pick = candidates[int(rng.random() * len(candidates))]
            if pick not in excluded and pick not in picks:
                picks.append(pick)
        samples.append(picks)
    return torch.tensor(samples)


def build_model(args, run, titles):
    """Return the encoder with its pooling and head, and with the entity table E and its map W."""
    model = build_encoder(args, run, "cls", "train-only")
    log("model", describe_model(model, args))
    add_entities(model, titles, args)
    return model.to(run.device)


def add_entities(model, titles, args):
    """Add the table E of entity vectors and the map W to the model. They are not saved with the encoder."""
    width = model.width
    vectors = torch.empty(len(titles), width).uniform_(-0.05, 0.05)
    found = 0
    if args.entity_vectors:
        vectors, found = load_entity_vectors(args.entity_vectors, titles)
    if args.entity_map == "none" and vectors.shape[1] != width:
        fail(f"--entity-map none: {args.entity_vectors} has vectors of {vectors.shape[1]} numbers, but "
             f"embeddings have {width}; use --entity-map linear")
    linear = torch.nn.Linear(vectors.shape[1], width, bias=args.entity_map == "tanh")
    init_linear(linear, model.encoder.config)
    tanh = torch.nn.Sequential(linear, torch.nn.Tanh())
    model.entity_map = {"linear": linear, "tanh": tanh, "none": torch.nn.Identity()}[args.entity_map]
    model.entities = torch.nn.Embedding.from_pretrained(vectors, freeze=False)
    origin = f"{found:,} of them from {args.entity_vectors}" if found else "random"
    log("entities", f"{len(titles):,} vectors of width {vectors.shape[1]}, {origin}, {args.entity_map} map, "
                    f"temperature {args.entity_temperature:g}, weight {args.entity_weight:g}")


# ── the paper ───────────────────────────────────────────────────────────────────────────────────────────────


def ease_loss(z, entity, hard=None, temperature=100.0, hard_logit=0.0, entity_ids=None, *, hard_ids=None,
              offset=0, impl="auto"):
    """Return L_ent, the mean over N sentences. All vectors are normalised by this function.

    z            (N, D) sentences of any float type; a zero vector has cosine 0 with all vectors
    entity       (M, D) entity vectors after the map W; row offset + i is the entity of sentence i
    hard         (M, m, D) vectors of m hard negatives per sentence, after the map W; None or m = 0: none
    temperature  τ, by which the cosine is divided
    hard_logit   w, at most 80; it is added only to the logits of a sentence's own hard negatives
    entity_ids   (M,) integer ids of the entities. Vectors that have the id of a sentence's own entity are
                 not negatives of this sentence. None: all vectors but row offset + i are negatives
    hard_ids     (M, m) ids of the hard negatives, read only if entity_ids is given. A hard negative must not
                 have the id of its sentence's entity
    offset       row of entity, hard, entity_ids and hard_ids that belongs to this rank's first sentence
    returns      scalar, float32 (float64 for float64 input); 0 if no sentence has negatives
    source       Nishikawa et al. 2022, the entity contrastive objective
    """
    check_rows(offset, z=(z, "N D"), entity=(entity, "M D"), hard=(hard, "M m D", None),
               entity_ids=(entity_ids, "M", int, None), hard_ids=(hard_ids, "M m", int, None))
    checks.check_number("hard_logit", hard_logit, -math.inf, 80)               # e^w must not overflow
    z, entity = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in (z, entity)]
    checks.check_same_dtype(z=z, entity=entity)
    z, entity = unit_rows(z), unit_rows(entity)
    local = slice(offset, offset + len(z))                     # these rows of entity belong to z
    ids = torch.arange(len(entity), device=z.device) if entity_ids is None else entity_ids.long()
    keys, key_ids = entity, ids
    if hard is not None:
        hard = unit_rows(hard.to(z.dtype))
        if entity_ids is None or hard_ids is None:
            hard_ids = (ids.min() - 1).expand(hard.shape[:2])  # an id that no entity has
        keys, key_ids = torch.cat([entity, hard.flatten(0, 1)]), torch.cat([ids, hard_ids.flatten()])
    negatives = similarity_lse(z, keys, temperature, exclude=(ids[local], key_ids), impl=impl)
    positive = (z * entity[local]).sum(1) / temperature
    if hard is not None and hard_logit:
        # Without w, S is the sum of exp(logit) over a sentence's negatives, and share is the part of S that
        # comes from the sentence's own hard negatives. w multiplies this part by e^w, so S becomes S (1 +
        # (e^w − 1) share). Rounding may make share slightly exceed 1.
        share = ((z[:, None] * hard[local]).sum(2) / temperature - negatives[:, None]).exp().sum(1)
        share = share.clamp(max=1)
        negatives = negatives + torch.log1p(math.expm1(hard_logit) * share)
    return -F.logsigmoid(positive - negatives).mean()         # = log(exp positive + exp negatives) − positive


def compute_loss(model, batch, rows, args):
    """Return this rank's part of the loss of a global batch of `rows` rows, and the values to log.
    batch: (tokens of both views from model.batch, entities from sample_entities) of this rank's rows."""
    tokens, ids = batch
    z1, z2 = model(tokens).chunk(2)
    n = len(z1)
    e = model.entity_map(model.entities(ids))                  # (n, 1 + m, D)
    if args.negative_group_size:
        offset = 0
        groups = zip(*[x.split(args.negative_group_size) for x in (z1, z2, e, ids)])
    else:
        offset = own_rows(rows).start
        groups = [(z1, gather_keys(z2, rows, args), gather_keys(e, rows, args), gather_rows(ids, rows))]
    simcse, entity = 0.0, 0.0
    for anchors, positives, vectors, numbers in groups:    # vectors[i, j] belongs to the entity numbers[i, j]
        common = dict(offset=offset, impl=args.impl)
        masked = {}
        if args.equal_entities == "mask":
            masked = dict(entity_ids=numbers[:, 0], hard_ids=numbers[:, 1:])
        share = len(anchors) / n
        with loss_autocast(anchors, args):
            simcse += share * info_nce(unit_rows(anchors), unit_rows(positives), args.temperature, **common)
            entity += share * ease_loss(anchors, vectors[:, 0], vectors[:, 1:], args.entity_temperature,
                                        args.hard_negative_weight, **common, **masked)
    loss = (args.simcse_weight * simcse + args.entity_weight * entity) * (n / rows)
    simcse, entity = simcse.detach() * (n / rows), entity.detach() * (n / rows)
    return loss, {"loss": loss.detach(), "simcse": simcse, "entity": entity}


# ── main ────────────────────────────────────────────────────────────────────────────────────────────────────


@command
def main(argv=None):
    args = make_parser().parse_args(argv)
    if args.evaluate:
        return evaluate_model(Evaluator(args), __file__)
    sentences, records, titles = load_data(args.data, args)
    evaluator = Evaluator(args)
    run = Run(args, __file__)
    model = build_model(args, run, titles)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0, fused=True)
    epoch_steps = steps_per_epoch(len(sentences), args.batch_size)
    total = args.steps or args.epochs * epoch_steps
    run.begin(model, optimizer, total, args.warmup_steps)
    tokens = tokenise_table(sentences, model, run)
    evaluator.evaluate_before(model, run)
    model.train()
    for step, picked in run.steps(total, len(tokens)):
        set_lr(optimizer, warmup_linear(step - 1, total, args.warmup_steps, args.lr))
        own = picked[own_rows(len(picked))]
        epoch = (step - 1) // epoch_steps if args.form == "paper" else 0  # --form code samples entities once
        ids = sample_entities([records[i] for i in own], epoch, args).to(run.device)
        loss, values = compute_loss(model, (model.batch(*tokens.views(own, 2)), ids), len(picked), args)
        optimizer.zero_grad()
        loss.backward()
        all_reduce_gradients(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.log_metrics(values, lr=optimizer.param_groups[0]["lr"])
        if run.eval_due:
            evaluator.evaluate_and_save(model, run)
    evaluator.finish(model, run)


if __name__ == "__main__":
    main()
