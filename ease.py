"""EASE: Entity-Aware Contrastive Learning of Sentence Embedding. Nishikawa et al., NAACL 2022, arXiv
2205.04260.

A sentence that links to an entity is pulled to the entity's vector. It is pushed from the entities of other
sentences and from hard negatives: entities of the same type that are not on its page. All languages share the
entities, which brings translations together. With z and z' of a sentence under two dropout masks, entities
e = W E[entity] and hard negatives h likewise,

    L = L_sim + λ L_ent,     L_sim = SimCSE's: z_i against all z'_j at its own temperature
    L_ent = −1/N Σ_i log( exp(cos(z_i, e_i) / τ)
                          / Σ_j [ exp(cos(z_i, e_j) / τ) + Σ_k exp(cos(z_i, h_jk) / τ + w [i = j]) ] )

τ is a divisor, and 100: with λ = 0.01 the entity term is a gentle pull. If several sentences of a batch link
to one entity, it is not a negative of any of them (--equal-entities). E and W are dropped after training.

Data: .json .jsonl .csv .tsv .parquet, one row per link, with columns named as in the released dataset or as
in brackets:
    text (sentence), positive_entity (entity)    both are needed
    negative_entity                              hard negatives to draw from: a JSON list, or separated by |
    entity_type, page (article, origin_entity)   or else the entity's types, separated by |, and the page that
                                                 links to it; without a page, the text is the page
Scored pairs for --dev, which chooses the best checkpoint (without it the last one is kept), and for --test:
columns sentence1, sentence2, score (0 to 5), by header, or the score first or last.

    python ease.py --model scratch --data tests/data/entities.tsv --dev tests/data/sts.tsv
    python ease.py --data ease-dataset-en.json --entity-vectors enwiki_768d.txt --dev stsb-dev.tsv
    torchrun --nproc-per-node 4 ease.py --data ease-dataset-18-langs.json --entity-vectors enwiki_768d.txt \
        --dev stsb-dev.tsv --model bert-base-multilingual-cased --pooling avg --entity-temperature 10 \
        --batch-size 256 --lr 5e-5 --out out/18

Expected: the paper's BERT-base has 77.0 and RoBERTa-base 76.8 Spearman as the mean of seven STS test sets,
where SimCSE has 76.25 and 76.57. Its code is that of the second command with --form code. Nobody has
published a run of the default, the paper's equations.

Departures from the released code: under torchrun entities are gathered as sentences are, there they are not
and the run fails; the best checkpoint is kept, there the last one. --form code brings back what else differs:
W with a bias and a tanh, w = 1, negatives from 8 rows instead of the batch, equal entities as negatives, hard
negatives drawn once instead of each epoch.
"""
from kernels.training.cli import Flags, answer_early, at_least, command, fail, fill, say

# ── flags ───────────────────────────────────────────────────────────────────────────────────────────────────


def make_parser():
    parser = Flags(__doc__)
    add, common = parser.add_argument, parser.common
    common("--form", "paper")
    add("--entity-vectors", reads="vectors",
        help="Wikipedia2Vec's text file, also .gz or .bz2; default random vectors of the encoder's width")
    add("--entity-map", choices=("linear", "tanh", "none"),
        help="W; default linear (paper), with --form code tanh")
    add("--entity-temperature", type=at_least(1e-4),
        help="τ of the entity term; default 100 (paper), scratch 0.1")
    add("--entity-weight", type=at_least(0), help="λ; default 0.01 (paper), scratch 1")
    add("--simcse-weight", type=at_least(0), default=1.0, help="of L_sim; default 1 (paper)")
    add("--hard-negatives", type=at_least(0, int),
        help="m, drawn for each sentence; default 1 (paper), 0 where the data have none")
    add("--hard-logit", type=at_least(-5),
        help="w, for a sentence's own hard negatives; default 0 (paper), with --form code 1")
    add("--equal-entities", choices=("mask", "keep"),
        help="entities equal to a row's own: mask, no negatives of it, or keep, negatives as all others; "
             "default mask, with --form code keep")
    add("--micro-batch", type=at_least(1, int),
        help="rows that are each other's negatives; default all, with --form code 8")
    common("--pooling", said="its folder's, else cls (paper), scratch avg, a decoder's last")
    common("--head", said="its folder's, else for cls train-only (paper)")
    common("--prompt", said="its folder's, else none")
    common("--warmup-steps", said="500 (paper), scratch 5")
    parser.plain("--evaluate", "--data", "--dev", "--test", "--transfer", "--cluster")
    common("--model", "bert-base-uncased")
    common("--out", "out/ease")
    common("--batch-size", said="128 (paper), scratch 64")
    common("--chunk-size", said="the batch")
    common("--epochs", said="1 (paper), scratch 8")
    common("--steps", said="by --epochs")
    common("--lr", said="3e-5 (paper), scratch 2e-3, after a warm-up falling linearly to 0")
    common("--temperature", 0.05, "0.05 (paper)")
    common("--max-length", 32, "32 (paper)")
    common("--seed", 42)
    common("--eval-every", 125, "125 (paper)")
    common("--impl", "auto")
    parser.plain("--resume", "--keep-state", "--log", "--precision")
    return parser


