"""The flags of the scripts: a parser with sections, presets and --resume, and flags that scripts share."""
import argparse
import functools
import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

from .errors import fail, log


def at_least(least, kind=float, most=None):
    """Return an argparse type: numbers of type `kind` from `least` to `most`; most=None: below 2^63."""
    def convert(text):
        value = kind(text)
        if not least <= value < 2**63 or most is not None and value > most:    # int64 ends at 2^63 − 1
            expected = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"{text}: expected a number {expected}")
        return value
    convert.__name__ = kind.__name__                           # argparse prints this name in error messages
    return convert


ratio = at_least(0, most=1)

POOLINGS = ("cls", "cls_before_pooler", "avg", "avg_top2", "avg_first_last", "last")  # see text/encoders.py

# The sections of --help, in this order.
GROUPS = "data", "model", "method", "training", "evaluation", "run"

# Flags that several scripts share: {flag: arguments of ScriptParser.add_argument}. Scripts set most defaults.
SHARED_FLAGS = {
    "--form": dict(choices=("paper", "code"),
                   help="follow the paper, or the authors' released code where the two differ (see above)"),
    "--data": dict(group="data", reads="training data", help="training data, in a format described above"),
    "--columns": dict(group="data", nargs="+",
                      help="columns of --data to read, in the order described above: header names, or "
                           "numbers counted from 1"),
    "--image-size": dict(group="data", type=at_least(1, int), help="height and width of a view in pixels"),
    "--workers": dict(group="data", type=at_least(0, int),
                      help="processes that decode image files; 0: decode in the main process"),
    "--skip-damaged": dict(group="data", action="store_true",
                           help="skip image files that cannot be read, instead of stopping"),
    "--max-length": dict(group="data", type=at_least(3, int),
                         help="truncate training texts to this many tokens"),
    "--model": dict(group="model", reads="model",
                    help="model to start from: a hub name, a local folder, or a new model with random "
                         "weights (for texts: scratch, a small BERT)"),
    "--pooling": dict(group="model", choices=POOLINGS,
                      help="how token states are pooled into a sentence embedding. cls: first token, "
                           "with the paper's head, if any; cls_before_pooler: first token, by default "
                           "without a head; last: last token; avg, avg_top2, avg_first_last: mean over the "
                           "tokens of the last layer, the last two layers, or the first and the last layer"),
    "--head": dict(group="model", nargs="+", choices=("keep", "train-only", "new", "pooler"),
                   help="projection head after pooling. One word sets its use: keep (also at inference) or "
                        "train-only (dropped after training). Another sets its initial weights: new (random) "
                        "or pooler (copied from the model's pooler); without this word, the weights are "
                        "those of the head saved with --model, else random"),
    "--prompt": dict(group="model", nargs="+", metavar="TEXT",
                     help="text before each input: 1 for all columns, 2 (first, others), or 1 per column"),
    "--temperature": dict(type=at_least(1e-4), help="temperature τ, by which similarities are divided"),
    "--adversarial": dict(type=at_least(0),
                          help="L2 norm of an adversarial perturbation, which is added to the token "
                               "embeddings along the gradient of the loss"),
    "--hard-negative-weight": dict(type=at_least(-100),
                                   help="w, added to the logits of an anchor's own hard negatives"),
    "--batch-size": dict(group="training", type=at_least(1, int), help="rows per step, summed over all GPUs"),
    "--chunk-size": dict(group="training", type=at_least(1, int),
                         help="encode at most this many texts or images at once to save memory (GradCache); "
                              "gradients are those of the full batch, except for batch norms; default all"),
    "--ring": dict(group="training", action="store_true",
                   help="for huge batches: pass embeddings from GPU to GPU, so that no GPU stores them all"),
    "--epochs": dict(group="training", type=at_least(1, int), help="passes over the training data"),
    "--steps": dict(group="training", type=at_least(1, int), help="number of training steps"),
    "--lr": dict(group="training", type=at_least(0), help="learning rate"),
    "--warmup-steps": dict(group="training", type=at_least(0, int), help="steps of learning-rate warm-up"),
    "--weight-decay": dict(group="training", type=at_least(0), help="weight decay"),
    "--seed": dict(group="training", type=at_least(0, int),
                   help="random seed for initial weights, data order and dropout"),
    "--precision": dict(group="training", choices=("bf16", "fp32"),
                        help="bf16: run the encoder under bfloat16 autocast; default bf16 on a GPU, else "
                             "fp32"),
    "--impl": dict(group="training", choices=("auto", "triton", "blockwise", "eager"),
                   help="implementation of the loss: Triton kernels, PyTorch block by block, or plain "
                        "PyTorch; auto: eager for a small batch, else triton on an NVIDIA GPU or blockwise"),
    "--evaluate": dict(group="evaluation", action="store_true",
                       help="score --model and exit; neither train --model nor write anything"),
    "--dev": dict(group="evaluation", reads="held-out data",
                  help="held-out data for evaluation during training, in a format described above"),
    "--dev-columns": dict(group="evaluation", nargs="+",
                          help="columns of --dev and --test, in the order described above: names or numbers"),
    "--test": dict(group="evaluation", reads="held-out data", nargs="*", default=[],
                   help="more files like --dev; the model is scored on all of them at the end; default none"),
    "--eval-every": dict(group="evaluation", type=at_least(1, int),
                         help="steps between two evaluations; the default is at most a quarter of all steps"),
    "--probe-epochs": dict(group="evaluation", type=at_least(0, int),
                           help="number of epochs for training a linear probe at the end; 0: no probe"),
    "--out": dict(group="run", metavar="PATH", help="output folder"),
    "--resume": dict(group="run", action="store_true",
                     help="continue the run in --out; flags that are not given are read from its args.json"),
    "--keep-state": dict(group="run", choices=("always", "running", "never"), default="running",
                         help="when to keep state.pt (about 3x the model's size), which --resume needs; "
                              "always: also after training; running: until training ends; never: do not "
                              "write it; default running"),
}
# Values of --model that make a new model with random weights, even if a folder has such a name.
NEW_MODELS = "scratch", *(f"resnet-{size}" for size in ("small", 18, 34, 50, 101, 152))
METAVARS = {"int": "N", "float": "X"}                          # {type of a value: its placeholder in --help}


