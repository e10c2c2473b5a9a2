"""Data files: every format, every error names its line, a table can be read several times."""
import csv
import functools
import gzip
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import simcse
from kernels.training import files
from kernels.training.cli import UserError
from kernels.training.tables import Table, describe_table, empty_cell, iter_texts, read_table
from kernels.training.text.documents import read_documents
from running import DATA, GOOD, SMALL, rejects

ROWS = [*list(csv.reader((DATA / "nli.csv").read_text(encoding="utf-8").splitlines()))[1:30],
        ["\u00e4 \"No, thanks,\" he said.", "He went,\nwithout\r\na word.", ", He"]]


def write_rows(folder, kind, header):
    """Write ROWS to a file; if the format allows it, with a byte order mark and no newline at the end."""
    head = [["sent0", "sent1", "hard_neg"]] if header else []
    items = [dict(zip(head[0], row)) if header else row for row in ROWS]
    quoted = [",".join('"' + cell.replace('"', '""') + '"' for cell in row) for row in head + ROWS]
    flat = ["\t".join(" ".join(cell.split()) for cell in row) for row in head + ROWS]
    texts = {"csv": "\ufeff" + "\r\n".join(quoted), "tsv": "\n".join(flat) + "\n",
             "json": json.dumps(items, indent=1),
             "jsonl": "\n".join(json.dumps(item, ensure_ascii=False) for item in items) + "\n",
             "txt": "\ufeff" + "\r\n".join(" ".join(row[0].split()) for row in ROWS)}
    (folder / f"rows.{kind}").write_bytes(texts[kind].encode())
    return folder / f"rows.{kind}"


GOOD_GZ = gzip.compress(GOOD.encode(), mtime=0)
PLAIN_CASES = [("txt", False), ("csv", True), ("csv", False), ("tsv", True), ("tsv", False), ("json", True),
               ("json", False), ("jsonl", True), ("jsonl", False)]
GZIP_CASES = [("csv", True), ("txt", False), ("jsonl", False)]


@pytest.mark.parametrize("kind, header, compressed", [
    *((*case, "") for case in PLAIN_CASES), *((*case, ".gz") for case in GZIP_CASES)])
def test_table_can_be_iterated_twice(kind, header, compressed, tmp_path):
    path = write_rows(tmp_path, kind, header)
    if compressed:
        path = path.with_name(path.name + ".gz")
        path.write_bytes(gzip.compress(path.with_suffix("").read_bytes(), mtime=0))
    names, table = read_table(path)
    flat = [[" ".join(cell.split()) for cell in row] for row in ROWS]
    wanted = {"tsv": flat, "txt": [row[:1] for row in flat]}.get(kind, ROWS)
    assert names == (["sent0", "sent1", "hard_neg"] if header else None) and len(table) == len(ROWS)
    for _ in range(2):
        assert [cells for _, cells in table] == wanted
    first = [location for location, _ in table][0]
    assert first == {"json": "item 1"}.get(kind, f"line {1 + (header and kind in ('csv', 'tsv'))}")


