"""Rows of .parquet files: how many at a time; by pyarrow itself where it is installed."""
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from kernels.training import parquet
from kernels.training.cli import Fault
from kernels.training.parquet import cuts_of, plan, read_parquet
from kernels.training.tables import SENTENCES, read_table

MB = 2**20


class Batch:
    """Of pyarrow."""
    schema, num_rows, nbytes = SimpleNamespace(types=["string", "int64"]), 1, 9

    def to_pylist(self):
        return [{"a": "A", "b": 1}]


class ParquetFile:
    schema_arrow, num_row_groups, asked = SimpleNamespace(names=["a", "b"]), 2, []
    metadata = SimpleNamespace(row_group=lambda number: SimpleNamespace(num_columns=0, num_rows=1))

    def __init__(self, file):
        if file.read() != b"good":
            raise ValueError("no magic bytes\nsecond line")

    def iter_batches(self, rows, row_groups):
        self.asked.append((rows, row_groups))
        return [Batch()]


def test_what_is_asked_of_the_package(tmp_path, monkeypatch):
    """Which may be missing: row group by row group."""
    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", SimpleNamespace(ParquetFile=ParquetFile))
    (tmp_path / "good.parquet").write_bytes(b"good")
    header, table = read_table(tmp_path / "good.parquet")
    assert header == ["a", "b"] and list(table) == [("row 1", ["A", "1"]), ("row 2", ["A", "1"])]
    assert ParquetFile.asked == [(10_000, [0]), (10_000, [1])] * 2
    (tmp_path / "bad.parquet").write_bytes(b"bad")
    faults = dict(bad="no magic bytes; write it anew, or as .jsonl", none="No such file or directory")
    for name, fault in faults.items():
        with pytest.raises(Fault, match=rf"{name}\.parquet: {fault}$"):
            read_table(tmp_path / f"{name}.parquet")


def planned(*sizes, rows, kind="BYTE_ARRAY"):
    about = dict(physical_type=kind, num_values=rows, encodings=("PLAIN",))
    columns = [SimpleNamespace(total_uncompressed_size=size, path_in_schema=f"c{i}", **about)
               for i, size in enumerate(sizes)]
    group = SimpleNamespace(num_rows=rows, num_columns=len(sizes), column=columns.__getitem__)
    return plan("a.parquet", group)


@pytest.mark.parametrize("sizes, rows, wanted", [
    ([MB], 10_000, (256, [])), ([2 * MB], 10_000, (10_000, ["c0"])), ([256 * MB], 64, (64, ["c0"])),
    ([256 * MB, MB], 64, (63, ["c0"])), ([300 * MB], 1, (1, ["c0"])), ([0], 0, (256, []))])
def test_rows_of_a_batch(sizes, rows, wanted):
    assert planned(*sizes, rows=rows) == wanted
    assert planned(*sizes, rows=rows, kind="INT64") == (10_000, [])


def test_a_column_that_no_memory_holds():
    with pytest.raises(Fault, match=r"a\.parquet: column c1 would need .* GB of memory, this machine has "):
        planned(MB, 2**60, rows=9)


def test_parts_of_a_batch():
    """Rows of about LONGEST bytes, each row once."""
    for sizes in [5] * 9, [16 * MB] * 5, [MB] * 40, [1, 30 * MB, 1, 1, 16 * MB], [0]:
        cuts = cuts_of(np.array(sizes))
        assert [i for start, end in cuts for i in range(start, end)] == [*range(len(sizes))]
        assert all(sum(sizes[start:end]) <= 16 * MB + max(sizes) for start, end in cuts)
    assert len(cuts_of(np.array([5] * 9))) == 1 and len(cuts_of(np.array([16 * MB] * 5))) == 5


# ── by pyarrow ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def arrow():
    pytest.importorskip("pyarrow.parquet")
    import pyarrow
    return pyarrow


def write(arrow, path, columns, **flags):
    arrow.parquet.write_table(arrow.table(columns), path, store_schema=False, **flags)
    return path


def test_rows_are_those_of_the_package(arrow, tmp_path, monkeypatch):
    """In batches and parts of any size, of every encoding, packing and version of pages."""
    texts = [f"A man eats {'slowly ' * (i % 7)}\u00e4{i % 90}." for i in range(400)]
    columns = {"s": texts, "n": [None if i % 3 else text for i, text in enumerate(texts)], "i": [*range(400)],
               "l": [texts[i : i + i % 4] for i in range(400)], "b": [text.encode() for text in texts],
               "d": [{"x": text, "y": [text]} for text in texts],
               "m": [None if i % 5 else [None, text] for i, text in enumerate(texts)]}
    wanted = [dict(zip(columns, cells)) for cells in zip(*columns.values())]
    for number, more in enumerate([{}, dict(use_dictionary=False),
                                   dict(compression="zstd", row_group_size=70),
                                   dict(data_page_version="2.0", data_page_size=100, compression="gzip"),
                                   dict(use_dictionary=["s", "n"], dictionary_pagesize_limit=50),
                                   dict(column_encoding={"s": "DELTA_BYTE_ARRAY"}, use_dictionary=False)]):
        path = write(arrow, tmp_path / f"{number}.parquet", columns, **more)
        for most, longest in (2**28, 2**24), (1000, 2**24), (2**28, 500), (10, 500):
            monkeypatch.setattr(parquet, "BYTES", most)
            monkeypatch.setattr(parquet, "LONGEST", longest)
            assert [*read_parquet(path)] == wanted, (more, most, longest)


def test_long_cells_are_refused(arrow, tmp_path, monkeypatch):
    """With their row, in a list too."""
    monkeypatch.setattr(parquet, "LONGEST", MB)
    for name, cells, row in [("a", ["A b"] * 300 + ["x" * 2 * MB] + ["C d"] * 9, 301),
                             ("l", [["A b"]] * 5 + [["x" * MB, "y"]], 6),
                             ("r", [["A b" * 9999] * 40] * 2, 1)]:
        path = write(arrow, tmp_path / f"{name}.parquet", {"sent0": cells}, row_group_size=300)
        with pytest.raises(Fault, match=rf"{name}.* row {row}: \d\.\d MB in column sent0, over 1 MB; short"):
            read_table(path, roles=SENTENCES)


def test_repeated_cells_take_no_more_memory(arrow, tmp_path):
    """2,000 rows, alone and in lists, of a quarter of a MB each, in a file of a few kilobytes."""
    numbers = arrow.array(np.arange(2000) % 3, arrow.int32())
    texts = arrow.DictionaryArray.from_arrays(numbers, arrow.array([f"{i} " * (MB // 8) for i in range(3)]))
    lists = arrow.ListArray.from_arrays(arrow.array(np.arange(0, 2001, 4), arrow.int32()), texts)
    for name, cells in ("flat", texts), ("lists", lists):
        path = write(arrow, tmp_path / f"{name}.parquet", {"sent0": cells}, compression="zstd")
        assert path.stat().st_size < 50_000
        before, rows = arrow.total_allocated_bytes(), read_parquet(path)
        next(rows)
        assert arrow.total_allocated_bytes() - before < 100 * MB
        rows.close()
