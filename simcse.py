"""SimCSE: Simple Contrastive Learning of Sentence Embeddings. Gao, Yao, Chen, EMNLP 2021, arXiv 2104.08821.

A sentence is pulled to its positive and pushed from the rest of the batch. Unsupervised, the positive is the same sentence
encoded again: dropout is the only noise. Supervised, it is an entailed sentence, and a contradicted one is a hard negative.
With s(a, b) = cos(a, b) / τ, anchors z1, positives z2, hard negatives z3 (if there are any) and α = exp(w):

    L = 1/N Σ_i [ −s(z1_i, z2_i) + log( Σ_j exp s(z1_i, z2_j) + Σ_j α^[i=j] exp s(z1_i, z3_j) ) ]        the paper's objective

Data, one row a line; .txt is one sentence a line, .csv .tsv .json .jsonl have columns whose order alone counts:
    1 column   unsupervised             I ate an apple.
    2 columns  anchor, positive         I ate an apple.,Someone ate fruit.
    3 columns  and a hard negative      I ate an apple.,Someone ate fruit.,Nobody ate.
Scored pairs for --dev and --test: columns sentence1, sentence2, score (0 to 5), by header, or the score first or last.

    python simcse.py --model scratch --data tests/data/nli.csv --dev tests/data/sts.tsv
    python simcse.py --data wiki1m_for_simcse.txt --dev stsb-dev.tsv --out out/unsupervised
    torchrun --nproc-per-node 4 simcse.py --data nli_for_simcse.csv --dev stsb-dev.tsv --out out/supervised

Expected: the paper's BERT-base has 82.5 (unsupervised) and 86.2 (supervised) Spearman on STS-B dev, and 76.25 and 81.57 as
the mean of its seven test sets. Unsupervised runs differ by about two points from seed to seed. The defaults are BERT-base's:
unsupervised RoBERTa-base takes --batch-size 512 --lr 1e-5 and large 512 and 3e-5; other large models --lr 1e-5.

Departures from the released code: an empty cell, there a space, is an error; under torchrun the gradient is the one of the
global batch, there 1/world of it. Evaluation every 125 steps is the released scripts'; the paper says 250.
"""
import argparse, csv, datetime, functools, hashlib, itertools, json, logging, math, os, re, shutil, signal, sys, time
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

from kernels import choose_impl, embed_in_chunks, gather_rows, own_rows, similarity_lse

# ── flags ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def make_parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error, add = fail, parser.add_argument
    poolings = ("cls", "cls_before_pooler", "avg", "avg_top2", "avg_first_last")
    add("--pooling", choices=poolings, help="what is a sentence's embedding; default cls, scratch avg")
    add("--head", choices=("keep", "train-only"), help="pooling cls: its MLP at test; default keep, unsupervised train-only")
    add("--hard-negative-weight", type=at_least(-100), default=0.0, help="w = log α; default 0, that is α = 1 (paper)")
    add("--mlm-weight", type=at_least(0), default=0.0, help="weight of a masked-LM loss; default 0, off; the paper's is 0.1")
    add("--test", nargs="*", default=[], help="files of scored pairs, read with the best model at the end")
    add("--data", required=True, help="training data; see above")
    add("--dev", help="scored pairs that choose the best checkpoint; none: the last one is kept")
    add("--model", default="bert-base-uncased", help="hub name, local folder, or from scratch; default bert-base-uncased, from scratch: scratch")
    add("--out", default="out/simcse", help="folder to write; default out/simcse")
    add("--batch-size", type=at_least(1, int), help="over all GPUs; default 512, unsupervised 64 (paper), scratch 32")
    add("--chunk-size", type=at_least(1, int), help="rows embedded at a time, with the whole batch's gradients; default the batch")
    add("--epochs", type=at_least(1, int), help="default 3, unsupervised 1 (paper), scratch 4")
    add("--steps", type=at_least(1, int), help="length of the training in steps instead of epochs")
    add("--lr", type=at_least(0), help="learning rate; default 5e-5, unsupervised 3e-5 (paper), scratch 2e-3, falling linearly to 0")
    add("--temperature", type=at_least(1e-4), default=0.05, help="τ; default 0.05 (paper)")
    add("--max-length", type=at_least(3, int), default=32, help="tokens a training sentence keeps; default 32 (paper)")
    add("--seed", type=at_least(0, int), default=42, help="default 42")
    add("--eval-every", type=at_least(1, int), default=125, help="steps between evaluations; default 125 (released scripts)")
    add("--resume", action="store_true", help="continue the run in --out from its last evaluation, with the same flags")
    add("--impl", default="auto", choices=("auto", "triton", "blockwise", "eager"), help="kernels; default auto")
    add("--precision", choices=["bf16", "fp32"], help="of the encoder, by default bf16 on a GPU and fp32 on a CPU; newer CPUs are fast in bf16")
    return parser


