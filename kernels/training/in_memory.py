"""Rows that a program hands over in the place of a file: lists, columns, arrays, DataFrames, Datasets.

pandas, datasets and pyarrow are not imported: what comes from them is known by what its type can do.
"""
from collections.abc import Mapping, Set

from .cli import fail
from .columns import twice

WANTED = "wanted texts or rows in a list or array, a dict of columns, a DataFrame, a Dataset, or a path"


class MemoryRows:
    """Rows that can be gone through again and again: a list of cells, a dict of them by column, or something
    that is no row, which is left as it is, for a message that names its place.

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
    if isinstance(data, MemoryRows):
        return data
    kind = type(data)                                          # a column of a DataFrame is an attribute of it
    if isinstance(data, Mapping):
        return rows_of_columns(data, data)
    if hasattr(kind, "dtype") and hasattr(kind, "shape"):
        shape, sort = tuple(data.shape), getattr(data.dtype, "kind", "O")
        if sort not in "UOT" or len(shape) not in (1, 2):      # texts, anything, NumPy's StringDType
            how = ", such as numpy.char.decode(data)" * (sort == "S")
            wanted = f"wanted texts of shape (rows,) or (rows, columns){how}"
            refuse(data, f"{data.dtype} of shape {shape}; {wanted}")
    if fault := unreadable(data):
        refuse(data, fault)
    if hasattr(kind, "features") or not (hasattr(kind, "columns") or hasattr(kind, "column_names")):
        return MemoryRows(len(data), lambda: items(data))            # a Dataset, which has columns, gives rows
    names = data.column_names if hasattr(kind, "column_names") else data.columns
    if doubled := twice(map(str, names)):
        refuse(data, f"two columns are called {doubled}; rename one")
    return rows_of_columns({name: data[name] for name in names}, data)


def rows_of_columns(columns, data):
    """The MemoryRows of a dict of columns, which data was or has."""
    tables = [name for name, column in columns.items()
              if hasattr(type(column), "columns") or hasattr(type(column), "column_names")]
    if tables:
        names = ", ".join(map(str, tables))[:80]
        refuse(data, f"it holds several tables ({names}); name one of them, such as data[{tables[0]!r}]")
    for name, column in columns.items():
        kinds = {str: "it is a text", Mapping: "it is a dict"}
        found = next((what for kind, what in kinds.items() if isinstance(column, kind)), unreadable(column))
        if found:
            what = found.split("; ")[0]
            refuse(data, f"column {str(name)[:40]!r}: {what}; wanted lists of texts, all of one length")
    lengths = {str(name): len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name} {length:,}" for name, length in lengths.items())[:200]
        refuse(data, f"columns of different lengths: {found}; wanted as many texts in each")
    length, lists = max(lengths.values(), default=0), list(columns.values())
    if all(isinstance(name, int) for name in columns):         # numbers are pandas' where there are no names
        return MemoryRows(length, lambda: zip(*map(items, lists)))
    return MemoryRows(length, lambda: (dict(zip(lengths, cells)) for cells in zip(*map(items, lists))))


def unreadable(data):
    """Why this cannot be gone through again and again in one order, and what to do; or None."""
    kind, has = type(data), lambda name: hasattr(type(data), name)
    if isinstance(data, (bytes, bytearray, memoryview)):
        return "bytes are no text; hand over data.decode(), if that is a path, or a list of texts"
    if has("read") and has("close"):
        return "an open file is read only once; hand over its path"
    if has("__next__"):
        return "it can be read only once; hand over list(data)"
    if isinstance(data, Set):
        return "a set has no order; hand over sorted(data)"
    if any(one.__name__ == "DataLoader" for one in kind.__mro__):
        return "it gives batches instead of rows; hand over data.dataset"
    try:
        len(data)
    except (TypeError, NotImplementedError):
        if has("__iter__"):
            return "it has no length, so it may be read only once; hand over list(data)"
        return f"it holds no rows; {WANTED}"
    return None if has("__iter__") or has("__getitem__") else f"it holds no rows; {WANTED}"


def refuse(data, fault):
    fail(f"data of type {type(data).__name__}: {fault}")


def items(data):
    return iter(data) if hasattr(type(data), "__iter__") else (data[i] for i in range(len(data)))


def row_of(row):
    """The row as a list or a dict of plain cells; what is no row, as it is."""
    if hasattr(type(row), "_asdict"):                          # a namedtuple
        row = row._asdict()
    if isinstance(row, Mapping):
        return {str(name): cell_of(row[name]) for name in row}
    row = cell_of(row)
    return [str(row)] if isinstance(row, str) else [*map(cell_of, row)] if isinstance(row, list) else row


def cell_of(cell):
    """As plain Python: the texts, numbers and lists of NumPy, pandas and pyarrow."""
    if type(cell) is str:
        return cell
    if hasattr(type(cell), "as_py"):
        return cell.as_py()
    if hasattr(type(cell), "tolist") and hasattr(type(cell), "dtype"):
        sort = getattr(cell.dtype, "kind", None)
        return cell.tolist() if sort and (sort in "UOT" or not cell.shape) else cell
    return list(cell) if isinstance(cell, tuple) else cell
