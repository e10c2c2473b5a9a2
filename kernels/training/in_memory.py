"""Rows that a program hands over in the place of a file: lists, columns, arrays, DataFrames, Datasets.

pandas, datasets and pyarrow are not imported: what comes from them is known by what its type can do. What an
instance has says nothing, for a column of a DataFrame is an attribute of it.
"""
import itertools
from collections.abc import Mapping, Set

from .cli import fail
from .columns import twice

WANTED = "wanted texts or rows in a list or array, a dict of columns, a DataFrame, a Dataset, or a path"


class MemoryRows:
    """Rows that can be gone through again and again: lists of cells, dicts of them by column; what is no row
    is left as it is, for a message that names its place.

    length  how many they are
    make    a function that gives an iterator over them all
    """

    def __init__(self, length, make):
        self.length, self.make = length, make

    def __len__(self):
        return self.length

    def __iter__(self):
        return map(row_of, self.make())


def rows_of(data):
    """The MemoryRows of what was handed over; a Fault says why it cannot be read, and what to hand over.

    data    a sequence of texts or of rows, as a list, a tuple, an array (N,), a Series, a Dataset; an array
            (N, columns) of texts; a dict of columns, each such a sequence; a DataFrame
    """
    kind = type(data)
    if isinstance(data, Mapping):
        return rows_of_columns(data, data)
    if hasattr(kind, "dtype") and hasattr(kind, "shape"):
        sort = getattr(data.dtype, "kind", "O")                # U: texts, O: anything, T: NumPy's StringDType
        if sort not in "UOT" or len(data.shape) not in (1, 2):
            how = ", such as numpy.char.decode(data)" if sort == "S" else ""
            wanted = f"wanted texts of shape (rows,) or (rows, columns){how}"
            refuse(data, f"{data.dtype} of shape {tuple(data.shape)}; {wanted}")
    if fault := unreadable(data):
        refuse(data, fault)
    if not is_table(data) or hasattr(kind, "features"):        # a Dataset gives rows
        return MemoryRows(len(data), lambda: items(data))
    names = getattr(data, "column_names", None) or [*data.columns]
    if doubled := twice(map(str, names)):
        refuse(data, f"two columns are called {doubled}; rename one")
    return rows_of_columns({name: data[name] for name in names}, data)


def rows_of_columns(columns, data):
    """The MemoryRows of a dict of columns, which data was or has."""
    for name, column in columns.items():
        if is_table(column):
            refuse(data, f"it holds several tables; name one of them, such as data[{name!r}]")
        is_one = isinstance(column, (str, Mapping))
        fault = f"it is a {type(column).__name__}" if is_one else unreadable(column)
        if fault:
            what = fault.split("; ")[0]
            refuse(data, f"column {str(name)[:40]!r}: {what}; wanted lists of texts, all of one length")
    lengths = {str(name): len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name} {length:,}" for name, length in lengths.items())[:200]
        refuse(data, f"columns of different lengths: {found}; wanted as many texts in each")
    named = not all(isinstance(name, int) for name in columns)            # pandas numbers what has no names

    def make():
        rows = zip(*map(items, columns.values()))
        return (dict(zip(lengths, cells)) for cells in rows) if named else rows

    return MemoryRows(max(lengths.values(), default=0), make)


def unreadable(data):
    """Why this cannot be gone through again and again in one order, and what to do; or None."""
    kind = type(data)
    if isinstance(data, (bytes, bytearray, memoryview)):
        return "bytes are no text; hand over data.decode(), if that is a path, or a list of texts"
    if hasattr(kind, "read"):
        return "an open file is read only once; hand over its path"
    if isinstance(data, Set):
        return "a set has no order; hand over sorted(data)"
    if any(one.__name__ == "DataLoader" for one in kind.__mro__):
        return "it gives batches instead of rows; hand over data.dataset"
    if not hasattr(kind, "__iter__") and not hasattr(kind, "__getitem__"):
        return f"it holds no rows; {WANTED}"
    try:
        len(data)
    except (TypeError, NotImplementedError):
        return "it can be read only once; hand over list(data)"
    return None


def refuse(data, fault):
    """Fails with the type of what was handed over."""
    fail(f"data of type {type(data).__name__}: {fault}")


def is_table(data):
    """Whether this is a DataFrame, a Dataset, or an Arrow table."""
    return hasattr(type(data), "columns") or hasattr(type(data), "column_names")


def items(data):
    """Those of a sequence, which may have no end of its own."""
    return itertools.islice(data, len(data))


def row_of(row):
    """The row as a list or a dict of plain cells; what is no row, as it is."""
    if hasattr(type(row), "_asdict"):                          # a namedtuple
        row = row._asdict()
    if isinstance(row, Mapping):
        return {str(name): cell_of(row[name]) for name in row}
    row = cell_of(row)
    if isinstance(row, str):
        return [row]
    return [cell_of(cell) for cell in row] if isinstance(row, list) else row


def cell_of(cell):
    """As plain Python: the texts, numbers and lists of NumPy, pandas and pyarrow."""
    if hasattr(type(cell), "as_py"):
        return cell.as_py()
    if hasattr(type(cell), "tolist"):
        cell = cell.tolist()
    return [*cell] if isinstance(cell, tuple) else cell
