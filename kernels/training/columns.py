"""The columns of a table: whether the first row is a header, and which role each column has."""
import re
from collections import Counter
from typing import NamedTuple

# {role: its usual column names}, as normalise_name returns them. For REPEATABLE_ROLES a number may follow.
SENTENCE_COLUMNS = {"anchor": "anchor query question sentence sentence1 sent0 text premise".split(),
                    "positive": "positive pos sentence2 sent1 answer passage entailment".split(),
                    "negative": "negative neg hardneg hardnegative contradiction sent2".split()}
RANKING_COLUMNS = {"text": SENTENCE_COLUMNS["anchor"] + "document source article".split(),
                   "reference": SENTENCE_COLUMNS["positive"] + "reference summary target".split(),
                   "candidate": SENTENCE_COLUMNS["negative"] + "candidate candidates cand".split()}
REPEATABLE_ROLES = "negative", "candidate"
OTHER_COLUMNS = """hypothesis score similarity label goldlabel id idx index genre subset
                   entity positiveentity negativeentity entitytype page article originentity
                   original synonym antonym synonymwords antonymwords""".split()
# A column name: one to three words of letters and digits, at most 30 characters.
NAME = re.compile(r"(?=.{1,30}$)\s*[^\W\d_]\w*([ ./-]\w+){0,2}\s*")
IDENTIFIER = re.compile("[a-z][a-z0-9_]*")                     # snake_case


class Header(NamedTuple):
    """The columns of a table, found from its first rows.

    has_header     whether the first row of a .csv or .tsv is a header
    display_names  column names for messages, with their roles if any; None: the columns have no names
    indices        indices of the columns to read, in this order; None: all columns
    error          why the columns cannot be read, or None
    is_guess       whether the first row only looks like a header, without a well-known column name
    """
    has_header: bool
    display_names: list | None = None
    indices: list | None = None
    error: str | None = None
    is_guess: bool = False


def find_header(rows, keys, width, roles=None, columns=None, names=()):
    """Return the Header of a table.

    rows     the first rows
    keys     column names, or [] if the columns have none; None: the first row may be a header
    width    number of columns
    roles    {role: usual column names}: read the columns in the order of the roles; None: read all columns
    columns  names or numbers of the columns to read instead; with roles they come from --columns
    names    the first row is a header if it has all of these names
    """
    has_header, is_known = False, True
    if keys is None:
        names = {normalise_name(name) for name in names or columns or () if not name.isdecimal()}
        has_all = bool(names) and {*map(normalise_name, rows[0])} >= names
        is_known = has_all or has_known_names(rows[0], roles or SENTENCE_COLUMNS)
        has_header = is_known or looks_like_header(rows, not roles)
        keys = [name.strip() for name in rows[0]] if has_header else []
    header = Header(has_header, keys or None, is_guess=not is_known and has_header)
    if columns:
        return select_columns(header, columns, width, roles)
    if not roles:
        doubled = first_duplicate(map(normalise_name, keys))
        return header._replace(error=doubled and f"two columns are called {doubled}, in {join_names(keys)}")
    return order_by_role(header, roles) if keys else header


def select_columns(header, columns, width, roles):
    """Return the Header with the indices of --columns."""
    names = [normalise_name(name) for name in header.display_names or ()]
    index_of = {str(i + 1): i for i in range(width)}
    index_of |= {name: i for i, name in enumerate(names) if names.count(name) == 1}
    indices = [index_of.get(normalise_name(column)) for column in columns]
    if None in indices:
        expected = f"one of {', '.join(header.display_names)}"[:150] + ", or " if names else ""
        unknown = columns[indices.index(None)][:40]
        error = f"--columns {unknown}: expected {expected}a number from 1 to {width}"
        if not roles:                                          # the script names the columns, not the user
            error = f"no column {unknown} among columns {join_names(header.display_names or ['(no header)'])}"
        return header._replace(display_names=None, error=error)
    all_names = header.display_names or [f"column {i + 1}" for i in range(width)]
    shown = [all_names[index] for index in indices]
    if roles:
        shown = [f"{role_by_position(i, roles)} {name}" for i, name in enumerate(shown)]
    return header._replace(display_names=shown, indices=indices)


def order_by_role(header, roles):
    """Return the Header with its columns in the order of their roles, or with an error."""
    names, order = header.display_names, list(roles)
    found = [role_of(name, roles) for name in names]
    indices = sorted((i for i, role in enumerate(found) if role), key=lambda i: order.index(found[i]))
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
        error += f"; choose columns by --columns, by name or number, in the order {', '.join(order)}"
    if error and header.is_guess:
        error += "; if that row is data, write a header above it"
    shown = [f"{found[i]} {names[i]}" for i in indices]
    return header._replace(display_names=shown, indices=indices, error=error)


def join_names(names):
    """Return the names joined by commas, shortened to about 200 characters."""
    text = ", ".join(names)
    return text if len(text) <= 200 else f"{text[:200]} ..."


def first_duplicate(names):
    """Return the repr() of the first name that occurs more than once, or None."""
    doubled = [name for name, times in Counter(names).items() if times > 1]
    return repr(doubled[0][:40]) if doubled else None


def normalise_name(name):
    """Return the name in lower case, without spaces, dashes and underscores."""
    return re.sub(r"[\s_-]+", "", name.casefold())


def role_of(name, roles):
    """Return the role of a column with this name, or None."""
    name = normalise_name(name)
    return next((role for role, names in roles.items()
                 if name in names or role in REPEATABLE_ROLES and name.rstrip("0123456789") in names), None)


def role_by_position(index, roles):
    """Return the role of a column without a name. Columns after the last role have that role, too."""
    return list(roles)[min(index, len(roles) - 1)]


def without_index(row):
    """Return the row without an empty first cell, which pandas writes as the name of its index."""
    return row[1:] if row and not row[0].strip() else row


def has_known_names(row, roles):
    """Return whether at least two cells of a row, or its only cell, are well-known column names."""
    row = without_index(row)
    known = sum(normalise_name(cell) in OTHER_COLUMNS or role_of(cell, roles) is not None for cell in row)
    return known >= min(2, len(row)) > 0


def looks_like_header(rows, may_be_words):
    """Return whether the first row looks like a header.

    Its cells are distinct and look like column names, few rows below look like that, and no cell occurs again
    in its column.

    may_be_words   the data may be single words; then the rows below do not count if the first row has only
                   snake_case names
    """
    first, below = without_index(rows[0]), rows[1:]
    if not first or first_duplicate(map(normalise_name, first)) or not all(map(NAME.fullmatch, first)):
        return False
    if may_be_words and all(map(IDENTIFIER.fullmatch, rows[0])):
        return True
    similar = sum(bool(row) and all(map(NAME.fullmatch, row)) for row in below)
    # compared from the right, because `first` may lack the cell of an index on the left
    repeated = any(a == b for row in below for a, b in zip(first[::-1], row[::-1]))
    return 4 * similar < len(below) and not repeated
