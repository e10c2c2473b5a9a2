"""Rows that need not fit in memory: read anew each time, their tokens in a file; wrong rows, and data that change between runs."""
import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest

from simcse import Rows, read_table
from test_scripts import DATA, bert, guide, metrics, one_cpu_thread, run, small  # noqa: F401, fixtures

ROWS = [*list(csv.reader((DATA / "nli.csv").read_text(encoding="utf-8").splitlines()))[1:30],
        ["\u00e4 \"No, thanks,\" he said.", "He went,\nwithout\r\na word.", ", He"]]


def written(folder, kind, header):
    """The rows as a file of that kind, with a byte order mark and without a newline at its end, where these can be."""
    head = [["sent0", "sent1", "hard_neg"]] * header
    texts = {"csv": "\ufeff" + "\r\n".join(",".join('"' + cell.replace('"', '""') + '"' for cell in row) for row in head + ROWS),
             "tsv": "\n".join("\t".join(" ".join(cell.split()) for cell in row) for row in head + ROWS) + "\n",
             "jsonl": "\n".join(json.dumps(dict(zip(head[0], row)) if header else row, ensure_ascii=False) for row in ROWS) + "\n",
             "json": json.dumps([dict(zip(head[0], row)) if header else row for row in ROWS], indent=1),
             "txt": "\ufeff" + "\r\n".join(" ".join(row[0].split()) for row in ROWS)}
    (folder / f"rows.{kind}").write_bytes(texts[kind].encode())
    return folder / f"rows.{kind}"


@pytest.mark.parametrize("kind, header", [("csv", True), ("csv", False), ("tsv", True), ("jsonl", True), ("jsonl", False), ("json", True), ("txt", False)])
def test_a_table_can_be_gone_through_again(kind, header, tmp_path):
    names, table = read_table(written(tmp_path, kind, header))
    wanted = [row if kind in ("csv", "jsonl", "json") else [" ".join(cell.split()) for cell in row][: 1 if kind == "txt" else 3] for row in ROWS]
    assert names == (["sent0", "sent1", "hard_neg"] if header else None) and len(table) == len(ROWS)
    for _ in range(2):
        assert [cells for _, cells in table] == wanted
    first = [place for place, _ in table][0]
    assert first == {"json": "item 1"}.get(kind, f"line {1 + (header and kind in ('csv', 'tsv'))}")


@pytest.mark.parametrize("name", ["simcse", "dclr", "vascl", "selfguided", "ease"])
def test_rows_are_the_tokens_of_each_sentence(name, tmp_path, bert):  # noqa: F811
    """In the order of the file, whatever the pieces that it is read in."""
    one = run(name, tmp_path / "one", *small(name, tmp_path), "--steps", 1)
    script, model = one.script, one.model
    texts = [("Yes.",), ("He sang a very long song about the sea and the wind.",), ("No.",), ("\u00e4",)] * 6_000     # three pieces
    args = type(one.args)(**vars(one.args) | dict(out=str(tmp_path / "rows"), max_length=8, rank=0, world=1))
    Path(args.out).mkdir()
    rows, cut = script.tokenise_rows([(None, cells) for cells in texts], model, args)
    assert len(rows) == len(texts) and cut == "6,000 of 24,000 sentences cut to 8 tokens"
    for i in (0, 1, 2, 9_999, 10_000, 10_001, 19_999, 20_000, 23_999):
        views = [model.tokenizer(texts[i][0], truncation=True, max_length=8)["input_ids"]] * args.views
        assert [ids.tolist() for ids in rows[i]] == views and all(ids.dtype == np.int32 for ids in rows[i])
    with pytest.raises(IndexError):
        rows[len(rows)]
    assert sorted(file.name for file in Path(args.out).iterdir()) == ["tokens"]


def test_rows_are_not_held_in_memory(tmp_path, bert):  # noqa: F811
    result = run("simcse", tmp_path / "out", *small("simcse", tmp_path), "--steps", 1)
    rows = Rows(tmp_path / "out" / "tokens", 3, 1)
    assert isinstance(rows.ids.base, np.memmap) and isinstance(rows.ends.base, np.memmap)
    assert len(rows) == 36 and len(rows[3]) == 3 and rows[3][0].flags.writeable and len(result.losses) == 1


@pytest.mark.parametrize("name", ["simcse", "cline"])
def test_wrong_rows_are_counted_before_training(name, tmp_path, capfd):
    path = tmp_path / "rows.csv"
    path.write_text("A,b,c\n" * 3 + "A\n" + 'A,"b\nb",c\n' + "A, ,c\n" * 8 + "A,b,c\n")
    with pytest.raises(SystemExit):
        __import__(name).main(["--model", "scratch", "--data", str(path), "--out", str(tmp_path / "out")])
    wanted = name + r"\.py: .*rows\.csv line 4: 1 columns, wanted 3 \(8 more rows are wrong: line 7, line 8, line 9, line 10, line 11, \.\.\.\)\n"
    assert re.fullmatch(wanted, capfd.readouterr().err) and sorted(file.name for file in tmp_path.iterdir()) == ["rows.csv"]


def test_resume_on_other_data_is_refused(tmp_path, capfd):
    flags = [*small("simcse", tmp_path), "--steps", 4, "--eval-every", 2]
    run("simcse", tmp_path / "out", *flags)
    data = next(file for file in flags if isinstance(file, Path))
    before, steps = data.read_bytes(), len(metrics(tmp_path / "out"))
    data.write_bytes(before.replace(b"a", b"e", 1))            # one letter
    with pytest.raises(SystemExit):
        run("simcse", tmp_path / "out", *flags, "--resume")
    assert "--resume: the content of --data, by its checksum, was " in capfd.readouterr().err and len(metrics(tmp_path / "out")) == steps
    data.write_bytes(before)
    run("simcse", tmp_path / "out", *flags, "--resume")
