"""Data files: every format, every fault with its place; rows are read anew each time."""
import csv
import gzip
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kernels.training.command import Fault
from kernels.training.documents import read_documents
from kernels.training.tables import Table, describe_table, empty_cell, read_table, texts_of
from running import DATA, refuse

ROWS = [*list(csv.reader((DATA / "nli.csv").read_text(encoding="utf-8").splitlines()))[1:30],
        ["\u00e4 \"No, thanks,\" he said.", "He went,\nwithout\r\na word.", ", He"]]


def written(folder, kind, header):
    """The rows as a file of that kind, with a byte order mark and without a newline at its end, where these
    can be."""
    head = [["sent0", "sent1", "hard_neg"]] * header
    items = [dict(zip(head[0], row)) if header else row for row in ROWS]
    quoted = [",".join('"' + cell.replace('"', '""') + '"' for cell in row) for row in head + ROWS]
    flat = ["\t".join(" ".join(cell.split()) for cell in row) for row in head + ROWS]
    texts = {"csv": "\ufeff" + "\r\n".join(quoted), "tsv": "\n".join(flat) + "\n",
             "json": json.dumps(items, indent=1),
             "jsonl": "\n".join(json.dumps(item, ensure_ascii=False) for item in items) + "\n",
             "txt": "\ufeff" + "\r\n".join(" ".join(row[0].split()) for row in ROWS)}
    (folder / f"rows.{kind}").write_bytes(texts[kind].encode())
    return folder / f"rows.{kind}"


PACKED = [("csv", True), ("txt", False), ("jsonl", False)]
HEADED = [(kind, header) for kind in ("csv", "tsv", "json", "jsonl") for header in (True, False)]


@pytest.mark.parametrize("kind, header, packed", [
    ("txt", False, ""), *((*case, "") for case in HEADED), *((*case, ".gz") for case in PACKED)])
def test_a_table_can_be_gone_through_again(kind, header, packed, tmp_path):
    path = written(tmp_path, kind, header)
    if packed:
        path = path.with_name(path.name + ".gz")
        path.write_bytes(gzip.compress(path.with_suffix("").read_bytes()))
    names, table = read_table(path)
    flat = [[" ".join(cell.split()) for cell in row] for row in ROWS]
    wanted = {"tsv": flat, "txt": [row[:1] for row in flat]}.get(kind, ROWS)
    assert names == (["sent0", "sent1", "hard_neg"] if header else None) and len(table) == len(ROWS)
    for _ in range(2):
        assert [cells for _, cells in table] == wanted
    first = [place for place, _ in table][0]
    assert first == {"json": "item 1"}.get(kind, f"line {1 + (header and kind in ('csv', 'tsv'))}")


@pytest.mark.parametrize("name, content, wanted", [
    ("nli.csv", None, r"nli\.csv: No such file or directory"),
    ("nli.csv", "", r"nli\.csv: no rows"),
    ("nli.csv", "sent0,sent1,hard_neg\n", r"nli\.csv: no rows"),
    ("nli.csv", "sent0,sent1\nA,b\n\nA,b\n", r"nli\.csv line 3: 0 columns, wanted 2"),
    ("nli.tsv", "A\tb\nA\n", r"nli\.tsv line 2: 1 columns, wanted 2"),
    ("nli.jsonl", '["A", "b"]\n["A", "b", "c"]\n', r"nli\.jsonl line 2: 3 columns, wanted 2"),
    ("nli.csv", "\n\nA,b\n", r"nli\.csv line 1: 0 columns, wanted 2 \(1 more rows are wrong: line 2\)"),
    ("nli.tsv", 'A\t"b"\nA\t"""b"" c"\n', r"nli\.tsv line 2: a cell quoted as in \.csv; .*"),
    ("nli.tsv", '"A"\t"b"\n"A, c"\t"b"\n', r"nli\.tsv: all cells are quoted as in \.csv; .*"),
    ("nli.csv.gz", b"A,b\n", r"nli\.csv\.gz: Not a gzipped file .*"),
    ("nli.csv.gz", gzip.compress(b"A,b\n" * 99)[:-9], r"nli\.csv\.gz: Compressed file ended before .*"),
    ("nli.csv.gz", gzip.compress(b"A,b\nA\n"), r"nli\.csv\.gz line 2: 1 columns, wanted 2"),
    ("nli.parquet", "A,b\n", r"nli\.parquet: a \.parquet wants the package pyarrow; .*"),
    ("nli.csv", "A,b\nA, \n", r"nli\.csv line 2: an empty cell; .*"),
    ("nli.csv", 'A,"b\nb\nb"\nA,b\nA,""\n', r"nli\.csv line 5: an empty cell; .*"),
    ("wiki.txt", "A\n\nB\n", r"wiki\.txt line 2: an empty cell; .*"),
    ("nli.jsonl", '{"a": "A", "b": "B"}\n{"a": "A"}\n', r"nli\.jsonl line 2: an empty cell; .*"),
    ("nli.csv", b"A,b\nA,b\nA,\xff\n", r"nli\.csv line 3: not UTF-8; convert .*"),
    ("wiki.txt", b"\xef\xbb\xbfA\n\xff\n", r"wiki\.txt line 2: not UTF-8; convert .*"),    # a byte order mark
    ("folder", "folder", r"folder: Is a directory"),
    ("nli.xlsx", "A,b\n", r"nli\.xlsx: wanted a name that ends in \.txt, .* or \.parquet; \.gz may follow"),
    ("nli.json", '[["A", "b"],\n["A" "b"]]', r"nli\.json line 2: not JSON: Expecting ',' delimiter.*"),
    ("nli.json", '["A"]\n["A"]', r"nli\.json line 2: not JSON: Extra data; a row a line is \.jsonl"),
    ("nli.json", '{"a": "b"}', r"nli\.json line 1: not JSON: no list; a row a line is \.jsonl"),
    ("nli.jsonl", '["A"]\n["A"\n["A"]\n', r"nli\.jsonl line 2: not JSON: Expecting ',' delimiter"),
    ("nli.json", "[" * 100_000, r"nli\.json line 1: not JSON: .*"),
    ("nli.jsonl", '["A"]\n5\n', r"nli\.jsonl line 2: wanted a row of texts, found '5'"),
    ("nli.json", '["A b", "A b"]',
     r"nli\.json item 1: wanted a row of texts, found 'A b' \(1 more rows are wrong: item 2\)"),
    ("nli.jsonl", '{"a": null}\n', r"nli\.jsonl line 1: wanted a row of texts, found '\[None\]'"),
    ("nli.csv", 'A,b\nA,"b\nA,b\n', r"nli\.csv after line 1: unexpected end of data; close every \", .*"),
    ("nli.csv", "A,b,c\n" * 3 + "A\n" + 'A,"b\nb",c\n' + "A, ,c\n" * 8 + "A,b,c\n",
     r"nli\.csv line 4: 1 columns, wanted 3 "
     r"\(8 more rows are wrong: line 7, line 8, line 9, line 10, line 11, \.\.\.\)"),
    ("nli.csv", "A,b\n", r"nli\.csv: 1 rows, wanted at least 2 and --batch-size, which is 1")])
