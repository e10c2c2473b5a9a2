"""Rows of text, of data files read row by row or in memory; every fault with its place."""
import csv
import functools
import hashlib
import itertools
import json
import os
import re
import sys
from pathlib import Path

from .cli import fail, say
from .columns import RANKING, SENTENCES, any_names, by_role, listed, plain, twice, unlike_texts  # noqa: F401 - for others, too
from .files import LONGEST, read_lines, stamp, unchanged
from .in_memory import rows_of
from .looks import Sample
from .parquet import read_parquet

KINDS = (".txt", ".csv", ".tsv", ".json", ".jsonl", ".parquet")
PEEK = 21                                                      # rows that tell whether the first is a header
MOST_FAULTS = 100_000                                          # rows that are counted
csv.field_size_limit(LONGEST)                                  # its own, 131,072, is a long article's


class Table:
    """The rows of a data file, (place, cells), place what a message calls the row: "line 7". They are read
    anew each time they are gone through, so that no file has to fit in memory. A file that read_table has
    checked must stay as it is: a Fault otherwise.

    path    of the file; or rows that are in memory, whatever in_memory.rows_of reads: a list of rows, each a
            text, a list of texts or a dict of texts by column, a dict of columns, a DataFrame ...
    header  what tells by the first rows which columns are read, a function of module columns
    sample  the beginnings of the cells of rows from all over it, where read_table has been through them
    lists   what a list of texts in a cell of JSON becomes: "join" one text, with | between them; "spread" as
            many columns; None: it is a fault
    """

    def __init__(self, path, lists=None, length=None, header=any_names):
        if isinstance(path, Table):
            path = path.path or path.rows
        in_file = isinstance(path, (str, os.PathLike))
        self.path, self.rows = (Path(path), None) if in_file else (None, rows_of(path))
        self.lists, self.header, self.was, self.sample = lists, header, None, None
        self.length = len(self.rows) if length is None and not in_file else length

    def __len__(self):
        return self.length

    def __iter__(self):
        for place, cells, fault in self.judged():
            if fault and self.was and place:
                fail(f"{self.path} {place}: {fault}")
            if place:
                yield place, cells

    def judged(self):
        """What read_cells yields, of a file that stays what it was."""
        with unchanged(self.path, self.was) as check:
            for place, cells, fault in read_cells(self):
                if fault:
                    check()
                yield place, cells, fault

    def __str__(self):
        return str(self.path) if self.path else f"{len(self.rows):,} rows in memory, sha1 {self.digest}"

    @functools.cached_property
    def digest(self):
        digest = hashlib.sha1()
        for _, row in read_rows(self):
            digest.update(spell(row).encode("utf-8", "surrogatepass"))
        return digest.hexdigest()[:12]

    @property
    def kind(self):
        """How the name of the file ends, before .gz."""
        return self.path and Path(self.path.name.lower().removesuffix(".gz")).suffix


def read_table(path, check=None, lists=None, *, roles=None, columns=None, names=()):
    """(header or None, Table) of a data file, or of a Table. check(cells) says what is wrong with a row, or
    nothing; all wrong rows are counted. lists: see Table.

    roles    {role: [names]}: columns come in this order, and the header says what is taken for what
    columns  those that are read instead, by name or number (--columns)
    names    a first row that has all of them is a header
    """
    reader = functools.partial(any_names, names=names)
    if roles:
        reader, lists = functools.partial(by_role, roles=roles, columns=columns), "spread"
    table, sample, wrong, more = Table(path, lists, header=reader), Sample(), [], 0
    header = unclear = guessed = texts = None
    if table.path and table.kind not in KINDS and not os.path.isdir(table.path):
        fail(f"{path}: wanted a name that ends in {', '.join(KINDS[:-1])} or {KINDS[-1]}; .gz may follow")
    table.was = table.path and stamp(table.path)
    for place, cells, fault in table.judged():
        if place is None:
            header, unclear, guessed, texts = cells.said, fault, cells.guessed, cells.texts
        elif fault := fault or check and check(cells):
            more += bool(wrong)
            wrong += [f"{place}: {fault}"[:300]] * (more < 7)
            if more == MOST_FAULTS:
                break
        else:
            sample.add(cells)
    if wrong:
        others = ", ".join(text.split(":")[0] for text in wrong[1:6]) + ", ..." * (more > 5)
        least = "at least " * (more == MOST_FAULTS)
        fail(f"{path} {wrong[0]}" + (f" ({least}{more:,} more rows are wrong: {others})" if more else ""))
    if not sample.seen:
        fail(f"{path}: no rows")
    if unclear := unclear or texts and unlike_texts(sample.rows, texts):
        fail(f"{path}: {unclear}")
    if guessed and header:
        say("note", f"{path}: its first row is taken as a header: {listed(header)}; if it is data, write a "
                    "header above it")
    table.length, table.sample = sample.seen, sample.rows
    return header, table


