"""Data files of rows of text, read row by row; every fault with its place."""
import csv
import itertools
import json
import re
from pathlib import Path

from tqdm import tqdm

from .command import fail

KINDS = (".txt", ".csv", ".tsv", ".json", ".jsonl")


class Table:
    """The rows of a data file, (place, cells), place what a message calls the row: "line 7". They are read
    anew each time they are gone through, so that no file has to fit in memory."""

    def __init__(self, path, lists=False, length=None):
        self.path, self.lists, self.length = Path(path), lists, length

    def __len__(self):
        return self.length

    def __iter__(self):
        return ((place, cells) for place, cells, _ in read_cells(self.path, self.lists) if place is not None)


def read_table(path, check=None, lists=False):
    """(header or None, Table) of a data file. check(cells) says what is wrong with a row, or nothing; all
    wrong rows are counted. With lists, a list of texts in JSON is one cell, joined by |."""
    path, header, length, wrong = Path(path), None, 0, []
    if path.suffix.lower() not in KINDS and not path.is_dir():
        fail(f"{path}: wanted a name that ends in {', '.join(KINDS[:-1])} or {KINDS[-1]}")
    try:
        for place, cells, fault in read_cells(path, lists):
            if place is None:
                header = cells
            elif fault := fault or check and check(cells):
                wrong.append(f"{place}: {fault}"[:300] if len(wrong) < 7 else None)    # of more: how many
            else:
                length += 1
    except OSError as error:
        fail(f"{path}: {error.strerror}")
    if wrong:
        more = ", ".join(text.split(":")[0] for text in wrong[1:6]) + ", ..." * (len(wrong) > 6)
        fail(f"{path} {wrong[0]}" + (f" ({len(wrong) - 1:,} more rows are wrong: {more})" if more else ""))
    if length == 0:
        fail(f"{path}: no rows")
    return header, Table(path, lists, length)


def describe_table(table, header):
    """600 rows of 3 columns (header sent0, sent1, hard_neg) from nli.csv"""
    columns, names = len(next(iter(table))[1]), f"header {', '.join(header)}" if header else "no header"
    return f"{len(table):,} rows of {columns} columns ({names}) from {table.path}"


def empty_cell(cells):
    """What is wrong with a row that has one."""
    return None if all(map(str.strip, cells)) else "an empty cell; fill it or delete the row"


def texts_of(path, most=100_000):
    """Yields the text of each row, its cells a line each, of as many rows as a vocabulary is made of."""
    return ("\n".join(cells) for _, cells in itertools.islice(Table(path, lists=True), most))


def read_cells(path, lists):
    """Yields (place, cells, what is wrong with them) of a data file; a header comes first, its place None."""
    kind, header, width, place, number = path.suffix.lower(), None, None, "line 0", 0

    def lines():
        nonlocal number
        bar = tqdm(total=path.stat().st_size, desc=f"reading {path.name}", unit="B", unit_scale=True,
                   leave=False, delay=1, disable=None)
        with open(path, "rb") as file, bar:
            for number, raw in enumerate(file, 1):
                bar.update(len(raw))
                yield raw.decode("utf-8-sig" if number == 1 else "utf-8")

    try:
        for place, row in read_rows(kind, lines()):
            if place == "line 1" and kind in (".csv", ".tsv") and is_header(row):
                header = row
                yield None, header, None
                continue
            if isinstance(row, dict):
                if header is None:
                    header = list(row)
                    yield None, header, None
                row = [row.pop(name, "") for name in header] + list(row.values())
            if lists and isinstance(row, list):
                row = ["|".join(cell) if is_texts(cell) else cell for cell in row]
            if isinstance(row, Exception):
                fault = f"not JSON: {getattr(row, 'msg', row)}"
            elif not isinstance(row, list) or not all(isinstance(cell, (str, int, float)) for cell in row):
                fault = f"wanted a row of texts, found {str(row)[:60]!r}"
            else:
                row, width = [str(cell) for cell in row], width or len(header or row)
                fault = f"{len(row)} columns, wanted {width}" if len(row) != width else None
            yield place, row, fault
    except UnicodeDecodeError:
        fail(f"{path} line {number}: not UTF-8; convert it, for example with iconv")
    except csv.Error as error:
        fail(f'{path} after {place}: {error}; close every ", and write "" for one inside a cell')


def is_header(row):
    """Different names in small letters, without spaces."""
    names = [name for name in row if re.fullmatch("[a-z][a-z0-9_]*", name)]
    return len(set(names)) == len(row) > 0


def is_texts(cell):
    return isinstance(cell, list) and all(isinstance(text, str) for text in cell)


def read_rows(kind, lines):
    """Yields (place, row) of lines; a row of JSON may be a dict, or the error in it."""
    if kind == ".txt":
        yield from ((f"line {i}", [line.rstrip("\r\n")]) for i, line in enumerate(lines, 1))
    elif kind == ".jsonl":
        yield from ((f"line {i}", parse(line)) for i, line in enumerate(lines, 1))
    elif kind == ".json":
        whole = parse("".join(lines))
        if isinstance(whole, list):
            yield from ((f"item {i}", row) for i, row in enumerate(whole, 1))
        else:
            what = getattr(whole, "msg", "no list")
            yield f"line {getattr(whole, 'lineno', 1)}", ValueError(f"{what}; a row a line is .jsonl")
    else:
        rules = dict(strict=True) if kind == ".csv" else dict(delimiter="\t", quoting=csv.QUOTE_NONE)
        reader, line = csv.reader(lines, **rules), 1
        for cells in reader:
            yield f"line {line}", cells
            line = reader.line_num + 1                         # a quoted cell may hold newlines


def parse(text):
    """What the JSON says, or the error in it."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return error
