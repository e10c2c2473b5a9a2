"""Print untrusted text, such as file names and table cells, so that it cannot break or hide a line."""
import re
import sys
import unicodedata
from pathlib import Path

HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # Unicode categories: controls, formats, surrogates, line ends
JOINERS = "\u200c\u200d"                 # also of category Cf, but kept: Persian text and emoji need them


def one_line(text):
    """Return text with line breaks, terminal controls, and bidirectional and invisible characters escaped."""
    def escape(match):
        character = match[0]
        is_hidden = unicodedata.category(character) in HIDDEN and character not in JOINERS
        return repr(character)[1:-1] if is_hidden else character
    return re.sub(r"[^ -~]", escape, str(text))


def program_name():
    """Return the file name of the running command, such as simcse.py."""
    return one_line(Path(sys.argv[0]).name)


def fail(message):
    """Print the message as one line and exit with status 2. Scripts use training/cli.py's fail instead."""
    print(one_line(f"{program_name()}: {message}"), file=sys.stderr)
    sys.exit(2)


def escape_unencodable():
    """Make stdout escape characters that its encoding lacks, instead of raising an error."""
    if hasattr(sys.stdout, "reconfigure"):  # the stdout of a notebook has no such method
        sys.stdout.reconfigure(errors="backslashreplace")
