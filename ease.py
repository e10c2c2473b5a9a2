"""EASE: Entity-Aware Contrastive Learning of Sentence Embedding. Nishikawa et al., NAACL 2022, arXiv 2205.04260.

A sentence that links to an entity is pulled to the entity's vector and pushed from the entities of other sentences, and from hard
negatives: entities of the same type that are not on its page. All languages share the entities, which ties translations together.
With two dropout masks' z and z' of a sentence, entities e = W E[entity] and hard negatives h alike,

    L = L_sim + λ L_ent,     L_sim = SimCSE's: z_i against all z'_j at its own temperature
    L_ent = −1/N Σ_i log exp(cos(z_i, e_i) / τ) / Σ_j [ exp(cos(z_i, e_j) / τ) + Σ_k exp(cos(z_i, h_jk) / τ + w [i = j]) ]

τ is a divisor, and 100: with λ = 0.01 the entity term is a gentle pull. An entity that several sentences of a batch link to is no
negative of theirs. E and W are dropped after training.

Data: .json .jsonl .csv .tsv with the released dataset's columns or others, one row a link; more columns are not read:
    text or sentence, positive_entity or entity     both are needed
    negative_entity                                 to draw hard negatives from: a JSON list, or one cell parted by |
    entity_type, page or article or origin_entity   or their types, parted by |, and their page; without, the text is the page
Scored pairs for --dev and --test: columns sentence1, sentence2, score (0 to 5), by header, or the score first or last.

    python ease.py --model scratch --data tests/data/entities.tsv --dev tests/data/sts.tsv
    python ease.py --data ease-dataset-en.json --entity-vectors enwiki_768d.txt --dev stsb-dev.tsv --out out/ease
    torchrun --nproc-per-node 4 ease.py --data ease-dataset-18-langs.json --entity-vectors enwiki_768d.txt --dev stsb-dev.tsv \
        --model bert-base-multilingual-cased --pooling avg --entity-temperature 10 --batch-size 256 --lr 5e-5 --out out/18

Expected: BERT-base 77.0 and RoBERTa-base 76.8 Spearman as the mean of seven STS test sets, where SimCSE has 76.25 and 76.57.

Departures from the released code: under torchrun entities are gathered as sentences are, there they are not and the run fails;
the best checkpoint is kept, there the last one. --form code brings back what else differs: W with a bias and a tanh, w = 1,
negatives from 8 rows instead of the batch, equal entities as negatives, hard negatives drawn once instead of each epoch.
"""
import argparse, bz2, csv, datetime, functools, gzip, hashlib, itertools, json, logging, math, os, random, re, shutil, signal, sys, time
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
from transformers import AutoModel, AutoTokenizer, BertConfig, BertTokenizer

from kernels import choose_impl, embed_in_chunks, gather_rows, info_nce, own_rows, similarity_lse

# ── flags ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def make_parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error, add = fail, parser.add_argument
    poolings = ("cls", "cls_before_pooler", "avg", "avg_top2", "avg_first_last")
    add("--form", choices=("paper", "code"), default="paper", help="default paper; code: as released, see above")
    add("--entity-vectors", help="Wikipedia2Vec's text file, also .gz or .bz2; default random vectors of the encoder's width")
    add("--entity-map", choices=("linear", "tanh", "none"), help="W; default linear (paper), with --form code tanh")
    add("--entity-temperature", type=at_least(1e-4), help="τ of the entity term; default 100 (paper), scratch 0.1")
    add("--entity-weight", type=at_least(0), help="λ; default 0.01 (paper), scratch 1")
    add("--simcse-weight", type=at_least(0), default=1.0, help="of L_sim; default 1 (paper)")
    add("--hard-negatives", type=at_least(0, int), help="m, drawn for each sentence; default 1 (paper), 0 where the data have none")
    add("--hard-logit", type=at_least(-5), help="w, for a sentence's own hard negatives; default 0 (paper), with --form code 1")
    add("--micro-batch", type=at_least(1, int), help="rows that are each other's negatives; default all, with --form code 8")
    add("--pooling", choices=poolings, help="what is a sentence's embedding; default cls, scratch avg")
    add("--warmup-steps", type=at_least(0, int), help="default 500 (paper), scratch 5")
    add("--test", nargs="*", default=[], help="files of scored pairs, read with the best model at the end")
    add("--data", required=True, help="training data; see above")
    add("--dev", help="scored pairs that choose the best checkpoint; none: the last one is kept")
    add("--model", default="bert-base-uncased", help="hub name, local folder, or from scratch; default bert-base-uncased, from scratch: scratch")
    add("--out", default="out/ease", help="folder to write; default out/ease")
    add("--batch-size", type=at_least(1, int), help="over all GPUs; default 128 (paper), scratch 64")
    add("--chunk-size", type=at_least(1, int), help="rows embedded at a time, with the whole batch's gradients; default the batch")
    add("--epochs", type=at_least(1, int), help="default 1 (paper), scratch 8")
    add("--steps", type=at_least(1, int), help="length of the training in steps instead of epochs")
    add("--lr", type=at_least(0), help="learning rate; default 3e-5 (paper), scratch 2e-3, after a warm-up falling linearly to 0")
    add("--temperature", type=at_least(1e-4), default=0.05, help="τ; default 0.05 (paper)")
    add("--max-length", type=at_least(3, int), default=32, help="tokens a training sentence keeps; default 32 (paper)")
    add("--seed", type=at_least(0, int), default=42, help="default 42")
    add("--eval-every", type=at_least(1, int), default=125, help="steps between evaluations; default 125 (paper)")
    add("--resume", action="store_true", help="continue the run in --out from its last evaluation, with the same flags")
    add("--impl", default="auto", choices=("auto", "triton", "blockwise", "eager"), help="kernels; default auto")
    add("--precision", choices=["bf16", "fp32"], help="of the encoder, by default bf16 on a GPU and fp32 on a CPU; newer CPUs are fast in bf16")
    return parser


