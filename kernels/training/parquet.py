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
            done = 0
            for batch in read_batches(ParquetFile, file, path):
                names = batch.schema.names
                columns = [cells_of(column, path, name, done) for column, name in zip(batch.columns, names)]
                for cells in zip(*columns):                    # a row at a time becomes Python's
                    done += 1
                    yield f"row {done}", dict(zip(names, cells))
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


def cells_of(column, path, name, done):
    """Yields the cells of a pyarrow Array, the column of this name behind so many rows, as plain Python."""
    size = None
    if hasattr(column, "dictionary"):
        import pyarrow.compute as pc
        size = pc.sum(pc.take(pc.binary_length(column.dictionary), column.indices)).as_py() or 0
    if size is not None and size <= LONGEST:                   # in all cells together
        yield from column.dictionary_decode().to_pylist()
    else:
        for number, scalar in enumerate(column, done + 1):
            yield unpack(scalar, f"{path} row {number}: column {name}")


def unpack(scalar, place):
    """The cell of a pyarrow Scalar as plain Python; a text or a list of over LONGEST bytes is a Fault."""
    is_list = type(scalar).__name__.endswith("ListScalar") and scalar.is_valid
    found, size = [], 0
    for part in scalar.values if is_list else [scalar]:
        if hasattr(part, "dictionary") and part.is_valid:      # where pyarrow has each different text once
            size += part.dictionary.slice(part.index.as_py(), 1).nbytes
        elif hasattr(part, "as_buffer") and part.is_valid:
            size += part.as_buffer().size
        if size > LONGEST:                                     # before it is copied
            fail(f"{place}: over {LONGEST >> 20} MB; shorten the cell, or delete the row")
        found.append(part.as_py())
    return found if is_list else found[0]
