"""Rows that a program hands over: each kind is read as the same rows in a list, or refused in one line."""
import collections
import io
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch

import simcse
from kernels.training.cli import Fault
from kernels.training.in_memory import rows_of
from kernels.training.tables import SENTENCES, Table, empty_cell, read_table
from running import GOOD, SMALL

ROWS = [("A man eats.", "He eats.", "Nobody eats."), ("A dog runs.", "It runs.", "It sits."),
        ("The sun is up.", "It is day.", "It is night.")]
NAMES = "sent0", "sent1", "hard_neg"
COLUMNS = {name: [*cells] for name, cells in zip(NAMES, zip(*ROWS))}
Pair = collections.namedtuple("Pair", NAMES)


class Series(collections.UserList):
    """Of pandas."""
    dtype, shape = np.dtype(object), property(lambda self: (len(self),))

    def tolist(self):
        return self.data


class Frame:
    """Of pandas: its rows are no part of it when it is gone through, and its columns are attributes."""
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


class Doubled(Frame):
    columns = property(lambda self: ["sent0", "sent0"])


class Dataset(Frame):
    """Of datasets: rows are dicts."""
    column_names = features = Frame.columns

    def __iter__(self):
        return (dict(zip(self.parts, row)) for row in zip(*self.parts.values()))


class IterableDataset(Dataset):
    __len__ = None


class ByNumber:
    """Of torch: it has neither an end of its own nor __iter__."""
    def __len__(self):
        return len(ROWS)

    def __getitem__(self, i):
        return ROWS[i % len(ROWS)]


class Scalar(collections.UserString):
    """Of pyarrow."""
    def as_py(self):
        return self.data


ARRAY = np.array(ROWS)
NAMED = {"dicts": [dict(zip(NAMES, row)) for row in ROWS], "namedtuples": [Pair(*row) for row in ROWS],
         "columns": COLUMNS, "columns of arrays": {name: np.array(cells) for name, cells in COLUMNS.items()},
         "columns of Series": {name: Series(cells) for name, cells in COLUMNS.items()},
         "a mapping": MappingProxyType(COLUMNS), "a frame": Frame(COLUMNS), "a Dataset": Dataset(COLUMNS),
         "scalars": {name: [*map(Scalar, cells)] for name, cells in COLUMNS.items()}}
BARE = {"a list": ROWS, "a tuple": tuple(map(list, ROWS)), "a deque": collections.deque(ROWS),
        "an array": ARRAY, "an array of objects": ARRAY.astype(object), "a list of arrays": [*ARRAY],
        "by number": ByNumber(), "a subset": torch.utils.data.Subset(ROWS, [0, 1, 2]),
        "rows of Series": [*map(Series, ROWS)],
        "a frame without names": Frame(dict(enumerate(COLUMNS.values())))}
ONE = [row[0] for row in ROWS]
SINGLE = {"texts": ONE, "an array": np.array(ONE), "NumPy's texts": [*np.array(ONE)], "a Series": Series(ONE),
          "values of a dict": dict(enumerate(ONE)).values(), "an array of one column": ARRAY[:, :1],
          "scalars": [*map(Scalar, ONE)]}


@pytest.mark.parametrize("kinds, header, rows", [
    (NAMED, ["anchor sent0", "positive sent1", "negative hard_neg"], ROWS), (BARE, None, ROWS),
    (SINGLE, None, [[text] for text in ONE])])
def test_what_is_read(kinds, header, rows):
    for kind, data in kinds.items():
        found, table = read_table(Table(data), empty_cell, roles=SENTENCES)
        assert found == header and len(table) == 3, kind
        for _ in range(2):
            assert [cells for _, cells in table] == [[*row] for row in rows], kind
        assert {type(cell) for _, cells in table for cell in cells} == {str}, kind


