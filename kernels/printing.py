"""Text that others wrote, such as names of files and cells, as it may be printed."""
import re
import sys
import unicodedata
from pathlib import Path

HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}                        # controls, formats, surrogates, line ends
JOINERS = "\u200c\u200d"                                       # formats too, which Persian and emoji need


def one_line(text):
    """The text with all that would break a line, steer a terminal, or turn or hide what stands there, spelt
    out."""
    def spelt(found):
        letter = found[0]
        hides = unicodedata.category(letter) in HIDDEN and letter not in JOINERS
        return repr(letter)[1:-1] if hides else letter
    return re.sub(r"[^ -~]", spelt, str(text))


def program():
    """The name of the command that runs: simcse.py, or kernels.benchmark for python -m kernels.benchmark."""
    path = Path(sys.argv[0])
    return one_line(f"kernels.{path.parent.name}" if path.name == "__main__.py" else path.name)


def fail(message):
    """Print one line and exit: for commands that are not scripts. Scripts have theirs in training/cli.py."""
    print(one_line(f"{program()}: {message}"), file=sys.stderr)
    sys.exit(2)


def print_all():
    """From here on stdout spells out what its encoding lacks; print would raise an error."""
    if hasattr(sys.stdout, "reconfigure"):                     # a notebook's has none
        sys.stdout.reconfigure(errors="backslashreplace")
