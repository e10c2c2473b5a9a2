"""Read the rows of data files. READERS has a function per file format, which yields (location, row).

location   name of the row in messages: "line 7", "item 7" or "row 7"
row        a list of cells, a dict {column: cell}, another JSON value; or a ValueError with the reason why the
           row cannot be read
"""
import csv
import functools
import json

from .columns import first_duplicate
from .files import MAX_TEXT_BYTES, read_lines, read_whole
from .parquet import read_parquet

csv.field_size_limit(MAX_TEXT_BYTES)                           # Python's limit is 131,072 characters


def read_txt(path):
    """Yield one text per line."""
    for number, line in enumerate(read_lines(path), 1):
        yield f"line {number}", [line.rstrip("\r\n")]


def read_csv(path, **options):
    """Yield the cells of comma-separated rows. options: arguments of csv.reader."""
    reader, line = csv.reader(read_lines(path), **options), 1
    try:
        for cells in reader:
            yield f"line {line}", cells
            line = reader.line_num + 1                         # a quoted cell may contain newlines
    except csv.Error as error:
        message = f'{error}; close every ", and write "" for a " inside a cell'
        if "new-line" in str(error):
            message = "a carriage return in a cell without quotes; delete it"
        yield f"line {line}", ValueError(message)


def read_jsonl(path):
    """Yield one JSON value per line."""
    for number, line in enumerate(read_lines(path), 1):
        yield f"line {number}", parse_json(line)


def read_json(path):
    """Yield the items of one JSON list."""
    content = parse_json(read_whole(path))
    if isinstance(content, list):
        yield from ((f"item {number}", row) for number, row in enumerate(content, 1))
    else:
        message, line = "expected a JSON list of rows", 1
        if isinstance(content, ValueError):
            message, line = content.args
        yield f"line {line}", ValueError(f"{message}; for one row per line, name the file .jsonl")


def parse_json(text):
    """Return the JSON value, or ValueError(message, line number) if the text is not valid JSON."""
    try:
        return json.loads(text, object_pairs_hook=to_dict)
    except (ValueError, RecursionError) as error:
        return ValueError(f"not JSON: {getattr(error, 'msg', error)}", getattr(error, "lineno", 1))


def to_dict(pairs):
    """Return the dict of a JSON object, or a ValueError (as parse_json) if a name occurs twice in it."""
    row = dict(pairs)
    doubled = first_duplicate(name for name, _ in pairs)
    return ValueError(f"the name {doubled} occurs twice in this row", 1) if doubled else row


READERS = {".txt": read_txt, ".csv": functools.partial(read_csv, strict=True),
           ".tsv": functools.partial(read_csv, delimiter="\t", quoting=csv.QUOTE_NONE),
           ".json": read_json, ".jsonl": read_jsonl, ".parquet": read_parquet}