# Defaults of the paper, of the released code where it differs, and for a small random BERT.
PAPER = dict(entity_map="linear", entity_temperature=100.0, entity_weight=0.01, hard_logit=0.0,
             equal_entities="mask", warmup_steps=500, batch_size=128, epochs=1, lr=3e-5)
CODE = dict(entity_map="tanh", hard_logit=1.0, equal_entities="keep", micro_batch=8)
SCRATCH = dict(entity_temperature=0.1, entity_weight=1.0, pooling="avg", warmup_steps=5, batch_size=64,
               epochs=8, lr=2e-3)


if __name__ == "__main__":
    answer_early(make_parser)  # --help, and wrong flags, before the seconds that torch takes

import math
import random

import torch
import torch.nn.functional as F

from kernels import check_rows, checks, gather_rows, info_nce, own_rows, similarity_lse
from kernels.training.extras.lazy_embedding import LazyEmbedding
from kernels.training.extras.wikipedia2vec import load_entity_vectors
from kernels.training.loop import epoch_steps, half_products, set_lr, sum_gradients, warmup_linear
from kernels.training.run import Run
from kernels.training.tables import plain, read_table
from kernels.training.text.encoders import begin_linear, build_encoder, describe_model
from kernels.training.text.evaluation import HeldOut, score
from kernels.training.text.sts import load_sts, spearman  # noqa: F401 - also called from here
from kernels.training.text.tokens import tokenise_table

# ── data and model ──────────────────────────────────────────────────────────────────────────────────────────

COLUMNS = {"text": "text", "sentence": "text", "positive_entity": "entity", "entity": "entity",
           "negative_entity": "negatives", "entity_type": "type",
           "page": "page", "article": "page", "origin_entity": "page"}


def load_data(path, args):
    """([(place, (sentence,))], records and titles of link_entities); fills the flags that were not given."""
    header, table = read_table(path, lists="join")
    names = [plain(name) for name in header or []]
    at = {kind: names.index(plain(name)) for name, kind in COLUMNS.items() if plain(name) in names}
    if "text" not in at or "entity" not in at:
        found = f"columns {', '.join(header)}" if header else "no names of columns"
        fail(f"{path}: {found}; wanted text (or sentence) and positive_entity (or entity), and see --help")
    source = next((kind for kind in ("negatives", "type") if kind in at), None)
    given = PAPER | (CODE if args.form == "code" else {}) | (SCRATCH if args.model == "scratch" else {})
    fill(args, given | dict(hard_negatives=1 if source else 0))
    if args.hard_logit > 80:                                   # exp of more leaves float32
        fail(f"--hard-logit {args.hard_logit:g}: wanted at most 80")
    if args.hard_negatives and not source:
        fail(f"--hard-negatives {args.hard_negatives}: {path} has neither negative_entity nor entity_type "
             "to draw them from")
    if not 2 <= args.batch_size <= len(table):
        fail(f"{path}: {len(table)} rows, --batch-size is {args.batch_size}; "
             "wanted at least 2 and as many rows as that")
    rows = [dict(place=place, **{kind: cells[column].strip() for kind, column in at.items()})
            for place, cells in table]
    for row in rows:
        for kind in ("text", "entity", *(["type"] if source == "type" else [])):
            if not row[kind].strip("| "):
                fail(f"{path} {row['place']}: no {header[at[kind]]}; fill the cell or delete the row")
    records, titles = link_entities(path, rows, args)
    names = ", ".join(header[column] for column in at.values())
    say("ease", f"{args.form}: {len(rows):,} sentences, {len(titles):,} entities, {args.hard_negatives} hard "
                f"negatives each (columns {names}) from {path}")
    return [(row["place"], (row["text"],)) for row in rows], records, titles


