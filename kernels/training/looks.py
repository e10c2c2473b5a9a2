"""Columns without names that are no texts to train on, by their looks: numbers, ids, labels, single words.

They are told beside columns of texts alone: pairs of words are data, too.
"""
import re

SAMPLE, LONG = 500, 200                                        # rows, letters of a cell that are looked at
# Scripts without spaces between words: Thai to Burmese, Khmer, Chinese and Japanese, others of Asia.
SPACELESS = re.compile("[\u0e00-\u109f\u1780-\u17ff\u1980-\u19ff\u2e80-\u2fff\u3001-\ua4cf\ua980-\ua9df"
                       "\uaa60-\uaadf\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff]")
NUMBER = re.compile(r"[-+]?\d+(,\d{3})*([.,]\d*)?")
# A part of an id, a date, a time, a link, a name of a file: with a digit or a sign that no word has within.
CODE = re.compile(r"[\d_/\\@#=|{}<>]|\w[.:]\w")
ENDS, ALL = [*".!?…。！？"], 0.95                              # of sentences; all but what is missing
OF_DATES = re.compile("(mon|tue|wed|thu|fri|sat|sun|jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*|"
                      "[ap]\\.?m\\.?|utc|gmt|cet|est|pst", re.I)
UNIT = re.compile(r"[^\W\d_]{1,3}[²³]?(/[^\W\d_]{1,3})?|[%‰°$€£¥]\w?")


class Sample:
    """Rows from all over a table, for the first ones may be sorted: the beginnings of their cells."""

    def __init__(self):
        self.rows, self.step, self.seen = [], 1, 0

    def add(self, row):
        if self.seen % self.step == 0:
            self.rows.append([cell[:LONG].strip() for cell in row])
            if len(self.rows) == 2 * SAMPLE:                   # from here on every second of those
                self.rows, self.step = self.rows[::2], 2 * self.step
        self.seen += 1


def no_texts(columns):
    """{place: what it holds, with an example} of the columns that are no texts.

    columns     cells of a Sample, column by column
    """
    sizes = [[*map(words, column)] for column in columns]
    kinds = [kind_of(*pair) for pair in zip(columns, sizes)]
    different = [len(set(column)) for column in columns]
    texts = [i for i, (kind, _) in enumerate(kinds) if kind is None and most(size > 1 for size in sizes[i])]
    return {i: f"{kind}, such as {example(columns[i])}" for i, (kind, beside) in enumerate(kinds)
            if kind and len(texts) >= beside and len(columns) > 1
            and (kind != LABELS or any(different[i] < different[text] for text in texts))}


def codes_among(sample, places):
    """Which of these columns holds numbers or ids while another one is texts; or None. What is labelled or
    scored may be a word beside a text."""
    found = no_texts([*zip(*sample)])
    odd = [i for i in places if found.get(i, LABELS).startswith((NUMBERS, IDS))]
    return f"column {odd[0] + 1} holds {found[odd[0]]}" if 0 < len(odd) < len(places) else None


NUMBERS, IDS, LABELS = "numbers", "ids or codes", "few different labels"


def kind_of(cells, sizes):
    """(what a column holds if it is no text, beside how many columns of texts that is told), or (None, 0).

    cells, sizes    of the column, and how many words each has
    """
    count, different = len(cells), len({cell.casefold() for cell in cells})
    if most((len(cell) < LONG and NUMBER.fullmatch(cell) for cell in cells), ALL):
        return NUMBERS, 0
    one = [size < 2 for size in sizes]
    coded = [is_code(cell) and not (size > 1 and SPACELESS.search(cell)) for cell, size in zip(cells, sizes)]
    if most(coded) and most(map(max, coded, one), ALL):
        return IDS, 1
    if most(one, ALL):
        return (LABELS, 1) if different <= count / 3 + 1 else ("single words", 2)     # which may be answers
    short = (size < 4 and len(cell) <= 40 and cell[-1:] not in ENDS for cell, size in zip(cells, sizes))
    if different <= min(20, count / 3 + 1) and most(short, ALL) and (count > 5 or any(one)):
        return LABELS, 1 if different <= count / 3 else 2
    return None, 0


def most(found, share=0.5):
    found = [bool(one) for one in found]
    return sum(found) > share * len(found)


def words(text):
    """How many it has; where there are no spaces, two letters are about one."""
    if len(text) >= LONG:                                      # a formula, a sequence
        return LONG
    bare = SPACELESS.sub("", text)
    return len(bare.split()) + (len(text) - len(bare) + 1) // 2


def is_code(text):
    """Whether each part of it is one of an id, of a date, or of a number with its unit."""
    parts = text.split()
    if len(text) >= LONG:
        return False
    if len(parts) == 2 and NUMBER.fullmatch(parts[0]) and UNIT.fullmatch(parts[1]):
        return True
    others = [part for part in parts if not CODE.search(part)]
    return len(others) < len(parts) and all(OF_DATES.fullmatch(part.strip(",.")) for part in others)


def example(cells):
    """A cell, the shortest where the first is too long for a message."""
    return repr(min(cells, key=len)[:60] if len(cells[0]) > 40 else cells[0])
