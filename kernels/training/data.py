"""Tables of texts: files with the extensions .txt .csv .tsv .json .jsonl and .parquet.

read_table checks all rows of a file before a script uses them. Files are read row by row; only a .json file
is loaded as a whole and must fit in memory. An error message names the file and the wrong row.

Columns have roles, such as anchor, positive and negative. --columns assigns the roles. Without --columns, the
column names decide (query: anchor); if there are no column names, the order of the columns decides. The
roles are not guessed from texts; the user can check them in the first row, which log_first_row prints. The
first row of a .csv or .tsv is a header if it has usual column names, or if looks_like_header says so.
"""
import csv
import functools
import itertools
import json
import re
import unicodedata
from collections import Counter
from pathlib import Path

from .errors import fail, log
from .progress import progress

# {role: usual column names, as normalise_name returns them}. In REPEATABLE_ROLES, a number may follow: neg2
SENTENCE_COLUMNS = {"anchor": "anchor query question sentence sentence1 sent0 text premise".split(),
                    "positive": "positive pos sentence2 sent1 answer passage entailment".split(),
                    "negative": "negative neg hardneg hardnegative wronganswer contradiction sent2".split()}
REPEATABLE_ROLES = "negative", "candidate"
SCORED_PAIR = "sentence1", "sentence2", "score"                # column names, as normalise_name returns them
NO_TEXTS = "score similarity label goldlabel class category id idx index genre subset".split()
OTHER_COLUMNS = [*NO_TEXTS, *"""hypothesis entity positiveentity negativeentity entitytype page article
                                originentity original synonym antonym""".split()]
FIRST_ROWS = 20                                                # so many rows are read to find the columns
NUMBER = r"[-+]?(\d+(\.\d*)?|\.\d+)(e[-+]?\d+)?"               # float() would also accept 1_0, nan and inf
NAME = r"[^\W\d_][\w-]*"                                      # a column name that is in no list above
IDENTIFIER = r"[\w.:/+-]*\d[\w.:/+-]*"                          # a number, or a word with a digit
LETTER = r"[^\W\d_]"
QUOTED = "a cell is quoted as in .csv, but a .tsv has no quotes; write it as .csv, or without quotes"
SEPARATORS = {"\t": "tabs", ";": "semicolons", ",": "commas"}
csv.field_size_limit(2**24)                                    # longest cell in characters (default 131,072)


# ── file formats: readers yield (place, row), such as ("line 3", cells); cells: a list or {column: cell} ────


class RowError(Exception):
    """Says what is wrong in a row and what is expected. read_csv and others yield it instead of the row."""