def test_faults(tmp_path, monkeypatch, capfd, name, content, wanted):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)          # not installed
    if content == name:
        Path(name).mkdir()
    elif content is not None:
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    refuse("simcse", capfd, wanted, "--model", "scratch", "--batch-size", "1", "--data", name)


@pytest.mark.parametrize("rows, wanted", [
    (["A b", "C"], [["A b"], ["C"]]), ([("A", "b"), ["C", "d"]], [["A", "b"], ["C", "d"]]),
    ([{"b": "B", "a": "A"}, {"a": "C", "b": "D"}], [["B", "A"], ["D", "C"]]),
    (["A", " "], "{} row 2: an empty cell; fill it or delete the row"),
    ([["A", "b"], ["A"], 5], r"{} row 2: 1 columns, wanted 2 \(1 more rows are wrong: row 3\)"),
    ([], "{}: no rows")])
def test_rows_in_memory(rows, wanted):
    """They are checked as a file's, and are as they were; other rows have another name."""
    before, named = repr(rows), rf"{len(rows)} rows in memory, sha1 [0-9a-f]{{12}}"
    if isinstance(wanted, str):
        with pytest.raises(Fault, match=wanted.format(named) + "$"):
            read_table(Table(rows), empty_cell)
        return
    header, table = read_table(Table(rows), empty_cell)
    assert header == (["b", "a"] if isinstance(rows[0], dict) else None) and len(table) == 2
    for again in (table, table, Table(rows)):
        assert list(again) == [("row 1", wanted[0]), ("row 2", wanted[1])]
    assert list(texts_of(Table(rows))) == ["\n".join(cells) for cells in wanted] and repr(rows) == before
    assert re.search(rf"from {named}$", describe_table(table, header))
    assert str(table) == str(Table(list(rows))) != str(Table(rows[::-1]))


def test_parquet(tmp_path, monkeypatch):
    """By a package that may be missing: what is asked of it."""
    class ParquetFile:
        def __init__(self, file):
            if file.read() != b"good":
                raise ValueError("no magic bytes\nsecond line")

        def iter_batches(self, size):
            return [SimpleNamespace(to_pylist=lambda: [{"a": "A", "b": 1}]) for _ in range(2)]

    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", SimpleNamespace(ParquetFile=ParquetFile))
    (tmp_path / "good.parquet").write_bytes(b"good")
    header, table = read_table(tmp_path / "good.parquet")
    assert header == ["a", "b"] and list(table) == [("row 1", ["A", "1"]), ("row 2", ["A", "1"])]
    (tmp_path / "bad.parquet").write_bytes(b"bad")
    for name, fault in ("bad", "no magic bytes"), ("none", "No such file or directory"):
        with pytest.raises(Fault, match=rf"{name}\.parquet: {fault}$"):
            read_table(tmp_path / f"{name}.parquet")


def test_documents_are_not_packed():
    with pytest.raises(Fault, match=r"wiki\.txt\.gz: documents are not read from \.gz; unpack it"):
        next(read_documents("wiki.txt.gz"))


def test_lists_are_cells(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "A", "others": ["b", "c d"]}\n{"text": "B", "others": []}\n')
    header, table = read_table(path, lists=True)
    assert header == ["text", "others"] and [cells for _, cells in table] == [["A", "b|c d"], ["B", ""]]
    assert re.fullmatch(r"line \d", next(iter(table))[0])


def test_shipped_data_is_what_its_generator_writes(tmp_path):
    subprocess.run([sys.executable, DATA / "make.py", tmp_path], check=True)
    made, kept = (np.load(folder / "shapes.npz") for folder in (tmp_path, DATA))
    assert made.files == kept.files
    assert all((made[name] == kept[name]).mean() > 0.999 for name in made.files)           # cosines may round
    texts = [path.relative_to(DATA) for path in DATA.rglob("*") if path.suffix not in (".npz", ".py", ".pyc")]
    assert [name for name in texts if (DATA / name).is_file() and
            (tmp_path / name).read_bytes() != (DATA / name).read_bytes()] == [] and len(texts) > 13
