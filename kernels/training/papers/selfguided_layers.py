"""For selfguided.py: pool the states of every layer, and score each layer on --dev (--layer-study)."""
import json
import os
from pathlib import Path

import torch
import torch.nn.functional as F

from ..errors import fail, is_first_rank, log
from ..out import atomic_file
from ..progress import progress
from ..run import Run
from ..text.encoders import build_encoder, describe_model
from ..text.sts import load_sts, spearman
from ..text.tokens import restore_order, tokenise


def pool_tokens(hidden, mask, pooling):
    """Pool hidden states (n, L, H) over tokens. Return (n, H).

    mask      (n, L): 1 for tokens, including special ones; 0 for padding, which is on the right and ignored.
              A row that is all padding gives finite numbers, not NaN
    pooling   "cls" (the first token) | "last" | "max" | "mean" | "sum"
    """
    if pooling == "cls":
        return hidden[:, 0]
    if pooling == "last":
        ends = (mask.sum(1) - 1).clamp(min=0)
        return hidden[torch.arange(len(mask), device=mask.device), ends]
    if pooling == "max":
        return hidden.masked_fill(mask[:, :, None] == 0, -1e9).amax(1)
    count = mask.sum(1, keepdim=True).clamp(min=1) if pooling == "mean" else 1
    return (hidden * mask[:, :, None]).sum(1) / count


@torch.no_grad()
def pool_layers(model, encoder, batch, layers, poolings):
    """Pool the hidden states of an encoder. Return (rows, layers, poolings, H) float32, sorted by row index.

    model     the SentenceEncoder that made the batch
    encoder   a transformer with the tokenizer of `model`
    layers    indices of layers; 0 is the embedding layer
    """
    pieces = []
    for _, ids, mask in batch:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=model.bf16):
            output = encoder(input_ids=ids, attention_mask=mask, output_hidden_states=True, **model.no_cache)
        states = (output.hidden_states[layer].float() for layer in layers)
        pooled = [torch.stack([pool_tokens(x, mask, pooling) for pooling in poolings], 1) for x in states]
        pieces.append(torch.stack(pooled, 1))
    return restore_order(torch.cat(pieces), batch)


def score_layers(model, encoder, pairs, poolings):
    """Return [[score of each pooling] of each layer]; layer 0 is the embedding layer. A score is 100 times
    Spearman's ρ of the pairs' cosines and --dev scores. Dropout and truncation to --max-length are off."""
    texts = [pair[side] for side in (0, 1) for pair in pairs]
    distinct = sorted(set(texts), key=lambda text: (len(text), text))
    prompted = [model.default_prompt + x for x in distinct]
    if model.lower_case:
        prompted = [text.lower() for text in prompted]
    rows, _ = tokenise(prompted, model.tokenizer, model.max_length)
    layers, training = range(encoder.config.num_hidden_layers + 1), encoder.training
    encoder.eval()
    starts = progress(range(0, len(rows), 32), "studying layers", " batches")
    batches = (model.batch(rows[i : i + 32]) for i in starts)
    z = torch.cat([pool_layers(model, encoder, batch, layers, poolings).cpu() for batch in batches])
    encoder.train(training)
    places = {text: i for i, text in enumerate(distinct)}
    first, second = torch.tensor([places[text] for text in texts]).chunk(2)
    scores = [pair[2] for pair in pairs]

    def score(x):
        x = F.normalize(torch.nan_to_num(x), dim=1, eps=1e-8).double()
        return 100 * spearman((x[first] * x[second]).sum(1).numpy(), scores)

    return [[score(z[:, layer, i]) for i in range(len(poolings))] for layer in layers]


def log_tables(encoders, model, pairs, path):
    """Print a table of scores for each of `encoders`, {name: encoder}. Write the tables to `path`, if given.
    All encoders use the tokenizer, prompt and maximum length of the SentenceEncoder `model`."""
    poolings = ["last" if model.pooling == "last" else "cls", "mean", "max"]
    tables = {name: score_layers(model, encoder, pairs, poolings) for name, encoder in encoders.items()}
    if len(tables) > 1:
        log("study", "     " + "".join(f"{name:>26}" for name in tables))
    log("study", "layer" + "".join(f"  {poolings[0]:>8}{'mean':>8}{'max':>8}" for _ in tables))
    for layer, rows in enumerate(zip(*tables.values())):
        log("study", f"{layer:5}" + "".join("  " + "".join(f"{x:8.2f}" for x in row) for row in rows))
    if path and is_first_rank():
        with atomic_file(Path(path)) as file:
            file.write(json.dumps(tables | {"poolings": poolings}))


def evaluate_layers(args, script):
    """Run --evaluate --layer-study: print the scores of every layer of --model."""
    check_layer_study(args)
    pairs, run = load_sts(args.dev, args.dev_columns), Run(args, script)
    model = build_encoder(args, run, columns=len(args.prompt or [""])).to(run.device)
    log("model", describe_model(model, args))
    log_tables({"evaluated": model.encoder}, model, pairs, args.layer_study)


def compare_layers(model, fixed, pairs, run):
    """With --layer-study, print the scores of the layers of the untrained (fixed) and trained encoder."""
    if run.args.layer_study is not None:
        encoders = {"untrained": fixed, "trained": model.encoder}
        log_tables(encoders, model, pairs, run.args.layer_study or run.out / "study.json")


def check_layer_study(args):
    """Raise UserError if --layer-study does not fit other flags, or names no .json in a writable folder."""
    if args.layer_study is None:
        return
    if not args.dev or args.evaluate and args.test + args.transfer + args.cluster:
        fail("--layer-study: expected --dev, to score the layers on it; with --evaluate, leave out --test, "
             "--transfer and --cluster")
    folder = Path(args.layer_study).absolute().parent
    if args.layer_study and (Path(args.layer_study).suffix != ".json" or not os.access(folder, os.W_OK)):
        fail(f"--layer-study {args.layer_study}: expected a name that ends in .json, in a writable folder")
