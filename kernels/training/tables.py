"""Rows of text, of data files read row by row or in memory; every fault with its place."""
import csv
import functools
import gzip
import hashlib
import itertools
import json
import os
import re
import zlib
from pathlib import Path

from tqdm import tqdm

from .columns import SENTENCES, any_names, by_role, plain  # noqa: F401 - scripts have them from here
from .command import fail

KINDS = (".txt", ".csv", ".tsv", ".json", ".jsonl", ".parquet")
PEEK = 21                                                      # rows that tell whether the first is a header


class Table:
    """The rows of a data file, (place, cells), place what a message calls the row: "line 7". They are read
    anew each time they are gone through, so that no file has to fit in memory.

    path    of the file; or a sequence of rows that are in memory: each a text, a list of texts, or a dict
            of texts by column
    header  what tells by the first rows which columns are read, a function of module columns
    """

    def __init__(self, path, lists=False, length=None, header=any_names):
        if isinstance(path, Table):
            path = path.path or path.rows
        in_file = isinstance(path, (str, os.PathLike))
        self.path, self.rows = (Path(path), None) if in_file else (None, path)
        self.lists, self.header = lists, header
        self.length = len(path) if length is None and not in_file else length

    def __len__(self):
        return self.length

    def __iter__(self):
        return ((place, cells) for place, cells, _ in read_cells(self) if place is not None)

    def __str__(self):
        return str(self.path) if self.path else f"{len(self.rows):,} rows in memory, sha1 {self.digest}"

    @functools.cached_property
    def digest(self):
        digest = hashlib.sha1()
        for _, row in read_rows(self):
            digest.update(repr(row).encode("utf-8", "surrogatepass"))
        return digest.hexdigest()[:12]

    @property
    def kind(self):
        """How the name of the file ends, before .gz."""
        return self.path and Path(self.path.name.lower().removesuffix(".gz")).suffix


def read_table(path, check=None, lists=False, *, roles=None, columns=None, names=()):
    """(header or None, Table) of a data file, or of a Table. check(cells) says what is wrong with a row, or
    nothing; all wrong rows are counted. With lists, a list of texts in JSON is one cell, joined by |.

    roles    {role: [names]}: columns come in this order, and the header says what is taken for what
    columns  those that are read instead, by name or number (--columns)
    names    a first row that has all of them is a header
    """
    reader = functools.partial(any_names, names=names)
    if roles:
        reader = functools.partial(by_role, roles=roles, columns=columns)
    table, header, unclear, length, wrong = Table(path, lists, header=reader), None, None, 0, []
    if table.path and table.kind not in KINDS and not table.path.is_dir():
        fail(f"{path}: wanted a name that ends in {', '.join(KINDS[:-1])} or {KINDS[-1]}; .gz may follow")
    try:
        for place, cells, fault in read_cells(table):
            if place is None:
                header, unclear = cells, fault
            elif fault := fault or check and check(cells):
                wrong.append(f"{place}: {fault}"[:300] if len(wrong) < 7 else None)    # of more: how many
            else:
                length += 1
    except (OSError, EOFError, zlib.error) as error:
        fail(f"{path}: {getattr(error, 'strerror', None) or error}")
    if wrong:
        more = ", ".join(text.split(":")[0] for text in wrong[1:6]) + ", ..." * (len(wrong) > 6)
        fail(f"{path} {wrong[0]}" + (f" ({len(wrong) - 1:,} more rows are wrong: {more})" if more else ""))
    if length == 0:
        fail(f"{path}: no rows")
    if unclear:
        fail(f"{path}: {unclear}")
    table.length = length
    return header, table


def describe_table(table, header):
    """600 rows (anchor sent0, positive sent1, negative hard_neg) from nli.csv"""
    columns = f" ({', '.join(header)})" if header else f" of {len(next(iter(table))[1])} columns (no header)"
    return f"{len(table):,} rows{columns} from {table}"


def empty_cell(cells):
    """What is wrong with a row that has one."""
    return None if all(map(str.strip, cells)) else "an empty cell; fill it or delete the row"


def texts_of(path, most=100_000):
    """Yields the text of each row, its cells a line each, of as many rows as a vocabulary is made of."""
    rows = itertools.islice(Table(path, lists=True), most)
    return ("\n".join(map(str, cells)) for _, cells in rows)   # of a column that is not read, not only texts


