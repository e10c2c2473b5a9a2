"""Find the columns of one or two texts and of the labels in a data file."""
from ..cli import fail, log
from ..tables import join_names, normalise_name, read_table, show_cells


def find_columns(path, args):
    """Return (table, indices of the text columns, index of the label column) of a file.

    Without --text-columns and --label-column the columns are found by their names (sentence, sentence1,
    sentence2; label, score), or else the last one has the labels. The names are stored in args, so that the
    next file, such as --dev, must have the same columns.
    """
    asked = [*(args.text_columns or [])]
    if args.label_column:
        asked.append(args.label_column)
    header, table, _ = read_table_with_names(path, asked)
    names = [normalise_name(name) for name in header]
    usual = next((name for name in ("label", "score") if name in names), names[-1])
    label = normalise_name(args.label_column or usual)
    others = [name for name in names if name not in (label, "")]
    texts = [name for name in ("sentence", "sentence1", "sentence2") if name in others] or others
    texts = [normalise_name(name) for name in args.text_columns or texts]
    if not {label, *texts} <= set(names) or label in texts or len(texts) not in (1, 2):
        fail(f"{path}: columns {join_names(header)}; expected one or two of text (now {join_names(texts)}) "
             f"and one of labels (now {label[:40]}); name them by --text-columns and --label-column")
    indices = [names.index(name) for name in texts]
    if not args.text_columns:
        cells = next(iter(table))[1]
        places = [*indices, names.index(label)]
        log("first", show_cells([*["text"] * len(indices), "label"], [cells[i] for i in places]))
    args.text_columns = [header[i] for i in indices]
    args.label_column = header[names.index(label)]
    return table, indices, names.index(label)


def read_table_with_names(path, names):
    """Return (column names, table, whether it has a header) of a file. `names` are names to look for in a
    header, see read_table; without a header the columns are called "column 1", "column 2", ..."""
    header, table = read_table(path, names=names)
    return header or [f"column {i + 1}" for i in range(len(next(iter(table))[1]))], table, bool(header)