def link_entities(path, rows, args):
    """([(row, entity, candidates for hard negatives, entities that must not be one)], titles of entities); an
    entity is a number, its place among the titles."""
    numbers, on_page, of_type, records = {}, {}, {}, []

    def number(title):
        return numbers.setdefault(" ".join(title.replace("_", " ").split()), len(numbers))

    def parts(cell):
        return [part.strip() for part in cell.split("|") if part.strip()]

    for row in rows:
        entity = number(row["entity"])
        on_page.setdefault(row.get("page") or row["text"], set()).add(entity)
        for kind in parts(row.get("type", "")):
            of_type.setdefault(kind, {})[entity] = None        # a dict keeps the order, unlike a set
    tuples, chance = {kind: tuple(entities) for kind, entities in of_type.items()}, random.Random(args.seed)
    for i, row in enumerate(rows):
        entity, candidates, known, barred, what = number(row["entity"]), (), (), (), ""
        if "negatives" in row:
            candidates = known = tuple(dict.fromkeys(map(number, parts(row["negatives"]))))
            barred, what = (entity,), "hard negatives"
        elif "type" in row:                                    # one of several types is drawn
            kind = chance.choice(parts(row["type"]))
            candidates, known, barred = tuples[kind], of_type[kind], on_page[row.get("page") or row["text"]]
            what = f"entities of type {kind!r} that are not on its page"
        free = len(candidates) - sum(other in known for other in barred)
        if free < args.hard_negatives:
            fail(f"{path} {row['place']}: {free} {what}, wanted at least --hard-negatives, "
                 f"which is {args.hard_negatives}")
        records.append((i, entity, candidates, barred))
    return records, list(numbers)


def draw_entities(records, epoch, args):
    """(n, 1 + m) int64: each record's entity and m different hard negatives. The draw depends on the seed,
    the epoch and the row only, so it is the same after --resume and on any number of GPUs."""
    drawn = []
    for row, entity, candidates, barred in records:
        chance, picks = random.Random(f"{args.seed} {epoch} {row}"), [entity]
        while len(picks) <= args.hard_negatives:
            pick = candidates[int(chance.random() * len(candidates))]
            if pick not in barred and pick not in picks:
                picks.append(pick)
        drawn.append(picks)
    return torch.tensor(drawn)


def build_model(args, run, titles):
    """The encoder without its pretrained pooler; for training only, the head and the entities."""
    model = build_encoder(args, run, "cls", "train-only")
    say("model", describe_model(model, args))
    add_entities(model, titles, args)
    return model.to(run.device)


def add_entities(model, titles, args):
    """Give the model the table E of the entities and the map W, which are for training only."""
    width = model.width
    vectors, found = torch.empty(len(titles), width).uniform_(-0.05, 0.05), 0
    if args.entity_vectors:
        vectors, found = load_entity_vectors(args.entity_vectors, titles)
    if args.entity_map == "none" and vectors.shape[1] != width:
        fail(f"--entity-map none: {args.entity_vectors} has {vectors.shape[1]} numbers a row, "
             f"embeddings have {width}; take linear")
    linear = torch.nn.Linear(vectors.shape[1], width, bias=args.entity_map == "tanh")
    begin_linear(linear, model.encoder.config)
    tanh = torch.nn.Sequential(linear, torch.nn.Tanh())
    model.entity_map = {"linear": linear, "tanh": tanh, "none": torch.nn.Identity()}[args.entity_map]
    model.entities = LazyEmbedding(vectors, min(len(titles), args.batch_size * (1 + args.hard_negatives)))
    origin = f"{found:,} of them from {args.entity_vectors}" if found else "random"
    say("entities", f"{len(titles):,} vectors of {vectors.shape[1]}, {origin}, {args.entity_map} map, "
                    f"temperature {args.entity_temperature:g}, weight {args.entity_weight:g}")


# ── the paper ───────────────────────────────────────────────────────────────────────────────────────────────