# What a flag is where it was not given: in the paper, in the form of the released code, and for a small random BERT.
PAPER = dict(entity_map="linear", entity_temperature=100.0, entity_weight=0.01, hard_logit=0.0, pooling="cls", warmup_steps=500,
             batch_size=128, epochs=1, lr=3e-5)
CODE = dict(entity_map="tanh", hard_logit=1.0, micro_batch=8)
SCRATCH = dict(entity_temperature=0.1, entity_weight=1.0, pooling="avg", warmup_steps=5, batch_size=64, epochs=8, lr=2e-3)


# ── data ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


COLUMNS = dict(text=("text", "sentence"), entity=("positive_entity", "entity"), negatives=("negative_entity",),
               type=("entity_type",), page=("page", "article", "origin_entity"))


def load_data(path, args):
    """([(place, (sentence,))], what link_entities makes of each, titles of all entities); fills the flags that were not given (PAPER, CODE, SCRATCH)."""
    header, table = read_table(path, lists=True)
    at = {kind: header.index(name) for kind, names in COLUMNS.items() for name in names if name in (header or [])}
    if "text" not in at or "entity" not in at:
        found = f"columns {', '.join(header)}" if header else "no names of columns"
        fail(f"{path}: {found}; wanted text (or sentence) and positive_entity (or entity), and see --help")
    source = next((kind for kind in ("negatives", "type") if kind in at), None)
    args.views = 2
    given = PAPER | (CODE if args.form == "code" else {}) | (SCRATCH if args.model == "scratch" else {})
    for name, value in (given | dict(hard_negatives=1 if source else 0)).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.hard_negatives and not source:
        fail(f"--hard-negatives {args.hard_negatives}: {path} has neither negative_entity nor entity_type to draw them from")
    if not 2 <= args.batch_size <= len(table):
        fail(f"{path}: {len(table)} rows, --batch-size is {args.batch_size}; wanted at least 2 and as many rows as that")
    rows = [{"place": place} | {kind: cells[column].strip() for kind, column in at.items()} for place, cells in table]
    for row in rows:
        for kind in ("text", "entity", *(["type"] if source == "type" else [])):
            if not row[kind].strip("| "):
                fail(f"{path} {row['place']}: no {header[at[kind]]}; fill the cell or delete the row")
    records, titles = link_entities(path, rows, args)
    say(Path(__file__).stem, f"{args.form}: {len(rows):,} sentences, {len(titles):,} entities, {args.hard_negatives} hard negatives each "
                             f"(columns {', '.join(header[column] for column in at.values())}) from {path}")
    return [(row["place"], (row["text"],)) for row in rows], records, titles