@pytest.mark.parametrize("data, wanted", [
    ((row for row in ROWS), "generator: it can be read only once; hand over list(data)"),
    (zip(ONE, ONE), "zip: it can be read only once; hand over list(data)"),
    (io.StringIO(GOOD), "StringIO: an open file is read only once; hand over its path"),
    (IterableDataset(COLUMNS), "IterableDataset: it can be read only once; hand over list(data)"),
    ({"train": Dataset(COLUMNS)}, "dict: it holds several tables; name one of them, such as data['train']"),
    ({"train": Frame(COLUMNS)}, "dict: it holds several tables; name one of them, such as data['train']"),
    ({*ONE}, "set: a set has no order; hand over sorted(data)"),
    (torch.utils.data.DataLoader(ROWS, 2),
     "DataLoader: it gives batches instead of rows; hand over data.dataset"),
    (b"a.csv", "bytes: bytes are no text; hand over data.decode(), if that is a path, or a list of texts"),
    (ARRAY[None], "ndarray: <U14 of shape (1, 3, 3); wanted texts of shape (rows,) or (rows, columns)"),
    (np.array("A man eats."), "ndarray: <U11 of shape (); wanted texts of shape (rows,) or (rows, columns)"),
    (ARRAY.astype("S"), "ndarray: |S14 of shape (3, 3); wanted texts of shape (rows,) or (rows, columns), "
                        "such as numpy.char.decode(data)"),
    (np.zeros((9, 2)), "ndarray: float64 of shape (9, 2); wanted texts of shape (rows,) or (rows, columns)"),
    ({"a": ONE, "b": ONE[1:]}, "dict: columns of different lengths: a 3, b 2; wanted as many texts in each"),
    ({"a": "A b.", "b": "C d."}, "dict: column 'a': it is a str; wanted lists of texts, all of one length"),
    ({"a": {0: "A b."}}, "dict: column 'a': it is a dict; wanted lists of texts, all of one length"),
    ({"a": ONE, "b": iter(ONE)},
     "dict: column 'b': it can be read only once; wanted lists of texts, all of one length"),
    (Doubled(COLUMNS), "Doubled: two columns are called 'sent0'; rename one"),
    *((data, f"{type(data).__name__}: it holds no rows; wanted texts or rows in a list or array, a dict of "
             "columns, a DataFrame, a Dataset, or a path") for data in (5, list, print))])
def test_what_is_refused(data, wanted):
    """And says what to hand over instead."""
    with pytest.raises(Fault) as fault:
        rows_of(data)
    assert str(fault.value) == f"data of type {wanted}"


@pytest.mark.parametrize("rows, wanted", [
    ([*ROWS[:1], None], "row 2: wanted a row of texts, found 'None'"),
    ([*ROWS[:1], ("A b", None, "c")],
     "row 2: wanted texts alone, found None among them; fill the cell or delete the row"),
    ({"sent0": ONE, "sent1": ["A", float("nan"), "c"]},
     "row 2: wanted texts alone, found nan among them; fill the cell or delete the row"),
    ([b"A b."], """row 1: wanted a row of texts, found "b'A b.'\""""),
    ([[b"A b."]], "row 1: wanted texts alone, found b'A b.' among them"),
    ([{"A b."}], """row 1: wanted a row of texts, found "{'A b.'}\""""),
    ([Frame(COLUMNS)], "row 1: wanted a row of texts, found '<test_in_memory.Frame object at .*"),
    (torch.zeros(1, 2), "column 1 holds numbers, such as '0.0', column 2 holds numbers, .*; wanted texts")])
def test_rows_that_are_refused(rows, wanted):
    with pytest.raises(Fault, match=rf" rows in memory, sha1 \w+:? {wanted}$"):
        read_table(Table(rows), empty_cell, roles=SENTENCES)


def test_a_path_is_one_as_by_the_flag(here):
    """And is among the flags that --resume takes from the folder."""
    flags = SMALL[2:]
    for data in "good.csv", Path("good.csv"):
        args = simcse.make_parser().parse_args(flags, data=data)
        assert args.data == "good.csv" and args.command == [*flags, "--data=good.csv"]
    assert simcse.make_parser().parse_args(flags, data=ROWS).data.rows is not None
    for data, wanted in ("", "--data: an empty name, .*"), ("a\0b", "--data=a.*: holds a NUL character, .*"):
        with pytest.raises(Fault, match=wanted):
            simcse.make_parser().parse_args(flags, data=data)
    for data in ROWS, "good.csv":
        with pytest.raises(Fault, match="^--data good.csv: data is handed over, too; leave one of them out$"):
            simcse.make_parser().parse_args(SMALL, data=data)


def test_main_says_so_in_one_line(capfd):
    with pytest.raises(SystemExit) as end:
        simcse.main(SMALL[2:], data=(row for row in ROWS))
    assert end.value.code == 2
    wanted = "data of type generator: it can be read only once; hand over list(data)"
    assert capfd.readouterr().err == f"simcse.py: {wanted}\n"