@pytest.mark.parametrize("name, content, wanted", [
    ("nli.csv", None, r"nli\.csv: No such file or directory"),
    ("nli.csv", "", r"nli\.csv: no rows"),
    ("nli.csv", "sent0,sent1,hard_neg\n", r"nli\.csv: no rows"),
    ("nli.csv", "sent0,sent1\nA,b\n\nA,b\n", r"nli\.csv line 3: 0 columns, expected 2"),
    ("nli.tsv", "A\tb\nA\n", r"nli\.tsv line 2: 1 columns, expected 2"),
    ("nli.jsonl", '["A", "b"]\n["A", "b", "c"]\n', r"nli\.jsonl line 2: 3 columns, expected 2"),
    ("nli.csv", "\n\nA,b\n", r"nli\.csv line 1: 0 columns, expected 2 \(1 more rows are wrong: line 2\)"),
    ("nli.tsv", 'A\t"b"\nA\t"""b"" c"\n', r"nli\.tsv line 2: a cell is quoted as in \.csv, .*"),
    ("nli.tsv", '"A"\t"b"\n"A, c"\t"b"\n', r"nli\.tsv: all cells are quoted as in \.csv, .*"),
    ("nli.csv.gz", b"A,b\n", r"nli\.csv\.gz: Not a gzipped file .*"),
    ("nli.csv.gz", GOOD_GZ[:-9], r"nli\.csv\.gz: Compressed file ended before .*"),
    ("nli.csv.gz", gzip.compress(b"A,b\nA\n", mtime=0), r"nli\.csv\.gz line 2: 1 columns, expected 2"),
    ("nli.parquet", "A,b\n", r"nli\.parquet: a \.parquet file needs the package pyarrow; .*"),
    ("nli.csv", "A,b\nA, \n", r"nli\.csv line 2: an empty cell; .*"),
    ("nli.csv", 'A,"b\nb\nb"\nA,b\nA,""\n', r"nli\.csv line 5: an empty cell; .*"),
    ("wiki.txt", "A\n\nB\n", r"wiki\.txt line 2: an empty cell; .*"),
    ("nli.jsonl", '{"a": "A", "b": "B"}\n{"a": "A"}\n', r"nli\.jsonl line 2: an empty cell; .*"),
    ("nli.csv", b"A,b\nA,b\nA,\xff\n", r"nli\.csv line 3: not UTF-8; convert .*"),
    ("wiki.txt", b"\xef\xbb\xbfA\n\xff\n", r"wiki\.txt line 2: not UTF-8; convert .*"),    # a byte order mark
    ("folder.csv", "folder.csv", r"folder\.csv: Is a directory"),
    ("nli.xlsx", "A,b\n", r"nli\.xlsx: expected a name that ends in \.txt, .* or \.parquet; \.gz may follow"),
    ("nli.json", '[["A", "b"],\n["A" "b"]]', r"nli\.json line 2: not JSON: Expecting ',' delimiter.*"),
    ("nli.json", '["A"]\n["A"]', r"nli\.json line 2: not JSON: Extra data; for one row per line, .*"),
    ("nli.json", '{"a": "b"}', r"nli\.json line 1: expected a JSON list of rows; for one row per line, .*"),
    ("nli.jsonl", '["A"]\n["A"\n["A"]\n', r"nli\.jsonl line 2: not JSON: Expecting ',' delimiter"),
    ("nli.jsonl", '["A"]\n5\n', r"nli\.jsonl line 2: expected a row of texts, found '5'"),
    ("nli.json", '["A b", "A b"]',
     r"nli\.json item 1: expected a row of texts, found 'A b' \(1 more rows are wrong: item 2\)"),
    ("nli.jsonl", '{"a": null}\n', r"nli\.jsonl line 1: expected only texts, found None; .*"),
    ("nli.csv", b"\xef\xbb\xbf", r"nli\.csv line 1: 0 columns, expected 1"),
    ("nli.json", "", r"nli\.json line 1: not JSON: Expecting value; for one row per line, .*"),
    ("nli.csv", "A,b\nA\0,b\n", r"nli\.csv line 2: a NUL character; .*"),
    ("wiki.txt", "A\n\0\n", r"wiki\.txt line 2: a NUL character; .*"),
    ("nli.jsonl", '["A\\u0000"]\n["A"]\n', r"nli\.jsonl line 1: a cell contains a NUL character; delete it"),
    ("nli.jsonl", '{"query": "A", "pos": ["b", "c\\u0000"]}\n', r"nli\.jsonl line 1: a cell .* a NUL .*"),
    ("nli.json", '[["A"], ["A\\ud800"]]', r"nli\.json item 2: a cell .* incomplete character, '\\ud800'; .*"),
    ("nli.json", '[{"\\udead": "A"}]', r"nli\.json: a column name contains an incomplete character, .*"),
    *(("nli.csv", "A,b\nC,d\n".encode(name), r"nli\.csv line 1: a NUL character; .* UTF-16, convert it, .*")
      for name in ("UTF-16LE", "UTF-16BE", "UTF-32LE", "UTF-32BE")),
    ("nli.csv", "\ufeff\u4f60\u597d".encode("UTF-16BE"), r"nli\.csv line 1: not UTF-8; convert it, .*"),
    *((f"nli.{kind}", '"A"\r"b"\r', rf"nli\.{kind}: lines end with a carriage return only; .* tr '\\r' '\\n'")
      for kind in ("csv", "txt", "tsv", "jsonl")),
    ("nli.tsv", "A\tb\nA\rA\tb\n", r"nli\.tsv line 2: a carriage return in a cell without .*"),
    ("wiki.txt", b"A\n" + b"x" * (2**24 + 1), r"wiki\.txt line 2: over 16 MB; expected one row per line"),
    ("wiki.txt.gz", gzip.compress(bytes(2**25), 1, mtime=0), r"wiki\.txt\.gz line 1: over 16 MB; .*"),
    ("wiki.txt", "A\n" + "\n" * 100_005, r"wiki\.txt line 2: an empty cell; .* \(at least 100,000 more .*"),
    ("nli.csv.gz", GOOD_GZ + b"more", r"nli\.csv\.gz: Not a gzipped file \(b'mo'\); copy it or .*"),
    ("nli.csv.gz", GOOD_GZ[:-8] + bytes(8), r"nli\.csv\.gz: CRC check failed .*; copy it or compress .*"),
    ("nli.csv.gz", GOOD_GZ[:10] + b"\xff" * 50, r"nli\.csv\.gz: Error -3 .*; copy it or compress it again"),
    *(("nli.jsonl", f'["A"]\n[{number}]\n', rf"nli\.jsonl line 2: expected only texts, found {shown}.*")
      for number, shown in dict(NaN="nan", Infinity="inf").items()),
    ("nli.json", '[["A"],\n[1e999]]\n', r"nli\.json item 2: expected only texts, found inf"),
    ("nli.jsonl", f'["A"]\n[{"9" * 5000}]\n', r"nli\.jsonl line 2: not JSON: Exceeds the limit .*"),
    ("nli.jsonl", '{"a": "A", "a": "b"}\n', r"nli\.jsonl line 1: the name 'a' occurs twice in this row"),
    ("nli.json", '[{"a": "A"}, {"a": "A", "a": "b"}]', r"nli\.json item 2: the name 'a' occurs twice .*"),
    ("nli.jsonl", '["A"]\n' + "[" * 100_000, r"nli\.jsonl line 2: not JSON: maximum recursion .*"),
    ("nli.jsonl", '["A"]\n' + "[" * 900 + "]" * 900, r"nli\.jsonl line 2: expected .*, found \[+"),
    ("a" * 300 + ".csv", None, r"a+\.\.\.a+\.csv: File name too long"),
    ("a" * 300, None, r"a+\.\.\.a+: expected a name .*"),
    ("nli.csv", 'A,b\nA,"b\nA,b\n', r"nli\.csv line 2: unexpected end of data; close every \", .*"),
    ("nli.csv", "A,b,c\n" * 3 + "A\n" + 'A,"b\nb",c\n' + "A, ,c\n" * 8 + "A,b,c\n",
     r"nli\.csv line 4: 1 columns, expected 3 "
     r"\(8 more rows are wrong: line 7, line 8, line 9, line 10, line 11, \.\.\.\)"),
    ("nli.csv", "A,b\n", r"nli\.csv: 1 rows, expected at least 2 and at least --batch-size \(1\)")])
