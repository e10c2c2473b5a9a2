"""Rows of each kind of data file: READERS has a function for each, which yields (place, row).

place   what messages call the row: "line 7", "item 7", "row 7"
row     a list of cells, a dict of cells by column, another JSON value; or a ValueError: why it cannot be read
"""
import csv
import functools
import json

from .columns import twice
from .files import LONGEST, read_lines, read_whole
from .parquet import read_parquet

csv.field_size_limit(LONGEST)                                  # its own, 131,072, is a long article's


def read_txt(path):
    """A text a line."""
    for number, line in enumerate(read_lines(path), 1):
        yield f"line {number}", [line.rstrip("\r\n")]


def read_csv(path, **rules):
    """Cells between commas, or as the rules of csv.reader say."""
    reader, line = csv.reader(read_lines(path), **rules), 1
    try:
        for cells in reader:
            yield f"line {line}", cells
            line = reader.line_num + 1                         # a quoted cell may hold newlines
    except csv.Error as error:
        fault = f'{error}; close every ", and write "" for one inside a cell'
        if "new-line" in str(error):
            fault = "a carriage return in a cell without quotes; delete it"
        yield f"line {line}", ValueError(fault)


def read_jsonl(path):
    """A JSON value a line."""
    for number, line in enumerate(read_lines(path), 1):
        yield f"line {number}", parse(line)


def read_json(path):
    """One JSON list of rows."""
    whole = parse(read_whole(path))
    if isinstance(whole, list):
        yield from ((f"item {number}", row) for number, row in enumerate(whole, 1))
    else:
        what, line = "not JSON: no list", 1
        if isinstance(whole, ValueError):
            what, line = whole.args
        yield f"line {line}", ValueError(f"{what}; a row a line is .jsonl")


def parse(text):
    """What the JSON says; or ValueError(why it is none, in which line)."""
    try:
        return json.loads(text, object_pairs_hook=as_row)
    except (ValueError, RecursionError) as error:
        return ValueError(f"not JSON: {getattr(error, 'msg', error)}", getattr(error, "lineno", 1))


def as_row(pairs):
    """The dict of a JSON object; a ValueError where a name has a second value, which would be lost."""
    row = dict(pairs)
    doubled = twice(name for name, _ in pairs)
    return ValueError(f"not JSON: {doubled} stands twice in a row") if doubled else row


READERS = {".txt": read_txt, ".csv": functools.partial(read_csv, strict=True),
           ".tsv": functools.partial(read_csv, delimiter="\t", quoting=csv.QUOTE_NONE),
           ".json": read_json, ".jsonl": read_jsonl, ".parquet": read_parquet}
