"""The command line of a script: flags that are checked, one line for every fault, what is printed."""
import argparse
import contextlib
import functools
import inspect
import json
import os
import re
import signal
import socket
import sys
import threading
import warnings
from pathlib import Path

from .. import versions
from ..printing import one_line, print_all, program
from . import ranks
from .ranks import is_first_rank

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")    # one line means one
for name in ("stdin", "stdout", "stderr"):                     # closed: the next file would get its number
    if getattr(sys, name) is None:
        setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))


class Fault(Exception):
    """A mistake, or a failure of the machine, told in one line to the person who started the run.

    every_rank   each rank that finds it prints it; else the first rank alone
    """

    def __init__(self, message, every_rank=False):
        super().__init__(re.sub(r"(\S{99})\S{102,}(\S{99})", r"\1...\2", one_line(message)))
        self.every_rank = every_rank


def fail(message, every_rank=False):
    """Ends the run with this line."""
    raise Fault(message, every_rank)


def afford(what, needed):
    """Fails early if something would need more bytes than this machine has."""
    has = memory()
    if needed > has:
        fail(f"{what} would need {needed / 2**30:,.0f} GB of memory, this machine has {has / 2**30:,.0f} GB")


def memory():
    """Bytes of this machine's memory; if the system does not tell, more than any machine has."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):              # Windows
        return 2**63


def say(label, text):
    """Prints a line, on the first rank only."""
    if is_first_rank():
        show(label, text)


def show(label, text):
    """Prints a line, on any rank."""
    put(clear_bar(sys.stdout) + one_line(f"{label:<8} {text}"))


def put(text, end="\n"):
    """Prints text. If nobody reads standard output any more, the run stops as by a signal, and is saved."""
    try:
        with written("standard output"):
            print(text, end=end, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"{program()}: standard output is closed; stopping", file=sys.stderr)
        if not in_main_thread():                               # the only one in which Python hears signals
            interrupt()
        signal.raise_signal(signal.SIGTERM)


def clear_bar(stream):
    """Characters that clear the progress bar of a terminal, so that a message can take its place."""
    return "\r\x1b[K" if stream.isatty() else ""


def at_least(least, kind=float, most=None):
    """An argparse type: a finite number of at least `least`, and at most `most`."""
    def convert(text):
        value = kind(text)
        if not least <= value < 2**63 or most is not None and value > most:    # no seed too long for PyTorch
            wanted = f"of at least {least}" if most is None else f"from {least} to {most}"
            if value >= 2**63 and most is None:
                wanted += ", and below 2^63"
            raise argparse.ArgumentTypeError(f"{text}: wanted a number {wanted}")
        return value
    convert.__name__ = kind.__name__                           # argparse names it where the text is no number
    return convert


ratio = at_least(0, most=1)


POOLINGS = ("cls", "cls_before_pooler", "avg", "avg_top2", "avg_first_last", "last")       # of encoders.py

# Flags that scripts share: arguments of Flags.add_argument. Defaults are each script's own.
COMMON = {
    "--form": dict(choices=("paper", "code"), help="as in the paper, or as in the released code: see above"),
    "--evaluate": dict(action="store_true", help="score --model: nothing is trained or written"),
    "--data": dict(reads="training data", help="training data; see above"),
    "--columns": dict(nargs="+", help="of --data, in the order above: names of a header, or numbers from 1"),
    "--dev": dict(reads="held-out data", help="held-out data to evaluate on; see above"),
    "--test": dict(reads="held-out data", nargs="*", default=[],
                   help="files, or a folder, of scored pairs for the best model"),
    "--transfer": dict(reads="held-out data", nargs="*", default=[],
                       help="the same of labelled texts (sentence, label; or sentence1, sentence2, label): "
                            "accuracy of a logistic regression on embeddings, cross-validated, or of "
                            "train.tsv,test.tsv"),
    "--cluster": dict(reads="held-out data", nargs="*", default=[],
                      help="the same for k-means: V-measure, and accuracy of the best matching"),
    "--model": dict(reads="model", help="hub name, local folder, or from scratch"),
    "--pooling": dict(choices=POOLINGS, help="what is a sentence's embedding"),
    "--head": dict(nargs="+", choices=("keep", "train-only", "new", "pooler"),
                   help="behind the pooling: in use after training, or in training alone; new: not the "
                        "folder's; pooler: starts as the model's pooler"),
    "--prompt": dict(nargs="+", help="put before each text: one for all columns, or one for each"),
    "--size": dict(type=at_least(1, int), help="pixels of a view's sides"),
    "--workers": dict(type=at_least(0, int), help="processes that decode picture files; 0: none but this"),
    "--skip-damaged": dict(action="store_true", help="leave picture files out that cannot be read"),
    "--out": dict(help="folder to write"),
    "--batch-size": dict(type=at_least(1, int), help="rows a step, over all GPUs"),
    "--chunk-size": dict(type=at_least(1, int), help="rows embedded at a time; gradients are the batch's"),
    "--epochs": dict(type=at_least(1, int), help="times that all rows are seen"),
    "--steps": dict(type=at_least(1, int), help="length of the training in steps"),
    "--lr": dict(type=at_least(0), help="learning rate"),
    "--warmup-steps": dict(type=at_least(0, int), help="in which the rate rises"),
    "--adversarial": dict(type=at_least(0), help="length of noise on embedded tokens, along the gradient"),
    "--weight-decay": dict(type=at_least(0), help="of the optimizer"),
    "--temperature": dict(type=at_least(1e-4), help="τ"),
    "--max-length": dict(type=at_least(3, int), help="tokens that a row's text keeps in training"),
    "--seed": dict(type=at_least(0, int), help="of weights, order and dropout"),
    "--eval-every": dict(type=at_least(1, int), help="steps between evaluations"),
    "--resume": dict(action="store_true",
                     help="continue the run in --out; flags that are not given are taken from its args.json"),
    "--keep-state": dict(choices=("always", "running", "never"), default="running",
                         help="when to keep state.pt (about 3x the model's size), which --resume needs; "
                              "default running: until the run is done"),
    "--log": dict(choices=("tensorboard", "wandb"),
                  help="send the numbers of metrics.jsonl there too; needs the package of that name"),
    "--impl": dict(choices=("auto", "triton", "blockwise", "eager"), help="kernels"),
    "--precision": dict(choices=("bf16", "fp32"), help="encoder and loss; default bf16 on a GPU, else fp32"),
}


class Flags(argparse.ArgumentParser):
    """The flags of a script: its own by add_argument, shared ones by common. A mistake raises Fault.

    inputs   {name: what it reads} of each flag that names something to read, in the order they were added
    """

    def __init__(self, doc):
        self.recipes, self.implied, self.inputs = {}, {}, {}
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)

    def add_argument(self, *names, reads=None, **settings):
        """Adds a flag, as argparse does.

        reads   "training data" or "held-out data" if the flag names such; a word for anything else that a
                run reads: "model", "vectors". --resume compares the contents of all of them. Training data
                of another flag than --data takes the place of --data.
        """
        flag = super().add_argument(*names, **settings)
        if reads:
            self.inputs[flag.dest] = reads
        return flag

    def add_recipes(self, recipes, implied=()):
        """Adds --recipe. implied: recipes that apply when the flag of the same name is given."""
        self.recipes, self.implied = recipes | dict(implied), implied
        self.add_argument("--recipe", choices=[*recipes], help="flags that belong together")

    def common(self, name, default=None, said=None):
        """Adds a flag of COMMON with this script's default. said: how --help describes the default, if its
        value alone does not."""
        told = default if said is None else said
        text = COMMON[name]["help"] + ("" if told is None else f"; default {told}")
        kept = {} if default is None else {"default": default}
        self.add_argument(name, **COMMON[name] | {"help": text} | kept)

    def plain(self, *names):
        """Adds flags of COMMON that have no default of this script's."""
        for name in names:
            self.common(name)

    def parse_args(self, args=None, namespace=None, data=None):
        """The flags; --resume adds those that the run was started with, a recipe changes defaults.

        data   what main was given instead of --data: a path, or rows in memory, as a Table reads them
        """
        given = sys.argv[1:] if args is None else [*map(str, args)]
        path = [f"--data={os.fsdecode(data)}"] if isinstance(data, (str, os.PathLike)) else []
        if named := [text for text in (*given, *path) if "\0" in text]:
            fail(f"{named[0]}: holds a NUL character, which no path or number does")
        parsed = super().parse_args(given, namespace)
        if data is not None and parsed.data is not None:
            fail(f"--data {parsed.data}: data is handed over, too; leave one of them out")
        args = given = [*given, *path]
        if getattr(parsed, "resume", False):
            given = [*saved_command(parsed.out), *given]       # a flag that is given again wins
            args = [*given, "--out", parsed.out]               # a folder may have moved since
            parsed = super().parse_args(args, namespace)
        implied = (name for name in self.implied if getattr(parsed, name))
        if name := getattr(parsed, "recipe", None) or next(implied, None):     # its values are the defaults
            self.set_defaults(**self.recipes[name].flags | {"recipe": name})
        parsed = super().parse_args(args, namespace)
        parsed.command, parsed.inputs = given, [*self.inputs]
        if data is not None and not path:
            from .tables import Table
            parsed.data = Table(data)
        self.check_inputs(parsed)
        return parsed

    def check_inputs(self, parsed):
        """Refuses data that are missing, named twice or by an empty name. Fills --data from a flag that
        takes its place."""
        for name in (name for name, kind in self.inputs.items() if kind == "training data"):
            value = getattr(parsed, name)
            if value and parsed.data not in (None, value):
                fail(f"--{name} names the data; leave --data out")
            parsed.data = parsed.data or value
        if parsed.data is None and not parsed.evaluate:
            fail("the following arguments are required: --data")
        for name in (*self.inputs, "out"):
            value = getattr(parsed, name, None)
            if value == "" or isinstance(value, list) and "" in value:
                fail(f"--{name.replace('_', '-')}: an empty name, which would be this folder")
        data = (getattr(parsed, name) for name, kind in self.inputs.items() if kind.endswith("data"))
        if parsed.evaluate and not any(data):
            fail("--evaluate: nothing to evaluate; name it by --dev, --test or --data, see --help")

    def error(self, message):
        fail(message)


