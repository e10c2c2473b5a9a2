"""Tables of texts, from data files or memory: checked once, then read row by row. Errors name the row."""
import functools
import hashlib
import itertools
import math
import os
import sys
from pathlib import Path

from .cli import fail, log
from .columns import (  # noqa: F401 - other modules import some of these names from here
    RANKING_COLUMNS,
    SENTENCE_COLUMNS,
    find_header,
    join_names,
    normalise_name,
    role_by_position,
)
from .files import check_unchanged, file_signature
from .in_memory import rows_of
from .rows import READERS

FILE_EXTENSIONS = tuple(READERS)
HEADER_ROWS = 21                                               # first rows, which tell if there is a header
MAX_COUNTED_ERRORS = 100_000
QUOTED = "quoted as in .csv, but a .tsv has no quotes; write it as .csv, or without quotes"


class Table:
    """The rows of a data file, or rows in memory. Iterating yields (location, cells) for each row.

    location is the name of the row in messages, such as "line 7". Each iteration reads the file again, so the
    file does not have to fit in memory. After read_table has checked a file, the file must not change.

    data            a path, another Table, or rows in memory (see in_memory.rows_of)
    lists           a list of texts in a JSON cell: "join": one text, separated by |; "spread": one column per
                    text; None: an error
    header_options  roles, columns and names, as for columns.find_header

    path            path of the file, or None for rows in memory
    signature       files.file_signature when the file was checked, or None
    """

    def __init__(self, data, lists=None, **header_options):
        self.path, self.rows, self.lists, self.header_options = None, None, lists, header_options
        if isinstance(data, Table):
            self.path, self.rows = data.path, data.rows
        elif isinstance(data, (str, os.PathLike)):
            self.path = Path(data)
        else:
            self.rows = rows_of(data)
        self.kind = self.path and Path(self.path.name.lower().removesuffix(".gz")).suffix
        if self.path and self.kind not in READERS:
            *others, last = FILE_EXTENSIONS
            fail(f"{data}: expected a name that ends in {', '.join(others)} or {last}; .gz may follow")
        self.length = None if self.path else len(self.rows)
        self.signature = None

    def __len__(self):
        return self.length

    def __iter__(self):
        with check_unchanged(self.path, self.signature):
            for location, cells, error in self.read()[1]:
                if error:
                    fail(f"{self} {location}: {error}")
                yield location, cells

    def __str__(self):
        return str(self.path) if self.path else f"{len(self.rows):,} rows in memory, sha1 {self.digest}"

    @functools.cached_property
    def digest(self):
        """The checksum of rows in memory, which --resume compares."""
        digest = hashlib.sha1()
        for row in self.rows:
            digest.update(safe_str(row).encode("utf-8", "surrogatepass"))
        return digest.hexdigest()[:12]

    def read(self):
        """Return the Header, and an iterator over (location, cells, error or None)."""
        if self.path:
            rows = READERS[self.kind](self.path)
        else:
            rows = ((f"row {i}", row) for i, row in enumerate(self.rows, 1))
        first = [*itertools.islice(rows, HEADER_ROWS)]
        known = [row for _, row in first if isinstance(row, (list, dict))]
        keys = [*known[0]] if known and isinstance(known[0], dict) else []
        width = len(keys) or next((len(row) for row in known if isinstance(row, list) and row), 1)
        may_be_header = known and self.kind in (".csv", ".tsv")
        header = find_header(known, None if may_be_header else keys, width, **self.header_options)
        if self.kind == ".tsv" and known and all(map(is_quoted, itertools.chain(*known))):
            header = header._replace(error=f"all cells are {QUOTED}")
        elif error := invalid_character(keys):
            header = header._replace(error=f"a column name contains {error}")
        rows = itertools.chain(first[1:] if header.has_header else first, rows)
        return header, self.check_rows(rows, keys, width, header.indices)

    def check_rows(self, rows, keys, width, indices):
        """Yield (location, cells, error or None) for these rows."""
        count = None
        for location, row in rows:
            cells, error = cells_of(row, keys, width, indices, self.lists)
            if error is None:
                count = count or len(cells)
                if len(cells) != count:
                    error = (f"{len(cells)} texts, expected {count} as in the first row; use lists of equal "
                             "length")
                elif self.kind == ".tsv" and any('""' in cell and is_quoted(cell) for cell in cells):
                    error = f"a cell is {QUOTED}"              # "" inside quotes is hardly ever plain text
            yield location, cells, error


def cells_of(row, keys, width, indices, lists):
    """Return (texts of a row, None), or (the row as far as it was read, error).

    row      as rows.py yields it
    keys     column names, if rows are dicts
    width    number of columns that a row must have
    indices  Header.indices
    lists    as for Table
    """
    if isinstance(row, dict) and keys:
        row = [row.get(name, "") for name in keys] + [row[name] for name in row if name not in keys]
    if isinstance(row, ValueError):
        return row, row.args[0]
    if not isinstance(row, list):
        return row, f"expected a row of texts, found {safe_str(row)[:60]!r}"
    if lists == "join":
        row = ["|".join(cell) if is_texts(cell) else cell for cell in row]
    if len(row) != width:
        return row, f"{len(row)} columns, expected {width}"
    if indices:
        row = [row[i] for i in indices]
    if lists == "spread":
        row = [text for cell in row for text in (cell if is_texts(cell) else [cell])]
    for cell in row:
        is_number = isinstance(cell, (int, float)) and abs(cell) <= sys.float_info.max     # no NaN
        if not is_number and not isinstance(cell, str):
            is_missing = safe_str(cell) in ("None", "nan", "NaT", "<NA>")
            how = "; fill the cell or delete the row" if is_missing else ""
            return row, f"expected only texts, found {safe_str(cell)[:60]}{how}"
    cells = [str(cell) for cell in row]
    error = invalid_character(cells)
    return cells, error and f"a cell contains {error}"