def ease_loss(z, entity, hard=None, temperature=100.0, hard_logit=0.0, entity_ids=None, *, hard_ids=None,
              offset=0, impl="auto"):
    """L_ent: mean over N sentences of −log softmax of their own entity among all entities and hard negatives.

    z            (N, D) sentences, any float type; half types are computed in float32. All vectors are
                 normalised here; a zero vector has cosine 0 with all
    entity       (M, D) entities after the map W; row offset + i belongs to sentence i
    hard         (M, m, D) hard negatives after W; None or m = 0: there are none
    temperature  τ, a divisor: exp(cos / τ)
    hard_logit   w ≤ 80, added to the logits of a sentence's own hard negatives, not of other sentences'
    entity_ids   (M,) integers: an entity with the id of a sentence's own entity is not a negative of that
                 sentence; None: all other entities are negatives
    hard_ids     (M, m) ids of hard negatives, used together with entity_ids; a sentence's own hard negatives
                 must not have its entity's id
    offset       this rank's first row among entity, hard and ids gathered from all ranks
    returns      scalar float32, float64 for float64; one sentence without hard negatives: 0
    source       Nishikawa et al. 2022, the entity contrastive objective
    """
    check_rows(offset, z=(z, "N D"), entity=(entity, "M D"), hard=(hard, "M m D", None),
               entity_ids=(entity_ids, "M", int, None), hard_ids=(hard_ids, "M m", int, None))
    checks.check_number("hard_logit", hard_logit, -math.inf, 80)   # e^w is to be a float32
    z, entity = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (z, entity))
    checks.check_alike(z=z, entity=entity)
    z, entity = F.normalize(z, dim=1, eps=1e-8), F.normalize(entity, dim=1, eps=1e-8)
    own = slice(offset, offset + len(z))
    ids = torch.arange(len(entity), device=z.device) if entity_ids is None else entity_ids.long()
    columns, column_ids = entity, ids
    if hard is not None:
        hard = F.normalize(hard.to(z.dtype), dim=2, eps=1e-8)
        if entity_ids is None or hard_ids is None:
            hard_ids = (ids.min() - 1).expand(hard.shape[:2])  # an id that no entity has
        columns, column_ids = torch.cat([entity, hard.flatten(0, 1)]), torch.cat([ids, hard_ids.flatten()])
    negatives = similarity_lse(z, columns, temperature, exclude=(ids[own], column_ids), impl=impl)
    positive = (z * entity[own]).sum(1) / temperature
    if hard is not None and hard_logit:  # its own are in the sum, with weight 1: it becomes exp(w)
        share = ((z[:, None] * hard[own]).sum(2) / temperature - negatives[:, None]).exp().sum(1)
        share = share.clamp(max=1)  # the kernels may round its products otherwise
        negatives = negatives + torch.log1p(math.expm1(hard_logit) * share)
    return -F.logsigmoid(positive - negatives).mean()  # = log(exp positive + exp negatives) - positive


def compute_loss(model, batch, rows, args):
    """This rank's part of SimCSE's loss plus λ times the entity term, for a batch of `rows` rows over all
    ranks. With --micro-batch both are means over parts of the batch that share no negatives."""
    groups, ids = batch  # ids (n, 1 + m): each sentence's entity, its hard negatives
    z1, z2 = model(groups).chunk(2)
    own, n = own_rows(rows), len(z1)
    ids = gather_rows(ids, rows)  # every rank looks up and maps the entities of all
    e = model.entity_map(model.entities(ids))                  # (M, 1 + m, H)
    offset, simcse, entity = 0, 0.0, 0.0
    if args.micro_batch:
        parts = zip(*(x.split(args.micro_batch) for x in (z1, z2, e[own], ids[own])))
    else:
        offset, parts = own.start, [(z1, gather_rows(z2, rows), e, ids)]
    for z1, z2, e, ids in parts:
        common = dict(offset=offset, impl=args.impl)
        unit = (F.normalize(z, dim=1, eps=1e-8) for z in (z1, z2))
        known = dict(entity_ids=ids[:, 0], hard_ids=ids[:, 1:]) if args.equal_entities == "mask" else {}
        with half_products(z1, args):
            simcse += len(z1) / n * info_nce(*unit, args.temperature, **common)
            entity += len(z1) / n * ease_loss(z1, e[:, 0], e[:, 1:], args.entity_temperature,
                                              args.hard_logit, **common, **known)
    loss = (args.simcse_weight * simcse + args.entity_weight * entity) * (n / rows)
    simcse, entity = (term.detach() * (n / rows) for term in (simcse, entity))
    return loss, {"loss": loss.detach(), "simcse": simcse, "entity": entity}


# ── main ────────────────────────────────────────────────────────────────────────────────────────────────────


@command
def main(argv=None):
    args = make_parser().parse_args(argv)
    if args.evaluate:
        return score(args, __file__)
    sentences, records, titles = load_data(args.data, args)
    held_out = HeldOut(args)
    run = Run(args, __file__)
    model = build_model(args, run, titles)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0, fused=True)
    epoch = epoch_steps(len(sentences), args.batch_size, run.world)
    total = args.steps or args.epochs * epoch
    rates = [warmup_linear(step, total, args.warmup_steps, args.lr) for step in range(total)]
    run.begin(model, optimizer, total, args.warmup_steps)
    model.entities.schedule(rates, run.step)
    tokens = tokenise_table(sentences, model, run)
    held_out.before(model, run)
    model.train()
    for step, rows in run.steps(total, len(tokens)):
        set_lr(optimizer, rates[step - 1])
        own = rows[own_rows(len(rows))]
        drawn_in = (step - 1) // epoch if args.form == "paper" else 0
        ids = draw_entities([records[i] for i in own], drawn_in, args).to(run.device)
        loss, values = compute_loss(model, (model.batch(*tokens.views(own, 2)), ids), len(rows), args)
        optimizer.zero_grad()
        loss.backward()
        sum_gradients(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.entities.step()
        run.note(values, lr=rates[step - 1])
        if run.due:
            held_out.judge(model, run)
    held_out.after(model, run)


if __name__ == "__main__":
    main()
