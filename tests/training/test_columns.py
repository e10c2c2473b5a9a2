"""Column names and roles: which rows are headers, --columns, and headers that are rejected."""
import json
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import cline
import dclr
import ease
import selfguided
import simcse
import vascl
from kernels.training.cli import UserError
from kernels.training.tables import RANKING_COLUMNS, SENTENCE_COLUMNS, empty_cell, read_table
from kernels.training.text.label_columns import find_columns
from kernels.training.text.sts import load_sts
from running import NLI, ONE_BATCH, ROOT, embed_saved, run_text

DOCUMENT = ROOT / "docs/others.md"

ROWS = [[f"The {name} sat here, on mat {i}." for name in ("cat", "dog", "cow", "hen")] for i in range(9)]


def write_table(folder, head, rows=ROWS, kind="csv"):
    """Write a file with this header and a column for each name: numbers for id, empty cells for label."""
    names = head.split(",")

    def cell(name, column, row):
        if name in ("id", ""):
            return str(row)
        return "" if name == "label" else rows[row][column]

    cells = [[cell(name, i, row) for i, name in enumerate(names)] for row in range(len(rows))]
    path = folder / f"data.{kind}"
    if kind == "csv":
        path.write_text("\n".join([head, *('"' + '","'.join(row) + '"' for row in cells)]))
    else:
        path.write_text(json.dumps([dict(zip(names, row)) for row in cells]))
    return path


def read_roles(path, columns=None):
    columns = columns and columns.split("|")
    header, table = read_table(path, empty_cell, roles=SENTENCE_COLUMNS, columns=columns)
    return header, [cells for _, cells in table]


@pytest.mark.parametrize("kind", ["csv", "json"])
@pytest.mark.parametrize("head, columns, shown, order", [
    ("Anchor,Positive,Negative", None, "anchor Anchor, positive Positive, negative Negative", "012"),
    ("negative,positive,anchor", None, "anchor anchor, positive positive, negative negative", "210"),
    (" Hard-Neg ,QUERY,Sentence 2", None, "anchor QUERY, positive Sentence 2, negative Hard-Neg", "120"),
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
    assert [name.replace("  ", " ").strip() for name in header] == shown.split(", ")
    assert cells == [[row[int(i)] for i in order] for row in ROWS]


ORDER = "; choose columns by --columns, by name or number, in the order anchor, positive, negative"
UNKNOWN = "columns not known as anchor, positive or negative: "
AMBIGUOUS = "--columns sentence: expected one of [Ss]entence, sentence, or a number from 1 to 2"


@pytest.mark.parametrize("head, columns, error", [
    ("sentence1,sentence2,score", None, UNKNOWN + "score" + ORDER),
    ("premise,hypothesis,id", None, UNKNOWN + "hypothesis, id" + ORDER),
    ("query,id,id", None, UNKNOWN + "id, id" + ORDER),
    ("Foo bar,Baz", None, UNKNOWN + f"Foo bar, Baz{ORDER}; if that row is data, write a header .*"),
    ("query,anchor", None, "2 columns are anchor: query, anchor" + ORDER),
    ("sentence,sentence", None, "2 columns are anchor: sentence, sentence" + ORDER),
    ("positive,negative", None, "no anchor among columns positive, negative" + ORDER),
    ("anchor,negative", None, "no positive among columns anchor, negative" + ORDER),
    (",anchor,positive", None, UNKNOWN + r"\(no name\)" + ORDER),
    ("anchor,positive", "Foo", "--columns Foo: expected one of anchor, positive, or a number from 1 to 2"),
    ("anchor,positive", "1|3", "--columns 3: expected one of anchor, positive, or a number from 1 to 2"),
    ("sentence,sentence", "sentence", AMBIGUOUS), ("Sentence,sentence", "sentence|sentence", AMBIGUOUS),
    ("query,answer", "\u00b2", "--columns \u00b2: expected one of query, answer, or a number from 1 to 2"),
    ("query,answer", "9" * 5000, "--columns 9{40}: expected one of query, answer, or a number from 1 to 2")])
def test_headers_that_are_rejected(head, columns, error, tmp_path):
    """Wrong rows are reported first. Columns with the same name can be chosen by their numbers."""
    with pytest.raises(UserError, match=rf"data\.csv: {error}$"):
        read_roles(write_table(tmp_path, head), columns)
    if head == "sentence,sentence":
        assert read_roles(tmp_path / "data.csv", "2|1")[1] == [[row[1], row[0]] for row in ROWS]
    if columns is None:
        with pytest.raises(UserError, match=r"data\.csv line 4: an empty cell; .*"):
            read_roles(write_table(tmp_path, head, [*ROWS[:2], [" "] * 4, *ROWS[2:]]))


def test_scored_pairs_with_two_columns_of_one_name_are_rejected(tmp_path):
    (tmp_path / "a.tsv").write_text("sentence1\tSentence 1\tscore\nA\tb\t1\n")
    with pytest.raises(UserError, match=r"a\.tsv: two columns are called 'sentence1', in .*, score$"):
        load_sts(tmp_path / "a.tsv")


def test_long_list_of_names_is_shortened(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([{f"{'long ' * 20}{i}": "A b." for i in range(99)}] * 2))
    with pytest.raises(UserError, match=rf"^.{{1,500}} \.\.\.{ORDER}$"):
        read_roles(tmp_path / "a.json")


@pytest.mark.parametrize("content, columns", [
    ("cat,feline\ndog,canine\nold cow,bovine\n", None),        # all rows look like the first
    ("Well,Good\n" + "A man eats.,Good\nA dog runs.,It is fast.\n" * 5, None),
    ("Well,Good\n" + "A man eats.,Good\n" * 5, "1|2"),
    ("Answer,He said so to a man.\nA man eats.,He eats.\n", None),         # one well-known name
    ("A man eats.,He eats.\n", None), ("A man eats.,He eats.\n", "2|1")])
def test_first_row_is_data(content, columns, tmp_path, capsys):
    (tmp_path / "a.csv").write_text(content)
    step = -1 if columns == "2|1" else 1
    rows = [line.split(",")[::step] for line in content.splitlines()]
    assert read_roles(tmp_path / "a.csv", columns)[1] == rows
    assert capsys.readouterr().out == ""                       # no note about a header


@pytest.mark.parametrize("columns", [None, "1|2", "Frage|Antwort"])
def test_header_is_recognised_with_and_without_columns(columns, tmp_path, capsys):
    """Without --columns the unknown names are an error. With column numbers, a note shows the header."""
    (tmp_path / "a.csv").write_text("Frage,Antwort\n" + "A man eats.,He eats.\n" * 5)
    note = r"note +.*a\.csv: its first row is read as a header: anchor Frage, positive Antwort; if .*\n"
    if columns is None:
        with pytest.raises(UserError, match="not known as .*; if that row is data, write a header above it$"):
            read_roles(tmp_path / "a.csv")
    else:
        header, rows = read_roles(tmp_path / "a.csv", columns)
        assert header == ["anchor Frage", "positive Antwort"] and rows == [["A man eats.", "He eats."]] * 5
        by_name = columns.startswith("Frage")                  # then the header is not a guess
        assert bool(re.fullmatch(note, capsys.readouterr().out)) != by_name


def test_columns_of_rankings(tmp_path):
    """Rankings have the columns of docs/others.md: text, reference, and candidates, possibly in a list."""
    header = "text,reference,cand1,cand2"
    assert "columns are the text, the reference, and the candidates" in DOCUMENT.read_text("utf-8")
    (tmp_path / "a.csv").write_text(header + "\na,b,c,d" * 3)
    rows = [["a", "b", "c", "d"]] * 3
    wanted = ["text text", "reference reference", "candidate cand1", "candidate cand2"]
    found, table = read_table(tmp_path / "a.csv", empty_cell, roles=RANKING_COLUMNS)
    assert found == wanted and [cells for _, cells in table] == rows
    row = {"candidates": ["c", "d"], "text": "a", "reference": "b"}
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps(row)] * 3))
    found, table = read_table(tmp_path / "a.jsonl", empty_cell, roles=RANKING_COLUMNS)
    assert found == wanted[:2] + ["candidate candidates"] and [cells for _, cells in table] == rows
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, [row, row | {"candidates": ["c"]}])))
    with pytest.raises(UserError, match="line 2: 3 texts, expected 4 as in the first row; use lists .*"):
        read_table(tmp_path / "a.jsonl", empty_cell, roles=RANKING_COLUMNS)
    (tmp_path / "a.jsonl").write_text(json.dumps({"query": "a", "pos": ["b"], "neg": ["c", "d"]}) + "\n")
    assert read_roles(tmp_path / "a.jsonl")[1] == [["a", "b", "c", "d"]]