def is_texts(cell):
    """Return whether a cell is a list of texts."""
    return isinstance(cell, list) and all(isinstance(text, str) for text in cell)


def is_quoted(cell):
    """Return whether a cell is enclosed in quotes, as in a .csv."""
    return len(cell) > 1 and cell[0] == cell[-1] == '"' and '"' not in cell[1:-1].replace('""', "")


def invalid_character(cells):
    """Return an error if the texts contain NUL or half of a surrogate pair (possible in JSON); or None."""
    text = "".join(cells)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"an incomplete character, {text[error.start]!a}; correct it, or delete the row"
    return "a NUL character; delete it" if "\0" in text else None


def safe_str(value):
    """Return str(value), or its type if Python cannot convert it: huge integers, deeply nested lists."""
    try:
        return str(value)
    except (ValueError, RecursionError):
        return type(value).__name__


def read_table(path, check=None, lists=None, *, roles=None, columns=None, names=()):
    """Check all rows of a data file or Table, and return (column names or None, Table). Fail on wrong rows.

    check    function of a row's cells: returns an error message, or None
    lists    as for Table; with roles it is "spread"
    roles, columns, names   as for columns.find_header; with roles the names include each column's role
    """
    table = Table(path, "spread" if roles else lists, roles=roles, columns=columns, names=names)
    count, errors = 0, []
    table.signature = table.path and file_signature(table.path)
    with check_unchanged(table.path, table.signature):
        header, rows = table.read()
        if columns and header.error:                           # `check` would see other columns
            fail(f"{path}: {header.error}")
        for location, cells, error in rows:
            error = error or check and check(cells)
            if not error:
                count += 1
                continue
            errors.append(f"{location}: {error}"[:300])
            if len(errors) > MAX_COUNTED_ERRORS:
                break
        if errors:
            fail(f"{path} {summarise(errors)}")
        if not count:
            fail(f"{path}: no rows")
        if header.error:
            fail(f"{path}: {header.error}")
    if header.is_guess:
        names = join_names(header.display_names)
        log("note", f"{path}: its first row is read as a header: {names}; if it is data, write a header "
                    "above it")
    table.length = count
    return header.display_names, table


def summarise(errors):
    """Return the first error, the number of other wrong rows, and where the next ones are."""
    first, *more = errors
    locations = ", ".join(error.split(":")[0] for error in more[:5]) + (", ..." if len(more) > 5 else "")
    at_least = "at least " if len(more) == MAX_COUNTED_ERRORS else ""
    return f"{first} ({at_least}{len(more):,} more rows are wrong: {locations})" if more else first


def describe_table(table, header):
    """Return a text such as "600 rows (anchor sent0, positive sent1, negative hard_neg) from nli.csv"."""
    if header:
        return f"{len(table):,} rows ({', '.join(header)}) from {table}"
    count = len(next(iter(table))[1])
    columns = "one column" if count == 1 else f"{count} columns"
    return f"{len(table):,} rows of {columns} (no header) from {table}"


def log_first_row(table, header, roles):
    """Print the first row with the role of each cell, so that a user sees what is trained."""
    cells = next(iter(table))[1]
    names = [name.split()[0] for name in header or [role_by_position(i, roles) for i in range(len(cells))]]
    names += names[-1:] * (len(cells) - len(names))            # a list of hard negatives has one name
    log("first", show_cells(names, cells))


def show_cells(names, cells):
    """Return a text such as 'anchor "A man eats."  positive "He eats."'; long cells are shortened."""
    shown = (cell if len(cell) <= 40 else f"{cell[:37]}..." for cell in cells)
    return "  ".join(f'{name} "{text}"' for name, text in zip(names, shown))


def empty_cell(cells):
    """Return an error message if a cell is empty, else None: a `check` of read_table."""
    return None if all(map(str.strip, cells)) else "an empty cell; fill it or delete the row"


def read_numbers(path, columns):
    """Return the numbers in these columns of a data file or Table, one list per row. Fail on other cells."""
    _, table = read_table(path, not_a_number, columns=columns)
    return [[float(cell) for cell in cells] for _, cells in table]


def not_a_number(cells):
    """Return an error message if a cell is not a finite number, else None: a `check` of read_table."""
    for cell in cells:
        try:
            is_finite = math.isfinite(float(cell))
        except ValueError:
            is_finite = False
        if not is_finite:
            return f"found {cell[:40]!r}, expected a number"
    return None


def read_groups(path, column, min_rows=1):
    """Return {text: indices of the rows with this text in the column} for a data file or Table. Fail if a
    text has fewer than `min_rows` rows."""
    _, table = read_table(path, empty_cell, columns=[column])
    groups = {}
    for row, (_, cells) in enumerate(table):
        groups.setdefault(cells[0], []).append(row)
    for text, rows in groups.items():
        if len(rows) < min_rows:
            fail(f"{path}: {column} {text[:40]!r} has {len(rows)} rows, expected at least {min_rows}")
    return groups


def iter_texts(path, max_rows=100_000):
    """Yield one text, its cells joined by newlines, for each of at most `max_rows` rows.

    --model scratch builds its vocabulary from these texts. Wrong rows are included, because columns that the
    script does not read may contain anything.
    """
    _, rows = Table(path, lists="join").read()
    for _, cells, _ in itertools.islice(rows, max_rows):
        if isinstance(cells, list):
            yield "\n".join(map(str, cells)).encode("utf-8", "replace").decode()
