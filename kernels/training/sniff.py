"""Find columns that do not look like texts (numbers, ids, labels, single words), if columns have no names."""
import re

SAMPLE_ROWS, MAX_CHARACTERS = 500, 200                         # of a table, of a cell
# Writing systems without spaces between words: Thai to Burmese, Khmer, Chinese and Japanese, others of Asia.
SPACELESS = re.compile("[\u0e00-\u109f\u1780-\u17ff\u1980-\u19ff\u2e80-\u2fff\u3001-\ua4cf\ua980-\ua9df"
                       "\uaa60-\uaadf\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff]")
NUMBER = re.compile(r"[-+]?\d+(,\d{3})*([.,]\d*)?")
# A part of an id, a date, a time, a URL or a file name: a digit, or a character that is never inside a word.
ID_PART = re.compile(r"[\d_/\\@#=|{}<>]|\w[.:]\w")
DATE_WORD = re.compile("(mon|tue|wed|thu|fri|sat|sun|jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*|"
                       "[ap]\\.?m\\.?|utc|gmt|cet|est|pst", re.I)
UNIT = re.compile(r"[^\W\d_]{1,3}[²³]?(/[^\W\d_]{1,3})?|[%‰°$€£¥]\w?")
SENTENCE_ENDS = ".!?…。！？"
NUMBERS, IDS, LABELS, WORDS = "numbers", "ids or codes", "few different labels", "single words"
# {kind: a column of this kind is an error beside at least this many columns of texts}; words may be answers
MIN_TEXT_COLUMNS = {NUMBERS: 0, IDS: 1, LABELS: 1, WORDS: 2}


class Sample:
    """A sample of rows, evenly spaced over a table that may be sorted. Long cells are cut."""

    def __init__(self):
        self.rows, self.step, self.seen = [], 1, 0

    def add(self, row):
        """Count this row, and keep it if it is one of the evenly spaced rows."""
        if self.seen % self.step == 0:
            self.rows.append([cell[:MAX_CHARACTERS].strip() for cell in row])
            if len(self.rows) == 2 * SAMPLE_ROWS:              # from here on keep only every second one
                self.rows, self.step = self.rows[::2], 2 * self.step
        self.seen += 1


def find_non_text_columns(sample):
    """Return {index of a column that does not look like texts: its kind, with an example}.

    sample   rows of a Sample
    """
    columns = [*zip(*sample)]
    kinds = [column_kind(column) for column in columns]
    texts = [column for column, kind in zip(columns, kinds) if kind == "texts"]
    # a column with as many distinct cells as the texts is not labels
    most = max((len({*column}) for column in texts), default=0)
    return {i: f"{kind}, such as {columns[i][0][:60]!r}" for i, kind in enumerate(kinds)
            if kind in MIN_TEXT_COLUMNS and len(texts) >= MIN_TEXT_COLUMNS[kind] and len(columns) > 1
            and (kind != LABELS or len({*columns[i]}) < most)}


def find_id_column(sample, indices):
    """Return which of these columns contains numbers or ids while another one is texts, or None.

    Labels and single words are accepted: labelled or scored data may have a single word next to a text.
    """
    found = find_non_text_columns(sample)
    wrong = [i for i in indices if found.get(i, LABELS).startswith((NUMBERS, IDS))]
    return f"column {wrong[0] + 1} holds {found[wrong[0]]}" if 0 < len(wrong) < len(indices) else None


def column_kind(cells):
    """Return the kind of a column: a key of MIN_TEXT_COLUMNS, "texts", or "mixed" for words among texts."""
    sizes, distinct = [*map(count_words, cells)], len({cell.casefold() for cell in cells})
    one_word = [size < 2 for size in sizes]
    short = [size < 2 or size < 4 and len(cell) <= 40 and cell[-1] not in SENTENCE_ENDS
             for cell, size in zip(cells, sizes)]
    ids = [*map(is_id, cells)]
    nearly_all = 0.95 * len(cells)                             # some cells may say that a value is missing
    if sum(len(cell) < MAX_CHARACTERS and bool(NUMBER.fullmatch(cell)) for cell in cells) > nearly_all:
        return NUMBERS
    if 2 * sum(ids) > len(cells) and sum(map(max, ids, one_word)) > nearly_all:
        return IDS
    few = 3 * distinct <= len(cells)
    if few and sum(short) > nearly_all and (sum(one_word) > nearly_all or distinct <= 20):
        return LABELS
    if sum(one_word) > nearly_all:
        return WORDS
    return "texts" if 2 * sum(one_word) < len(cells) else "mixed"


def count_words(text):
    """Return the number of words; in writing systems without spaces, a word is counted as two characters."""
    if len(text) >= MAX_CHARACTERS:                            # such as a formula or a DNA sequence
        return MAX_CHARACTERS
    spaced = SPACELESS.sub("", text)
    return len(spaced.split()) + (len(text) - len(spaced) + 1) // 2


def is_id(text):
    """Return whether a text is an id, a date, or a number with a unit."""
    if len(text) >= MAX_CHARACTERS or SPACELESS.search(text):
        return False
    parts = text.split() or [""]
    if len(parts) == 2 and NUMBER.fullmatch(parts[0]) and UNIT.fullmatch(parts[1]):
        return True
    others = [part for part in parts if not ID_PART.search(part)]
    return len(others) < len(parts) and all(DATE_WORD.fullmatch(part.strip(",.")) for part in others)
