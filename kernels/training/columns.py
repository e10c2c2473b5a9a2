"""Columns: whether a first row names them, and which is anchor, positive or hard negative."""
import re
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
OTHERS = """hypothesis score similarity label goldlabel id idx index genre subset
            entity positiveentity negativeentity entitytype page article originentity
            original synonym antonym synonymwords antonymwords""".split()
# One to three words of letters and digits; a name as programs write it.
NAME = re.compile(r"(?=.{1,30}$)\s*[^\W\d_]\w*([ ./-]\w+){0,2}\s*")
IDENTIFIER = re.compile("[a-z][a-z0-9_]*")


class Header(NamedTuple):
    """What the first rows of a table say of its columns.

    headed   whether the first row of a .csv or .tsv names them
    said     what a person is told: their names, or what each is taken for; None: there are no names
    places   of those that are read, in this order; None: all
    fault    why they cannot be read, or None
    guessed  whether the first row only looks like names, and has none that is known
    texts    places that must look like texts, for no name says that they are
    """
    headed: bool
    said: list | None = None
    places: list | None = None
    fault: str | None = None
    guessed: bool = False
    texts: list | tuple = ()


def find_header(rows, keys, width, roles=None, columns=None, names=()):
    """The Header of a table.

    rows     the first of them
    keys     names of the columns, [] where there are none; None: the first row may have them
    width    how many columns there are
    roles    {role: [names]}: columns come in this order; None: all of them as they stand
    columns  those that are read instead, by name or number (--columns)
    names    a first row that has all of them is a header
    """
    headed, known = False, True
    if keys is None:
        names = {plain(name) for name in names or columns or () if not name.isdecimal()}
        known = bool(names) and {*map(plain, rows[0])} >= names or is_known(rows[0], roles or SENTENCES)
        headed = known or looks_like_names(rows, not roles)
        keys = [name.strip() for name in rows[0]] if headed else []
    header = Header(headed, keys or None, guessed=not known and headed)
    if columns:
        return choose(header, columns, width, roles)
    if not roles:
        doubled = twice(map(plain, keys))
        return header._replace(fault=doubled and f"two columns of one name, {doubled}, in {listed(keys)}")
    if not keys:
        texts = [i for i in range(width) if not role_at(i, roles).endswith("_words")]
        return header._replace(texts=texts)
    return arrange(header, roles)


def choose(header, columns, width, roles):
    """The Header with the places of --columns."""
    names, at = [plain(name) for name in header.said or ()], {str(i + 1): i for i in range(width)}
    at |= {name: i for i, name in enumerate(names) if names.count(name) == 1}
    places = [at.get(plain(column)) for column in columns]
    if None in places:
        wanted = f"one of {', '.join(header.said)}"[:150] + ", or " if names else ""
        fault = f"--columns {columns[places.index(None)][:40]}: wanted {wanted}a number from 1 to {width}"
        return header._replace(said=None, fault=fault)
    called = header.said or [f"column {i + 1}" for i in range(width)]
    said = [f"{role_at(i, roles)} {called[place]}" for i, place in enumerate(places)]
    return header._replace(said=said, places=places)


def arrange(header, roles):
    """The Header with its columns in the order of their roles, or with a fault."""
    names, order = header.said, list(roles)
    found = [role_of(name, roles) for name in names]
    places = sorted((i for i, role in enumerate(found) if role), key=lambda i: order.index(found[i]))
    unknown = [name or "(no name)" for name, role in zip(names, found) if role is None]
    double = [role for role in order if role not in REPEATED and found.count(role) > 1]
    missing = [role for role in order[: len(set(found))] if role not in found]
    fault = None
    if unknown:
        fault = f"columns not known as {', '.join(order[:-1])} or {order[-1]}: {listed(unknown)}"
    elif double:
        same = [name for name, role in zip(names, found) if role == double[0]]
        fault = f"{len(same)} columns are {double[0]}: {listed(same)}"
    elif missing:
        fault = f"no {missing[0]} among columns {listed(names)}"
    if fault:
        fault += f"; name or number those to read by --columns, in the order {', '.join(order)}"
    if fault and header.guessed:
        fault += "; if that row is data, write a header above it"
    return header._replace(said=[f"{found[i]} {names[i]}" for i in places], places=places, fault=fault)


def unlike_texts(sample, places):
    """Why the columns at these places are not all texts, and which --columns to give instead; or None.

    sample      a Table's
    """
    found = no_texts(sample)
    told = ", ".join(f"column {i + 1} holds {found[i]}" for i in places if i in found)
    if not told:
        return None
    every = [str(i + 1) for i in places]
    texts = " ".join([str(i + 1) for i in places if i not in found][:9])
    how = f"number those to read: --columns {texts} ({' '.join(every[:9])}, if all are texts)"
    return f"{told[:300]}; {how if texts else 'wanted texts'}"


def listed(names):
    """As many of the names as a line has room for."""
    text = ", ".join(names)
    return text if len(text) <= 200 else f"{text[:200]} ..."


def twice(names):
    """The name that stands there more than once, as Python spells it; or None."""
    doubled = [name for name, times in Counter(names).items() if times > 1]
    return repr(doubled[0][:40]) if doubled else None


def plain(name):
    """The name in small letters, without spaces, dashes and underscores."""
    return re.sub(r"[\s_-]+", "", name.casefold())


def role_of(name, roles):
    """The role of a column of this name, or None."""
    name = plain(name)
    return next((role for role, names in roles.items()
                 if name in names or role in REPEATED and name.rstrip("0123456789") in names), None)


def role_at(place, roles):
    """The role of the column at this place where no name says it: past the last one it is that again."""
    return list(roles)[min(place, len(roles) - 1)]


def without_index(row):
    """Without the empty first cell that pandas writes over its index."""
    return row[1:] if row and not row[0].strip() else row


def is_known(row, roles):
    """Whether a row has two names that everyone uses for columns, or has one cell and that is one."""
    row = without_index(row)
    known = sum(plain(cell) in OTHERS or role_of(cell, roles) is not None for cell in row)
    return known >= min(2, len(row)) > 0


def looks_like_names(rows, may_be_words):
    """Whether the first row is different names, of a kind that hardly any row below is, and none there again.
    Where the rows may be words, names as programs write them are enough."""
    first, below = without_index(rows[0]), rows[1:]
    if not first or twice(map(plain, first)) or not all(map(NAME.fullmatch, first)):
        return False
    if may_be_words and all(map(IDENTIFIER.fullmatch, rows[0])):
        return True
    alike = sum(bool(row) and all(map(NAME.fullmatch, row)) for row in below)
    again = any(a == b for row in below for a, b in zip(first[::-1], row[::-1]))   # from the end: the index
    return 4 * alike < len(below) and not again