class Recipe(NamedTuple):
    """Preset values of flags, {name of a flag: value}, and their source: a paper or released code."""
    source: str
    flags: dict


class ScriptParser(argparse.ArgumentParser):
    """The argument parser of a script. It raises UserError for wrong flags, instead of exiting.

    recipes   {name: Recipe}, the presets of --recipe
    inputs    {flag: kind of input, such as "model"} for each flag that names a file, a folder or a model
    groups    {section of --help: argparse group}
    """

    def __init__(self, doc):
        self.recipes, self.inputs, self.groups = {}, {}, {}
        formatter = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=30)
        super().__init__(usage="%(prog)s [flags]", description=doc, formatter_class=formatter)
        self.groups = {name: self.add_argument_group(name) for name in GROUPS}

    def add_argument(self, *names, group="method", reads=None, **settings):
        """Add a flag, as argparse does.

        group   section of --help: one of GROUPS
        reads   kind of input that the flag names: "training data", "held-out data", or another word such as
                "model". --resume checks that the content of this input has not changed
        """
        if "action" not in settings and not settings.keys() & {"choices", "metavar"}:
            kind = getattr(settings.get("type"), "__name__", None)
            settings["metavar"] = "PATH" if reads else METAVARS.get(kind, "NAME")
        # argparse adds --help before __init__ fills self.groups
        flag = (self.groups[group] if self.groups else super()).add_argument(*names, **settings)
        if reads:
            self.inputs[flag.dest] = reads
        return flag

    def add_recipes(self, recipes):
        """Add --recipe with its presets, {name: Recipe}."""
        self.recipes = recipes
        presets = ", ".join(f"{name} ({recipe.source})" for name, recipe in recipes.items())
        self.add_argument("--recipe", choices=[*recipes], group="training",
                          help="preset values for several flags; flags on the command line override them; "
                               f"default none. The presets: {presets}".replace("%", "%%"))

    def add_shared(self, name, default=None, shown=None, **changes):
        """Add a flag of SHARED_FLAGS. `changes` replace some of its settings, such as type.

        shown   text that --help prints in place of the default value
        """
        settings = SHARED_FLAGS[name] | changes
        shown = default if shown is None else shown
        if shown is not None:
            settings["help"] += f"; default {shown}"
        if default is not None:
            settings["default"] = default
        self.add_argument(name, **settings)

    def add_shared_flags(self, *names, **defaults):
        """Add flags of SHARED_FLAGS. names: flags without a default. defaults: {flag: default} or
        {flag: (default, text that --help prints in place of the default)}."""
        for name in names:
            self.add_shared(name)
        for name, default in defaults.items():
            default = default if isinstance(default, tuple) else (default,)
            self.add_shared(f"--{name.replace('_', '-')}", *default)

    def parse_args(self, argv=None):
        """Parse the flags. --resume adds the flags of the run in --out. A recipe changes default values."""
        words = sys.argv[1:] if argv is None else [*map(str, argv)]
        parsed = super().parse_args(words)
        if parsed.resume:
            words = [*saved_command(parsed.out), *words]       # flags given now override those of the run
            words += ["--out", parsed.out]                     # the folder may have been moved since then
            parsed = super().parse_args(words)
        name = getattr(parsed, "recipe", None)
        if name:
            self.set_defaults(**self.recipes[name].flags)
            parsed = super().parse_args(words)
        parsed.command, parsed.inputs = words, self.inputs
        # argparse sets no default for an attribute that exists, so a flag that is not given stays None
        found = vars(super().parse_args(words, argparse.Namespace(**dict.fromkeys(vars(parsed)))))
        parsed.given = [name for name, value in found.items() if value is not None]
        self.check_inputs(parsed)
        for flag, values in input_values(parsed):
            for value in values:
                if os.path.exists(value) and not (os.path.isfile(value) or os.path.isdir(value)):
                    fail(f"--{flag.replace('_', '-')} {value}: neither a file nor a folder; a pipe is not "
                         "accepted, because data are read twice")
        if name:
            self.log_recipe(parsed, name)
        return parsed

    def log_recipe(self, parsed, name):
        """Print the flags of a recipe with their values in this run, and which of them the user changed."""
        source, flags = self.recipes[name]
        words = []
        for flag, value in flags.items():
            actual = getattr(parsed, flag)
            changed = "" if actual == value else f" (not {value})"
            shown = "" if actual is True else f" {actual}{changed}"          # a flag with True takes no value
            words.append(f"--{flag.replace('_', '-')}{shown}")
        log("recipe", f"{name}, {source}: {', '.join(words)}")

    def check_inputs(self, parsed):
        """Fail if data are missing, or if the name of an input is empty."""
        if parsed.data is None and not parsed.evaluate:
            fail(f"--resume: no run in {parsed.out}" if parsed.resume else
                 "the following arguments are required: --data")
        for name in (*self.inputs, "out"):
            value = getattr(parsed, name, None)
            if value == "" or isinstance(value, list) and "" in value:
                fail(f"--{name.replace('_', '-')}: empty; expected a name")
        data = (getattr(parsed, name) for name, kind in self.inputs.items() if kind.endswith("data"))
        if parsed.evaluate and not any(data):
            fail("--evaluate: nothing to evaluate; give --dev, --test or --data, see --help")

    def error(self, message):
        fail(message)