def link_entities(path, rows, args):
    """([(row, entity, candidates for hard negatives, entities that cannot be one)], titles); entities go by their number."""
    numbers, pages, types, records = {}, {}, {}, []
    number = lambda title: numbers.setdefault(" ".join(title.replace("_", " ").split()), len(numbers))
    parts = lambda cell: [part.strip() for part in cell.split("|") if part.strip()]
    for row in rows:
        entity = number(row["entity"])
        pages.setdefault(row.get("page") or row["text"], set()).add(entity)
        for kind in parts(row.get("type", "")):
            types.setdefault(kind, {})[entity] = None
    of_type, chance = {kind: tuple(entities) for kind, entities in types.items()}, random.Random(args.seed)
    for i, row in enumerate(rows):
        entity, candidates, found, barred, what = number(row["entity"]), (), (), (), ""
        if "negatives" in row:
            candidates = found = tuple(dict.fromkeys(map(number, parts(row["negatives"]))))
            barred, what = (entity,), "hard negatives"
        elif "type" in row:                                    # of several types one is drawn
            kind = chance.choice(parts(row["type"]))
            candidates, found, barred = of_type[kind], types[kind], pages[row.get("page") or row["text"]]
            what = f"entities of type {kind!r} that are not on its page"
        free = len(candidates) - sum(other in found for other in barred)
        if free < args.hard_negatives:
            fail(f"{path} {row['place']}: {free} {what}, wanted at least --hard-negatives, which is {args.hard_negatives}")
        records.append((i, entity, candidates, barred))
    return records, list(numbers)


def draw_entities(records, epoch, args):
    """(n, 1 + m) int64: each record's entity, and m different hard negatives, drawn from the seed, the epoch and the row alone: the
    same after --resume and on any number of GPUs."""
    drawn = []
    for row, entity, candidates, barred in records:
        chance, picks = random.Random(f"{args.seed} {epoch} {row}"), [entity]
        while len(picks) <= args.hard_negatives:
            pick = candidates[int(chance.random() * len(candidates))]
            if pick not in barred and pick not in picks:
                picks.append(pick)
        drawn.append(picks)
    return torch.tensor(drawn)


def load_vectors(path, titles):
    """((entities, D) float32, how many the file has) from Wikipedia2Vec's text, line by line; the others are random (released code)."""
    places, vectors, found, line = {title: i for i, title in enumerate(titles)}, None, set(), 0
    try:
        with {".gz": gzip.open, ".bz2": bz2.open}.get(Path(path).suffix, open)(path, "rb") as file:
            for line, text in enumerate(tqdm(file, "vectors", unit=" lines", leave=False, disable=not sys.stderr.isatty()), 1):
                if line == 1 and re.fullmatch(rb"\d+ \d+\s*", text):           # word2vec's header: rows and columns
                    continue
                name, _, numbers = text.strip().partition(b"\t" if b"\t" in text else b" ")
                width = numbers.count(b" ") + bool(numbers)
                if vectors is None:
                    vectors = torch.empty(len(titles), width).uniform_(-0.05, 0.05)
                if width != vectors.shape[1]:
                    fail(f"{path} line {line}: {width} numbers, wanted {vectors.shape[1]} as before")
                title = name.removeprefix(b"ENTITY/").decode().replace("_", " ")
                if name.startswith(b"ENTITY/") and title in places:
                    vectors[places[title]] = torch.from_numpy(np.array(numbers.split(), np.float32))
                    found.add(title)
    except (OSError, EOFError) as error:
        fail(f"{path}: {getattr(error, 'strerror', None) or error}")
    except ValueError as error:                                # no number, or not UTF-8
        fail(f"{path} line {line}: {error}")
    if not found:
        fail(f"{path}: none of the {len(titles):,} entities; wanted lines like ENTITY/Title 0.1 0.2 (Wikipedia2Vec's save_text)")
    if not vectors.isfinite().all():
        fail(f"{path}: not all numbers are finite")
    return vectors, len(found)


# What one more group costs, in tokens: its launches, and a pass over all gradients. CPU: measured (2 layers of 768, from 25
# to 400 alike); CUDA: an estimate.
GROUP_COST = {"cpu": 100, "cuda": 8192}


def make_batch(rows, model, args):
    """[(places (n,), ids (n, L), mask (n, L))]: the rows, view after view, in groups of similar length, on the device.

    The loss needs the embeddings alone, so no row has to be padded to the longest of its batch.
    """
    flat = [ids for view in zip(*rows) for ids in view]
    order = sorted(range(len(flat)), key=lambda i: len(flat[i]))
    batch = []
    for start, end in length_groups([len(flat[i]) for i in order], GROUP_COST[model.device.type], args.chunk_size):
        places = torch.tensor(order[start:end])
        group = [torch.from_numpy(flat[i]) for i in order[start:end]]
        ids = torch.nn.utils.rnn.pad_sequence(group, batch_first=True, padding_value=model.tokenizer.pad_token_id or 0)
        mask = torch.arange(ids.shape[1]) < torch.tensor([len(ids) for ids in group])[:, None]
        batch.append([x.to(model.device, torch.int64) for x in (places, ids, mask)])
    return batch


