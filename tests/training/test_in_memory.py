"""Rows in memory: each accepted type gives the same rows as a list, other types are rejected in one line."""
import collections
import io
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch

import simcse
from kernels.training.cli import UserError
from kernels.training.in_memory import rows_of
from kernels.training.tables import SENTENCE_COLUMNS, Table, empty_cell, read_table
from running import GOOD, SMALL

ROWS = [("A man eats.", "He eats.", "Nobody eats."), ("A dog runs.", "It runs.", "It sits."),
        ("The sun is up.", "It is day.", "It is night.")]
NAMES = "sent0", "sent1", "hard_neg"
COLUMNS = {name: [*cells] for name, cells in zip(NAMES, zip(*ROWS))}
Pair = collections.namedtuple("Pair", NAMES)


class Series(collections.UserList):
    """Behaves like a Series of pandas."""
    dtype, shape = np.dtype(object), property(lambda self: (len(self),))

    def tolist(self):
        return self.data


class Frame:
    """Behaves like a DataFrame of pandas: iterating yields column names, and columns are attributes."""
    columns = property(lambda self: [*self.parts])

    def __init__(self, parts):
        self.parts = parts
        vars(self).update(features=1, dtype=2, read=3, close=4)

    def __len__(self):
        return len(next(iter(self.parts.values()), ()))

    def __iter__(self):
        return iter(self.parts)

    def __getitem__(self, name):
        return Series(self.parts[name])


class FrameWithDuplicates(Frame):
    columns = property(lambda self: ["sent0", "sent0"])


class Dataset(Frame):
    """Behaves like a Dataset of the datasets library: iterating yields dicts."""
    column_names = Frame.columns
    features = Frame.columns

    def __iter__(self):
        return (dict(zip(self.parts, row)) for row in zip(*self.parts.values()))


class IterableDataset(Dataset):
    __len__ = None


class IndexedDataset:
    """Behaves like a torch Dataset: no __iter__, and no IndexError for indices beyond its length."""
    def __len__(self):
        return len(ROWS)

    def __getitem__(self, i):
        return ROWS[i % len(ROWS)]


class Scalar(collections.UserString):
    """Behaves like a pyarrow Scalar."""
    def as_py(self):
        return self.data


ARRAY = np.array(ROWS)
WITH_NAMES = {
    "dicts": [dict(zip(NAMES, row)) for row in ROWS], "namedtuples": [Pair(*row) for row in ROWS],
    "columns": COLUMNS, "columns of arrays": {name: np.array(cells) for name, cells in COLUMNS.items()},
    "columns of Series": {name: Series(cells) for name, cells in COLUMNS.items()},
    "a mapping": MappingProxyType(COLUMNS), "a frame": Frame(COLUMNS), "a Dataset": Dataset(COLUMNS),
    "scalars": {name: [*map(Scalar, cells)] for name, cells in COLUMNS.items()}}
WITHOUT_NAMES = {
    "a list": ROWS, "a tuple": tuple(map(list, ROWS)), "a deque": collections.deque(ROWS), "an array": ARRAY,
    "an array of objects": ARRAY.astype(object), "a list of arrays": [*ARRAY], "by index": IndexedDataset(),
    "a subset": torch.utils.data.Subset(ROWS, [0, 1, 2]), "rows of Series": [*map(Series, ROWS)],
    "a frame without names": Frame(dict(enumerate(COLUMNS.values())))}
ONE = [row[0] for row in ROWS]
ONE_COLUMN = {
    "texts": ONE, "an array": np.array(ONE), "NumPy's texts": [*np.array(ONE)], "a Series": Series(ONE),
    "values of a dict": dict(enumerate(ONE)).values(), "an array of one column": ARRAY[:, :1],
    "scalars": [*map(Scalar, ONE)]}


@pytest.mark.parametrize("kinds, header, rows", [
    (WITH_NAMES, ["anchor sent0", "positive sent1", "negative hard_neg"], ROWS), (WITHOUT_NAMES, None, ROWS),
    (ONE_COLUMN, None, [[text] for text in ONE])])
def test_accepted_types(kinds, header, rows):
    for kind, data in kinds.items():
        found, table = read_table(Table(data), empty_cell, roles=SENTENCE_COLUMNS)
        assert found == header and len(table) == 3, kind
        for _ in range(2):
            assert [cells for _, cells in table] == [[*row] for row in rows], kind
        assert {type(cell) for _, cells in table for cell in cells} == {str}, kind