def test_bad_files_are_rejected(tmp_path, monkeypatch, capfd, name, content, wanted):
    monkeypatch.chdir(tmp_path)
    for package in ("pyarrow", "pyarrow.parquet"):    # not installed; other tests may have imported it
        monkeypatch.setitem(sys.modules, package, None)
    if content == name:
        Path(name).mkdir()
    elif content is not None:
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    rejects("simcse", capfd, wanted, "--model", "scratch", "--batch-size", "1", "--data", name)


NESTED = functools.reduce(lambda inner, _: [inner], range(9999), "A")


@pytest.mark.parametrize("rows, wanted", [
    (["A b", "C"], [["A b"], ["C"]]), ([("A", "b"), ["C", "d"]], [["A", "b"], ["C", "d"]]),
    ([{"b": "B", "a": "A"}, {"a": "C", "b": "D"}], [["B", "A"], ["D", "C"]]),
    (["A", " "], "{} row 2: an empty cell; fill it or delete the row"),
    (["A", "\ud800"], r"{} row 2: a cell contains an incomplete character, '\\ud800'; correct it, or .*"),
    (["A", "b\0"], "{} row 2: a cell contains a NUL character; delete it"),
    ([["A"], [10**5000]], "{} row 2: expected only texts, found int"),         # str() fails for such a number
    ([["A"], [NESTED]], "{} row 2: expected only texts, found list"),
    ([["A", "b"], ["A"], 5], r"{} row 2: 1 columns, expected 2 \(1 more rows are wrong: row 3\)"),
    ([], "{}: no rows")])