# ── model ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def build_model(args):
    """The encoder without its pretrained pooler, its tokenizer and the head, which training alone uses; see add_entities."""
    model = torch.nn.Module()
    model.device, model.pooling = torch.device(args.device), args.pooling
    model.bf16, model.chunked = args.precision == "bf16", bool(args.chunk_size)
    model.encoder, model.tokenizer = load_encoder(args)
    config = model.encoder.config
    model.has_pooler = hasattr(model.encoder, "pooler")        # BERT, RoBERTa: save_model can write the head there
    model.encoder.pooler = model.head = None
    model.keep_head = False
    if args.pooling == "cls":
        model.head = torch.nn.Linear(config.hidden_size, config.hidden_size)
        torch.nn.init.normal_(model.head.weight, std=config.initializer_range)
        torch.nn.init.zeros_(model.head.bias)
    config.output_hidden_states = args.pooling in ("avg_top2", "avg_first_last")
    table = getattr(model.encoder.embeddings, "position_embeddings", None)
    reserved = 0 if getattr(table, "padding_idx", None) is None else table.padding_idx + 1     # as RoBERTa's
    model.longest = min(model.tokenizer.model_max_length, config.max_position_embeddings - reserved)
    if args.max_length > model.longest:
        fail(f"--max-length {args.max_length}: {args.model} reads at most {model.longest} tokens")
    return model.to(model.device)


