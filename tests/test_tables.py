"""Data files: every format, every fault with its place; rows are read anew each time."""
import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kernels.training.tables import read_table
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


HEADED = [(kind, header) for kind in ("csv", "tsv", "json", "jsonl") for header in (True, False)]


@pytest.mark.parametrize("kind, header", [("txt", False), *HEADED])
def test_a_table_can_be_gone_through_again(kind, header, tmp_path):
    names, table = read_table(written(tmp_path, kind, header))
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
    ("nli.csv", "A,b,c,d\n", r"nli\.csv line 1: 4 columns, wanted 1 \(sentence\), 2 \(.*\) or 3 \(.*\)"),
    ("nli.csv", "A,b\nA, \n", r"nli\.csv line 2: an empty cell; .*"),
    ("nli.csv", 'A,"b\nb\nb"\nA,b\nA,""\n', r"nli\.csv line 5: an empty cell; .*"),
    ("wiki.txt", "A\n\nB\n", r"wiki\.txt line 2: an empty cell; .*"),
    ("nli.jsonl", '{"a": "A", "b": "B"}\n{"a": "A"}\n', r"nli\.jsonl line 2: an empty cell; .*"),
    ("nli.csv", b"A,b\nA,b\nA,\xff\n", r"nli\.csv line 3: not UTF-8; convert .*"),
    ("wiki.txt", b"\xef\xbb\xbfA\n\xff\n", r"wiki\.txt line 2: not UTF-8; convert .*"),    # a byte order mark
    ("folder", "folder", r"folder: Is a directory"),
    ("nli.xlsx", "A,b\n", r"nli\.xlsx: wanted a name that ends in \.txt, \.csv, \.tsv, \.json or \.jsonl"),
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
    if content == name:
        Path(name).mkdir()
    elif content is not None:
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    refuse("simcse", capfd, wanted, "--model", "scratch", "--batch-size", "1", "--data", name)


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
