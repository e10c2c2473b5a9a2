"""Columns without names that are no texts to train on, by their looks: numbers, ids, labels, single words."""
import re

SAMPLE, LONG = 500, 200                                        # rows, letters of a cell that are looked at
# Scripts without spaces between words: Thai to Burmese, Khmer, Chinese and Japanese, others of Asia.
SPACELESS = re.compile("[\u0e00-\u109f\u1780-\u17ff\u1980-\u19ff\u2e80-\u2fff\u3001-\ua4cf\ua980-\ua9df"
                       "\uaa60-\uaadf\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff]")
NUMBER = re.compile(r"[-+]?\d+(,\d{3})*([.,]\d*)?")
# A part of an id, a date, a time, a link, a name of a file: with a digit or a sign that no word has within.
CODE = re.compile(r"[\d_/\\@#=|{}<>]|\w[.:]\w")
OF_DATES = re.compile("(mon|tue|wed|thu|fri|sat|sun|jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*|"
                      "[ap]\\.?m\\.?|utc|gmt|cet|est|pst", re.I)
UNIT = re.compile(r"[^\W\d_]{1,3}[²³]?(/[^\W\d_]{1,3})?|[%‰°$€£¥]\w?")
ENDS = ".!?…。！？"                                             # of sentences
NUMBERS, IDS, LABELS, WORDS = "numbers", "ids or codes", "few different labels", "single words"
BESIDE = {NUMBERS: 0, IDS: 1, LABELS: 1, WORDS: 2}             # columns of texts; words may be answers


class Sample:
    """Rows from all over a table, for the first ones may be sorted: the beginnings of their cells."""

    def __init__(self):
        self.rows, self.step, self.seen = [], 1, 0

    def add(self, row):
        """Counts this row, and keeps it if its turn has come."""
        if self.seen % self.step == 0:
            self.rows.append([cell[:LONG].strip() for cell in row])
            if len(self.rows) == 2 * SAMPLE:                   # from here on every second of those
                self.rows, self.step = self.rows[::2], 2 * self.step
        self.seen += 1


def no_texts(sample):
    """{place: what it holds, with an example} of the columns that are no texts, of the rows of a Sample."""
    columns = [*zip(*sample)]
    kinds = [kind_of(column) for column in columns]
    texts = [column for column, kind in zip(columns, kinds) if kind == "texts"]
    most = max((len({*column}) for column in texts), default=0)           # of labels there are fewer
    return {i: f"{kind}, such as {columns[i][0][:60]!r}" for i, kind in enumerate(kinds)
            if kind in BESIDE and len(texts) >= BESIDE[kind] and len(columns) > 1
            and (kind != LABELS or len({*columns[i]}) < most)}


def codes_among(sample, places):
    """Which of these columns holds numbers or ids while another one is texts; or None. What is labelled or
    scored may be a word beside a text."""
    found = no_texts(sample)
    odd = [i for i in places if found.get(i, LABELS).startswith((NUMBERS, IDS))]
    return f"column {odd[0] + 1} holds {found[odd[0]]}" if 0 < len(odd) < len(places) else None


def kind_of(cells):
    """What a column holds: a key of BESIDE; "texts"; or "mixed", for words among texts."""
    sizes, different = [*map(words, cells)], len({cell.casefold() for cell in cells})
    one = [size < 2 for size in sizes]
    short = [size < 2 or size < 4 and len(cell) <= 40 and cell[-1] not in ENDS
             for cell, size in zip(cells, sizes)]
    coded = [*map(is_code, cells)]
    most = 0.95 * len(cells)                                   # all but what is missing
    if sum(len(cell) < LONG and bool(NUMBER.fullmatch(cell)) for cell in cells) > most:
        return NUMBERS
    if 2 * sum(coded) > len(cells) and sum(map(max, coded, one)) > most:
        return IDS
    if 3 * different <= len(cells) and sum(short) > most and (sum(one) > most or different <= 20):
        return LABELS
    if sum(one) > most:
        return WORDS
    return "texts" if 2 * sum(one) < len(cells) else "mixed"


def words(text):
    """How many it has; where there are no spaces, two letters are about one."""
    if len(text) >= LONG:                                      # a formula, a sequence
        return LONG
    bare = SPACELESS.sub("", text)
    return len(bare.split()) + (len(text) - len(bare) + 1) // 2


def is_code(text):
    """Whether each part of it is one of an id, of a date, or of a number with its unit."""
    if len(text) >= LONG or SPACELESS.search(text):
        return False
    first, *others = parts = text.split() or [""]
    if len(others) == 1 and NUMBER.fullmatch(first) and UNIT.fullmatch(others[0]):
        return True
    others = [part for part in parts if not CODE.search(part)]
    return len(others) < len(parts) and all(OF_DATES.fullmatch(part.strip(",.")) for part in others)
