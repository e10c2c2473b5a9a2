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
from ..text.layers import pool_layers
from ..text.sts import load_sts, spearman
from ..text.tokens import tokenise


def score_layers(model, encoder, pairs, poolings):
    """[[100 ρ of each pooling] of each layer], by cosine, without dropout; no text is cut to --max-length."""
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
    """Print a table for each of {name: encoder} of the model's kind, and write them to path, if any."""
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
    check_study(args)
    pairs, run = load_sts(args.dev), Run(args, script)
    model = build_encoder(args, run, columns=len(args.prompt or [""])).to(run.device)
    say("model", describe_model(model, args))
    study({"evaluated": model.encoder}, model, pairs, args.study)


def study_copies(model, pairs, run):
    """--study at the end of a training: tables of the model's fixed copy and of its trained encoder."""
    if run.args.study is not None:
        encoders = {"untrained": model.fixed[0], "trained": model.encoder}
        study(encoders, model, pairs, run.args.study or run.out / "study.json")


def check_study(args):
    """Fail if --study is given without what it needs."""
    if args.study is None:
        return
    if not args.dev or args.evaluate and args.test + args.transfer + args.cluster:
        fail("--study: layers are judged by --dev; wanted it, and with --evaluate no other data")
    folder = Path(args.study).absolute().parent
    if args.study and (Path(args.study).suffix != ".json" or not os.access(folder, os.W_OK)):
        fail(f"--study {args.study}: wanted the name of a .json in a folder that can be written")
