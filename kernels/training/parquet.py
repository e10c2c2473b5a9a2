"""Rows of .parquet files, read in small batches: a file of kilobytes may decompress to gigabytes of text."""
from .cli import UserError, check_memory, fail
from .columns import first_duplicate
from .files import MAX_TEXT_BYTES, open_file

MAX_BATCH_ROWS, MAX_BATCH_BYTES = 10_000, 2**28                # read at a time


def read_parquet(path):
    """Yield (location, row) for each row of a .parquet file, as rows.py describes; rows are dicts."""
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        fail(f"{path}: a .parquet file needs the package pyarrow; pip install pyarrow, or write it as .jsonl")
    with open_file(path) as file:
        try:
            done = 0
            for batch in read_batches(ParquetFile, file, path):
                names = batch.schema.names
                columns = [cells_of(column, path, name, done) for column, name in zip(batch.columns, names)]
                for cells in zip(*columns):                    # converts one row at a time to Python
                    done += 1
                    yield f"row {done}", dict(zip(names, cells))
        except UserError:
            raise
        except Exception as error:                             # pyarrow has many errors for damaged files
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            fail(f"{path}: {reason}; write the file again, or write it as .jsonl")


def read_batches(ParquetFile, file, path):
    """Yield pyarrow's record batches of an open file.

    Where pyarrow can, it reads text columns as dictionaries, with each distinct text only once: a text of a
    megabyte may occur in thousands of rows.
    """
    about = ParquetFile(file)
    if doubled := first_duplicate(about.schema_arrow.names):
        fail(f"{path}: two columns are called {doubled}")
    groups = [about.metadata.row_group(i) for i in range(about.num_row_groups)]
    texts, delta_encoded = [], set()
    for group in groups:
        columns = [group.column(i) for i in range(group.num_columns)]
        delta = [column for column in columns if "DELTA_BYTE_ARRAY" in column.encodings]
        texts.append([column for column in columns if "BYTE_ARRAY" in column.physical_type])
        delta_encoded.update(column.path_in_schema for column in delta)
    as_dictionary = {column.path_in_schema for columns in texts for column in columns} - delta_encoded
    table = ParquetFile(file, read_dictionary=[*as_dictionary])
    for i, (group, columns) in enumerate(zip(groups, texts)):
        for column in columns:                                 # one cell may be as large as its column
            check_memory(f"{path}: column {column.path_in_schema}", 4 * column.total_uncompressed_size)
        size = sum(column.total_uncompressed_size for column in columns) // max(1, group.num_rows)
        # delta-encoded texts are decompressed in full, so that a batch of them may need much memory
        most = 256 if delta_encoded else MAX_BATCH_ROWS
        yield from table.iter_batches(max(1, min(most, MAX_BATCH_BYTES // max(1, size))), row_groups=[i])


def cells_of(column, path, name, done):
    """Yield the cells of a column in a batch as Python values.

    column   pyarrow Array
    done     number of rows before this batch, for messages
    """
    size = None
    if hasattr(column, "dictionary"):
        import pyarrow.compute as pc
        size = pc.sum(pc.take(pc.binary_length(column.dictionary), column.indices)).as_py() or 0
    if size is not None and size <= MAX_TEXT_BYTES:            # all cells together: none can be too long
        yield from column.dictionary_decode().to_pylist()
    else:
        for number, scalar in enumerate(column, done + 1):
            yield unpack(scalar, f"{path} row {number}: column {name}")


def unpack(scalar, location):
    """Return a pyarrow Scalar as a Python value. Fail if a text or a list is over MAX_TEXT_BYTES long."""
    is_list = type(scalar).__name__.endswith("ListScalar") and scalar.is_valid
    found, size = [], 0
    for part in scalar.values if is_list else [scalar]:
        if hasattr(part, "dictionary") and part.is_valid:      # a column that was read as a dictionary
            size += part.dictionary.slice(part.index.as_py(), 1).nbytes
        elif hasattr(part, "as_buffer") and part.is_valid:
            size += part.as_buffer().size
        if size > MAX_TEXT_BYTES:                              # before as_py copies it
            fail(f"{location}: over {MAX_TEXT_BYTES >> 20} MB; shorten the cell, or delete the row")
        found.append(part.as_py())
    return found if is_list else found[0]
