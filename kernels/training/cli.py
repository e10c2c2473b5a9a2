"""The command line of a script: checked flags, printed lines, one-line errors, signals."""
import argparse
import contextlib
import functools
import inspect
import json
import os
import re
import signal
import sys
import threading
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from . import ranks
from .ranks import is_first_rank

# An error of ours is one line on the screen: transformers must not print its own warnings around it.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")
# Replace standard streams that are closed. Otherwise the next file opened would get their file descriptor.
for name in ("stdin", "stdout", "stderr"):
    if getattr(sys, name) is None:
        setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))


def one_line(text):
    """Return text with line breaks, terminal controls and other unprintable characters escaped."""
    kept = "\u200c\u200d\u3000"                                # Persian, emoji and Japanese texts have these
    return "".join(x if x.isprintable() or x in kept else repr(x)[1:-1] for x in str(text))


class UserError(Exception):
    """A user's mistake, or a failure of the machine. Its message is one line, printed without a traceback.

    every_rank   every rank that raises the error prints it; otherwise only rank 0 does
    """

    def __init__(self, message, every_rank=False):
        # shorten words of 300 or more characters, such as long paths, in the middle
        super().__init__(re.sub(r"(\S{99})\S{102,}(\S{99})", r"\1...\2", one_line(message)))
        self.every_rank = every_rank


def fail(message, every_rank=False):
    """Raise UserError, which ends the run with this message."""
    raise UserError(message, every_rank)


def check_memory(what, needed):
    """Fail early if `what` would need more bytes of memory than this machine has."""
    total = total_memory()
    if needed > total:
        fail(f"{what} would need {needed / 2**30:,.0f} GB of memory, this machine has "
             f"{total / 2**30:,.0f} GB")


def total_memory():
    """Return the bytes of this machine's memory, or 2^63 if the system does not report them."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):              # Windows
        return 2**63


def log(label, text):
    """Print a line, on rank 0 only."""
    if is_first_rank():
        log_on_any_rank(label, text)


def log_on_any_rank(label, text):
    """Print a line, whatever the rank of this process."""
    write(clear_bar(sys.stdout) + one_line(f"{label:<8} {text}"))


def write(text, end="\n"):
    """Print text. If standard output is closed (a broken pipe), save and stop the run, as SIGTERM does."""
    try:
        with writing("standard output"):
            print(text, end=end, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"{Path(sys.argv[0]).name}: standard output is closed; stopping", file=sys.stderr)
        if not in_main_thread():                               # only the main thread runs signal handlers
            interrupt()
        signal.raise_signal(signal.SIGTERM)


def clear_bar(stream):
    """Return the characters that clear a terminal's progress bar, so that a message can replace it."""
    return "\r\x1b[K" if stream.isatty() else ""


def at_least(least, kind=float, most=None):
    """Return an argparse type: a finite number of type `kind`, from `least` to `most` (None: below 2^63)."""
    def convert(text):
        value = kind(text)
        if not least <= value < 2**63 or most is not None and value > most:    # largest seed of PyTorch
            expected = f"of at least {least}" if most is None else f"from {least} to {most}"
            if value >= 2**63 and most is None:
                expected += ", and below 2^63"
            raise argparse.ArgumentTypeError(f"{text}: expected a number {expected}")
        return value
    convert.__name__ = kind.__name__                           # argparse: "invalid int value"
    return convert


ratio = at_least(0, most=1)

POOLINGS = ("cls", "cls_before_pooler", "avg", "avg_top2", "avg_first_last", "last")  # see text/encoders.py

# The sections of --help, in this order.
GROUPS = "data", "model", "method", "other papers", "training", "evaluation", "run"