def test_rows_in_memory(rows, wanted):
    """Rows in memory are checked like those of a file and not changed; other rows have another checksum."""
    named = rf"{len(rows)} rows in memory, sha1 [0-9a-f]{{12}}"
    if isinstance(wanted, str):
        with pytest.raises(UserError, match=wanted.format(named) + "$"):
            read_table(Table(rows), empty_cell)
        assert len(Table(rows)) == len(rows)
        return
    before = repr(rows)
    header, table = read_table(Table(rows), empty_cell)
    assert header == (["b", "a"] if isinstance(rows[0], dict) else None) and len(table) == 2
    for again in (table, table, Table(rows)):
        assert list(again) == [("row 1", wanted[0]), ("row 2", wanted[1])]
    assert list(iter_texts(Table(rows))) == ["\n".join(cells) for cells in wanted] and repr(rows) == before
    assert re.search(rf"from {named}$", describe_table(table, header))
    assert str(table) == str(Table(list(rows))) != str(Table(rows[::-1]))


CHANGES = {"a row loses a cell": lambda text: text.replace(",He eats.", "", 1),
           "half of the rows go": lambda text: text[: len(text) // 2].rpartition("\n")[0] + "\n",
           "a cell is empty": lambda text: text.replace("He eats.", ""), "all rows go": lambda text: "",
           "as long as before": lambda text: text.replace("He eats.", "He sits."),
           "a byte that is not UTF-8": lambda text: text.replace("He", "\udcff"), "deleted": None,
           "a quote": lambda text: text + '"'}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("has_started", [False, True])
def test_changed_file_is_rejected(change, has_started, tmp_path):
    """If a file changes after the check, every later iteration fails, and one that has started, too."""
    text, path = GOOD * 5_000, tmp_path / "nli.csv"            # longer than Python's read buffer
    path.write_text(text)
    _, table = read_table(path, empty_cell)
    wanted = [cells for _, cells in table]
    assert len(wanted) == 15_000 and [cells for _, cells in table] == wanted
    rows = iter(table)
    if has_started:
        next(rows)
    if CHANGES[change] is None:
        path.unlink()
    else:
        path.write_text(CHANGES[change](text), errors="surrogateescape")
    with pytest.raises(UserError, match=r"^.*nli\.csv: changed or deleted while it was read; start again.*$"):
        list(rows)
    for read in (lambda: next(iter(table)), lambda: describe_table(table, None), lambda: list(table)):
        with pytest.raises(UserError, match=r"nli\.csv: changed or deleted"):
            read()


def test_data_that_change_before_training(cwd, capfd, monkeypatch):
    """A row inserted between the check and tokenising would shift all later rows."""
    tokenise = simcse.tokenise_table

    def change_and_tokenise(*args, **more):
        Path("good.csv").write_text(GOOD.replace("It runs.\n", "It runs.\nThe end.\n"))
        return tokenise(*args, **more)

    monkeypatch.setattr(simcse, "tokenise_table", change_and_tokenise)
    with pytest.raises(SystemExit) as end:
        simcse.main([*SMALL, "--out", "out"])
    assert end.value.code == 2
    err = capfd.readouterr().err
    assert re.fullmatch(r"simcse\.py: good\.csv: changed or deleted while it was read; .*\n", err), err


def test_errors_of_iter_texts_name_the_file(tmp_path, monkeypatch):
    """iter_texts reads files that were not checked: it accepts wrong rows, but reports unreadable files."""
    path = tmp_path / "nli.jsonl"
    path.write_text('["A"]\n5\n["\\ud800"]\n["B"]\n')
    assert list(iter_texts(path)) == ["A", "?", "B"]
    path.unlink()
    with pytest.raises(UserError, match=r"nli\.jsonl: No such file or directory$"):
        list(iter_texts(path))
    path.write_text("[1]")

    def open_denied(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "open", open_denied, raising=False)
    with pytest.raises(UserError, match=r"nli\.jsonl: Permission denied$"):
        list(iter_texts(path))


def test_only_newlines_end_a_line(tmp_path):
    """Other characters at which str.splitlines splits belong to the text. Cells may be long."""
    text, long = "A\x85b\u2028c\u2029d\x0be\x0cf\x1cg \x0b", "x " * 100_000
    rows = [[text, "B c."], ["C d.", long], ["E f.", text]]
    contents = dict(csv="".join(f"{a},{b}\n" for a, b in rows), tsv="".join(f"{a}\t{b}\r\n" for a, b in rows),
                    jsonl="".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows),
                    json=json.dumps(rows, ensure_ascii=False))
    for kind, content in contents.items():
        path = tmp_path / f"a.{kind}"
        path.write_bytes(content.encode())
        assert [cells for _, cells in read_table(path)[1]] == rows, kind
    (tmp_path / "a.txt").write_bytes("".join(f"{a}\r\n" for a, _ in rows).encode())
    assert [cells for _, cells in read_table(tmp_path / "a.txt")[1]] == [[a] for a, _ in rows]
    assert len(long) > 131_072                                 # the default limit of the csv module


