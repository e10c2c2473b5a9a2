"""Text that others wrote, such as names of files and cells, as it may be printed."""
import re
import sys
import unicodedata

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


def print_all():
    """From here on stdout spells out what its encoding lacks; print would raise an error."""
    if hasattr(sys.stdout, "reconfigure"):                     # a notebook's has none
        sys.stdout.reconfigure(errors="backslashreplace")