# Flags that several scripts share: arguments of ScriptParser.add_argument. Each script gives its own default.
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
                   help="projection head after pooling: one or two words. Its use: keep (also at inference) "
                        "or train-only (dropped after training). Its initial weights: new (random) or pooler "
                        "(those of the model's pooler); if not given, those of the head saved with --model, "
                        "else random"),
    "--prompt": dict(group="model", nargs="+", metavar="TEXT",
                     help="text to put before every input: one for all columns, or one per column"),
    "--temperature": dict(type=at_least(1e-4), help="temperature τ, by which similarities are divided"),
    "--adversarial": dict(type=at_least(0),
                          help="L2 norm of an adversarial perturbation, which is added to the token "
                               "embeddings along the gradient of the loss"),
    "--hard-negative-weight": dict(type=at_least(-100),
                                   help="w, added to the logits of an anchor's own hard negatives"),
    "--batch-size": dict(group="training", type=at_least(1, int), help="rows per step, summed over all GPUs"),
    "--chunk-size": dict(group="training", type=at_least(1, int),
                         help="encode this many rows at a time to save memory (GradCache); gradients are "
                              "those of the full batch; default the whole batch"),
    "--chunk-tokens": dict(group="training", type=at_least(1, int),
                           help="encode at most this many tokens at a time, counted with padding, as "
                                "--chunk-size does with rows; a longer text is encoded alone; default no "
                                "limit"),
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
                        "PyTorch; auto: triton on an NVIDIA GPU, else blockwise"),
    "--evaluate": dict(group="evaluation", action="store_true",
                       help="score --model and exit, without training or writing anything"),
    "--dev": dict(group="evaluation", reads="held-out data",
                  help="held-out data for evaluation during training, in a format described above"),
    "--test": dict(group="evaluation", reads="held-out data", nargs="*", default=[],
                   help="scored sentence pairs for the final score: files or folders; default none"),
    "--transfer": dict(group="evaluation", reads="held-out data", nargs="*", default=[],
                       help="labelled texts (sentence, label; or sentence1, sentence2, label), to measure "
                            "the accuracy of a logistic regression on frozen embeddings. One file: "
                            "cross-validation; two files joined by a comma (TRAIN,TEST): train on the first, "
                            "test on the second; default none"),
    "--cluster": dict(group="evaluation", reads="held-out data", nargs="*", default=[],
                      help="labelled texts whose embeddings are clustered by k-means, to measure V-measure "
                           "and accuracy (under the best matching of clusters to labels); default none"),
    "--eval-every": dict(group="evaluation", type=at_least(1, int), help="steps between two evaluations"),
    "--out": dict(group="run", metavar="PATH", help="output folder"),
    "--resume": dict(group="run", action="store_true",
                     help="continue the run in --out; flags that are not given are read from its args.json"),
    "--keep-state": dict(group="run", choices=("always", "running", "never"), default="running",
                         help="when to keep state.pt (about 3x the model's size), which --resume needs; "
                              "always: also after training; running: until training ends; never: do not "
                              "write it; default running"),
    "--log": dict(group="run", choices=("tensorboard", "wandb"),
                  help="also send the metrics to this tracker, whose package must be installed"),
}
METAVARS = {"int": "N", "float": "X"}                          # {type of a flag's value: its name in --help}