# What a flag is where it was not given: by the number of columns (paper, BERT-base), and for a small random BERT.
MODES = {1: dict(mode="unsupervised", views=2, pooling="cls", head="train-only", batch_size=64, lr=3e-5, epochs=1),
         2: dict(mode="pairs", views=2, pooling="cls", head="keep", batch_size=512, lr=5e-5, epochs=3),
         3: dict(mode="supervised", views=3, pooling="cls", head="keep", batch_size=512, lr=5e-5, epochs=3)}
SCRATCH = dict(pooling="avg", batch_size=32, lr=2e-3, epochs=4)


# ── data ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def load_data(path, args):
    """The Table of rows of sentences; fills the flags that the number of columns decides (MODES)."""
    header, table = read_table(path, empty_cell)
    place, cells = next(iter(table))
    if (columns := len(cells)) not in MODES:
        fail(f"{path} {place}: {columns} columns, wanted 1 (sentence), 2 (anchor, positive) or 3 (and hard negative)")
    for name, value in (MODES[columns] | (SCRATCH if args.model == "scratch" else {})).items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    if len(table) < 2 or args.batch_size > len(table):
        fail(f"{path}: {len(table)} rows, wanted at least 2 and --batch-size, which is {args.batch_size}")
    names = f"header {', '.join(header)}" if header else "no header"
    say(Path(__file__).stem, f"{args.mode}: {len(table):,} rows of {columns} columns ({names}) from {path}")
    return table


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
    """The encoder without its pretrained pooler, its tokenizer, and what is trained beside it: the head, a masked LM."""
    model = torch.nn.Module()
    model.device, model.pooling = torch.device(args.device), args.pooling
    model.bf16, model.chunked = args.precision == "bf16", bool(args.chunk_size)
    loaded, model.tokenizer = load_encoder(args, AutoModelForMaskedLM if args.mlm_weight else AutoModel)
    model.encoder, config = loaded.base_model, loaded.config
    model.lm = loaded if args.mlm_weight else None
    if model.lm is not None:                                   # its decoder leaves the word embeddings (released code)
        decoder = model.lm.get_output_embeddings()
        decoder.weight = torch.nn.Parameter(decoder.weight.detach().clone())
    model.has_pooler = hasattr(model.encoder, "pooler")        # BERT, RoBERTa: save_model can write the head there
    model.encoder.pooler = model.head = None
    model.keep_head = args.pooling == "cls" and args.head == "keep"
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
    """The contrastive loss of a batch, plus the masked LM's if it is on."""
    z1, *keys = embed(model, batch).chunk(args.views)
    keys = [gather_rows(z, args.rows) for z in keys]
    loss = simcse_loss(z1, *keys, temperature=args.temperature, hard_negative_weight=args.hard_negative_weight,
                       offset=own_rows(args.rows).start, impl=args.impl) * (len(z1) * args.world / args.rows)
    values = {"loss": loss.detach()}
    if model.lm is not None:
        mlm = mlm_loss(model, batch, args)
        loss, values["mlm"] = loss + args.mlm_weight * mlm, mlm.detach()
    return loss, values