def saved_command(out):
    """Return the words of the command line of the run in an output folder; [] if there is no run."""
    path = Path(out) / "args.json"
    if not path.is_file():
        return []
    try:
        return [*map(str, json.loads(path.read_text(encoding="utf-8"))["command"])]
    except (ValueError, LookupError, TypeError) as error:
        fail(f"--resume: {path} is damaged ({type(error).__name__}); start a new run in another folder")


def input_values(args):
    """Return [(flag, its values as strings)] of the given flags that name a file, a folder or a model. A
    model with random weights, such as scratch, is not listed: a folder of this name is not read."""
    found = []
    for name, kind in args.inputs.items():
        values = getattr(args, name)
        values = values if isinstance(values, list) else [values]
        values = [str(value) for value in values if value and not (kind == "model" and value in NEW_MODELS)]
        if values:
            found.append((name, values))
    return found


def run_flags(parser, **defaults):
    """Add the flags that every script has. defaults: as for ScriptParser.add_shared_flags."""
    parser.add_shared_flags("--data", "--evaluate", "--precision", "--resume", "--keep-state",
                            **dict(steps=(None, "from --epochs"), seed=42) | defaults)


def text_flags(parser, **defaults):
    """Add the flags of a script that trains a sentence encoder. defaults: as for add_shared_flags."""
    usual = dict(max_length=(32, "32 (paper)"), temperature=(0.05, "0.05 (paper)"), impl="auto",
                 prompt=(None, "as saved with --model, else none"))
    run_flags(parser, **usual | defaults)
    parser.add_shared_flags("--dev", "--dev-columns", "--test", "--chunk-size")


def image_flags(parser, model, **defaults):
    """Add the flags of a script that trains an image encoder. model: the default of --model."""
    run_flags(parser, model=(model, f"{model}; new models: {', '.join(NEW_MODELS[1:])}"),
              dev=(None, "the test set in --data"),
              image_size=(None, "for arrays, the shorter side of the images; for image files, the size saved "
                                "with --model, else 224, or less if the first images are smaller"),
              workers=(None, "CPU cores / processes per machine"), eval_every=1000, impl="auto", **defaults)
    parser.add_shared_flags("--skip-damaged", "--chunk-size")


def fill_defaults(args, defaults):
    """Set each flag that was not given to its value in `defaults`, {flag: value}."""
    for name, value in defaults.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)


def check_batch_size(rows, path, batch_size, unit="rows", least=2):
    """Fail if the training data at `path` have fewer rows than a batch, or if a batch has fewer than `least`
    rows. A contrastive loss needs at least two rows."""
    if batch_size < least:
        fail(f"--batch-size {batch_size}: expected at least {least}")
    if rows < batch_size:
        fail(f"{path}: {rows:,} {unit}, fewer than --batch-size, which is {batch_size:,}; give a smaller "
             "--batch-size")