class ScriptParser(argparse.ArgumentParser):
    """The argument parser of a script. It raises UserError for wrong flags, instead of exiting.

    recipes   {name: Recipe}, the presets of --recipe and of the flags in `implied`
    implied   {flag: Recipe}, the presets that are applied if this flag is given
    inputs    {flag: kind of input} for flags that name something to read, in the order they were added
    groups    {section of --help: argparse group}
    """

    def __init__(self, doc):
        self.recipes, self.implied, self.inputs, self.groups = {}, {}, {}, {}
        formatter = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=30)
        super().__init__(usage="%(prog)s [flags]", description=doc, formatter_class=formatter)
        self.groups = {name: self.add_argument_group(name) for name in GROUPS}

    def add_argument(self, *names, group="method", reads=None, **settings):
        """Add a flag, as argparse does.

        group   section of --help: one of GROUPS
        reads   kind of input that the flag names: "training data", "held-out data", or another word such as
                "model". --resume checks that no input has changed. If a script has a second flag for
                training data, it can be given instead of --data.
        """
        if "action" not in settings and not settings.keys() & {"choices", "metavar"}:
            kind = getattr(settings.get("type"), "__name__", None)
            settings["metavar"] = "PATH" if reads else METAVARS.get(kind, "NAME")
        # the groups do not exist yet when argparse adds --help
        flag = (self.groups[group] if self.groups else super()).add_argument(*names, **settings)
        if reads:
            self.inputs[flag.dest] = reads
        return flag

    def add_recipes(self, recipes, implied=()):
        """Add --recipe. implied: {flag: Recipe}, which is applied if this flag is given."""
        self.recipes, self.implied = recipes | dict(implied), implied
        presets = ", ".join(f"{name} ({recipe.source})" for name, recipe in recipes.items())
        self.add_argument("--recipe", choices=[*recipes], group="training",
                          help="preset values for several flags; flags on the command line override them; "
                               f"default none. The presets: {presets}".replace("%", "%%"))

    def add_shared(self, name, default=None, shown=None, **changes):
        """Add a flag of SHARED_FLAGS; `changes` replace its settings.

        shown   text that --help prints as the default, instead of its value
        """
        settings = SHARED_FLAGS[name] | changes
        shown = default if shown is None else shown
        if shown is not None:
            settings["help"] += f"; default {shown}"
        if default is not None:
            settings["default"] = default
        self.add_argument(name, **settings)

    def add_shared_flags(self, *names):
        """Add flags of SHARED_FLAGS for which this script has no default of its own."""
        for name in names:
            self.add_shared(name)

    def parse_args(self, args=None, namespace=None, data=None):
        """Parse the flags. --resume adds the flags of the saved run; a recipe changes the defaults.

        data   the data argument of main, used instead of --data: a path, or rows in memory (see tables.Table)
        """
        given = sys.argv[1:] if args is None else [*map(str, args)]
        path = [f"--data={os.fsdecode(data)}"] if isinstance(data, (str, os.PathLike)) else []
        parsed = super().parse_args(given, namespace)
        if data is not None and parsed.data is not None:
            fail(f"--data {parsed.data}: main got its data argument, too; give only one of the two")
        given = [*given, *path]
        args = given
        if getattr(parsed, "resume", False):
            given = [*saved_command(parsed.out), *given]       # of a flag given twice, the last value counts
            args = [*given, "--out", parsed.out]               # the folder may have been moved
            try:
                parsed = super().parse_args(args, namespace)
            except UserError as error:                         # a flag of an earlier version
                fail(f"--resume: the command of the run in {parsed.out}: {error}; start a new run")
        implied = (name for name in self.implied if getattr(parsed, name))
        if name := getattr(parsed, "recipe", None) or next(implied, None):
            self.set_defaults(**self.recipes[name].flags | {"recipe": name})
        parsed = super().parse_args(args, namespace)
        parsed.command, parsed.inputs = given, [*self.inputs]
        if data is not None and not path:
            from .tables import Table
            parsed.data = Table(data)
        self.check_inputs(parsed)
        return parsed

    def check_inputs(self, parsed):
        """Fail if data are missing, given twice or given as an empty string. Set --data from a flag that
        replaces it."""
        for name in (name for name, kind in self.inputs.items() if kind == "training data"):
            value = getattr(parsed, name)
            if value and parsed.data not in (None, value):
                fail(f"--{name} gives the training data; leave out --data")
            parsed.data = parsed.data or value
        if parsed.data is None and not parsed.evaluate:
            fail("the following arguments are required: --data")
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
    """Return the command line, as a list of words, that started the run in --out; [] if there is no run."""
    path = Path(out) / "args.json"
    if not path.is_file():
        return []
    try:
        command = json.loads(path.read_text(encoding="utf-8")).get("command", [])
        if not all(type(word) is str for word in command):
            raise TypeError("a flag is not a string")
        return command
    except (OSError, ValueError, AttributeError, TypeError) as error:
        fail(f"--resume: {path} is damaged ({type(error).__name__}); start a new run in another folder")


def parse_early(make_parser):
    """Handle --help and wrong flags before the script imports transformers, which takes seconds.

    From here on a signal ends the process with one line, also during those imports.
    """
    def exit_now(*_):
        log("stopped", NOTHING_SAVED)
        os._exit(EXIT_STOPPED)                                 # an import could catch an exception

    handle_signals(exit_now)
    escape_unencodable()
    try:
        make_parser().parse_args()
    except UserError as error:
        if is_first_rank():
            print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)


def escape_unencodable():
    """Make stdout escape characters that its encoding lacks, instead of raising an error."""
    if hasattr(sys.stdout, "reconfigure"):                     # the stdout of a notebook has no such method
        sys.stdout.reconfigure(errors="backslashreplace")


EXIT_STOPPED = 130                                             # exit code after a signal
NOTHING_SAVED = "before anything was saved"


def in_main_thread():
    """Return whether this is the main thread, the only one in which Python handles signals."""
    return threading.current_thread() is threading.main_thread()


def handle_signals(handler):
    """Set one handler for Ctrl-C, SIGTERM and SIGHUP (a closed terminal), except those that nohup ignores.

    Python allows this in the main thread only; in other threads nothing changes.
    """
    for kind in SIGNALS if in_main_thread() else ():
        if kind == signal.SIGINT or signal.getsignal(kind) is not signal.SIG_IGN:
            signal.signal(kind, handler)


SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


def fill_defaults(args, defaults):
    """Set the flags that were not given to these defaults."""
    for name, value in defaults.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)