def test_long_numbers_are_read_fast(tmp_path, alarm):
    rows = [[f"{i}" * 200_000 + "x", "A man."] for i in range(9)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    assert read_roles(tmp_path / "a.json")[1] == rows


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
    path.write_text("Review\tClass\n" + "A long, long one.\tgood\n" * 5)
    args = SimpleNamespace(text_columns=None, label_column=None)
    table, texts, label = find_columns(path, args)
    assert (len(table), texts, label) == (5, [0], 1)
    assert (args.text_columns, args.label_column) == (["Review"], "Class")
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


@pytest.mark.parametrize("columns, equal", [(4, False), (4, True), (5, True), (1, True), (2, True)])
def test_hard_negatives_and_equal_texts(columns, equal, tmp_path, bert):
    """Every anchor is compared with the hard negatives of all rows. With --ignore-equal, those that have the
    text of its positive are left out."""
    rows = [[*NLI[i], *NLI[i + 12][:2]][:columns] for i in range(12)]
    for i, j, column in (0, 3, 1), (0, 5, 2), (7, 7, -1), (2, 9, 1):
        rows[j][column % columns] = rows[i][1 % columns]
    flags = ["--model", bert, "--pooling", "avg", *ONE_BATCH, *(["--ignore-equal"] if equal else [])]
    result = run_text("simcse", tmp_path, rows, *flags)
    z1, *keys = [F.normalize(embed_saved(bert, column, "avg").double(), dim=1) for column in zip(*rows)]
    texts = [list(column) for column in zip(*rows)][1:] or [[row[0] for row in rows]]
    keys, positives = torch.cat(keys or [z1]), texts[0]
    same = torch.tensor([[text == positive for column in texts for text in column] for positive in positives])
    same[range(12), range(12)] = False
    logits = (z1 @ keys.T / 0.05).masked_fill(same & equal, -torch.inf)
    wanted = F.cross_entropy(logits, torch.arange(12)).item()
    assert result.losses == [pytest.approx(wanted, abs=1e-4)]
    if equal:
        assert result.said["equal"].startswith(f"{int(same.any(1).sum())} of 12 rows have a ")
    assert result.args.count == max(columns, 2) and ("equal" in result.said) == equal
