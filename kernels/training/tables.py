"""Tables of texts, in data files or in memory: checked once, read row by row, every fault with its place."""
import functools
import hashlib
import itertools
import os
import sys
from pathlib import Path

from .cli import fail, say
from .columns import RANKING, SENTENCES, find_header, listed, plain, unlike_texts  # noqa: F401 - for others
from .files import stamp, unchanged
from .in_memory import rows_of
from .looks import Sample
from .rows import READERS

KINDS = tuple(READERS)
PEEK = 21                                                      # rows that tell whether the first is a header
MOST_FAULTS = 100_000                                          # rows that are counted
QUOTED = "quoted as in .csv; a .tsv has no quoting: write it as .csv, or without quotes"


class Table:
    """The rows of a data file, as (place, cells), place what a message calls the row: "line 7". Each pass
    reads them anew, so no file has to fit in memory. A file that read_table has checked must not change.

    data    a path; another Table; or whatever in_memory.rows_of reads
    lists   what a list of texts in a cell of JSON becomes: "join" one text, with | between them; "spread" as
            many columns; None: it is a fault
    asked   the last arguments of columns.find_header
    """

    def __init__(self, data, lists=None, **asked):
        self.path, self.rows, self.lists, self.asked = None, None, lists, asked
        if isinstance(data, Table):
            self.path, self.rows = data.path, data.rows
        elif isinstance(data, (str, os.PathLike)):
            self.path = Path(data)
        else:
            self.rows = rows_of(data)
        self.kind = self.path and Path(self.path.name.lower().removesuffix(".gz")).suffix
        if self.path and self.kind not in READERS:
            fail(f"{data}: wanted a name that ends in {', '.join(KINDS[:-1])} or {KINDS[-1]}; .gz may follow")
        self.length, self.was, self.sample = None if self.path else len(self.rows), None, None

    def __len__(self):
        return self.length

    def __iter__(self):
        with unchanged(self.path, self.was):
            for place, cells, fault in self.read()[1]:
                if fault:
                    fail(f"{self} {place}: {fault}")
                yield place, cells

    def __str__(self):
        return str(self.path) if self.path else f"{len(self.rows):,} rows in memory, sha1 {self.digest}"

    @functools.cached_property
    def digest(self):
        """Of rows in memory; --resume compares it."""
        digest = hashlib.sha1()
        for row in self.rows:
            digest.update(spell(row).encode("utf-8", "surrogatepass"))
        return digest.hexdigest()[:12]

    def read(self):
        """(Header, an iterator of (place, cells, what is wrong with them or None))"""
        if self.path:
            rows = READERS[self.kind](self.path)
        else:
            rows = ((f"row {i}", row) for i, row in enumerate(self.rows, 1))
        first = [*itertools.islice(rows, PEEK)]
        known = [row for _, row in first if isinstance(row, (list, dict))]
        keys = [*known[0]] if known and isinstance(known[0], dict) else []
        width = len(keys) or next((len(row) for row in known if isinstance(row, list) and row), 1)
        may_be_header = known and self.kind in (".csv", ".tsv")
        header = find_header(known, None if may_be_header else keys, width, **self.asked)
        if self.kind == ".tsv" and known and all(map(is_quoted, itertools.chain(*known))):
            header = header._replace(fault=f"all cells are {QUOTED}")
        elif fault := odd_letter(keys):
            header = header._replace(fault=f"a name of a column holds {fault}")
        return header, self.judge(itertools.chain(first[header.headed :], rows), keys, width, header.places)

    def judge(self, rows, keys, width, places):
        """Yields (place, cells, fault) of these rows."""
        count = None
        for place, row in rows:
            cells, fault = cells_of(row, keys, width, places, self.lists)
            if fault is None:
                count = count or len(cells)
                if len(cells) != count:
                    fault = f"{len(cells)} texts, wanted {count} as in the first row; make its lists as long"
                elif self.kind == ".tsv" and any('""' in cell and is_quoted(cell) for cell in cells):
                    fault = f"a cell {QUOTED}"                 # no other reading is likely
            yield place, cells, fault