def describe_table(table, header):
    """600 rows (anchor sent0, positive sent1, negative hard_neg) from nli.csv"""
    if header:
        return f"{len(table):,} rows ({', '.join(header)}) from {table}"
    count = len(next(iter(table))[1])
    columns = "one column" if count == 1 else f"{count} columns"
    return f"{len(table):,} rows of {columns} (no header) from {table}"


def as_utf8(text):
    """For tokenizers: columns that are not read may hold anything."""
    return text.encode("utf-8", "replace").decode()


def empty_cell(cells):
    """What is wrong with a row that has one."""
    return None if all(map(str.strip, cells)) else "an empty cell; fill it or delete the row"


def texts_of(path, most=100_000):
    """Yields the text of each row, its cells a line each, of as many rows as a vocabulary is made of."""
    rows = itertools.islice(Table(path, lists="join"), most)
    rows = (cells for _, cells in rows if isinstance(cells, list))
    return (as_utf8("\n".join(map(str, cells))) for cells in rows)


def read_cells(table):
    """Yields (place, cells, what is wrong with them) of a table; first, its place None, the Header."""
    rows, place, quoting = read_rows(table), "line 0", table.kind == ".tsv"
    from_text = table.kind in (".txt", ".csv", ".tsv")
    try:
        first, known = [], []
        for place, row in itertools.islice(rows, PEEK):
            first.append((place, row))
            known.append(row)
        keys = list(known[0]) if known and isinstance(known[0], dict) else []
        may_be_header = table.kind in (".csv", ".tsv") and known
        header = table.header(known, None if may_be_header else keys)
        headed, places, unclear = header.headed, header.places, header.fault
        if quoting and known and all(map(is_quoted, itertools.chain(*known))):
            unclear = f"all cells are {QUOTED}"
        if odd := odd_letter(keys):
            unclear = f"a name of a column holds {odd}"
        yield None, header, unclear
        spread = None                                          # columns of a row, those of its lists included
        width = len(keys) or next((len(row) for row in known if isinstance(row, list) and row), 1)
        for place, row in itertools.chain(first[headed:], rows):
            if keys and isinstance(row, dict):
                row = [row.pop(name, "") for name in keys] + list(row.values())
            if table.lists == "join" and isinstance(row, list):
                row = ["|".join(cell) if is_texts(cell) else cell for cell in row]
            fault = None
            if isinstance(row, Exception):
                fault = f"not JSON: {getattr(row, 'msg', row)}"
            elif isinstance(row, list) and len(row) != width:
                fault = f"{len(row)} columns, wanted {width}"
            elif not from_text and isinstance(row, list) and (odd := odd_letter(row)):
                fault = f"a cell holds {odd}"
            elif isinstance(row, list) and places:
                row = [row[i] for i in places]
            if fault is None and table.lists == "spread" and isinstance(row, list):
                row = [text for cell in row for text in (cell if is_texts(cell) else [cell])]
                spread = spread or len(row)
                if len(row) != spread:
                    fault = f"{len(row)} texts, wanted {spread} as in the first row; make its lists as long"
            if fault is None and not (isinstance(row, list) and set(map(type, row)) == {str}):
                fault = no_texts(row)
                row = list(map(str, row)) if fault is None else row
            elif quoting and '""' in "\t".join(row) and any(map(is_quoted_twice, row)):
                fault = f"a cell {QUOTED}"
            yield place, row, fault
    except csv.Error as error:
        if "new-line" in str(error):
            fail(f"{table} after {place}: a carriage return in a cell without quotes; delete it")
        fail(f'{table} after {place}: {error}; close every ", and write "" for one inside a cell')