def read_lines(path):
    """Yield the lines of a UTF-8 text file, and show progress."""
    size = path.stat().st_size
    with (open(path, "rb") as file,
          progress(None, f"reading {path.name}", total=size, unit="B", unit_scale=True) as bar):
        try:
            for number, line in enumerate(file, 1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if "\0" in text:                               # NUL bytes are a sign of UTF-16
                    raise UnicodeError
                bar.update(len(line))
                yield text
        except UnicodeError:
            fail(f"{path} line {number}: not UTF-8; convert it, for example with iconv")


def read_txt(path):
    """Yield ("line N", [text]) for each line of a .txt file."""
    tabs = {line.count("\t") for line in itertools.islice(read_lines(path), FIRST_ROWS)}
    if len(tabs) == 1 and 0 not in tabs:
        fail(f"{path}: its lines have columns, separated by tabs; name the file .tsv")
    for number, line in enumerate(read_lines(path), 1):
        yield f"line {number}", [line.rstrip("\r\n")]


def read_csv(path, separator, **options):
    """Yield ("line N", cells) for each row of a .csv or .tsv file. options: more arguments of csv.reader."""
    check_separator(path, [*itertools.islice(read_lines(path), FIRST_ROWS)], separator)
    reader, line = csv.reader(read_lines(path), delimiter=separator, **options), 1
    try:
        for cells in reader:
            yield f"line {line}", cells
            line = reader.line_num + 1                         # a quoted cell may contain newlines
    except csv.Error as error:
        yield f"line {line}", RowError(f'{error}; close every ", and write "" for a " inside a cell')


def check_separator(path, lines, separator):
    """Fail if another separator fits better: each line contains it equally often, or it splits the first line
    into usual column names. But never fail if each line contains `separator` equally often."""
    counts = {other: {line.count(other) for line in lines} for other in SEPARATORS}
    for other in SEPARATORS.keys() - {separator}:
        equally_many = len(counts[other]) == 1 and 0 not in counts[other] and len(lines) > 2
        has_header = lines and other in lines[0] and has_known_names(lines[0].split(other))
        if (equally_many or has_header) and not (len(counts[separator]) == 1 and 0 not in counts[separator]):
            how = {"\t": "name the file .tsv", ",": "name the file .csv"}.get(other, "write it with commas")
            fail(f"{path}: its lines seem to be separated by {SEPARATORS[other]}, expected "
                 f"{SEPARATORS[separator]}; {how}")


def read_jsonl(path):
    """Yield ("line N", JSON value) for each line of a .jsonl file."""
    for number, line in enumerate(read_lines(path), 1):
        try:
            yield f"line {number}", json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", error) if line.strip() else "the line is empty"
            yield f"line {number}", RowError(f"not JSON: {reason}")


def read_json(path):
    """Yield ("item N", item) for each item of a .json file, which must contain one list."""
    try:
        content, number, reason = json.loads("".join(read_lines(path))), 1, "expected a JSON list of rows"
    except (ValueError, RecursionError) as error:
        content, number = None, getattr(error, "lineno", 1)
        reason = f"not JSON: {getattr(error, 'msg', error)}"
    if not isinstance(content, list):
        fail(f"{path} line {number}: {reason}; if each line is a row, name the file .jsonl")
    yield from ((f"item {number}", row) for number, row in enumerate(content, 1))


def read_parquet(path):
    """Yield ("row N", {column: cell}) for each row of a .parquet file."""
    try:
        import pyarrow.parquet
    except ImportError:
        fail(f"{path}: a .parquet file needs the package pyarrow; pip install pyarrow, or write it as .jsonl")
    with open(path, "rb") as file:
        try:
            rows = (row for batch in pyarrow.parquet.ParquetFile(file).iter_batches(1000)
                    for row in batch.to_pylist())
            yield from ((f"row {number}", row) for number, row in enumerate(rows, 1))
        except pyarrow.ArrowException as error:
            fail(f"{path}: {error}; write the file again, or write it as .jsonl")


READERS = {".txt": read_txt, ".csv": functools.partial(read_csv, separator=",", strict=True),
           ".tsv": functools.partial(read_csv, separator="\t", quoting=csv.QUOTE_NONE),
           ".json": read_json, ".jsonl": read_jsonl, ".parquet": read_parquet}


# ── tables ──────────────────────────────────────────────────────────────────────────────────────────────────


class Table:
    """The rows of a data file. Iterating yields (place, cells), such as ("line 3", ["A man eats."]).

    path        path of the file
    roles       {role: usual column names}; columns are put in the order of the roles. None: no roles
    columns     columns to read, by name or by number from 1, in the order of the roles; None: all columns
    names       column names: if the first row of a .csv or .tsv contains all of them, the row is a header
    join        True: a cell that is a list becomes one text, joined by |. False: the entries of the list
                are several positives or negatives of the row (see spread)
    any_width   True: rows may differ in the number of their negatives, which may be 0
    flag        the flag by which the user can choose columns, for messages
    Attributes:
    header      names of the columns that are read, with their roles in front ("anchor sent0"); None: no names
    cell_roles  role of each column that is read, such as "anchor"; not set if the columns have no roles
    """

    def __init__(self, path, roles=None, columns=None, names=(), join=False, any_width=False,
                 flag="--columns"):
        self.path, self.roles, self.columns, self.join = Path(path), roles, columns, join
        self.names, self.any_width, self.flag = names, any_width, flag
        self.header = self.keys = self.indices = self.header_row = self.count = self.width_of_rows = None
        self.is_unusual = False
        self.kind = self.path.suffix.lower()
        if self.kind not in READERS:
            fail(f"{path}: expected a name that ends in {', '.join(READERS)}")
        self.find_columns()

    def __len__(self):
        return self.count

    def __iter__(self):
        for place, row in self.raw_rows():
            yield from ((place, cells) for cells in self.convert(row))

    def raw_rows(self):
        """Yield (place, row) for each row after the header. A row is a list, a dict, or a RowError."""
        return itertools.islice(READERS[self.kind](self.path), 0 if self.header_row is None else 1, None)

    def find_columns(self):
        """Read the first rows, and set keys (the column names if rows are dicts), header, indices
        (positions of the columns to read) and others. Fail if the columns do not fit the roles."""
        first = [row for _, row in itertools.islice(self.raw_rows(), FIRST_ROWS)]
        first = [row for row in first if isinstance(row, (list, dict)) and row]
        if not first:
            return
        self.width, found = len(first[0]), []
        if self.kind == ".tsv" and any(all(map(is_quoted, column)) for column in zip(*first[1:])):
            fail(f"{self.path}: {QUOTED}")
        if isinstance(first[0], dict):
            self.keys = found = [*first[0]]
        elif self.kind in (".csv", ".tsv"):
            wanted = {normalise_name(name) for name in self.columns or self.names if not name.isdecimal()}
            has_all = wanted and {*map(normalise_name, first[0])} >= wanted
            is_usual = has_all or has_known_names(first[0], self.roles or SENTENCE_COLUMNS)
            if is_usual or looks_like_header(first):
                found = self.set_header(first[0], is_unusual=not is_usual)
        if self.columns:
            self.select_columns(found)
        elif self.roles and self.is_unusual and not any(role_of(name, self.roles) for name in found):
            self.header = [f"{role_by_position(i, self.roles)} {name}" for i, name in enumerate(found)]
        elif self.roles and found:
            self.order_by_role(found)
        elif not self.roles:
            self.header = found or None
        if self.roles:
            names = self.header or [role_by_position(i, self.roles) for i in range(self.width)]
            self.cell_roles = [name.split()[0] for name in names]

    def set_header(self, row, is_unusual=True):
        """Read this row, the first one, as column names. Return the names. is_unusual: see header_note."""
        self.header_row, self.is_unusual = row, is_unusual
        return [name.strip() for name in row]

    def select_columns(self, found):
        """Set header and indices from --columns. found: names of all columns, or [] if they have no names."""
        names = [normalise_name(name) for name in found]
        index_of = {str(i + 1): i for i in range(self.width)}
        index_of |= {name: i for i, name in enumerate(names) if names.count(name) == 1}
        for column in self.columns:
            if normalise_name(column) not in index_of:
                expected = f"one of {join_names(found)}, or " if found else ""
                fail(f"{self.path}: no column {column[:40]}; expected {expected}a number from 1 to "
                     f"{self.width} in {self.flag}")
        self.indices = [index_of[normalise_name(column)] for column in self.columns]
        if len({*self.indices}) < len(self.indices):
            fail(f"{self.path}: {self.flag} {' '.join(self.columns)}: a column occurs twice")
        self.header = [found[i] if found else f"column {i + 1}" for i in self.indices]
        if self.roles:
            self.header = [f"{role_by_position(i, self.roles)} {name}" for i, name in enumerate(self.header)]

    def order_by_role(self, names):
        """Set header and indices so that the columns are in the order of the roles. Fail if a column has no
        role, if a role is missing, or if a role outside REPEATABLE_ROLES is doubled."""
        order, found = list(self.roles), [role_of(name, self.roles) for name in names]
        unknown = [name or "(no name)" for name, role in zip(names, found) if role is None]
        doubled = [role for role in order if role not in REPEATABLE_ROLES and found.count(role) > 1]
        missing = [role for role in order[: len(set(found))] if role not in found]
        error = None
        if unknown:
            error = f"columns not known as {', '.join(order[:-1])} or {order[-1]}: {join_names(unknown)}"
        elif doubled:
            same = [name for name, role in zip(names, found) if role == doubled[0]]
            error = f"{len(same)} columns are {doubled[0]}: {join_names(same)}"
        elif missing:
            error = f"no {missing[0]} among columns {join_names(names)}"
        if error:
            fail(f"{self.path}: {error}; choose columns by {self.flag}, by name or number, in the order "
                 f"{', '.join(order)}" + (f", or {', '.join(self.names)}" if self.names else ""))
        numbers = [int(re.search(r"\d*$", name.strip())[0] or 0) for name in names]       # neg2 before neg10
        self.indices = sorted(range(len(names)), key=lambda i: (order.index(found[i]), numbers[i]))
        self.header = [f"{found[i]} {names[i]}" for i in self.indices]

    def convert(self, row):
        """Return one row of the data as a list of rows of texts: one row for each positive if the row has a
        list of positives, else one row. Raise RowError if the row is wrong."""
        if isinstance(row, RowError):
            raise row
        if isinstance(row, dict) and self.keys:
            if unknown := row.keys() - {*self.keys}:
                raise RowError(f"column {min(unknown)!r:.40} is not in the first row")
            row = [row.get(name, "") for name in self.keys]
        if not isinstance(row, list) or not row:
            raise RowError(f"expected a row of texts, found {str(row)[:60]!r}")
        if row == self.header_row:
            raise RowError("equal to the header, the first row; delete it")
        if len(row) != self.width:
            raise RowError(f"{len(row)} columns, expected {self.width}")
        row = row if self.indices is None else [row[i] for i in self.indices]
        if self.join:
            row = ["|".join(map(str, cell)) if isinstance(cell, list) else cell for cell in row]
        rows = [row] if not self.roles else self.spread(row)
        return [[to_text(cell, self.kind) for cell in cells] for cells in rows]

    def spread(self, row):
        """Return one row for each positive of `row`, whose cells may be lists of positives and negatives.
        Each of these rows has the anchor and all negatives of `row`."""
        first_role = self.cell_roles[0]
        if {*self.cell_roles} == {first_role}:
            return [row]
        texts = {role: [] for role in self.roles}
        for role, cell in zip(self.cell_roles, row):
            if isinstance(cell, list) and role != first_role:  # to_text refuses an anchor that is a list
                texts[role] += cell
            else:
                texts[role].append(cell)
        needed = self.cell_roles[:2] if self.any_width else self.cell_roles
        if not all(texts[role] for role in needed):
            raise RowError("an empty list; fill it or delete the row")
        anchor, positives, *others = texts.values()
        others = [*itertools.chain(*others)]
        rows = [[*anchor, positive, *others] for positive in positives]
        self.width_of_rows = self.width_of_rows or len(rows[0])
        if len(rows[0]) != self.width_of_rows and not self.any_width:
            raise RowError(f"{len(rows[0])} texts, expected {self.width_of_rows} as in the first row")
        return rows


def is_quoted(cell):
    return len(cell) > 1 and cell[0] == cell[-1] == '"'


def to_text(cell, kind):
    """Return a cell as text. Raise RowError if the cell is neither a text nor a number."""
    if isinstance(cell, str):
        if kind == ".tsv" and '""' in cell and is_quoted(cell):
            raise RowError(QUOTED)
        if not cell.isascii() and re.search("[\ud800-\udfff]", cell):
            raise RowError("an invalid character, half of a surrogate pair; correct it, or delete the row")
        return cell
    if isinstance(cell, (int, float)) and re.fullmatch(NUMBER, str(cell)):
        return str(cell)
    raise RowError(f"expected only texts, found {str(cell)[:60]!r}; fill the cell or delete the row")


def read_table(path, check=None, **options):
    """Check all rows of a data file, and return (header, Table). Fail if a row is wrong.

    check     function: cells of a row → error message, or None if the row is right
    options   further arguments of Table
    """
    table, count, errors = Table(path, **options), 0, []
    if table.header and not table.roles and not table.columns:
        for name, times in Counter(map(normalise_name, table.header)).items():
            if times > 1:
                fail(f"{path}: {times} columns are called {name}: {join_names(table.header)}; rename them")
    for place, row in table.raw_rows():
        try:
            rows = table.convert(row)
            for error in filter(None, map(check, rows) if check else ()):
                raise RowError(error)
            count += len(rows)
        except RowError as error:
            errors.append(f"{place}: {error}"[:300])
    if errors:
        more = f" ({len(errors) - 1:,} more rows are wrong)" if len(errors) > 1 else ""
        fail(f"{path} {errors[0]}{more}")
    if not count:
        fail(f"{path}: no rows")
    table.count = count
    return table.header, table


# ── names of columns ────────────────────────────────────────────────────────────────────────────────────────


def normalise_name(name):
    """Return a column name in lower case, without spaces, dashes and underscores, in Unicode's form NFC."""
    return re.sub(r"[\s_-]+", "", unicodedata.normalize("NFC", name.casefold()))


def role_of(name, roles):
    """Return the role that has this name among its usual column names, or None."""
    name = normalise_name(name)
    return next((role for role, names in roles.items()
                 if name in names or role in REPEATABLE_ROLES and name.rstrip("0123456789") in names), None)


def role_by_position(index, roles):
    """Return the role of column number `index`, from 0. Columns after the last role have the last role."""
    return list(roles)[min(index, len(roles) - 1)]


def has_known_names(row, roles=SENTENCE_COLUMNS):
    """Return whether at least two cells of a row, or its only cell, are usual column names. An empty first
    cell is ignored, because pandas writes an empty name for its index column."""
    row = row[1:] if row and not row[0].strip() else row
    known = sum(normalise_name(cell) in OTHER_COLUMNS or role_of(cell, roles) is not None for cell in row)
    return len(row) > 0 and known >= min(2, len(row))


def looks_like_header(rows):
    """Return whether the first of these rows looks like a header: its cells are different words (see NAME);
    no column repeats its first cell; and in some column, no cell below the first is such a word."""
    start = int(bool(rows[0]) and not rows[0][0].strip())      # pandas writes an empty name for its index
    columns = [*zip(*(row[start:] for row in rows))]
    are_names = [[bool(re.fullmatch(NAME, cell.strip())) for cell in column] for column in columns]
    is_new = len({*rows[0]}) == len(rows[0]) and not any(name in others for name, *others in columns)
    return is_new and all(is_name for is_name, *_ in are_names) and any(
        others and not any(others) for _, *others in are_names)


def join_names(names):
    """Return the names joined by commas, shortened to about 200 characters."""
    text = ", ".join(names)
    return text if len(text) <= 200 else f"{text[:200]} ..."


def describe_table(table, header):
    """Return a text such as "600 rows (anchor sent0, positive sent1, negative hard_neg) from nli.csv"."""
    if header:
        return f"{len(table):,} rows ({', '.join(header)}) from {table.path}"
    count = len(next(iter(table))[1])
    columns = "one column" if count == 1 else f"{count} columns"
    return f"{len(table):,} rows of {columns} (no header) from {table.path}"


def log_first_row(table):
    """Print the first row with the role of each cell, so that the user can check the roles. Fail if a column
    has no texts. Columns given by --columns, or by --dev-columns with usual names, are not checked."""
    cells, names = next(iter(table))[1], table.cell_roles
    more = names[-1:] * (len(cells) - len(names))              # one column may contain lists of negatives
    usual = [role_of(name.partition(" ")[2], table.roles) for name in table.header or ()]
    if not table.columns or table.flag != "--columns" and usual != names:
        refuse_identifiers(table, range(len(cells)))
    log("first", show_cells(names + more, cells) + header_note(table))


def refuse_identifiers(table, columns):
    """Fail if one of `columns` (indices) has no texts: its name says so, or at least half of its first 100
    cells are numbers, identifiers such as q12, or cells without a letter. It also has no texts if these cells
    (at least 20) are single words, and each word occurs ten times on average: these are labels."""
    rows = [cells for _, cells in itertools.islice(table, 100)]
    names = [normalise_name(name.partition(" ")[2]) for name in table.header or ()]   # drop the role in front
    for i in columns:
        cells = [row[i].strip() for row in rows if i < len(row)]
        others = [cell for cell in cells if re.fullmatch(IDENTIFIER, cell) or not re.search(LETTER, cell)]
        are_labels = len(cells) >= max(20, 10 * len({*cells})) and not any(" " in cell for cell in cells)
        says_so = table.roles and i < len(names) and names[i] in NO_TEXTS
        if 2 * len(others) >= len(cells) or are_labels or says_so:
            fail(f"{table.path}: column {i + 1} has no texts, but numbers, labels or identifiers, such as "
                 f"{(others or cells)[0][:40]}; choose columns of texts by {table.flag}, by name or number")


def are_scores(cells, name=""):
    """Return whether a column has scores. This is true if its name says so, and also if at least half of
    its non-empty cells are numbers, unless its name is usual for negatives."""
    filled = [cell.strip() for cell in cells if cell.strip()]
    are_numbers = 2 * sum(re.fullmatch(NUMBER, cell) is not None for cell in filled) >= len(filled) > 0
    is_negative = role_of(name, SENTENCE_COLUMNS) == "negative"
    return normalise_name(name) in NO_TEXTS or are_numbers and not is_negative


def header_note(table):
    """Return a note for the line of the first row: the row above it, if it was read as an unusual header."""
    return f"  (after the header {', '.join(table.header_row)[:80]})" if table.is_unusual else ""


def show_cells(names, cells):
    """Return a text such as 'anchor "A man eats."  positive "He eats."'; long cells are shortened."""
    shown = (cell if len(cell) <= 40 else f"{cell[:37]}..." for cell in cells)
    return "  ".join(f'{name} "{text}"' for name, text in zip(names, shown))


def empty_cell(cells):
    """Return an error message if a cell is empty, else None. read_table takes this function as `check`."""
    return None if all(map(str.strip, cells)) else "an empty cell; fill it or delete the row"


def iter_texts(path, max_rows=100_000):
    """Yield one text for each of the first `max_rows` rows: all cells of the row, joined by newlines. --model
    scratch builds its vocabulary from these texts. Rows are not checked, because columns that the script does
    not read may contain anything."""
    for _, row in itertools.islice(Table(path).raw_rows(), max_rows):
        if isinstance(row, (dict, list)):
            cells = row.values() if isinstance(row, dict) else row
            texts = ("|".join(map(str, cell)) if isinstance(cell, list) else str(cell) for cell in cells)
            yield "\n".join(texts).encode("utf-8", "replace").decode()