def load_encoder(args, auto=AutoModel, flag="--model"):
    """(model, tokenizer) of a folder or a hub name; scratch is a small random BERT with word pieces of the data file."""
    if args.model == "scratch" and flag == "--model":
        words = Counter()
        for _, cells in itertools.islice(Table(Path(args.data), lists=True), 100_000):
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
        fail(f"{flag} {args.model}: no config.json in this folder, so it is no transformers model")
    if not local:
        say("hub", f"{args.model} is fetched, unless it is in the cache")
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model, info = auto.from_pretrained(args.model, attn_implementation="sdpa", dtype=torch.float32,
                                           output_loading_info=True, ignore_mismatched_sizes=True)
    except Exception as error:                                 # whatever the network or a damaged file makes of it
        if local:
            fail(f"{flag} {args.model}: {type(error).__name__}: {str(error).strip()}".splitlines()[0])
        fail(f"{flag} {args.model}: no such folder, and the hub does not give it; name a local folder"
             + (", or take scratch" if flag == "--model" else ""))
    if not tokenizer.is_fast:
        fail(f"{flag} {args.model}: {type(tokenizer).__name__} is a slow tokenizer; wanted one with a tokenizer.json")
    lost = [name for name in (*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"]))     # would be random
            if name.removeprefix(f"{model.base_model_prefix}.") in model.base_model.state_dict() and "pooler" not in name]
    what = f"{len(lost)} weights, such as {min(lost)}," if lost else "the words of its tokenizer"
    if lost or len(tokenizer) <= len(tokenizer.all_special_ids):
        fail(f"{flag} {args.model}: {what} are missing or do not fit its config.json")
    if not hasattr(model.base_model, "embeddings"):
        fail(f"{flag} {args.model}: {type(model.base_model).__name__} is no encoder like BERT, RoBERTa or DistilBERT")
    if any("pooler" in name for name in info["missing_keys"]):
        model.base_model.pooler = None                         # it would be random
    return model, tokenizer


def embed(model, batch):
    """(rows, H) float32 embeddings in the order of the rows: one path for training and evaluation."""
    z = embed_in_chunks(lambda group: pool(model, *group[1:]), batch, model if model.chunked else None)
    places = torch.cat([places for places, _, _ in batch])
    return z[places.argsort()]


def pool(model, ids, mask):
    """(n, H) float32 embeddings of ids (n, L)."""
    with torch.autocast(model.device.type, torch.bfloat16, enabled=model.bf16):
        output = model.encoder(input_ids=ids, attention_mask=mask)
        hidden = output.last_hidden_state                      # (n, L, H)
        if model.pooling == "avg_top2":
            hidden = (hidden + output.hidden_states[-2]) / 2
        if model.pooling == "avg_first_last":                  # the first transformer layer; 0 is the word embeddings
            hidden = (hidden + output.hidden_states[1]) / 2
        if model.pooling.startswith("avg"):                    # special tokens count, padding does not
            z = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        else:
            z = hidden[:, 0]
        if model.head is not None and (model.training or model.keep_head):
            z = torch.tanh(model.head(z))
    return z.float()


# ── the paper ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def compute_loss(model, batch, args):
    """SimCSE's loss of a batch plus λ times the entity term; with --micro-batch, means over parts that do not meet."""
    groups, ids = batch                                        # ids (n, 1 + m): each sentence's entity, its hard negatives
    z1, z2 = embed(model, groups).chunk(2)
    own, n = own_rows(args.rows), len(z1)
    ids = gather_rows(ids, args.rows)                     # every rank looks up and maps the entities of all
    e = model.entity_map(model.entities(ids))                  # (M, 1 + m, H)
    offset, simcse, entity = own.start, 0.0, 0.0
    parts = [(z1, gather_rows(z2, args.rows), e, ids)]
    if args.micro_batch:
        offset, parts = 0, zip(*(x.split(args.micro_batch) for x in (z1, z2, e[own], ids[own])))
    for z1, z2, e, ids in parts:
        common = dict(offset=offset, impl=args.impl)
        simcse += len(z1) / n * info_nce(*(F.normalize(z, dim=1, eps=1e-8) for z in (z1, z2)), args.temperature, **common)
        if args.form == "paper":
            common |= dict(entity_ids=ids[:, 0], hard_ids=ids[:, 1:])
        entity += len(z1) / n * ease_loss(z1, e[:, 0], e[:, 1:], args.entity_temperature, args.hard_logit, **common)
    loss = (args.simcse_weight * simcse + args.entity_weight * entity) * (n * args.world / args.rows)
    return loss, {"loss": loss.detach(), "simcse": simcse.detach(), "entity": entity.detach()}


def ease_loss(z, entity, hard=None, temperature=100.0, hard_logit=0.0, entity_ids=None, *, hard_ids=None, offset=0, impl="auto"):
    """The entity term: mean over N sentences of −log softmax of their entity among all entities and all hard negatives.

    z            (N, D) sentences, any float type, half types computed in float32; all vectors are normalised here, a zero vector
                 has cosine 0 with all
    entity       (M, D) entities after their map; row offset + i belongs to sentence i
    hard         (M, m, D) hard negatives alike; None or m = 0: there are none
    temperature  τ, a divisor: exp(cos / τ)
    hard_logit   w, added to the logits of a sentence's own hard negatives; those of other sentences have none
    entity_ids   (M,) integers: an entity with the id of a sentence's own is no negative of it; None: all are
    hard_ids     (M, m) the same of hard negatives, beside entity_ids; a sentence's own must not have its entity's id
    offset       this rank's first row where entity, hard and the ids are gathered from all ranks
    returns      scalar float32, float64 for float64; one sentence without hard negatives: 0
    source       Nishikawa et al. 2022, the entity contrastive objective
    """
    z, entity = (F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=1, eps=1e-8) for x in (z, entity))
    own = slice(offset, offset + len(z))
    ids = torch.arange(len(entity), device=z.device) if entity_ids is None else entity_ids
    columns, column_ids = entity, ids
    if hard is not None:
        hard = F.normalize(hard.to(z.dtype), dim=2, eps=1e-8)
        if entity_ids is None or hard_ids is None:
            hard_ids = (ids.min() - 1).expand(hard.shape[:2])  # an id that no entity has
        columns, column_ids = torch.cat([entity, hard.flatten(0, 1)]), torch.cat([ids, hard_ids.flatten()])
    positive = (z * entity[own]).sum(1) / temperature
    negatives = similarity_lse(z, columns, temperature, exclude=(ids[own], column_ids), impl=impl)
    if hard is not None and hard_logit:                        # its own are in the sum, with weight 1: it becomes exp(w)
        share = ((z[:, None] * hard[own]).sum(2) / temperature - negatives[:, None]).exp().sum(1)
        negatives = negatives + torch.log1p(math.expm1(hard_logit) * share)
    return -F.logsigmoid(positive - negatives).mean()          # = log(exp positive + exp negatives) - positive


def add_entities(model, titles, args):
    """The table E of the entities and the map W, for training alone."""
    width = model.encoder.config.hidden_size
    vectors, found = torch.empty(len(titles), width).uniform_(-0.05, 0.05), 0
    if args.entity_vectors:
        vectors, found = load_vectors(args.entity_vectors, titles)
    if args.entity_map == "none" and vectors.shape[1] != width:
        fail(f"--entity-map none: {args.entity_vectors} has {vectors.shape[1]} numbers a row, embeddings have {width}; take linear")
    linear = torch.nn.Linear(vectors.shape[1], width, bias=args.entity_map == "tanh")
    torch.nn.init.normal_(linear.weight, std=model.encoder.config.initializer_range)
    if linear.bias is not None:
        torch.nn.init.zeros_(linear.bias)
    maps = {"linear": linear, "tanh": torch.nn.Sequential(linear, torch.nn.Tanh()), "none": torch.nn.Identity()}
    model.entity_map = maps[args.entity_map].to(model.device)
    model.entities = EntityTable(vectors, min(len(titles), args.batch_size * (1 + args.hard_negatives))).to(model.device)
    say("entities", f"{len(titles):,} vectors of {vectors.shape[1]}, {f'{found:,} of them from {args.entity_vectors}' if found else 'random'}, "
                    f"{args.entity_map} map, temperature {args.entity_temperature:g}, weight {args.entity_weight:g}")