def saved_command(out):
    """The flags that the run in --out was started with, as typed; [] if there is no such run."""
    path = Path(out) / "args.json"
    if not path.is_file():
        return []
    try:
        command = json.loads(path.read_text(encoding="utf-8")).get("command", [])
        if not all(type(word) is str and "\0" not in word for word in command):
            raise TypeError("a flag is not a text")
        return command
    except (OSError, ValueError, AttributeError, TypeError) as error:
        fail(f"--resume: {path} is damaged ({type(error).__name__}); start a new run in another folder")


def answer_early(make_parser):
    """Answers --help, wrong flags and old packages before a script imports torch, which takes seconds; a
    signal in those seconds ends in one line, too."""
    def leave(*_):
        say("stopped", NOTHING)
        os._exit(STOPPED)                                      # an exception would be an import's

    handle_signals(leave)
    print_all()
    try:
        if problem := versions.problem(*versions.OLDEST):
            fail(problem)
        if sys.flags.optimize > 1:
            fail("python -OO, or PYTHONOPTIMIZE=2, drops docstrings, which transformers reads; leave it out")
        make_parser().parse_args()
        check_ranks()
    except Fault as fault:
        if fault.every_rank or is_first_rank():
            print(f"{program()}: {fault}", file=sys.stderr)
        sys.exit(2)