def test_json_must_fit_in_memory(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([["A b."]] * 1000, indent=1))
    assert len(read_table(path)[1]) == 1000
    monkeypatch.setattr(files, "total_memory", lambda: 8 * 10_000)
    with pytest.raises(UserError, match=r"a\.json: over 0\.0 GB, but a \.json is read into memory; .*"):
        read_table(path)


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def screen(self):
        """Return the lines that the terminal shows."""
        lines = []
        for line in self.getvalue().split("\n"):
            visible = ""
            for part in re.split("\r", line):
                visible = "" if part.startswith("\x1b[K") else visible
                part = part.removeprefix("\x1b[K")
                visible = part + visible[len(part) :]
            lines.append(visible.rstrip())
        return [line for line in lines if line]


@pytest.mark.parametrize("bad_row", ["\udcff,b", "A", 'A,"b', "A, "])
def test_error_message_replaces_the_progress_bar(bad_row, cwd, monkeypatch):
    Path("a.csv").write_text(GOOD * 5000 + bad_row + "\n" + GOOD, errors="surrogateescape")
    monkeypatch.setattr("kernels.training.progress.QUIET_SECONDS", 0)
    monkeypatch.setattr(files, "progress", functools.partial(files.progress, mininterval=0, miniters=1))
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with pytest.raises(SystemExit):
        simcse.main([*SMALL, "--data", "a.csv"])
    assert "reading a.csv" in terminal.getvalue()
    line, = terminal.screen()
    assert line.startswith("simcse.py: a.csv "), line


@pytest.mark.parametrize("name, flags, content, wanted", [
    ("ease", ["--entity-vectors"], "ENTITY/E 1  2\n", r"a line 1: could not convert string to float: .*"),
    ("cline", ["--data"], f"A,b,c,0:{'9' * 5000}:1,\n", r"a\.csv line 1: '0:9+', expected start:end:code .*"),
    ("cline", ["--data"], f"A,b,c,x{'9' * 100_000},\n", r"a\.csv line 1: 'x9+', expected start:end:code .*")])
def test_huge_numbers_in_other_files(name, flags, content, wanted, cwd, alarm, capfd):
    Path("e.tsv").write_text("text\tentity\nA b.\tE\nC d.\tF\n")
    data, path = (["--data", "e.tsv"], "a") if name == "ease" else ([], "a.csv")
    Path(path).write_text(content * 3)
    rejects(name, capfd, wanted, *SMALL, *data, *flags, path)


def test_compressed_documents_are_rejected():
    with pytest.raises(UserError, match=r"wiki\.txt\.gz: documents are not read from \.gz; unpack it"):
        next(read_documents("wiki.txt.gz"))


def test_lists_in_cells_are_joined(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "A", "others": ["b", "c d"]}\n{"text": "B", "others": []}\n')
    header, table = read_table(path, lists="join")
    assert header == ["text", "others"] and [cells for _, cells in table] == [["A", "b|c d"], ["B", ""]]
    assert re.fullmatch(r"line \d", next(iter(table))[0])


def test_make_py_writes_the_shipped_data(tmp_path):
    subprocess.run([sys.executable, DATA / "make.py", tmp_path], check=True)
    made, shipped = (np.load(folder / "shapes.npz") for folder in (tmp_path, DATA))
    assert made.files == shipped.files
    # cosines may be rounded differently on another machine
    assert all((made[name] == shipped[name]).mean() > 0.999 for name in made.files)
    texts = [path.relative_to(DATA) for path in DATA.rglob("*") if path.suffix not in (".npz", ".py", ".pyc")]
    assert [name for name in texts if (DATA / name).is_file() and
            (tmp_path / name).read_bytes() != (DATA / name).read_bytes()] == [] and len(texts) > 13