def cells_of(row, keys, width, places, lists):
    """(the texts of a row, None), or (what is known of its cells, what is wrong with it).

    row            as rows.py yields it
    keys, width    names of the columns of rows that are dicts; how many columns a row must have
    places, lists  as a Header's and a Table's
    """
    if isinstance(row, dict) and keys:
        row = [row.get(name, "") for name in keys] + [row[name] for name in row if name not in keys]
    if isinstance(row, ValueError):
        return row, row.args[0]
    if not isinstance(row, list):
        return row, f"wanted a row of texts, found {spell(row)[:60]!r}"
    if lists == "join":
        row = ["|".join(cell) if is_texts(cell) else cell for cell in row]
    if len(row) != width:
        return row, f"{len(row)} columns, wanted {width}"
    if places:
        row = [row[i] for i in places]
    if lists == "spread":
        row = [text for cell in row for text in (cell if is_texts(cell) else [cell])]
    for cell in row:
        is_number = isinstance(cell, (int, float)) and abs(cell) <= sys.float_info.max     # no NaN
        if not is_number and not isinstance(cell, str):
            how = "; fill the cell or delete the row" if spell(cell) in ("None", "nan", "NaT", "<NA>") else ""
            return row, f"wanted texts alone, found {spell(cell)[:60]} among them{how}"
    cells = [str(cell) for cell in row]
    fault = odd_letter(cells)
    return cells, fault and f"a cell holds {fault}"


def is_texts(cell):
    """Whether this is a list of texts."""
    return isinstance(cell, list) and all(isinstance(text, str) for text in cell)


def is_quoted(cell):
    """Whether the cell is as a .csv has one between quotes."""
    return len(cell) > 1 and cell[0] == cell[-1] == '"' and '"' not in cell[1:-1].replace('""', "")


def odd_letter(cells):
    """What these texts hold that a text cannot, though JSON and rows in memory can spell it; or None."""
    text = "".join(cells)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"half of a letter, {text[error.start]!a}; mend it, or delete the row"
    return "a NUL character; delete it" if "\0" in text else None


def spell(value):
    """The value as Python spells it, or its type; there may be numbers and lists beyond Python's limits."""
    try:
        return str(value)
    except (ValueError, RecursionError):
        return type(value).__name__


def read_table(path, check=None, lists=None, *, roles=None, columns=None, names=()):
    """(header or None, Table) of a data file, or of a Table; all rows are checked, and wrong ones counted.

    check    a function of a row's cells: what is wrong with them, or None
    lists    as a Table's; with roles it is "spread"
    roles, columns, names   as find_header's; with roles the header says what is taken for what
    """
    table = Table(path, "spread" if roles else lists, roles=roles, columns=columns, names=names)
    sample, faults = Sample(), []
    table.was = table.path and stamp(table.path)
    with unchanged(table.path, table.was):
        header, rows = table.read()
        for place, cells, fault in rows:
            fault = fault or check and check(cells)
            if not fault:
                sample.add(cells)
                continue
            faults.append(f"{place}: {fault}"[:300])
            if len(faults) > MOST_FAULTS:
                break
        if faults:
            fail(f"{path} {summary(faults)}")
        if not sample.seen:
            fail(f"{path}: no rows")
        if fault := header.fault or header.texts and unlike_texts(sample.rows, header.texts):
            fail(f"{path}: {fault}")
    if header.guessed:
        say("note", f"{path}: its first row is taken as a header: {listed(header.said)}; if it is data, "
                    "write a header above it")
    table.length, table.sample = sample.seen, sample.rows
    return header.said, table


def summary(faults):
    """The first of these faults of rows, how many more there are, and where the next ones are."""
    first, *more = faults
    places = ", ".join(fault.split(":")[0] for fault in more[:5]) + (", ..." if len(more) > 5 else "")
    least = "at least " if len(more) == MOST_FAULTS else ""
    return f"{first} ({least}{len(more):,} more rows are wrong: {places})" if more else first


def describe_table(table, header):
    """600 rows (anchor sent0, positive sent1, negative hard_neg) from nli.csv"""
    if header:
        return f"{len(table):,} rows ({', '.join(header)}) from {table}"
    count = len(next(iter(table))[1])
    columns = "one column" if count == 1 else f"{count} columns"
    return f"{len(table):,} rows of {columns} (no header) from {table}"


def empty_cell(cells):
    """What is wrong with a row that has one."""
    return None if all(map(str.strip, cells)) else "an empty cell; fill it or delete the row"


def texts_of(path, most=100_000):
    """Yields the text of each row, its cells a line each, of as many rows as a vocabulary is made of; of
    wrong rows, too, for columns that are not read may hold anything."""
    _, rows = Table(path, lists="join").read()
    for _, cells, _ in itertools.islice(rows, most):
        if isinstance(cells, list):
            yield "\n".join(map(str, cells)).encode("utf-8", "replace").decode()
