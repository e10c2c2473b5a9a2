"""Texts with labels, one or two in a row: which columns of a data file have them."""
from ..cli import fail
from ..looks import codes_among
from ..tables import listed, plain, read_table


def find_columns(path, args):
    """(rows of the table, places of its columns of text, place of its column of labels)"""
    header, table, _ = read_named(path, [*(args.text or []), *([args.label] if args.label else [])])
    names = [plain(name) for name in header]
    label = plain(args.label or next((name for name in ("label", "score") if name in names), names[-1]))
    others = [name for name in names if name not in (label, "")]
    texts = [name for name in ("sentence", "sentence1", "sentence2") if name in others] or others
    texts = [plain(name) for name in args.text or texts]
    if not {label, *texts} <= set(names) or label in texts or len(texts) not in (1, 2):
        fail(f"{path}: columns {listed(header)}; wanted one or two of text (now {listed(texts)}) and "
             f"one of labels (now {label[:40]}); name them by --text and --label")
    at = [names.index(name) for name in texts]
    if not args.text and texts == others and (fault := codes_among(table.sample, at)):
        fail(f"{path}: {fault}; name those to read in a header: sentence (or sentence1, sentence2) and label")
    args.text, args.label = [header[i] for i in at], header[names.index(label)]  # the same in --dev
    return table, at, names.index(label)


def read_named(path, names):
    """(a name of each column, the table, whether its first row has them); names as read_table takes them."""
    header, table = read_table(path, names=names)
    return header or [f"column {i + 1}" for i in range(len(next(iter(table))[1]))], table, bool(header)