def command(main):
    """Decorate a script's main as a shell command.

    A UserError or a failure of the machine becomes one line on stderr and exit code 2; a signal becomes one
    line on stdout and exit code 130. Any other exception is a bug and keeps its traceback.
    """
    script = Path(inspect.getfile(main)).name

    @functools.wraps(main)
    def run(*args, **more):
        escape_unencodable()
        handlers = {kind: signal.getsignal(kind) for kind in SIGNALS}
        handle_signals(interrupt)
        set_checkpoint_note(False)
        try:
            with warnings.catch_warnings():
                if not sys.warnoptions:
                    warnings.simplefilter("ignore")
                if problem := ranks.env_error():
                    fail(problem, every_rank=True)
                main(*args, **more)
        except KeyboardInterrupt:                              # before training: in it, Run handles signals
            handle_signals(signal.SIG_IGN)
            log("stopped", NOTHING_SAVED)
            exit_process(EXIT_STOPPED)
        except BaseException as error:                         # tokenizers' PanicException is no Exception
            shown = to_user_error(error, main)
            if shown is None:
                raise
            if shown.every_rank or is_first_rank():
                print(clear_bar(sys.stderr) + f"{script}: {shown}", file=sys.stderr, flush=True)
            exit_process(2)
        finally:
            if in_main_thread():
                for kind, handler in handlers.items():
                    signal.signal(kind, handler)
        if dist.is_initialized():
            dist.destroy_process_group()
    return run


def exit_process(code):
    """End the process. If other ranks exist, skip Python's cleanup, which hangs if one of them is dead."""
    if dist.is_initialized() or ranks.is_joining():
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def interrupt(*_):
    """Signal handler: raise KeyboardInterrupt, as Ctrl-C does."""
    raise KeyboardInterrupt


def write_from_handler(text):
    """Write bytes to standard output from a signal handler: print is not reentrant."""
    if sys.stdout.isatty():                                    # the progress bar ends without a newline
        text = b"\n" + text
    os.write(1, text)


checkpoint_note = ""                                           # appended to messages of errors


def set_checkpoint_note(exists):
    """Set the text that error messages end with: whether --out contains a complete checkpoint."""
    global checkpoint_note
    note = "; the checkpoint in --out is complete, and --resume continues from it"
    checkpoint_note = note if exists else ""


@contextlib.contextmanager
def writing(path):
    """Context manager: if the block raises, add `path` to the exception, so that to_user_error can name the
    file that was being written."""
    try:
        yield
    except Exception as error:
        error.writing = getattr(error, "writing", path)
        raise


# PyTorch, oneDNN and tokenizers have no exception type for these: they can be recognised by their texts only.
OUT_OF_MEMORY = "can't allocate memory", "cannot allocate memory", "not create a primitive", "threadpoolbuild"


def is_out_of_memory(error):
    """Return whether an exception means that the memory of the machine, or of the GPU, is full."""
    text = str(error).lower()
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(x in text for x in OUT_OF_MEMORY)


def to_user_error(error, main):
    """Return a UserError that explains an exception to the user, or None if the exception is a bug."""
    if isinstance(error, UserError):
        return error
    message = describe_error(error, main)
    return UserError(message + checkpoint_note, every_rank=True) if message else None


def describe_error(error, main):
    """Return what failed on this machine or in another process, and what to do about it; None for a bug."""
    from safetensors import SafetensorError

    text, path = str(error), getattr(error, "writing", None)
    if is_out_of_memory(error):
        return describe_out_of_memory(error, main)
    # torch.save raises a RuntimeError with the OSError as context; tokenizers and safetensors raise their own
    disk = error if isinstance(error, OSError) else error.__context__
    if isinstance(disk, OSError) and isinstance(error, (OSError, RuntimeError)):
        path = disk.filename2 or disk.filename or path         # filename2: the target of a rename
        text = disk.strerror or str(disk)
        return f"{path}: {text}" if path else text
    if isinstance(error, SafetensorError) or "(os error " in text:
        return f"{path}: {text}" if path else text
    if not isinstance(error, RuntimeError):
        return None
    if "DataLoader worker (pid" in text or "shared memory" in text:
        full = "; /dev/shm is full" if "shared memory" in text else ""
        return ("a process that decoded images was killed, perhaps by lack of memory"
                f"{full}; try fewer --workers")
    if dist.is_initialized() and (isinstance(error, dist.DistError) or "gloo" in text):
        return f"another process of this run has died or hangs ({text.splitlines()[0][:80]})"
    return None


def describe_out_of_memory(error, main):
    """Return which memory is full, and which flags of the script to lower."""
    known = main.__globals__["make_parser"]()._option_string_actions
    flags = "--chunk-size", "--chunk-tokens", "--batch-size", "--max-length"
    lower = [flag for flag in flags if flag in known]
    advice = f"lower {' or '.join(lower)}" if lower else "close other programs, or use a larger machine"
    whose = "GPU's" if isinstance(error, torch.OutOfMemoryError) else "machine's"
    return f"the {whose} memory is full; {advice}"