QUOTED = "quoted as in .csv; a .tsv has no quoting: write it as .csv, or without quotes"


def is_quoted(cell):
    return len(cell) > 1 and cell[0] == cell[-1] == '"' and '"' not in cell[1:-1].replace('""', "")


def is_quoted_twice(cell):
    """Such that no other reading is likely: with quotes within, which are doubled, or empty."""
    return '""' in cell and is_quoted(cell)


def is_texts(cell):
    return isinstance(cell, list) and all(isinstance(text, str) for text in cell)


def no_texts(row):
    """What is wrong with a row that is not texts alone; or None, where numbers can be spelled as texts."""
    if not isinstance(row, list):
        return f"wanted a row of texts, found {spell(row)[:60]!r}"
    for cell in row:
        if not is_cell(cell):
            missing = "; fill the cell or delete the row" * (spell(cell) in ("None", "nan", "NaT", "<NA>"))
            return f"wanted texts alone, found {spell(cell)[:60]} among them{missing}"
    return None


def is_cell(cell):
    """Whether it is a text, or a number that has an end: no NaN."""
    return isinstance(cell, str) or isinstance(cell, (int, float)) and abs(cell) <= sys.float_info.max


def odd_letter(cells):
    """What some of these cannot hold, though JSON and rows in memory can spell it; or None."""
    text = "".join(cell if isinstance(cell, str) else "".join(cell) for cell in cells
                   if isinstance(cell, str) or is_texts(cell))
    if half := not text.isascii() and re.search("[\ud800-\udfff]", text):
        return f"half of a letter, {half.group()!a}; mend it, or delete the row"
    return "a NUL character; delete it" if "\0" in text else None


def spell(row):
    """As Python does; in memory there may be numbers and lists beyond its limits."""
    try:
        return str(row)
    except (ValueError, RecursionError):
        return type(row).__name__


def read_rows(table):
    """Yields (place, row) of a table; a row of JSON may be a dict, or the error in it."""
    kind, path = table.kind, table.path
    if path is None:
        yield from ((f"row {i}", row) for i, row in enumerate(table.rows, 1))
    elif kind == ".parquet":
        yield from ((f"row {i}", row) for i, row in enumerate(read_parquet(path), 1))
    elif kind == ".txt":
        yield from ((f"line {i}", [line.rstrip("\r\n")]) for i, line in enumerate(read_lines(path), 1))
    elif kind == ".jsonl":
        yield from ((f"line {i}", parse(line)) for i, line in enumerate(read_lines(path), 1))
    elif kind == ".json":
        whole = parse("".join(read_lines(path, whole=True)))
        if isinstance(whole, list):
            yield from ((f"item {i}", row) for i, row in enumerate(whole, 1))
        else:
            what = getattr(whole, "msg", whole) if isinstance(whole, Exception) else "no list"
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
        return json.loads(text, object_pairs_hook=as_row, parse_int=as_number)
    except ValueError as error:
        return error
    except RecursionError:
        return ValueError("lists within lists, too deep to be read")


def as_row(pairs):
    """The dict of an object of JSON; an error where a name has a second value, which would be lost."""
    row = dict(pairs)
    if len(row) < len(pairs):
        return ValueError(f"{twice(name for name, _ in pairs)} stands twice in a row")
    return row


def as_number(digits):
    """Python reads 4,300 of them."""
    return int(digits) if len(digits) < 400 else float(digits)
