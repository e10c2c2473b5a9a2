"""Data files and rows in memory: every format, columns and roles, lists, and errors that name the row."""
import collections
import csv
import gzip
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import cline
import dclr
import ease
import selfguided
import simcse
import vascl
from kernels.training.data import SENTENCE_COLUMNS, Table, empty_cell, iter_texts, read_table
from kernels.training.errors import UserError
from kernels.training.text.classifier import find_columns
from kernels.training.text.sts import load_sts
from running import GOOD, NLI, ONE_BATCH, SMALL, embed_saved, rejects, run_text

ROWS = [*NLI[:29], ["\u00e4 \"No, thanks,\" he said.", "He went,\nwithout\r\na word.", ", He"]]
GOOD_GZ = gzip.compress(GOOD.encode(), mtime=0)


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


@pytest.mark.parametrize("kind, header, compressed", [
    ("txt", False, ""), ("csv", True, ""), ("csv", False, ""), ("tsv", True, ""), ("tsv", False, ""),
    ("json", True, ""), ("json", False, ""), ("jsonl", True, ""), ("jsonl", False, ""),
    ("csv", True, ".gz"), ("txt", False, ".gz"), ("jsonl", False, ".gz")])
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
    first = [place for place, _ in table][0]
    assert first == {"json": "item 1"}.get(kind, f"line {1 + (header and kind in ('csv', 'tsv'))}")


