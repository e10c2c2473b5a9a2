"""User errors, printed messages, and @command, which prints an error as one line, without a traceback."""
import contextlib
import functools
import inspect
import os
import signal
import sys
import threading
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

# A script prints an error as one line. Without this setting, transformers would add its own messages.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")

EXIT_STOPPED = 130                                             # exit code of a run that a signal stopped
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
# Texts of out-of-memory errors for which PyTorch, oneDNN and tokenizers have no exception type of their own
OUT_OF_MEMORY = "can't allocate memory", "cannot allocate memory", "not create a primitive", "threadpoolbuild"


class UserError(Exception):
    """A user's mistake, or a failure of the machine. Its message is one line, printed without a traceback.

    every_rank   True: every rank that raises the error prints it. False: only rank 0 prints it
    """

    def __init__(self, message, every_rank=False):
        super().__init__(one_line(message))
        self.every_rank = every_rank


def fail(message, every_rank=False):
    """Raise UserError, which ends the run with this message."""
    raise UserError(message, every_rank)


def one_line(text):
    """Return text as one line: line breaks, terminal controls and unprintable characters are escaped."""
    kept = "\u200c\u200d\u3000"                          # not escaped: Persian, emoji and Japanese need these
    return "".join(x if x.isprintable() or x in kept else repr(x)[1:-1] for x in str(text))


def is_first_rank():
    """Return whether this process prints messages and writes files: rank 0, or a process without torchrun."""
    return os.environ.get("RANK", "0") == "0"


def log(label, text, every_rank=False):
    """Print a label and a text in one line. Rank 0 prints; with every_rank=True, every rank does."""
    if every_rank or is_first_rank():
        write(clear_bar(sys.stdout) + one_line(f"{label:<8} {text}") + "\n", sys.stdout)


def write(text, stream):
    """Write text to stdout or stderr at once. If the pipe is closed, as after `... | head`, drop all text."""
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def clear_bar(stream):
    """Return the characters that erase a progress bar if `stream` is a terminal, else an empty text."""
    return "\r\x1b[K" if stream.isatty() else ""


@contextlib.contextmanager
def signals_handled_by(handler):
    """Context manager: use `handler` for Ctrl-C, SIGTERM and SIGHUP (a closed terminal). Signals already
    ignored (by nohup) stay ignored. Python sets handlers only in the main thread; in others, do nothing."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = {kind: signal.getsignal(kind) for kind in SIGNALS if in_main_thread}
    before = {kind: old for kind, old in before.items() if old not in (signal.SIG_IGN, None)}
    for kind in before:
        signal.signal(kind, handler)
    try:
        yield
    finally:
        for kind, old in before.items():
            signal.signal(kind, old)


def command(main):
    """Decorator: turn a script's function main into a shell command.

    A UserError or a failure of the machine becomes one line on stderr and exit code 2; a signal becomes a
    message on stdout and exit code 130. Any other exception is a bug and keeps its traceback.
    """
    script = Path(inspect.getfile(main)).name

    @functools.wraps(main)
    def run(*args, **more):
        if hasattr(sys.stdout, "reconfigure"):                 # a notebook's stdout has no such method
            sys.stdout.reconfigure(errors="backslashreplace")  # escape characters that the encoding lacks
        code = 0
        try:
            with signals_handled_by(signal.default_int_handler), warnings.catch_warnings():
                if not sys.warnoptions:
                    warnings.simplefilter("ignore")
                main(*args, **more)
        except KeyboardInterrupt:                              # the signal did not come within Run.steps
            log("stopped", "a signal ended this script; files saved before the signal are complete")
            code = EXIT_STOPPED
        except Exception as error:
            message = describe(error)
            if message is None:
                raise
            if is_first_rank() or getattr(error, "every_rank", True):
                write(f"{clear_bar(sys.stderr)}{script}: {message}\n", sys.stderr)
            code = 2
        if dist.is_initialized() and not code:
            dist.destroy_process_group()
        elif dist.is_initialized():                            # a normal exit would wait for ranks that died
            os._exit(code)
        if code:
            sys.exit(code)
    return run


def is_out_of_memory(error):
    """Return whether an exception means that the memory of the machine, or of the GPU, is full."""
    text = str(error).lower()
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(x in text for x in OUT_OF_MEMORY)


def describe(error):
    """Return the one-line message that a user needs for an exception, or None if the exception is a bug."""
    if isinstance(error, UserError):
        return str(error)
    text = str(error)
    if is_out_of_memory(error):
        whose = "GPU's" if isinstance(error, torch.OutOfMemoryError) else "machine's"
        return f"the {whose} memory is full; lower --batch-size, or --chunk-size if the script has this flag"
    if isinstance(error, OSError) and error.strerror:
        path = error.filename2 or error.filename               # filename2 is the target of a rename
        return one_line(f"{path}: {error.strerror}" if path else error.strerror)
    if isinstance(error, RuntimeError) and "DataLoader worker (pid" in text:
        return "a process that decoded images was killed, perhaps by lack of memory; try fewer --workers"
    if isinstance(error, dist.DistError) or isinstance(error, RuntimeError) and "gloo" in text:
        return one_line(f"another process of this run has died or hangs ({text.splitlines()[0][:80]})")
    return None
