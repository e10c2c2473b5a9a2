"""Test the reading of data files: formats, columns and their roles, lists in cells, and errors."""
import csv
import json
import re
import sys

import pytest

from kernels.training.data import SENTENCE_COLUMNS, empty_cell, log_first_row, read_table
from kernels.training.errors import UserError

# ── formats ──

NAMES = ["sent0", "sent1", "hard_neg"]
A, LONG = 'He said: "No",\r\nand went.', "x " * 100_000
OTHER = "A\x85b\u2028c\x0bd\x0ce \x0b"                          # str.splitlines would split this text
ROWS = [[A, OTHER, ", \u00e4"], [LONG, "", A]]
FLAT = [[cell.replace("\r\n", " ") for cell in row] for row in ROWS]
QUOTED = "\r\n".join(",".join('"' + cell.replace('"', '""') + '"' for cell in row) for row in ROWS)
LINES = "\n".join("\t".join(row) for row in FLAT)
JSON_LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
DICTS = [dict(zip(NAMES, row)) for row in ROWS]


@pytest.mark.parametrize("kind, content, names, rows, place", [
    ("txt", f"\ufeff{OTHER}\r\n{LONG}", None, [[OTHER], [LONG]], "line 1"),   # with a byte order mark
    ("csv", "\ufeffsent0,sent1,hard_neg\n" + QUOTED, NAMES, ROWS, "line 2"),
    ("csv", QUOTED, None, ROWS, "line 1"),
    ("tsv", f"sent0\tsent1\thard_neg\n{LINES}", NAMES, FLAT, "line 2"),
    ("tsv", LINES, None, FLAT, "line 1"),
    ("json", json.dumps(DICTS, indent=1), NAMES, ROWS, "item 1"),
    ("json", json.dumps(ROWS), None, ROWS, "item 1"),
    ("jsonl", "\n".join(map(json.dumps, DICTS)), NAMES, ROWS, "line 1"),
    ("jsonl", JSON_LINES, None, ROWS, "line 1")],
    ids="txt csv-header csv tsv-header tsv json-names json jsonl-names jsonl".split())
def test_every_format_has_the_same_rows(kind, content, names, rows, place, tmp_path):
    """A table can be iterated twice. Each row comes with its place in the file."""
    path = tmp_path / f"a.{kind}"
    path.write_bytes(content.encode())
    header, table = read_table(path)
    assert header == names and len(table) == 2 and next(iter(table))[0] == place
    for _ in range(2):
        assert [cells for _, cells in table] == rows


@pytest.mark.parametrize("name, content, wanted", [
    ("a.csv", 'A,"b\nb\nb"\nA,b\nA,""\nA,""\n', r" line 5: an empty cell; .* \(1 more rows are wrong\)"),
    ("a.csv", 'A,b\nA,"b\nA,b\n', " line 2: unexpected end of data; close every \""),
    ("a.csv", "sent0;sent1\nA;b\n", ": .* separated by semicolons, expected commas"),
    ("a.tsv", "anchor,positive\nA,b\n", r": .* by commas, expected tabs; name the file \.csv"),
    ("a.csv", "A,b\nC,d\n".encode("UTF-16LE"), " line 1: not UTF-8"),
    ("a.csv", "premise,hypothesis,id\nA,b,2\n", ": columns not known as .*: hypothesis, id; .* by --columns"),
    ("a.csv", "anchor,negative\nA,b\n", ": no positive among columns anchor, negative; choose columns by"),
    ("a.xlsx", "A,b\n", r": expected a name that ends in \.txt, .*, \.parquet"),
    ("a.parquet", "A,b\n", ": .* needs the package pyarrow"),
    ("a.jsonl", '{"query": "A"}\n{"query": "A", "b": "c"}\n', " line 2: column 'b' is not in the first row"),
    ("a.jsonl", '{"query": "A", "pos": ["b", " "]}\n', " line 1: an empty cell"),
    ("a.csv", "\nA,b\n", " line 1: expected a row of texts, found '\\[\\]'"),
    ("a.csv", "query,body\nA dog.,It runs.\n", ": columns not known as .*: body; .* by --columns"),
    ("a.csv", "query,passage\nA,b\nquery,passage\n", " line 3: equal to the header, the first row; delete"),
    ("a.tsv", 'x1\t"A"\nx2\t"b"\n', ": a cell is quoted as in .csv, but a .tsv has no quotes")])
def test_wrong_files_are_refused(name, content, wanted, tmp_path, monkeypatch):
    """The message names the file, the row, and what is wrong."""
    for package in ("pyarrow", "pyarrow.parquet"):             # as if pyarrow were not installed
        monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=re.escape(name) + wanted):
        read_table(tmp_path / name, empty_cell, roles=SENTENCE_COLUMNS)


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"query": ["A", "C"], "pos": [["b"], ["d", "e"]]}), path)
    _, found = read_table(path, roles=SENTENCE_COLUMNS)
    assert [*found] == [("row 1", ["A", "b"]), ("row 2", ["C", "d"]), ("row 2", ["C", "e"])]


