"""Rows that a program passes instead of a file: lists, columns, arrays, DataFrames, Datasets.

pandas, datasets and pyarrow are not imported: their objects are recognised by the attributes of their types.
Attributes of the objects themselves would mislead, because a DataFrame has its columns as attributes.
"""
import itertools
from collections.abc import Mapping, Set

from .cli import fail
from .columns import first_duplicate

EXPECTED = "expected texts or rows in a list or array, a dict of columns, a DataFrame, a Dataset, or a path"


class MemoryRows:
    """Rows that can be iterated several times: lists of cells, or dicts {column: cell}.

    An item that is not a row is passed through unchanged, so that the caller can report its position.

    length  number of rows
    make    function that returns a new iterator over all rows
    """

    def __init__(self, length, make):
        self.length, self.make = length, make

    def __len__(self):
        return self.length

    def __iter__(self):
        return map(to_row, self.make())


def rows_of(data):
    """Return the MemoryRows of `data`. Fail if it cannot be read, and suggest what to pass instead.

    data    a sequence of texts or of rows (list, tuple, array (N,), Series, Dataset), an array (N, columns)
            of texts, a dict of columns, or a DataFrame
    """
    kind = type(data)
    if isinstance(data, Mapping):
        return rows_of_columns(data, data)
    if hasattr(kind, "dtype") and hasattr(kind, "shape"):
        dtype_kind = getattr(data.dtype, "kind", "O")          # U: texts, O: objects, T: NumPy's StringDType
        if dtype_kind not in "UOT" or len(data.shape) not in (1, 2):
            how = ", such as numpy.char.decode(data)" if dtype_kind == "S" else ""
            expected = f"expected texts of shape (rows,) or (rows, columns){how}"
            fail_with_type(data, f"{data.dtype} of shape {tuple(data.shape)}; {expected}")
    if error := unreadable_reason(data):
        fail_with_type(data, error)
    if not is_table(data) or hasattr(kind, "features"):        # iterating over a Dataset yields rows
        return MemoryRows(len(data), lambda: iterate(data))
    names = getattr(data, "column_names", None) or [*data.columns]
    if doubled := first_duplicate(map(str, names)):
        fail_with_type(data, f"two columns are called {doubled}; rename one of them")
    return rows_of_columns({name: data[name] for name in names}, data)


def rows_of_columns(columns, data):
    """Return the MemoryRows of a dict of columns. data: the object that was passed, for messages."""
    for name, column in columns.items():
        if is_table(column):
            fail_with_type(data, f"contains several tables; pass one of them, such as data[{name!r}]")
        is_one = isinstance(column, (str, Mapping))
        error = f"it is a {type(column).__name__}" if is_one else unreadable_reason(column)
        if error:
            found = error.split("; ")[0]
            name = str(name)[:40]
            fail_with_type(data, f"column {name!r}: {found}; expected lists of texts, all of one length")
    lengths = {str(name): len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name} {length:,}" for name, length in lengths.items())[:200]
        fail_with_type(data, f"columns of different lengths: {found}; expected columns of equal length")
    has_names = not all(isinstance(name, int) for name in columns)        # pandas: 0, 1, ... without names

    def make():
        rows = zip(*map(iterate, columns.values()))
        return (dict(zip(lengths, cells)) for cells in rows) if has_names else rows

    return MemoryRows(max(lengths.values(), default=0), make)


def unreadable_reason(data):
    """Return why `data` cannot be iterated several times in a fixed order, and what to pass; or None."""
    kind = type(data)
    if isinstance(data, (bytes, bytearray, memoryview)):
        return "bytes are not text; pass data.decode() if it is a path, or a list of texts"
    if hasattr(kind, "read"):
        return "an open file can be read only once; pass its path"
    if isinstance(data, Set):
        return "a set has no order; pass sorted(data)"
    if any(base.__name__ == "DataLoader" for base in kind.__mro__):
        return "it yields batches instead of rows; pass data.dataset"
    if not hasattr(kind, "__iter__") and not hasattr(kind, "__getitem__"):
        return f"it contains no rows; {EXPECTED}"
    try:
        len(data)
    except (TypeError, NotImplementedError):
        return "it can be read only once; pass list(data)"
    return None


def fail_with_type(data, error):
    """Fail with a message that begins with the type of `data`."""
    fail(f"data of type {type(data).__name__}: {error}")


def is_table(data):
    """Return whether `data` is a DataFrame, a Dataset or an Arrow table."""
    return hasattr(type(data), "columns") or hasattr(type(data), "column_names")


def iterate(data):
    """Return an iterator over len(data) items. The iterator of `data` itself may not end."""
    return itertools.islice(data, len(data))


def to_row(row):
    """Return the row as a list or dict of Python values; an item that is not a row is returned unchanged."""
    if hasattr(type(row), "_asdict"):                          # a namedtuple
        row = row._asdict()
    if isinstance(row, Mapping):
        return {str(name): to_python(row[name]) for name in row}
    row = to_python(row)
    if isinstance(row, str):
        return [row]
    return [to_python(cell) for cell in row] if isinstance(row, list) else row


def to_python(cell):
    """Convert a cell of NumPy, pandas or pyarrow to a Python string, number or list."""
    if hasattr(type(cell), "as_py"):
        return cell.as_py()
    if hasattr(type(cell), "tolist"):
        cell = cell.tolist()
    return [*cell] if isinstance(cell, tuple) else cell
