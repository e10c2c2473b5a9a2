"""The layers of an encoder: their states pooled over tokens, and how good each is on scored pairs."""
import json
import os
from pathlib import Path

import torch
import torch.nn.functional as F

from ..cli import fail, is_first_rank, say, written
from ..output_dir import new_file
from ..progress import progress
from ..run import Run
from ..text.encoders import build_encoder, describe_model
from ..text.sts import load_sts, spearman
from ..text.tokens import in_order, tokenise


def pool_tokens(hidden, mask, pooling):
    """(n, H) of hidden states (n, L, H): special tokens count, padding, on the right, does not; a row of it
    alone gives no NaN. pooling: "cls" is the first token, "last", "max", "mean", "sum"."""
    if pooling in ("cls", "last"):
        ends = (mask.sum(1) - 1).clamp(min=0) * (pooling == "last")
        return hidden[torch.arange(len(mask), device=mask.device), ends]
    if pooling == "max":
        return hidden.masked_fill(mask[:, :, None] == 0, -1e9).amax(1)
    count = mask.sum(1, keepdim=True).clamp(min=1) if pooling == "mean" else 1
    return (hidden * mask[:, :, None]).sum(1) / count


@torch.no_grad()
def pool_layers(model, encoder, batch, layers, poolings):
    """(rows, layers, poolings, H) float32, in the order of the batch's rows: states of an encoder that reads
    the model's tokens; layer 0 is the word embeddings."""
    pieces = []
    for _, ids, mask in batch:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=model.bf16):
            output = encoder(input_ids=ids, attention_mask=mask, output_hidden_states=True, **model.no_cache)
        states = (output.hidden_states[layer].float() for layer in layers)
        pooled = [torch.stack([pool_tokens(x, mask, pooling) for pooling in poolings], 1) for x in states]
        pieces.append(torch.stack(pooled, 1))
    return in_order(torch.cat(pieces), batch)


def score_layers(model, encoder, pairs, poolings):
    """[[100 ρ by cosine of each pooling] of each layer], without dropout; no text is cut to --max-length."""
    texts = [pair[side] for side in (0, 1) for pair in pairs]
    distinct = sorted(set(texts), key=lambda text: (len(text), text))
    rows, _ = tokenise([model.spelt(model.scored + x) for x in distinct], model.tokenizer, model.longest)
    layers, training = range(encoder.config.num_hidden_layers + 1), encoder.training
    encoder.eval()
    starts = progress(range(0, len(rows), 32), "studying layers", " batches")
    batches = (model.batch(rows[i : i + 32]) for i in starts)
    z = torch.cat([pool_layers(model, encoder, batch, layers, poolings).cpu() for batch in batches])
    encoder.train(training)
    places = {text: i for i, text in enumerate(distinct)}
    one, two = torch.tensor([places[text] for text in texts]).chunk(2)
    scores = [pair[2] for pair in pairs]
    unit = lambda x: F.normalize(torch.nan_to_num(x), dim=1, eps=1e-8).double()
    rho = lambda x: 100 * spearman((x[one] * x[two]).sum(1).numpy(), scores)
    return [[rho(unit(z[:, layer, i])) for i in range(len(poolings))] for layer in layers]


def study(encoders, model, pairs, path):
    """Prints the tables of {name: encoder} of the model's kind, and writes them where there is a path."""
    poolings = ["last" if model.pooling == "last" else "cls", "mean", "max"]
    tables = {name: score_layers(model, encoder, pairs, poolings) for name, encoder in encoders.items()}
    if len(tables) > 1:
        say("study", "     " + "".join(f"{name:>26}" for name in tables))
    say("study", "layer" + "".join(f"  {poolings[0]:>8}{'mean':>8}{'max':>8}" for _ in tables))
    for layer, rows in enumerate(zip(*tables.values())):
        say("study", f"{layer:5}" + "".join("  " + "".join(f"{x:8.2f}" for x in row) for row in rows))
    if path and is_first_rank():
        aside = Path(f"{path}.tmp")
        with written(path), new_file(aside) as file:
            file.write(json.dumps(tables | {"poolings": poolings}))
        os.replace(aside, path)                                # at once whole


def study_model(args, script):
    """--evaluate --study: the table of --model."""
    pairs, run = load_sts(args.dev), Run(args, script)
    model = build_encoder(args, run, columns=len(args.prompt or [""])).to(run.device)
    say("model", describe_model(model, args))
    study({"evaluated": model.encoder}, model, pairs, args.study)


def check_study(args):
    if not args.dev or args.evaluate and args.test + args.transfer + args.cluster:
        fail("--study: layers are judged by --dev; wanted it, and with --evaluate no other data")
    folder = Path(args.study).absolute().parent
    if args.study and (Path(args.study).suffix != ".json" or not os.access(folder, os.W_OK)):
        fail(f"--study {args.study}: wanted the name of a .json in a folder that can be written")