@pytest.mark.parametrize("data, wanted", [
    ((row for row in ROWS), "generator: it can be read only once; pass list(data)"),
    (zip(ONE, ONE), "zip: it can be read only once; pass list(data)"),
    (io.StringIO(GOOD), "StringIO: an open file can be read only once; pass its path"),
    (IterableDataset(COLUMNS), "IterableDataset: it can be read only once; pass list(data)"),
    ({"train": Dataset(COLUMNS)}, "dict: contains several tables; pass one of them, such as data['train']"),
    ({"train": Frame(COLUMNS)}, "dict: contains several tables; pass one of them, such as data['train']"),
    ({*ONE}, "set: a set has no order; pass sorted(data)"),
    (torch.utils.data.DataLoader(ROWS, 2),
     "DataLoader: it yields batches instead of rows; pass data.dataset"),
    (b"a.csv", "bytes: bytes are not text; pass data.decode() if it is a path, or a list of texts"),
    (ARRAY[None], "ndarray: <U14 of shape (1, 3, 3); expected texts of shape (rows,) or (rows, columns)"),
    (np.array("A man eats."),
     "ndarray: <U11 of shape (); expected texts of shape (rows,) or (rows, columns)"),
    (ARRAY.astype("S"), "ndarray: |S14 of shape (3, 3); expected texts of shape (rows,) or (rows, columns), "
                        "such as numpy.char.decode(data)"),
    (np.zeros((9, 2)),
     "ndarray: float64 of shape (9, 2); expected texts of shape (rows,) or (rows, columns)"),
    ({"a": ONE, "b": ONE[1:]},
     "dict: columns of different lengths: a 3, b 2; expected columns of equal length"),
    ({"a": "A b.", "b": "C d."}, "dict: column 'a': it is a str; expected lists of texts, all of one length"),
    ({"a": {0: "A b."}}, "dict: column 'a': it is a dict; expected lists of texts, all of one length"),
    ({"a": ONE, "b": iter(ONE)},
     "dict: column 'b': it can be read only once; expected lists of texts, all of one length"),
    (FrameWithDuplicates(COLUMNS), "FrameWithDuplicates: two columns are called 'sent0'; rename one of them"),
    *((data, f"{type(data).__name__}: it contains no rows; expected texts or rows in a list or array, a dict "
             "of columns, a DataFrame, a Dataset, or a path") for data in (5, list, print))])
def test_rejected_types(data, wanted):
    """The message says what to pass instead."""
    with pytest.raises(UserError) as error:
        rows_of(data)
    assert str(error.value) == f"data of type {wanted}"


@pytest.mark.parametrize("rows, wanted", [
    ([*ROWS[:1], None], "row 2: expected a row of texts, found 'None'"),
    ([*ROWS[:1], ("A b", None, "c")],
     "row 2: expected only texts, found None; fill the cell or delete the row"),
    ({"sent0": ONE, "sent1": ["A", float("nan"), "c"]},
     "row 2: expected only texts, found nan; fill the cell or delete the row"),
    ([b"A b."], """row 1: expected a row of texts, found "b'A b.'\""""),
    ([[b"A b."]], "row 1: expected only texts, found b'A b.'"),
    ([{"A b."}], """row 1: expected a row of texts, found "{'A b.'}\""""),
    ([Frame(COLUMNS)], "row 1: expected a row of texts, found '<test_in_memory.Frame object at .*")])
def test_rejected_rows(rows, wanted):
    with pytest.raises(UserError, match=rf" rows in memory, sha1 \w+:? {wanted}$"):
        read_table(Table(rows), empty_cell, roles=SENTENCE_COLUMNS)


def test_data_argument_of_main(cwd):
    """A path given as data= works like --data, and is saved for --resume."""
    flags = SMALL[2:]
    for data in "good.csv", Path("good.csv"):
        args = simcse.make_parser().parse_args(flags, data=data)
        assert args.data == "good.csv" and args.command == [*flags, "--data=good.csv"]
    assert simcse.make_parser().parse_args(flags, data=ROWS).data.rows is not None
    with pytest.raises(UserError, match="--data: empty; .*"):
        simcse.make_parser().parse_args(flags, data="")
    for data in ROWS, "good.csv":
        with pytest.raises(UserError, match="^--data good.csv: main got its data argument, too; give .*"):
            simcse.make_parser().parse_args(SMALL, data=data)


def test_main_rejects_a_generator_in_one_line(capfd):
    with pytest.raises(SystemExit) as end:
        simcse.main(SMALL[2:], data=(row for row in ROWS))
    assert end.value.code == 2
    wanted = "data of type generator: it can be read only once; pass list(data)"
    assert capfd.readouterr().err == f"simcse.py: {wanted}\n"