class EntityTable(torch.nn.Module):
    """A vector for each entity, trained by AdamW as all weights are, at the cost of the rows that a batch uses.

    AdamW moves a row also in steps without gradient, by what is left of its momentum. Here a row waits, and makes these moves up
    before its next use, as far as float32 sees them (0.9¹⁶⁰ = 5e-8): the vectors are those of a dense table, to rounding.
    """

    def __init__(self, vectors, slots):
        super().__init__()
        last = torch.zeros(len(vectors), dtype=torch.int64)    # the step of a row's last gradient, from 1; 0: none yet
        for name, x in dict(vectors=vectors, m=torch.zeros_like(vectors), v=torch.zeros_like(vectors), last=last).items():
            self.register_buffer(name, x)
        # The batch's rows, put here by forward: what backward, average_gradients and clip_grad_norm_ see of the table.
        self.used = torch.nn.Parameter(vectors.new_zeros(slots, vectors.shape[1]))

    def schedule(self, rates, done):
        """The learning rate of each step, and how many steps are done."""
        steps = torch.arange(1, len(rates) + 1, dtype=torch.float64)
        rates, scales = torch.tensor(rates, dtype=torch.float64) / (1 - 0.9 ** steps), (1 - 0.999 ** steps).rsqrt()
        self.rates, self.scales, self.done = rates.to(self.vectors), scales.to(self.vectors), done

    @torch.no_grad()
    def catch_up(self, rows):
        """(vectors, m, v) of the rows after all steps that are done."""
        vectors, m, v, last = (x[rows] for x in (self.vectors, self.m, self.v, self.last))
        waited, root = torch.where(last > 0, self.done - last, -1), v.sqrt()
        for k in range(min(int(waited.max()) + 1, 160)):       # 0 is the step with the gradient: that move waits as well
            at = (last + k - 1).clamp(0, self.done - 1)
            rate = torch.where(k <= waited, self.rates[at] * 0.9 ** k, 0)
            vectors -= rate[:, None] * m / (root * (self.scales[at] * 0.999 ** (k / 2))[:, None] + 1e-8)
        waited = waited.clamp(min=0)[:, None]
        return vectors, m * 0.9 ** waited, v * 0.999 ** waited

    def forward(self, ids):
        """(..., D) vectors of the entities ids (...)."""
        rows, places = ids.unique(return_inverse=True)
        self.batch = rows, *self.catch_up(rows)
        with torch.no_grad():
            self.used[: len(rows)] = self.batch[1]
        return self.used[places]

    @torch.no_grad()
    def step(self):
        """AdamW's step for the rows of the last batch, from the gradient of `used`."""
        rows, vectors, m, v = self.batch
        gradient, self.done = self.used.grad[: len(rows)], self.done + 1
        self.vectors[rows], self.m[rows], self.v[rows] = vectors, 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient ** 2
        self.last[rows], self.used.grad = self.done, None


# ── evaluation ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def load_sts(path):
    """[(sentence1, sentence2, score)]; the subsets of a file are one list (the setting "all")."""
    header, table = read_table(path)
    names = ["sentence1", "sentence2", "score"]
    first = next(iter(table))[1]
    if header is None and len(first) == 3:                     # the score is last, unless only the first cell is a number
        header = names if re.fullmatch(r"[\d. ]*", first[2]) else ["score", "sentence1", "sentence2"]
    if header is None or not set(names) <= set(header):
        fail(f"{path}: {', '.join(header or ['no header'])}; wanted {', '.join(names)}, or 3 columns, the score first or last")
    pairs = []
    for place, cells in table:
        one, two, score = (" ".join(cells[header.index(name)].split()) for name in names)
        if not one or not two:
            fail(f"{path} {place}: an empty sentence")
        if not re.fullmatch(r"(\d+\.?\d*|\.\d+)?", score) or float(score or 0) > 5:
            fail(f"{path} {place}: score {score!r}, wanted a number from 0 to 5")
        if score:                                              # SemEval leaves some pairs unscored; they do not count
            pairs.append((one, two, float(score)))
    if len(pairs) < 2:
        fail(f"{path}: {len(pairs)} scored pairs, wanted at least 2")
    return pairs