def check_ranks():
    """Refuses environment variables of torchrun that cannot be."""
    if problem := ranks.problem():
        fail(problem, every_rank=True)


STOPPED, NOTHING = 130, "before anything was saved"            # exit code after a signal; what is told


def in_main_thread():
    """Whether Python lets this thread handle signals."""
    return threading.current_thread() is threading.main_thread()


def handle_signals(handler):
    """Sets one handler for Ctrl-C, SIGTERM and a closed terminal, unless nohup ignores that. Only the main
    thread may do so in Python: in another one the handlers stay as they are."""
    for kind in SIGNALS if in_main_thread() else ():
        if kind == signal.SIGINT or signal.getsignal(kind) is not signal.SIG_IGN:
            signal.signal(kind, handler)


SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


def fill(args, defaults):
    """Sets flags that were not given to these defaults."""
    for name, value in defaults.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)


def command(main):
    """Makes main a shell command: a Fault, or a failure of the machine, is one line on stderr and exit code
    2; a signal is one line on stdout and 130."""
    script = one_line(Path(inspect.getfile(main)).name)

    @functools.wraps(main)
    def run(*args, **more):
        import torch.distributed as dist

        print_all()
        handlers = {kind: signal.getsignal(kind) for kind in SIGNALS}
        handle_signals(interrupt)
        has_checkpoint(False)
        try:
            with warnings.catch_warnings():
                if not sys.warnoptions:
                    warnings.simplefilter("ignore")
                check_ranks()
                with second_signal_ends():
                    main(*args, **more)
        except KeyboardInterrupt:                              # Run takes it while it is at work
            handle_signals(signal.SIG_IGN)
            say("stopped", NOTHING)
            leave(STOPPED)
        except BaseException as error:                         # tokenizers' PanicException is no Exception
            fault = as_fault(error, main)
            if fault is None:
                raise
            if fault.every_rank or is_first_rank():
                print(clear_bar(sys.stderr) + f"{script}: {fault}", file=sys.stderr, flush=True)
            leave(2)
        finally:
            if in_main_thread():
                for kind, handler in handlers.items():
                    signal.signal(kind, handler)
        if dist.is_initialized():
            dist.destroy_process_group()
    return run


