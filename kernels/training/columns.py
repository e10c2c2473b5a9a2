"""Columns: whether a first row names them, and which is anchor, positive or hard negative."""
import re
import shlex
from collections import Counter
from typing import NamedTuple

from .looks import no_texts

# Names as plain leaves them. A number may follow those of a role that REPEATED has.
SENTENCES = {"anchor": "anchor query question sentence sentence1 sent0 text premise".split(),
             "positive": "positive pos sentence2 sent1 answer passage entailment".split(),
             "negative": "negative neg hardneg hardnegative contradiction sent2".split()}
RANKING = {"text": SENTENCES["anchor"] + "document source article".split(),
           "reference": SENTENCES["positive"] + "reference summary target".split(),
           "candidate": SENTENCES["negative"] + "candidate candidates cand".split()}
REPEATED = "negative", "candidate"
NO_TEXT = "score similarity label goldlabel id idx index genre subset".split()
OTHERS = """hypothesis score similarity label goldlabel id idx index genre subset
            entity positiveentity negativeentity entitytype page article originentity
            original synonym antonym synonymwords antonymwords""".split()


class Header(NamedTuple):
    """What was found out of the first rows.

    headed  whether the first row of a .csv or .tsv names columns
    said    what a person is told of them: the header, or what each column is taken for; None: no header
    places  which columns are read, in this order; None: all
    fault   why they cannot be read, or None
    guessed whether the header was recognised by its looks alone, not by a name that is known
    texts   places of columns without names that should hold texts, unlike those of words in cline.py
    """
    headed: bool
    said: list | None
    places: list | None = None
    fault: str | None = None
    guessed: bool = False
    texts: list | tuple = ()


def any_names(rows, keys, names=()):
    """The Header of all columns, whatever their names. rows: the first of a file; keys: a header that is
    certain, [] where there is none, None where the first row may be one, as where it has these names."""
    header, headed = keys, False
    if keys is None:
        different = len(set(rows[0])) == len(rows[0])
        small = different and all(re.fullmatch("[a-z][a-z0-9_]*", name) for name in rows[0])
        known = has_all(rows[0], names) or is_known(rows[0])
        headed = bool(rows[0]) and (small or known or looks_like_names(rows))
        header = [name.strip() for name in rows[0]] if headed else []
    doubled, fault = twice(map(plain, header)), None
    if doubled:
        fault = f"two columns of one name, {doubled}, in {listed(header)}"
    elif headed and not header[0] and not has_all(header, names):
        fault = INDEX
    return Header(headed, header or None, None, fault, headed and not known)


def by_role(rows, keys, roles=SENTENCES, columns=None):
    """The Header of columns in the order of their roles {role: [names]}: by --columns, by the names of a
    header, or as they stand where there is none. rows, keys as in any_names."""
    named, headed, known = [name for name in columns or [] if not is_number(name)], False, True
    if keys is None and rows[0]:
        known = has_all(rows[0], named) or is_known(rows[0], roles)
        headed = known or looks_like_names(rows)
    header = keys or (headed and [name.strip() for name in rows[0]]) or []
    if columns:
        found = chosen(rows, keys is None, headed, header, list(roles), columns)
        return found._replace(guessed=headed and not known)
    if not header:
        first, order = next((row for row in rows if isinstance(row, list)), []), list(roles)
        texts = [i for i in range(len(first)) if not order[min(i, len(order) - 1)].endswith("_words")]
        return Header(False, None, texts=texts if all(not isinstance(cell, list) for cell in first) else [])
    order, found = list(roles), [role_of(name, roles) for name in header]
    places = sorted((i for i in range(len(header)) if found[i]), key=lambda i: order.index(found[i]))
    said, fault = [f"{found[i]} {header[i]}" for i in places], fault_of(header, found, order)
    if fault:
        fault += f"; {suggestion(header, found, order, rows[headed:])}"
        if not known:
            fault += "; if that row is data, write a header above it"
    return Header(headed, said, places or None, fault, not known)


def unlike_texts(sample, places):
    """Why the columns at these places are not all texts, and which --columns to give instead; or None.

    sample      a Table's
    """
    found = no_texts([*zip(*sample)])
    told = ", ".join(f"column {i + 1} holds {found[i]}" for i in places if i in found)
    if not told:
        return None
    spelt = lambda some: " ".join([str(i + 1) for i in some][:9])
    texts = [i for i in places if i not in found]
    how = f"number those to read: --columns {spelt(texts)} ({spelt(places)}, if all are texts)"
    return f"{told[:300]}; {how if texts else 'wanted texts'}"