# ── columns and roles ──


def test_columns_that_the_user_chooses_may_have_numbers(tmp_path):
    (tmp_path / "a.csv").write_text("1999,When?\n2001,Where?\n")
    log_first_row(read_table(tmp_path / "a.csv", roles=SENTENCE_COLUMNS, columns=["2", "1"])[1])
    with pytest.raises(UserError, match="column 1 has no texts"):
        log_first_row(read_table(tmp_path / "a.csv", roles=SENTENCE_COLUMNS)[1])


@pytest.mark.parametrize("kind", ["csv", "json"])
@pytest.mark.parametrize("content, columns, header, row", [
    ("Hard-Neg,QUERY,Sentence 2\nn,a,p", None, "anchor QUERY, positive Sentence 2, negative Hard-Neg", "apn"),
    ("sent1,negative_10,sent0,hard_neg2\np,n,a,m", None,
     "anchor sent0, positive sent1, negative hard_neg2, negative negative_10", "apmn"),
    ("premise\na", None, "anchor premise", "a"),
    ("id,query,passage,label\n1,a,p,", ["query", "PASSAGE"], "anchor query, positive passage", "ap"),
    (",query,passage\n0,a,p", ["query", "passage"], "anchor query, positive passage", "ap"),
    ("id,query,passage,label\n1,p,a,", ["3", "2"], "anchor passage, positive query", "ap"),
    ("Frage,Antwort\np,a", ["Antwort", "Frage"], "anchor Antwort, positive Frage", "ap")])
def test_roles(kind, content, columns, header, row, tmp_path):
    """Column names are found in any case and order. Columns that are not read may contain anything."""
    path = tmp_path / f"a.{kind}"
    path.write_text(content if kind == "csv" else json.dumps([*csv.DictReader(content.splitlines())]))
    found, table = read_table(path, empty_cell, roles=SENTENCE_COLUMNS, columns=columns)
    assert found == header.split(", ") and [cells for _, cells in table] == [[*row]]


@pytest.mark.parametrize("name, columns, rows", [
    ("a.csv", None, ["cat,feline", "dog,canine"]), ("a.csv", ["2", "1"], ["Hi!,Hello", "Ein Hund,A dog"]),
    ("a.csv", None, ["Answer,He said so to a man.", "A man eats.,He eats."]),
    ("a.csv", None, ["same,same", "A dog,Ein Hund"]), ("a.csv", None, ["a,1", "A dog,Ein Hund"]),
    ("a.tsv", None, ["One, two; three.", "One, or two.", "One, two, three; four."])])
def test_nothing_is_guessed_from_texts(name, columns, rows, tmp_path):
    """A first row whose cells are no names, or like those of other rows, is data. A text may have commas."""
    (tmp_path / name).write_text("\n".join(rows))
    cells = [row.split(",") if name == "a.csv" else [row] for row in rows]
    _, table = read_table(tmp_path / name, roles=SENTENCE_COLUMNS, columns=columns)
    assert [cells for _, cells in table] == [row[::-1] if columns else row for row in cells]


@pytest.mark.parametrize("lines, columns, header, rows", [
    (["sentence_a,sentence_b", "A dog.,A cat."], None, ["anchor sentence_a", "positive sentence_b"], 1),
    (["Frage,Antwort", "Ein Hund,A dog", "Ja,Yes!"], ["2", "1"],
     ["anchor Antwort", "positive Frage"], 2),
    (["doc_id,body", "d1,A dog.", "d2,A cat."], ["body"], ["anchor body"], 2),
    ([",doc,body", "0,d1,A dog."], ["body"], ["anchor body"], 1)])
def test_unusual_headers(lines, columns, header, rows, tmp_path):
    """A first row of different words is a header if the other rows have no words in some column."""
    (tmp_path / "a.csv").write_text("\n".join(lines))
    found, table = read_table(tmp_path / "a.csv", roles=SENTENCE_COLUMNS, columns=columns)
    assert found == header and len(table) == len([*table]) == rows


def test_lists_of_positives_and_negatives(tmp_path):
    """Each positive in a list gives a row with all negatives. All rows have equally many negatives."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"query": "q", "pos": ["a", "b"], "neg": ["c", "d"]}\n'
                    '{"query": "r", "pos": "e", "neg": ["f", "g"]}\n')
    _, table = read_table(path, roles=SENTENCE_COLUMNS)
    assert ["".join(cells) for _, cells in table] == ["qacd", "qbcd", "refg"]
    path.write_text('{"query": "q", "pos": ["a"], "neg": ["c", "d", "e", "x"]}\n'
                    '{"query": "r", "pos": ["b"], "neg": ["f", "g"]}\n')
    with pytest.raises(UserError, match="line 2: 4 texts, expected 6 as in the first row$"):
        read_table(path, roles=SENTENCE_COLUMNS)