def leave(code):
    """Ends the process; at once if it belongs to a group, whose dead ranks may hang an ordinary exit."""
    import torch.distributed as dist

    if dist.is_initialized() or ranks.waits():
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def interrupt(*_):
    """A signal handler that does what Ctrl-C does."""
    raise KeyboardInterrupt


@contextlib.contextmanager
def second_signal_ends():
    """Python handles no signal while a process waits in C++ for another one that hangs. So with several
    processes a thread counts signals, and the second one ends this process."""
    if ranks.world() == 1 or not in_main_thread():
        yield
        return
    (ours, signals), done = socket.socketpair(), threading.Event()
    signals.setblocking(False)
    threading.Thread(target=count_signals, args=(ours, done), daemon=True).start()
    before = signal.set_wakeup_fd(signals.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        done.set()
        signals.close()


def count_signals(ours, done):
    """Reads signal numbers from a socket; the second one ends this process, unless `done` is set first."""
    heard = 0
    while heard < 2 and (number := ours.recv(1)):
        heard += number[0] in SIGNALS
    if not done.wait(1):                                       # else Python came to handle it
        try:
            if is_first_rank():
                text = f"stopped  while it waited for another process{checkpoint_note}\n"
                os.write(1, b"\n" * sys.stdout.isatty() + text.encode())
        finally:
            os._exit(STOPPED)


checkpoint_note = ""                                           # what messages say of the folder of this run


def has_checkpoint(there):
    """Run says whether --out holds a checkpoint: messages of errors then tell so."""
    global checkpoint_note
    note = "; a checkpoint that --out holds is whole, and --resume continues from it"
    checkpoint_note = note if there else ""


@contextlib.contextmanager
def written(path):
    """Notes on an exception of the block which file or folder was being written, for as_fault's message."""
    try:
        yield
    except Exception as error:
        error.written = getattr(error, "written", path)
        raise


# What PyTorch, oneDNN and tokenizers tell by their texts alone.
OUT_OF_MEMORY = "can't allocate memory", "cannot allocate memory", "not create a primitive", "threadpoolbuild"


def is_out_of_memory(error):
    """Whether an exception says that the memory of the machine, or of the GPU, is full."""
    import torch

    text = str(error).lower()
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(x in text for x in OUT_OF_MEMORY)


def as_fault(error, main):
    """The Fault that tells a user what to do about an exception. None: it is a bug, which needs its
    traceback."""
    if isinstance(error, Fault):
        return error
    message = describe(error, main)
    return Fault(message + checkpoint_note, every_rank=True) if message else None


def describe(error, main):
    """What went wrong on this machine, or in another process, and what to do about it. None: a bug."""
    import torch.distributed as dist
    from safetensors import SafetensorError

    text, path = str(error), getattr(error, "written", None)
    if is_out_of_memory(error):
        return describe_full_memory(error, main)
    # torch.save hides what the disk said; tokenizers and safetensors have exceptions of their own for it
    disk = error if isinstance(error, OSError) else error.__context__
    if isinstance(disk, OSError) and isinstance(error, (OSError, RuntimeError)):
        path = disk.filename2 or disk.filename or path         # of two, it is the second that is written
        text = disk.strerror or str(disk)
        return f"{path}: {text}" if path else text
    if isinstance(error, SafetensorError) or "(os error " in text:
        return f"{path}: {text}" if path else text
    if not isinstance(error, RuntimeError):
        return None
    if "DataLoader worker (pid" in text or "shared memory" in text:
        full = "; /dev/shm is full" if "shared memory" in text else ""
        return ("a process that decoded pictures was killed, perhaps for want of memory"
                f"{full}; try fewer --workers")
    if dist.is_initialized() and (isinstance(error, dist.DistError) or "gloo" in text):
        return f"another process of this run has died or hangs ({text.splitlines()[0][:80]})"
    return None


def describe_full_memory(error, main):
    """Which memory is full, and which flags of the script need less."""
    import torch

    known = main.__globals__["make_parser"]().format_usage()
    lower = [flag for flag in ("--chunk-size", "--batch-size", "--max-length") if f"{flag} " in known]
    mend = f"lower {' or '.join(lower)}" if lower else "end other programs, or take a machine with more"
    whose = "GPU's" if isinstance(error, torch.OutOfMemoryError) else "machine's"
    return f"the {whose} memory is full; {mend}"