def spearman(a, b):
    """Pearson correlation of the ranks; equal values share their mean rank. 0 where one side is constant."""
    ranks = []
    for x in (a, b):
        _, group, sizes = np.unique(x, return_inverse=True, return_counts=True)
        ranks.append((sizes.cumsum() - (sizes - 1) / 2)[group])
    return 0.0 if min(np.ptp(r) for r in ranks) == 0 else float(np.corrcoef(*ranks)[0, 1])


@torch.no_grad()
def evaluate(model, pairs, args):
    """100 ρ, and alignment and uniformity (Wang, Isola 2020), of scored pairs; sentences are not cut to --max-length."""
    model.eval()
    sentences = sorted({sentence for pair in pairs for sentence in pair[:2]}, key=lambda text: (len(text), text))
    rows = [(ids,) for ids in tokenise(sentences, model, model.longest)[0]]
    z = torch.cat([embed(model, make_batch(rows[i : i + 128], model, args)) for i in range(0, len(rows), 128)])
    z = F.normalize(torch.nan_to_num(z), dim=1, eps=1e-8)
    model.train()
    place = {sentence: i for i, sentence in enumerate(sentences)}
    one, two = (z[[place[pair[side]] for pair in pairs]].double() for side in (0, 1))
    scores = np.array([pair[2] for pair in pairs])
    result = {"spearman": 100 * spearman((one * two).sum(1).cpu().numpy(), scores)}
    near = torch.from_numpy(scores > 4).to(z.device)
    if near.any():
        result["alignment"] = (one - two)[near].square().sum(1).mean().item()
    if len(z) > 1:                                             # exp(−2 |x − y|²) = exp(4 x·y − 4) on unit rows
        total = similarity_lse(z, temperature=0.25, exclude="diagonal", impl=args.impl).double().logsumexp(0).item()
        result["uniformity"] = total - 4 - math.log(len(z) * (len(z) - 1))
    return result


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


def tokenise(sentences, model, longest):
    """([int32 ids (L,)], how many were cut): each sentence alone, with special tokens and without padding."""
    tokenizer, rows, cut = model.tokenizer.backend_tokenizer, [], 0
    tokenizer.no_padding()
    tokenizer.enable_truncation(longest, direction=model.tokenizer.truncation_side)
    for start in range(0, len(sentences), 10_000):             # a million at once would hold tens of gigabytes
        encoded = tokenizer.encode_batch_fast(sentences[start : start + 10_000])
        rows += [np.array(encoding.ids, np.int32) for encoding in encoded]
        cut += sum(bool(encoding.overflowing) for encoding in encoded)
    return rows, cut