def simcse_loss(z1, z2, z3=None, temperature=0.05, hard_negative_weight=0.0, *, offset=0, impl="auto"):
    """Mean loss of N anchors: z1 against its positive among z2, and against hard negatives z3 if there are any.

    z1                    (N, D) raw embeddings, any float type; normalised here, a zero vector has cosine 0 with all
    z2, z3                (M, D) the same of positives and hard negatives; row offset + i belongs to anchor i
    hard_negative_weight  w = log α, added to the anchor's own hard negative in the denominator; the others have weight 1
    offset                this rank's first row where z2 and z3 are gathered from all ranks
    returns               scalar float32, float64 for float64; one anchor without hard negatives: 0
    source                Gao et al. 2021, the unsupervised and the supervised objective
    """
    z1, z2 = F.normalize(z1, dim=1, eps=1e-8), F.normalize(z2, dim=1, eps=1e-8)
    own = slice(offset, offset + len(z1))
    others = dict(temperature=temperature, exclude="diagonal", offset=offset, impl=impl)
    positive = (z1 * z2[own]).sum(1) / temperature
    negatives = similarity_lse(z1, z2, **others)
    if z3 is not None:
        z3 = F.normalize(z3, dim=1, eps=1e-8)
        hard = hard_negative_weight + (z1 * z3[own]).sum(1) / temperature
        negatives = torch.logaddexp(torch.logaddexp(negatives, hard), similarity_lse(z1, z3, **others))
    return -F.logsigmoid(positive - negatives).mean()          # = log(exp positive + exp negatives) - positive


def mlm_loss(model, batch, args):
    """Mean cross entropy of the tokens chosen in all views: 15 %, of which 80 % are masked and 10 % replaced (BERT)."""
    special = torch.tensor(model.tokenizer.all_special_ids, device=model.device)         # padding is one of them

    def total(group):
        """(1, 2): the sum of a group's cross entropies, and of how many tokens."""
        _, ids, mask = group
        chosen = (torch.rand(ids.shape, device=ids.device) < 0.15) & ~torch.isin(ids, special)
        dice, masked = torch.rand(ids.shape, device=ids.device), ids.clone()
        masked[chosen & (dice < 0.8)] = model.tokenizer.mask_token_id
        replaced = chosen & (dice >= 0.9)
        masked[replaced] = torch.randint(len(model.tokenizer), ids.shape, device=ids.device)[replaced]
        # The decoder, by far the widest layer, is handed the chosen tokens only.
        decoder = model.lm.get_output_embeddings()
        with torch.autocast(model.device.type, torch.bfloat16, enabled=model.bf16), \
                decoder.register_forward_pre_hook(lambda _, hidden: (hidden[0][chosen],)):
            logits = model.lm(input_ids=masked, attention_mask=mask).logits               # (chosen, vocabulary)
        return torch.stack([F.cross_entropy(logits.float(), ids[chosen], reduction="sum"), chosen.sum().float()])[None]

    loss, tokens = embed_in_chunks(total, batch, model if model.chunked else None).sum(0)
    tokens = tokens.detach()
    if args.world > 1:
        dist.all_reduce(tokens)
    return loss * args.world / tokens.clamp(min=1)             # its mean over ranks is the mean over all tokens


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


def lr_at(step, total, args):
    """Linear decay to 0 without warm-up; step counts from 1, and the first has the full rate."""
    return args.lr * (total - step + 1) / total


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
    table = load_data(args.data, args)
    dev = load_sts(args.dev) if args.dev else []
    tests = {path: load_sts(path) for path in args.test}
    start(args)
    model = build_model(args)
    begin_out(args)
    rows, cut = tokenise_rows(table, model, args)
    total = args.steps or args.epochs * epoch_steps(rows, args)
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
    asked_to_stop(0, args)
    began, first_bad = (progress["step"], time.perf_counter()), torch.zeros((), dtype=torch.int64, device=model.device)
    for step, batch in zip(range(progress["step"] + 1, total + 1), batches(rows, progress["step"], args)):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, total, args)
        loss, values = compute_loss(model, make_batch(batch, model, args), args)
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model, args)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        values["lr"] = lr_at(step, total, args)
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