@pytest.mark.parametrize("name, content, wanted", [
    ("nli.csv", None, r"nli\.csv: No such file or directory"),
    ("nli.csv", "", r"nli\.csv: no rows"),
    ("nli.csv", "sent0,sent1,hard_neg\n", r"nli\.csv: no rows"),
    ("nli.csv", "sent0,sent1\nA,b\n\nA,b\n", r"nli\.csv line 3: 0 columns, expected 2"),
    ("nli.tsv", "A\tb\nA\n", r"nli\.tsv line 2: 1 columns, expected 2"),
    ("nli.csv", "A,b,c\n" * 3 + "A\n" + 'A,"b\nb",c\n' + "A, ,c\n" * 8 + "A,b,c\n",
     r"nli\.csv line 4: 1 columns, expected 3 \(8 more rows are wrong\)"),
    ("nli.tsv", 'A\t"b"\nA\t"""b"" c"\n', r"nli\.tsv line 2: a cell is quoted as in \.csv, .*"),
    ("nli.csv.gz", b"A,b\n", r".*Not a gzipped file .*"),
    ("nli.csv.gz", GOOD_GZ[:-9], r".*Compressed file ended before .*"),
    ("nli.parquet", "A,b\n", r"nli\.parquet: a \.parquet file needs the package pyarrow; .*"),
    ("nli.csv", 'A,"b\nb\nb"\nA,b\nA,""\n', r"nli\.csv line 5: an empty cell; .*"),
    ("wiki.txt", "A\n\nB\n", r"wiki\.txt line 2: an empty cell; .*"),
    ("nli.jsonl", '{"a": "A", "b": "B"}\n{"a": "A"}\n', r"nli\.jsonl: columns not known as .*: a, b; .*"),
    ("nli.jsonl", '{"query": "A", "answer": "B"}\n{"query": "A"}\n', r"nli\.jsonl line 2: an empty cell; .*"),
    ("nli.jsonl", '{"query": "A"}\n{"query": "A", "b": "c"}\n', r"nli\.jsonl line 2: column 'b' is not .*"),
    ("nli.csv", b"A,b\nA,b\nA,\xff\n", r"nli\.csv line 3: not UTF-8; convert .*"),
    ("nli.csv", "A,b\nC,d\n".encode("UTF-16LE"), r"nli\.csv line 1: not UTF-8; convert .*"),
    ("folder.csv", "folder.csv", r"folder\.csv: Is a directory"),
    ("nli.xlsx", "A,b\n", r"nli\.xlsx: expected a name that ends in \.txt, .*, \.parquet; \.gz may follow"),
    ("nli.json", '[["A", "b"],\n["A" "b"]]', r"nli\.json line 2: not JSON: Expecting ',' delimiter.*"),
    ("nli.json", '["A"]\n["A"]', r"nli\.json line 2: not JSON: Extra data; for one row per line, .*"),
    ("nli.json", '{"a": "b"}', r"nli\.json line 1: expected a JSON list of rows; for one row per line, .*"),
    ("nli.jsonl", '["A"]\n["A"\n["A"]\n', r"nli\.jsonl line 2: not JSON: Expecting ',' delimiter"),
    ("nli.jsonl", '["A"]\n\n["A"]\n', r"nli\.jsonl line 2: not JSON: the line is empty"),
    ("nli.jsonl", '["A"]\n5\n', r"nli\.jsonl line 2: expected a row of texts, found '5'"),
    ("nli.jsonl", '["A"]\n[null]\n', r"nli\.jsonl line 2: expected only texts, found 'None'; .*"),
    ("nli.json", '[["A"],\n[NaN]]\n', r"nli\.json item 2: expected only texts, found 'nan'; .*"),
    ("nli.json", '[["A"], ["A\\ud800"]]', r"nli\.json item 2: an incomplete character, .*"),
    ("nli.csv", 'A,b\nA,"b\nA,b\n', r"nli\.csv line 2: unexpected end of data; close every \", .*"),
    ("nli.csv", "sent0;sent1\nA;b\n", r"nli\.csv: .* separated by semicolons, expected commas; write it .*"),
    ("nli.csv", "A, b\tc\nD\te, f, g\nH\ti\n", r"nli\.csv: .* by tabs, expected commas; name the file \.tsv"),
    ("nli.tsv", "anchor,positive\nA,b\n", r"nli\.tsv: .* by commas, expected tabs; name the file \.csv"),
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
    assert len(long) > 131_072                                 # the default limit of the csv module


def test_sentences_with_other_separators_are_read(tmp_path):
    """Single sentences may contain tabs, commas and semicolons, if their numbers differ."""
    texts = ["One, two; three.", "One.", "One, two, three; four."]
    for kind in ("txt", "tsv"):
        (tmp_path / f"a.{kind}").write_text("\n".join(texts))
        assert [cells for _, cells in read_table(tmp_path / f"a.{kind}")[1]] == [[text] for text in texts]


def test_parquet(tmp_path):
    """Columns of every encoding are read, lists included."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"query": ["A", "C"], "pos": [["b"], ["d", "e"]]})
    for options in ({}, dict(use_dictionary=False, column_encoding={"query": "DELTA_LENGTH_BYTE_ARRAY"})):
        parquet.write_table(table, tmp_path / "a.parquet", **options)
        _, found = read_table(tmp_path / "a.parquet", roles=SENTENCE_COLUMNS)
        assert [*found] == [("row 1", ["A", "b"]), ("row 2", ["C", "d"]), ("row 2", ["C", "e"])]
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    with pytest.raises(UserError, match=r"a\.parquet: .*; write the file again, or write it as \.jsonl"):
        read_table(tmp_path / "a.parquet")


# ── columns and roles ───────────────────────────────────────────────────────────────────────────────────────

CELLS = [[f"The {name} sat here, on mat {i}." for name in ("cat", "dog", "cow", "hen")] for i in range(9)]
ORDER = "; choose columns by --columns, by name or number, in the order anchor, positive, negative"
UNKNOWN = "columns not known as anchor, positive or negative: "
AMBIGUOUS = "no column sentence; expected one of [Ss]entence, sentence, or a number from 1 to 2 .*"


def write_table(folder, head, kind="csv"):
    """Write CELLS to a file with this header: numbers for id, empty cells for label."""
    names = head.split(",")
    rows = [[str(i) if name in ("id", "") else "" if name == "label" else cell
             for name, cell in zip(names, row)] for i, row in enumerate(CELLS)]
    path = folder / f"data.{kind}"
    if kind == "csv":
        with open(path, "w", newline="") as file:
            csv.writer(file).writerows([names, *rows])
    else:
        path.write_text(json.dumps([dict(zip(names, row)) for row in rows]))
    return path


def read_roles(path, columns=None, **more):
    columns = columns and columns.split("|")
    header, table = read_table(path, empty_cell, roles=SENTENCE_COLUMNS, columns=columns, **more)
    return header, [cells for _, cells in table]


@pytest.mark.parametrize("kind", ["csv", "json"])
@pytest.mark.parametrize("head, columns, shown, order", [
    ("Anchor,Positive,Negative", None, "anchor Anchor, positive Positive, negative Negative", "012"),
    ("negative,positive,anchor", None, "anchor anchor, positive positive, negative negative", "210"),
    ("Hard-Neg,QUERY,Sentence 2", None, "anchor QUERY, positive Sentence 2, negative Hard-Neg", "120"),
    ("sent1,negative_2,sent0,hard_neg1", None,
     "anchor sent0, positive sent1, negative negative_2, negative hard_neg1", "2013"),
    ("premise", None, "anchor premise", "0"),
    ("id,query,passage,label", "query|PASSAGE", "anchor query, positive passage", "12"),
    (",query,passage", "query|passage", "anchor query, positive passage", "12"),
    ("id,query,passage,label", "3|2", "anchor passage, positive query", "21"),
    ("Frage,Antwort", "Antwort|Frage", "anchor Antwort, positive Frage", "10")])
def test_roles(kind, head, columns, shown, order, tmp_path):
    """Column names may be in any case and order; columns that are not read may contain anything."""
    header, cells = read_roles(write_table(tmp_path, head, kind=kind), columns)
    assert header == shown.split(", ") and cells == [[row[int(i)] for i in order] for row in CELLS]


@pytest.mark.parametrize("head, columns, error", [
    ("sentence1,sentence2,score", None, UNKNOWN + "score" + ORDER),
    ("premise,hypothesis,id", None, UNKNOWN + "hypothesis, id" + ORDER),
    ("query,anchor", None, "2 columns are anchor: query, anchor" + ORDER),
    ("positive,negative", None, "no anchor among columns positive, negative" + ORDER),
    ("anchor,negative", None, "no positive among columns anchor, negative" + ORDER),
    (",anchor,positive", None, UNKNOWN + r"\(no name\)" + ORDER),
    ("anchor,positive", "Foo", "no column Foo; expected one of anchor, positive, or a number from 1 to 2 .*"),
    ("anchor,positive", "1|3", "no column 3; expected one of anchor, positive, or a number from 1 to 2 .*"),
    ("sentence,sentence", "sentence", AMBIGUOUS)])
def test_headers_that_are_rejected(head, columns, error, tmp_path):
    """Columns with the same name can be chosen by their numbers."""
    with pytest.raises(UserError, match=rf"data\.csv: {error}$"):
        read_roles(write_table(tmp_path, head), columns)
    if head == "sentence,sentence":
        assert read_roles(tmp_path / "data.csv", "2|1")[1] == [[row[1], row[0]] for row in CELLS]


@pytest.mark.parametrize("content, columns", [
    ("cat,feline\ndog,canine\n", None), ("Frage,Antwort\nA man eats.,He eats.\n", None),
    ("Answer,He said so to a man.\nA man eats.,He eats.\n", None),         # one well-known name
    ("Frage,Antwort\nA man eats.,He eats.\n", "2|1")])
def test_first_row_is_data(content, columns, tmp_path):
    """A header is known by its names. Nothing is guessed from what cells look like."""
    (tmp_path / "a.csv").write_text(content)
    rows = [line.split(",")[:: -1 if columns else 1] for line in content.splitlines()]
    assert read_roles(tmp_path / "a.csv", columns)[1] == rows


def test_column_names_of_all_scripts(tmp_path):
    """Scored pairs, labelled texts, sentences and links are found by column name, in any case."""
    path = tmp_path / "a.tsv"
    path.write_text("\tScore\tSentence 2\tSentence1\n0\t5\tB c.\tA b.\n1\t0\tD e.\tC d.\n")
    assert load_sts(path) == [("A b.", "B c.", 5.0), ("C d.", "D e.", 0.0)]
    flags = ["--data", str(path), "--batch-size", "2"]
    sentences = selfguided.load_data(path, selfguided.make_parser().parse_args(flags))
    assert [text for _, (text,) in sentences] == ["B c.", "A b.", "D e.", "C d."]
    path.write_text("Gold Label\tReview, long\n" + "yes\tA b.\nno\tC d.\n")
    args = SimpleNamespace(text_columns=None, label_column="gold_label")
    assert find_columns(path, args)[1:] == ([1], 0) and args.label_column == "Gold Label"
    path.write_text("text\tCategory\nA b.\tx\n")
    assert len(find_columns(path, SimpleNamespace(text_columns=None, label_column=None))[0]) == 1
    path.write_text("Positive Entity\tText\nE\tA b.\nF\tC d.\n")
    assert ease.load_data(path, ease.make_parser().parse_args(flags))[0] == [
        ("line 2", ("A b.",)), ("line 3", ("C d.",))]
    path.write_text("Antonym\tOriginal\tSynonym\n" + "no b\ta b\tan b\n" * 2)
    assert cline.load_data(path, cline.make_parser().parse_args(flags))[0][0][:3] == ("a b", "an b", "no b")
    path.write_text("id\tText\tOther\n1\tA b.\tB.\n2\tC d.\tD.\n")
    for script, more in (dclr, ["--guide", "x"]), (vascl, ["--neighbours", "1"]), (simcse, []):
        args = script.make_parser().parse_args([*flags, "--columns", "text", *more])
        assert [cells for _, cells in script.load_data(path, args)] == [["A b."], ["C d."]]
    path.write_text("\tsentence\tlabel\n0\tA\tb\n1\tC\td\n")    # the first column is an index of pandas
    assert find_columns(path, SimpleNamespace(text_columns=None, label_column=None))[1:] == ([1], 2)


# ── lists in cells ──────────────────────────────────────────────────────────────────────────────────────────


def write_jsonl(folder, *rows):
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "a.jsonl"


def test_lists_of_positives_and_negatives(tmp_path, capsys):
    """One row per positive in a list, with all negatives; --negatives repeats or cuts them, and says so."""
    path = write_jsonl(tmp_path, {"query": "q", "pos": ["a", "b"], "neg": ["c", "d"]},
                       {"query": "r", "pos": "e", "neg": ["f", "g"]})
    assert read_roles(path)[1] == [["q", "a", "c", "d"], ["q", "b", "c", "d"], ["r", "e", "f", "g"]]
    path = write_jsonl(tmp_path, {"query": "q", "pos": ["a"], "neg": ["c", "d", "e"]},
                       {"query": "r", "pos": ["b"], "neg": ["f"]})
    with pytest.raises(UserError, match="line 2: 3 texts, expected 5 as in the first row; --negatives N .*"):
        read_roles(path)
    assert read_roles(path, negatives=2)[1] == [["q", "a", "c", "d"], ["r", "b", "f", "f"]]
    assert "--negatives 2: negatives cut in 1 rows, repeated in 1 rows" in capsys.readouterr().out
    for row, error in [({"query": "q", "pos": [], "neg": ["c"]}, "an empty list; .*"),
                       ({"query": "q", "pos": ["a"], "neg": []}, "an empty list; .*"),
                       ({"query": ["q"], "pos": ["a"], "neg": ["c"]}, "expected only texts, .*"),
                       ({"query": "q", "pos": ["a", " "], "neg": ["c"]}, "an empty cell; .*")]:
        with pytest.raises(UserError, match=f"line 1: {error}"):
            read_roles(write_jsonl(tmp_path, row), negatives=2)


def test_lists_in_cells_are_joined(tmp_path):
    path = write_jsonl(tmp_path, {"text": "A", "others": ["b", "c d"]}, {"text": "B", "others": []})
    header, table = read_table(path, join=True)
    assert header == ["text", "others"] and [cells for _, cells in table] == [["A", "b|c d"], ["B", ""]]


def test_iter_texts_accepts_wrong_rows(tmp_path):
    (tmp_path / "a.jsonl").write_text('["A"]\n5\n["\\ud800"]\n["B", ["c", "d"]]\n')
    assert list(iter_texts(tmp_path / "a.jsonl")) == ["A", "?", "B\nc|d"]


# ── rows in memory ──────────────────────────────────────────────────────────────────────────────────────────

NAMES = "sent0", "sent1", "hard_neg"
THREE = [tuple(row) for row in NLI[:3]]
COLUMNS = {name: [*cells] for name, cells in zip(NAMES, zip(*THREE))}
Pair = collections.namedtuple("Pair", NAMES)


class Series(collections.UserList):
    """Behaves like a Series of pandas."""
    def tolist(self):
        return self.data


class Frame:
    """Behaves like a DataFrame of pandas: iterating yields column names."""
    columns = property(lambda self: [*self.parts])

    def __init__(self, parts):
        self.parts = parts

    def __iter__(self):
        return iter(self.parts)

    def __getitem__(self, name):
        return Series(self.parts[name])


class Dataset(Frame):
    """Behaves like a Dataset of the datasets library."""
    column_names = Frame.columns


@pytest.mark.parametrize("data, header", [
    (THREE, None), (np.array(THREE), None), ([*np.array(THREE)], None),
    (torch.utils.data.Subset(THREE, range(3)), None),
    ([dict(zip(NAMES, row)) for row in THREE], NAMES), ([Pair(*row) for row in THREE], NAMES),
    (COLUMNS, NAMES), ({name: np.array(cells) for name, cells in COLUMNS.items()}, NAMES),
    (Frame(COLUMNS), NAMES), (Dataset(COLUMNS), NAMES)])
def test_rows_in_memory(data, header):
    """Each type gives the same rows as a list; other rows have another checksum."""
    found, table = read_table(Table(data), empty_cell, roles=SENTENCE_COLUMNS)
    assert found == (header and ["anchor sent0", "positive sent1", "negative hard_neg"]) and len(table) == 3
    for _ in range(2):
        assert [*table] == [(f"row {i}", [*row]) for i, row in enumerate(THREE, 1)]
    assert re.fullmatch(r"3 rows in memory, sha1 [0-9a-f]{12}", str(table))
    assert str(table) == str(Table(data)) != str(Table(THREE[::-1]))


@pytest.mark.parametrize("data, wanted", [
    (iter(THREE), "data of type list_iterator: expected texts or rows in a list .*"),
    ({"a": ["A"], "b": ["A", "B"]}, r"data of type dict: columns of lengths .*, expected lists .*"),
    ({"a": "A b.", "b": "C d."}, "data of type dict: columns of lengths .*"),
    ([THREE[0], None], "2 rows in memory, .* row 2: expected a row of texts, found 'None'"),
    ([THREE[0], ("A", np.nan, "b")], ".* row 2: expected only texts, found 'nan'; .*"),
    ([THREE[0], ("A", " ", "b")], ".* row 2: an empty cell; .*"), ([], ".*: no rows")])
def test_wrong_rows_in_memory(data, wanted):
    with pytest.raises(UserError, match=f"^{wanted}$"):
        read_table(Table(data), empty_cell, roles=SENTENCE_COLUMNS)


def test_texts_in_memory_are_trained(cwd, capsys):
    """main(data=...) trains as the file of the same rows does."""
    def losses(**data):
        simcse.main(["--model", "scratch", "--batch-size", "2", "--steps", "2", "--out", f"out{len(data)}"],
                    **data) if data else simcse.main([*SMALL, "--steps", "2", "--out", "out0"])
        rows = map(json.loads, open(f"out{len(data)}/metrics.jsonl"))
        return [row["loss"] for row in rows]

    assert losses(data=[*csv.reader(GOOD.splitlines())]) == losses()
    assert 'first    anchor "A man eats."  positive "He eats."' in capsys.readouterr().out


# ── what is trained ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("columns, ignore", [
    (4, False), (4, True), (5, True), (1, True), (2, True), (2, False)])
def test_hard_negatives_and_equal_texts(columns, ignore, tmp_path, bert):
    """Every anchor is compared with the positives and hard negatives of all rows. With --ignore-equal, those
    are left out whose text is the anchor, or a positive of a row with the same anchor."""
    rows = [[*NLI[i], *NLI[i + 12][:2]][:columns] for i in range(12)]
    for i, j, column in (0, 3, 1), (0, 5, 2), (7, 7, -1), (2, 9, 1):
        rows[j][column % columns] = rows[i][1 % columns]
    rows[4][0] = rows[6][0]                                    # (A, B1), (A, B2) and (B1, C)
    rows[10][0] = rows[4][1 % columns]
    flags = ["--model", bert, "--pooling", "avg", *ONE_BATCH, *(["--ignore-equal"] if ignore else [])]
    result = run_text("simcse", tmp_path, rows, *flags)
    z1, *keys = [F.normalize(embed_saved(bert, column, "avg").double(), dim=1) for column in zip(*rows)]
    anchors, *others = zip(*rows)
    others = others or [anchors]
    positives = {(anchor, positive) for anchor, positive in zip(anchors, others[0])}
    keys_texts = [text for column in others for text in column]
    wrong = torch.tensor([[text == anchor or (anchor, text) in positives for text in keys_texts]
                          for anchor in anchors])
    wrong[range(12), range(12)] = False
    logits = (z1 @ torch.cat(keys or [z1]).T / 0.05).masked_fill(wrong & ignore, -torch.inf)
    wanted = F.cross_entropy(logits, torch.arange(12)).item()
    assert result.losses == [pytest.approx(wanted, abs=1e-4)] and result.args.count == max(columns, 2)
    share = 100 * max(sum(column.count(text) > 1 for text in column) for column in (anchors, others[0])) / 12
    what = "" if ignore else "--ignore-equal leaves "
    assert re.match(rf"{share:.0f} % of the \w+ occur more than once; {what}their ", result.said["equal"])
