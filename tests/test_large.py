"""Files larger than memory: rows that stay on the disk, their index, wrong rows, and data that change between runs."""
import csv
import json
import os
import re
from pathlib import Path

import pytest
import torch

import simcse
from simcse import OnDisk, read_table
from test_scripts import DATA, bert, metrics, one_cpu_thread, run, small  # noqa: F401, fixtures

ROWS = [*list(csv.reader((DATA / "nli.csv").read_text(encoding="utf-8").splitlines()))[1:30],
        ["\u00e4 \"No, thanks,\" he said.", "He went,\nwithout\r\na word.", ", He"]]


def written(folder, kind, header):
    """The rows as a file of that kind, with a byte order mark and without a newline at its end, where these can be."""
    head = [["sent0", "sent1", "hard_neg"]] * header
    texts = {"csv": "\ufeff" + "\r\n".join(",".join('"' + cell.replace('"', '""') + '"' for cell in row) for row in head + ROWS),
             "tsv": "\n".join("\t".join(" ".join(cell.split()) for cell in row) for row in head + ROWS) + "\n",
             "jsonl": "\n".join(json.dumps(dict(zip(head[0], row)) if header else row, ensure_ascii=False) for row in ROWS) + "\n",
             "txt": "\ufeff" + "\r\n".join(" ".join(row[0].split()) for row in ROWS)}
    (folder / f"rows.{kind}").write_bytes(texts[kind].encode())
    return folder / f"rows.{kind}"


@pytest.mark.parametrize("kind, header", [("csv", True), ("csv", False), ("tsv", True), ("jsonl", True), ("jsonl", False), ("txt", False)])
def test_rows_on_disk_are_those_in_memory(kind, header, tmp_path, monkeypatch):
    path = written(tmp_path, kind, header)
    names, kept = read_table(path)
    monkeypatch.setattr(simcse, "LARGE", 0)
    for _ in range(2):                                         # with a new index, and with the index of before
        found, rows = read_table(path)
        assert isinstance(rows, OnDisk) and found == names and len(rows) == len(kept) == len(ROWS)
        assert [cells for _, cells in rows] == [cells for _, cells in kept] and rows[5][0] == "row 6"
    monkeypatch.setattr(simcse, "read_cells", lambda *_: pytest.fail("the index was made again"))
    if not header:                                             # a header is read again, nothing else
        with pytest.raises(pytest.fail.Exception):
            read_table(path)


def test_index_holds_until_the_file_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(simcse, "LARGE", 0)
    path, made = written(tmp_path, "tsv", True), []
    keep = OnDisk.keep
    monkeypatch.setattr(OnDisk, "keep", lambda self, header: made.append(self.index) or keep(self, header))
    read_table(path), read_table(path)
    assert len(made) == 1 and made[0] == tmp_path / "rows.tsv.simcse.index" and made[0].stat().st_size == 8 * (len(ROWS) + 3)
    path.write_text(path.read_text().replace("concert", "conBert", 1))     # as long as before
    os.utime(path, ns=(1, 1))
    assert "B" in "".join(map(str, read_table(path)[1])) and len(made) == 2
    for kept in (20, 45, 48):                                  # damaged: cut off in a number, and behind one
        made[0].write_bytes(made[0].read_bytes()[:kept])
        assert len(read_table(path)[1]) == len(ROWS)
    assert len(made) == 5
    monkeypatch.setattr(simcse.os, "access", lambda *_: False)
    monkeypatch.setattr(simcse.tempfile, "gettempdir", lambda: str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    read_table(path)
    assert made[5] == tmp_path / "elsewhere" / "rows.tsv.simcse.index"


@pytest.mark.parametrize("name", ["simcse", "dclr", "vascl"])
def test_training_on_a_large_file_is_the_same(name, tmp_path, bert, monkeypatch):  # noqa: F811
    """In the order of the file in memory, over the end of an epoch."""
    flags = [*small(name, tmp_path), "--steps", 7, "--eval-every", 6, *(["--guide", bert] if name == "dclr" else [])]
    one = run(name, tmp_path / "one", *flags)
    monkeypatch.setattr(one.script, "LARGE", 1000)             # of the training data and of nothing else
    two = run(name, tmp_path / "two", *flags)
    assert two.losses == one.losses and next(tmp_path.glob(f"*.{name}.index"))
    state = torch.load(tmp_path / "two" / "state.pt", weights_only=True)["model"]
    assert all(torch.equal(weight, one.state["model"][key]) for key, weight in state.items())


@pytest.mark.parametrize("large", [False, True])
def test_wrong_rows_are_counted_before_training(large, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(simcse, "LARGE", 0 if large else 2**30)
    path = tmp_path / "rows.csv"
    path.write_text("A,b\n" * 3 + "A\n" + 'A,"b\nb"\n' + "A, \n" * 8 + "A,b\n")
    with pytest.raises(SystemExit):
        simcse.main(["--model", "scratch", "--data", str(path), "--out", str(tmp_path / "out")])
    wanted = r"simcse\.py: .*rows\.csv line 4: 1 columns, wanted 2 \(8 more rows are wrong: line 7, line 8, line 9, line 10, line 11, \.\.\.\)\n"
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