def suggestion(header, found, order, rows):
    """Which --columns to give where the names of a header do not say it: those that hold text, each with the
    role that it would get. A column whose name is known keeps its role."""
    unknown = [i for i, role in enumerate(found) if role is None and holds_text(i, header, rows)]
    places = []
    for role in order[:-1]:
        own = [i for i, name in enumerate(found) if name == role]
        places += own or unknown[:1]
        if not own:
            unknown = unknown[1:]
    places = (places + [i for i, role in enumerate(found) if role == order[-1]] + unknown)[:9]
    roles = [order[min(i, len(order) - 1)] for i in range(len(places))]
    if not places or any(found[i] not in (None, role) for i, role in zip(places, roles)):
        return f"name those to read by --columns, in the order {', '.join(order)}"
    names, how = [header[i] for i in places], "name"
    if twice(map(plain, names)) or not all(0 < len(name) <= 40 for name in names):
        names, how = [str(i + 1) for i in places], "number"
    column = "column " if how == "number" else ""
    each = ", ".join(f"{role} {column}{name}" for role, name in zip(roles, names))
    return f"{how} those to read: --columns {shlex.join(names)} ({each})"


def holds_text(place, header, rows):
    """Whether a column is text by its name and by the first rows below: some letters in most of its cells."""
    cells = [[*row.values()] if isinstance(row, dict) else row for row in rows]
    cells = [row[place] for row in cells if isinstance(row, list) and place < len(row)]
    texts = [cell for cell in cells if isinstance(cell, str) and re.search(r"[^\W\d_]", cell)]
    return plain(header[place]) not in ("", *NO_TEXT) and 2 * len(texts) > len(cells)


def chosen(rows, may_have, headed, header, roles, columns):
    """The Header of --columns. may_have: whether the first row may be a header."""
    width = len(header or next((row for row in rows if isinstance(row, list) and row), []))
    names, places = [plain(name) for name in header], []
    for column in columns:
        if names.count(plain(column)) == 1:
            places.append(names.index(plain(column)))
        elif is_number(column) and 1 <= int(column) <= width:
            places.append(int(column) - 1)
        else:
            known = header or (rows[0] if may_have else [])
            known = f"one of {', '.join(known)}"[:150] + ", or " if known else ""
            found = "two columns are called so; " if plain(column) in names else ""
            fault = f"--columns {shlex.join([column[:40]])}: {found}wanted {known}a number from 1 to {width}"
            return Header(headed, None, None, fault)
    said = [f"{roles[min(i, len(roles) - 1)]} {header[place] if header else f'column {place + 1}'}"
            for i, place in enumerate(places)]
    return Header(headed, said, places)


INDEX = "the first name of the header is empty, as of pandas' index; write the file with index=False"


def fault_of(header, found, order):
    """Why columns of these roles, None where there is none, are not rows to train on."""
    one_each = [role for role in found if role and role not in REPEATED]
    double = [role for role in order if one_each.count(role) > 1]
    unknown = [name for name, role in zip(header, found) if role is None]
    if not header[0]:
        return INDEX
    if unknown:
        return f"columns not known as {', '.join(order[:-1])} or {order[-1]}: {listed(unknown)}"
    if double:
        names = [name for name, role in zip(header, found) if role == double[0]]
        return f"{len(names)} columns are {double[0]}: {listed(names)}"
    missing = [role for role in order[: len(set(found))] if role not in found]
    return f"no {missing[0]} among columns {listed(header)}" if missing else None


def listed(names):
    """As many of the names as a line has room for."""
    text = ", ".join(names)
    return text if len(text) <= 200 else f"{text[:200]} ..."


def twice(names):
    """The name that stands there more than once, as Python spells it; or None."""
    [(name, times)] = Counter(names).most_common(1) or [("", 0)]
    return repr(name[:40]) if times > 1 else None


def is_number(text):
    """Whether int makes a place of it."""
    return bool(re.fullmatch(r"\d{1,9}", text))


def plain(name):
    """The name in small letters, without spaces, dashes and underscores."""
    return re.sub(r"[\s_-]+", "", name.casefold())


def role_of(name, roles):
    name = plain(name)
    return next((role for role, names in roles.items()
                 if name in names or role in REPEATED and name.rstrip("0123456789") in names), None)


def is_name(cell):
    """One to three words of letters and digits."""
    return len(cell) <= 30 and bool(re.fullmatch(r"\s*[^\W\d_]\w*([ ./-]\w+){0,2}\s*", cell))


def without_index(row):
    """Without the empty first cell that pandas writes over its index."""
    return row[1:] if row and not row[0].strip() else row


def has_all(row, names):
    return bool(names) and {plain(cell) for cell in row} >= {plain(name) for name in names}


def is_known(row, roles=SENTENCES):
    """Whether a row has two names that everyone uses for columns, or has one cell and that is one."""
    row = without_index(row)
    known = sum(plain(cell) in OTHERS or role_of(cell, roles) is not None for cell in row)
    return known >= min(2, len(row)) > 0


def looks_like_names(rows):
    """Whether the first row is different names, of a kind that hardly any row below is, and none below
    again."""
    first, below = without_index(rows[0]), rows[1:]
    if not first or not below or not all(map(is_name, first)) or len(set(map(plain, first))) < len(first):
        return False
    alike = sum(bool(row) and all(map(is_name, row)) for row in below)
    again = any(a == b for row in below for a, b in zip(first[::-1], row[::-1]))   # from the end: the index
    return 4 * alike < len(below) and not again
