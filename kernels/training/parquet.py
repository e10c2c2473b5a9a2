"""Rows of .parquet files, few at a time: packed, gigabytes of text may be a file of kilobytes."""
from .cli import Fault, afford, fail
from .columns import twice
from .files import LONGEST, opened

BATCH, BYTES = 10_000, 2**28                                   # rows and bytes that are read at once


def read_parquet(path):
    """Yields (place, row) of a .parquet, rows as dicts."""
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        fail(f"{path}: a .parquet wants the package pyarrow; pip install pyarrow, or write it as .jsonl")
    with opened(path) as file:
        try:
            number = 0
            for batch in read_batches(ParquetFile, file, path):
                for cells in zip(*batch.columns):              # a row at a time becomes Python's
                    number += 1
                    place = f"row {number}"
                    yield place, {name: unpack(cell, f"{path} {place}: column {name}")
                                  for name, cell in zip(batch.schema.names, cells)}
        except Fault:
            raise
        except Exception as error:                             # whatever pyarrow makes of a damaged file
            found = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            fail(f"{path}: {found}; write it anew, or as .jsonl")


def read_batches(ParquetFile, file, path):
    """Yields pyarrow's batches of an open file. Each different text is read only once, where pyarrow can: one
    of a megabyte may stand in thousands of rows, and take a few bytes in each."""
    about = ParquetFile(file)
    if doubled := twice(about.schema_arrow.names):
        fail(f"{path}: two columns are called {doubled}")
    groups = [about.metadata.row_group(i) for i in range(about.num_row_groups)]
    texts, coded = [], set()
    for group in groups:
        columns = [group.column(i) for i in range(group.num_columns)]
        texts.append([column for column in columns if "BYTE_ARRAY" in column.physical_type])
        coded.update(column.path_in_schema for column in columns if "DELTA_BYTE_ARRAY" in column.encodings)
    once = {column.path_in_schema for columns in texts for column in columns} - coded
    table = ParquetFile(file, read_dictionary=[*once])
    for i, (group, columns) in enumerate(zip(groups, texts)):
        for column in columns:                                 # a cell may be as long as its column
            afford(f"{path}: column {column.path_in_schema}", 4 * column.total_uncompressed_size)
        size = sum(column.total_uncompressed_size for column in columns) // max(1, group.num_rows)
        most = 256 if coded else BATCH                         # rows: pyarrow unpacks coded ones
        yield from table.iter_batches(max(1, min(most, BYTES // max(1, size))), row_groups=[i])


def unpack(scalar, place):
    """The cell of a pyarrow Scalar as plain Python; a text or a list of over LONGEST letters is a Fault."""
    is_list = type(scalar).__name__.endswith("ListScalar") and scalar.is_valid
    found, size = [], 0
    for part in scalar.values if is_list else [scalar]:
        found.append(part.as_py())
        size += len(found[-1]) if isinstance(found[-1], (str, bytes)) else 0
        if size > LONGEST:
            fail(f"{place}: over {LONGEST >> 20} MB; shorten the cell, or delete the row")
    return found if is_list else found[0]