def read_cells(table):
    """Yields (place, cells, what is wrong with them) of a table; first, its place None, what the header says
    of the columns."""
    rows, place, quoting = read_rows(table), "line 0", table.kind == ".tsv"
    try:
        first, known = [], []
        for place, row in itertools.islice(rows, PEEK):
            first.append((place, row))
            known.append(row)
        keys = list(known[0]) if known and isinstance(known[0], dict) else []
        may_be_header = table.kind in (".csv", ".tsv") and known
        headed, said, places, unclear = table.header(known, None if may_be_header else keys)
        if quoting and known and all(map(is_quoted, itertools.chain(*known))):
            unclear = f"all cells are {QUOTED}"
        yield None, said, unclear
        width = len(keys) or next((len(row) for row in known if row and isinstance(row, list)), 1)
        for place, row in itertools.chain(first[headed:], rows):
            if keys and isinstance(row, dict):
                row = [row.pop(name, "") for name in keys] + list(row.values())
            if table.lists and isinstance(row, list):
                row = ["|".join(cell) if is_texts(cell) else cell for cell in row]
            fault = None
            if isinstance(row, Exception):
                fault = f"not JSON: {getattr(row, 'msg', row)}"
            elif isinstance(row, list) and len(row) != width:
                fault = f"{len(row)} columns, wanted {width}"
            elif isinstance(row, list) and places:
                row = [row[i] for i in places]
            if fault is None and not (isinstance(row, list) and set(map(type, row)) == {str}):
                if not isinstance(row, list) or not all(isinstance(cell, (str, int, float)) for cell in row):
                    fault = f"wanted a row of texts, found {str(row)[:60]!r}"
                row = list(map(str, row)) if fault is None else row
            elif quoting and '""' in "\t".join(row) and any(map(is_quoted_twice, row)):
                fault = f"a cell {QUOTED}"
            yield place, row, fault
    except csv.Error as error:
        fail(f'{table} after {place}: {error}; close every ", and write "" for one inside a cell')


QUOTED = "quoted as in .csv; a .tsv has no quoting: write it as .csv, or without quotes"


def is_quoted(cell):
    return bool(re.fullmatch('"([^"]|"")*"', cell))


def is_quoted_twice(cell):
    """Such that no other reading is likely: with quotes within, which are doubled, or empty."""
    return '""' in cell and is_quoted(cell)


def is_texts(cell):
    return isinstance(cell, list) and all(isinstance(text, str) for text in cell)


def read_lines(path):
    """Yields the lines of a text file, which may be packed by gzip."""
    packed = path.suffix.lower() == ".gz"
    bar = tqdm(total=None if packed else path.stat().st_size, desc=f"reading {path.name}", unit="B",
               unit_scale=True, leave=False, delay=1, disable=None)
    with (gzip.open if packed else open)(path, "rb") as file, bar:
        for number, raw in enumerate(file, 1):
            bar.update(len(raw))
            try:
                yield raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                fail(f"{path} line {number}: not UTF-8; convert it, for example with iconv")


def read_parquet(path):
    """Yields the rows of a .parquet, as dicts."""
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        fail(f"{path}: a .parquet wants the package pyarrow; pip install pyarrow, or write it as .jsonl")
    try:
        with open(path, "rb") as file:
            for part in ParquetFile(file).iter_batches(10_000):
                yield from part.to_pylist()
    except ValueError as error:
        fail(f"{path}: {str(error).splitlines()[0]}")


def read_rows(table):
    """Yields (place, row) of a table; a row of JSON may be a dict, or the error in it."""
    kind, path = table.kind, table.path
    if path is None:
        for i, row in enumerate(table.rows, 1):
            like = {str: lambda text: [text], tuple: list, dict: dict}.get(type(row), lambda row: row)
            yield f"row {i}", like(row)
    elif kind == ".parquet":
        yield from ((f"row {i}", row) for i, row in enumerate(read_parquet(path), 1))
    elif kind == ".txt":
        yield from ((f"line {i}", [line.rstrip("\r\n")]) for i, line in enumerate(read_lines(path), 1))
    elif kind == ".jsonl":
        yield from ((f"line {i}", parse(line)) for i, line in enumerate(read_lines(path), 1))
    elif kind == ".json":
        whole = parse("".join(read_lines(path)))
        if isinstance(whole, list):
            yield from ((f"item {i}", row) for i, row in enumerate(whole, 1))
        else:
            what = getattr(whole, "msg", "no list")
            yield f"line {getattr(whole, 'lineno', 1)}", ValueError(f"{what}; a row a line is .jsonl")
    else:
        rules = dict(strict=True) if kind == ".csv" else dict(delimiter="\t", quoting=csv.QUOTE_NONE)
        reader, line = csv.reader(read_lines(path), **rules), 1
        for cells in reader:
            yield f"line {line}", cells
            line = reader.line_num + 1                         # a quoted cell may hold newlines


def parse(text):
    """What the JSON says, or the error in it."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return error