def tokenise_rows(table, model, args, name="tokens"):
    """(Rows of args.views views, what became of long sentences); one column is used twice.

    Rank 0 writes the tokens into --out, and every rank maps them: neither they nor the text have to fit in memory.
    """
    columns, folder = len(next(iter(table))[1]), Path(args.out) / name
    if args.rank == 0 and not folder.is_dir():
        write_tokens(table, model, min(args.max_length, model.longest), folder)
    if args.world > 1:
        dist.barrier()
    if not folder.is_dir():
        fail(f"--out {args.out}: what rank 0 writes is not there; name a folder that all machines share", every_rank=True)
    rows = Rows(folder, columns, args.views // columns)
    return rows, f"{rows.ends[-1]:,} of {columns * len(rows):,} sentences cut to {args.max_length} tokens"


def write_tokens(table, model, longest, folder):
    """Files of all `ids`, one sentence behind the other, and of where sentences end: a 0 first, how many were cut last."""
    aside, rows, done, cut = folder.with_suffix(".tmp"), iter(table), 0, 0
    aside.mkdir(exist_ok=True)
    with open(aside / "ids", "wb") as ids, open(aside / "ends", "wb") as ends:
        ends.write(bytes(8))
        while texts := [cell for _, cells in itertools.islice(rows, 10_000) for cell in cells]:
            sentences, more = tokenise(texts, model, longest)
            places = done + np.cumsum([len(sentence) for sentence in sentences])
            ids.write(np.concatenate(sentences).tobytes())
            ends.write(places.tobytes())
            done, cut = places[-1], cut + more
        ends.write(np.int64(cut).tobytes())
    os.replace(aside, folder)


class Rows:
    """Rows of tokens, as write_tokens left them: rows[i] has the int32 ids (L,) of each column, several times over."""

    def __init__(self, folder, columns, times):
        self.columns, self.times = columns, times
        self.ids, self.ends = (np.asarray(np.memmap(folder / name, kind, "c")) for name, kind in (("ids", np.int32), ("ends", np.int64)))

    def __len__(self):
        return (len(self.ends) - 2) // self.columns

    def __getitem__(self, i):
        first = range(len(self))[i] * self.columns
        return tuple(self.ids[self.ends[j] : self.ends[j + 1]] for j in range(first, first + self.columns)) * self.times


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
    sentences, records, titles = load_data(args.data, args)
    dev = load_sts(args.dev) if args.dev else []
    tests = {path: load_sts(path) for path in args.test}
    start(args)
    model = build_model(args)
    add_entities(model, titles, args)
    begin_out(args)
    rows, cut = tokenise_rows(sentences, model, args)
    rows = list(zip(rows, records))
    epoch = epoch_steps(rows, args)
    total = args.steps or args.epochs * epoch
    rates = [warmup_linear(step, total, args.warmup_steps, args.lr) for step in range(total)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0, fused=True)
    torch.manual_seed(args.seed + args.rank)                   # ranks have equal weights and different dropout
    say("data", f"{len(dev):,} dev pairs; {cut}")
    size = sum(p.numel() for p in model.encoder.parameters()) / 1e6
    say("model", f"{args.model}, {size:.1f} M parameters, {args.pooling} pooling")
    say("run", f"seed {args.seed}, {args.world} × {model.device.type}, {args.precision}, "
               f"kernels {choose_impl(args.impl, torch.empty(0, device=model.device))}, "
               f"{total:,} steps of {args.batch_size}, writing {args.out}")

    progress = {"step": 0, "before": None, "best": None}
    if args.resume:
        progress = load_state(model, optimizer, args)
    elif args.rank == 0:
        progress["before"] = evaluate(model, dev, args) if dev else None
    if dev and args.rank == 0:
        say("before", f"dev Spearman {progress['before']['spearman']:.2f}")
    model.train()
    model.entities.schedule(rates, progress["step"])
    asked_to_stop(0, args)
    began, first_bad = (progress["step"], time.perf_counter()), torch.zeros((), dtype=torch.int64, device=model.device)
    for step, batch in zip(range(progress["step"] + 1, total + 1), batches(rows, progress["step"], args)):
        for group in optimizer.param_groups:
            group["lr"] = rates[step - 1]
        sentences, records = zip(*batch)
        ids = draw_entities(records, (step - 1) // epoch if args.form == "paper" else 0, args).to(model.device)
        loss, values = compute_loss(model, (make_batch(sentences, model, args), ids), args)
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model, args)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.entities.step()
        values["lr"] = rates[step - 1]
        first_bad = torch.where((first_bad == 0) & ~values["loss"].isfinite(), step, first_bad)
        stop, due = asked_to_stop(step, args), step % args.eval_every == 0 or step == total
        shown = due or stop or step % (1 + total // 40) == 0
        if shown:
            refuse_bad_loss(first_bad, lambda step: named(batches(range(len(rows)), step - 1, args)), progress, args)
        if due and args.rank == 0:
            scores = evaluate(model, dev, args) if dev else {}
            values |= {f"dev_{name}": value for name, value in scores.items()}
            values["best"] = not dev or not progress["best"] or scores["spearman"] > progress["best"]["spearman"]
            if values["best"]:
                progress["best"] = {"step": step, **scores}
                save_model(model, progress["best"], args)
        if shown:
            report(step, total, values, began, args)
        if due or stop:
            progress["step"] = step
            save_state(model, optimizer, progress, args)
        if stop:
            say("stopped", f"at step {step}, saved; --resume continues")
            sys.exit(130)

    if args.rank == 0:
        minutes, seconds = divmod(round(time.perf_counter() - began[1]), 60)
        load_best(model, args)
        for path, pairs in tests.items():
            tests[path] = evaluate(model, pairs, args)["spearman"]
            say("test", f"{tests[path]:.2f}  {path}")
        if tests:
            say("test", f"{np.mean([round(score, 2) for score in tests.values()]):.2f}  mean")
        before, best = progress["before"], progress["best"]
        rise = f"dev Spearman {before['spearman']:.2f} → {best['spearman']:.2f} at step {best['step']}, " if dev else ""
        say("done", f"{rise}{minutes} min {seconds} s, peak {peak_gb(model.device):.1f} GB")
        say("load", load_line(model, args))
    if args.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
