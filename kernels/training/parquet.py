"""Rows of .parquet files, few at a time: packed, gigabytes of text may be a file of kilobytes."""
import numpy as np

from .cli import Fault, afford, fail
from .columns import twice
from .files import LONGEST, opened

ROWS, LARGE, BYTES = 256, 10_000, 2**28                        # of a batch, at most: rows; bytes
TEXTS = "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY"


def read_parquet(path):
    """Yields the rows of a .parquet, as dicts."""
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        fail(f"{path}: a .parquet wants the package pyarrow; pip install pyarrow, or write it as .jsonl")
    with opened(path) as file:
        try:
            table, done = ParquetFile(file), 0
            if doubled := twice(table.schema_arrow.names):
                fail(f"{path}: two columns are called {doubled}")
            for number in range(table.num_row_groups):
                rows, large = plan(path, table.metadata.row_group(number))
                part = ParquetFile(file, read_dictionary=large) if large else table
                for batch in part.iter_batches(rows, row_groups=[number]):
                    yield from unpacked(path, done, batch, table.schema_arrow)
                    done += batch.num_rows
        except Fault:
            raise
        except Exception as error:                             # whatever pyarrow makes of a damaged file
            found = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            fail(f"{path}: {found}; write it anew, or as .jsonl")


def plan(path, group):
    """(rows of a batch of this row group, paths of its columns that are read with each different text only
    once: a text of a megabyte may stand in thousands of rows, and take a few bytes in each)"""
    columns = [group.column(i) for i in range(group.num_columns)]
    texts = [column for column in columns if column.physical_type in TEXTS]
    for column in texts:                                       # a cell may be as long as its column
        afford(f"{path}: column {column.path_in_schema}", 4 * column.total_uncompressed_size)
    rows = max(1, group.num_rows)
    large = [column.path_in_schema for column in texts if "DELTA_BYTE_ARRAY" not in column.encodings and
             column.total_uncompressed_size * ROWS * max(1, column.num_values // rows) > BYTES]
    row = sum(column.total_uncompressed_size for column in texts) // rows
    most = LARGE if len(large) == len(texts) else ROWS
    return max(1, min(most, BYTES // max(1, row))), large


def unpacked(path, done, batch, schema):
    """Yields the rows of a batch, made LONGEST bytes at a time; a longer cell is a Fault.

    done     the rows before it
    schema   of the file, in which no text is a dictionary's
    """
    if batch.nbytes <= LONGEST and "dictionary" not in str(batch.schema.types):
        yield from batch.to_pylist()
        return
    sizes = np.stack([sizes_of(column) for column in batch.columns])
    if (sizes > LONGEST).any():
        row, column = np.argwhere(sizes.T > LONGEST)[0]
        fail(f"{path} row {done + row + 1}: {sizes[column, row] / 2**20:,.1f} MB in column "
             f"{batch.schema.names[column]}, over {LONGEST >> 20} MB; shorten the cell, or delete the row")
    from pyarrow import Table
    for start, end in cuts_of(sizes.sum(0)):
        yield from Table.from_batches([batch.slice(start, end - start)]).cast(schema).to_pylist()


def cuts_of(sizes):
    """[(start, end)] of parts of about LONGEST bytes, of rows of these sizes (N,)."""
    part = sizes.cumsum() // LONGEST
    cuts = [0, *(np.flatnonzero(np.diff(part)) + 1).tolist(), len(sizes)]
    return [*zip(cuts, cuts[1:])]


def sizes_of(array):
    """(N,) int64: bytes of the texts in each cell of a pyarrow Array."""
    import pyarrow.compute as pc
    from pyarrow import types

    def numbers(found):
        return pc.fill_null(found, 0).to_numpy(zero_copy_only=False).astype(np.int64)

    kind = array.type
    if types.is_dictionary(kind):
        return np.append(sizes_of(array.dictionary), 0)[numbers(array.indices)]
    if types.is_list(kind) or types.is_large_list(kind):
        lengths, ends = numbers(pc.list_value_length(array)), np.append(0, sizes_of(array.flatten()).cumsum())
        return ends[lengths.cumsum()] - ends[lengths.cumsum() - lengths]
    if types.is_struct(kind):
        return sum(map(sizes_of, array.flatten()), np.zeros(len(array), np.int64))
    try:
        return numbers(pc.binary_length(array))
    except (NotImplementedError, ValueError):                  # of numbers
        return np.full(len(array), array.nbytes // max(len(array), 1))
