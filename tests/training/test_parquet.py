"""Rows of .parquet files: batch sizes, tested with a fake pyarrow; with pyarrow itself if it is installed."""
import itertools
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from kernels.training import parquet
from kernels.training.cli import UserError
from kernels.training.parquet import read_batches, read_parquet
from kernels.training.tables import SENTENCE_COLUMNS, read_table

MB = 2**20


def read_rows(path):
    return [row for _, row in read_parquet(path)]


def fake_parquet_file(*sizes, rows=1, kind="BYTE_ARRAY", encoding="PLAIN"):
    """Return a fake ParquetFile with two row groups, whose columns have these sizes. It records its calls."""
    columns = [SimpleNamespace(total_uncompressed_size=size, path_in_schema=name, physical_type=kind,
                               encodings=(encoding,)) for name, size in zip("ab", sizes)]
    group = SimpleNamespace(num_rows=rows, num_columns=len(sizes), column=columns.__getitem__)
    cells = [[SimpleNamespace(as_py=lambda: "A")], [SimpleNamespace(as_py=lambda: 1)]]

    class ParquetFile:
        schema_arrow, num_row_groups, calls = SimpleNamespace(names=["a", "b"]), 2, []
        metadata = SimpleNamespace(row_group=lambda number: group)

        def __init__(self, file, read_dictionary=()):
            file.seek(0)
            self.as_dictionary = sorted(read_dictionary)
            if file.read() != b"good":
                raise ValueError("no magic bytes\nsecond line")

        def iter_batches(self, rows, row_groups):
            self.calls.append((rows, row_groups, self.as_dictionary))
            return [SimpleNamespace(columns=cells, schema=self.schema_arrow)]

    return ParquetFile


def test_row_groups_are_read_one_by_one(tmp_path, monkeypatch):
    fake = fake_parquet_file(9, 9)
    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", SimpleNamespace(ParquetFile=fake))
    (tmp_path / "good.parquet").write_bytes(b"good")
    header, table = read_table(tmp_path / "good.parquet")
    assert header == ["a", "b"] and list(table) == [("row 1", ["A", "1"]), ("row 2", ["A", "1"])]
    assert fake.calls == [(10_000, [0], ["a", "b"]), (10_000, [1], ["a", "b"])] * 2
    (tmp_path / "bad.parquet").write_bytes(b"bad")
    errors = dict(bad="no magic bytes; write the file again, or write it as .jsonl",
                  none="No such file or directory")
    for name, error in errors.items():
        with pytest.raises(UserError, match=rf"{name}\.parquet: {error}$"):
            read_table(tmp_path / f"{name}.parquet")


@pytest.mark.parametrize("sizes, more, wanted", [
    ([MB], dict(rows=10_000), (10_000, ["a"])), ([256 * MB], dict(rows=64), (64, ["a"])),
    ([256 * MB, MB], dict(rows=64), (63, ["a", "b"])), ([300 * MB], {}, (1, ["a"])),
    ([0], dict(rows=0), (10_000, ["a"])), ([MB], dict(rows=10_000, encoding="DELTA_BYTE_ARRAY"), (256, [])),
    ([300 * MB], dict(kind="INT64"), (10_000, [])),
    ([MB, 2**60], {}, r"a\.parquet: column b would need .* GB of memory, this machine has .*")])
def test_batch_size(sizes, more, wanted, tmp_path):
    """The batch size depends on row bytes and encoding. UserError if a column is larger than the memory."""
    (tmp_path / "a.parquet").write_bytes(b"good")
    fake = fake_parquet_file(*sizes, **more)
    with open(tmp_path / "a.parquet", "rb") as file:
        if isinstance(wanted, str):
            with pytest.raises(UserError, match=wanted):
                [*read_batches(fake, file, "a.parquet")]
        else:
            [*read_batches(fake, file, "a.parquet")]
            assert fake.calls == [(wanted[0], [group], wanted[1]) for group in (0, 1)]


# ── with pyarrow ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def arrow():
    pytest.importorskip("pyarrow.parquet")
    import pyarrow
    return pyarrow


def write(arrow, path, columns, **flags):
    arrow.parquet.write_table(arrow.table(columns), path, store_schema=False, **flags)
    return path


def test_rows_equal_those_that_were_written(arrow, tmp_path, monkeypatch):
    """Batches of any size work, and so do all encodings, compressions and page versions."""
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
        for most in 2**28, 1000, 10:
            monkeypatch.setattr(parquet, "MAX_BATCH_BYTES", most)
            assert read_rows(path) == wanted, (more, most)


def test_long_cells_are_rejected(arrow, tmp_path, monkeypatch):
    """The message names the row. Long lists are rejected, too."""
    monkeypatch.setattr(parquet, "MAX_TEXT_BYTES", MB)
    for name, cells, row in [("a", ["A b"] * 300 + ["x" * 2 * MB] + ["C d"] * 9, 301),
                             ("l", [["A b"]] * 5 + [["x" * MB, "y"]], 6),
                             ("r", [["A b" * 9999] * 40] * 2, 1)]:
        path = write(arrow, tmp_path / f"{name}.parquet", {"sent0": cells}, row_group_size=300)
        with pytest.raises(UserError, match=rf"{name}.* row {row}: column sent0: over 1 MB; shorten"):
            read_table(path, roles=SENTENCE_COLUMNS)


def test_repeated_cells_share_memory(arrow, tmp_path):
    """A file of a few kilobytes has 2,000 texts of a quarter of a MB, in cells or in lists."""
    numbers = arrow.array(np.arange(2000) % 3, arrow.int32())
    texts = arrow.DictionaryArray.from_arrays(numbers, arrow.array([f"{i} " * (MB // 8) for i in range(3)]))
    lists = arrow.ListArray.from_arrays(arrow.array(np.arange(0, 2001, 4), arrow.int32()), texts)
    for name, cells in ("flat", texts), ("lists", lists):
        path = write(arrow, tmp_path / f"{name}.parquet", {"sent0": cells}, compression="zstd")
        assert path.stat().st_size < 50_000
        before, rows = arrow.total_allocated_bytes(), read_parquet(path)
        assert len([*itertools.islice(rows, 9)]) == 9 and arrow.total_allocated_bytes() - before < 100 * MB
        rows.close()
