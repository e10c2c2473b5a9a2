"""The tokens of sentences: on the disk, and in batches of groups of similar length."""
import itertools
import os
import shutil

import numpy as np
import torch
import torch.distributed as dist

from ..cli import fail, say, written

# What one more group costs, in tokens: its launches, and a pass over all gradients. CPU: measured (2 layers
# of 768, from 25 to 400 alike); CUDA: an estimate.
GROUP_COST = {"cpu": 100, "cuda": 8192}
WHOLE = 2**31 - 1                                              # tokens that no text has
ROWS, LETTERS = 10_000, 2**21                                  # tokenised at a time: a letter takes 100 bytes


def portions(items, letters=len, rows=ROWS):
    """Yields lists of the items, in their order, that can be tokenised at once: a million sentences, or a
    thousand long ones, would hold tens of gigabytes.

    items       an iterable
    letters     a function of an item: how many it has; a list has at most LETTERS, unless of one item
    rows        the most items of a list
    """
    part, size = [], 0
    for item in items:
        more = letters(item)
        if part and (len(part) == rows or size + more > LETTERS):
            yield part
            part, size = [], 0
        part.append(item)
        size += more
    if part:
        yield part


def letters_of(texts):
    """How many letters the texts have together."""
    return sum(map(len, texts))


def tokenise(sentences, tokenizer, longest):
    """([int32 ids (L,)], how many were cut): each sentence alone, with special tokens and without padding."""
    backend, rows, cut = tokenizer.backend_tokenizer, [], 0
    nothing = [tokenizer.pad_token_id or 0]  # of a text without tokens, where there are no special ones
    backend.no_padding()
    backend.enable_truncation(longest, direction=tokenizer.truncation_side)
    for part in portions(sentences):
        encoded = backend.encode_batch_fast(part)
        rows += [np.array(encoding.ids or nothing, np.int32) for encoding in encoded]
        cut += sum(bool(encoding.overflowing) for encoding in encoded)
        del encoded                                            # before there are others
    return rows, cut


def tokenise_table(table, model, run, name="tokens", whole=False):
    """The TokenRows of all sentences of a table, as a model of SentenceEncoder's kind reads them, cut to
    --max-length, or whole.

    Rank 0 writes them into --out, and every rank reads them there, row by row: neither they nor the text have
    to fit in memory. --resume writes them anew, so that nothing depends on what became of the old ones.
    """
    columns, folder = len(next(iter(table))[1]), run.out / name
    longest = WHOLE if whole else min(run.args.max_length, model.longest)
    if run.rank == 0:
        with written(folder):
            cut = write_tokens(table, model, longest, folder)
        if not whole:
            say(name, f"{cut:,} of {columns * len(table):,} sentences cut to {longest}")
    if run.world > 1:
        dist.barrier()
    if not folder.is_dir():
        fail(f"--out {run.out}: what rank 0 writes is not there; name a folder that all machines share",
             every_rank=True)
    return TokenRows(folder, columns)


def write_tokens(table, model, longest, folder):
    """Writes two files: `ids`, one sentence behind the other, and `ends`, a 0 and where each sentence ends.
    Returns how many sentences were cut."""
    aside, done, cut = folder.with_suffix(".tmp"), 0, 0
    rows = (model.prompted(cells) for _, cells in table)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    with open(aside / "ids", "wb") as ids, open(aside / "ends", "wb") as ends:
        ends.write(bytes(8))
        for part in portions(rows, letters_of):
            sentences, more = tokenise([*itertools.chain(*part)], model.tokenizer, longest)
            places = done + np.cumsum([len(sentence) for sentence in sentences])
            ids.write(np.concatenate(sentences).tobytes())
            ends.write(places.tobytes())
            done, cut = places[-1], cut + more
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(aside, folder)
    return cut


class TokenRows:
    """Rows of tokens in a folder that write_tokens wrote: rows[i] has the int32 ids (L,) of each column."""

    def __init__(self, folder, columns):
        self.folder, self.columns = folder, columns
        self.ids, self.ends = (open(folder / name, "rb", buffering=0) for name in ("ids", "ends"))
        self.length = (os.path.getsize(folder / "ends") // 8 - 1) // columns

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        place = range(len(self))[i] * self.columns
        first, *ends = self.read_part(self.ends, np.int64, place, self.columns + 1).tolist()
        ids = self.read_part(self.ids, np.int32, first, ends[-1] - first)
        return tuple(ids[start - first : end - first] for start, end in zip((first, *ends), ends))

    def read_part(self, file, kind, place, count):
        """An array of a part of the file. It is no memmap: where a file is cut meanwhile that kills the
        process."""
        found = np.empty(count, kind)
        file.seek(place * found.itemsize)
        if file.readinto(found) != found.nbytes:
            fail(f"{self.folder}: was cut while it was read; --resume makes it anew", every_rank=True)
        return found

    def views(self, places, count):
        """[[ids] a view]: the rows at these places, column after column, and round again until there are so
        many."""
        columns = list(zip(*(self[i] for i in places)))
        return [columns[i % self.columns] for i in range(count)]


def grouped(lengths, device, most=None):
    """[places]: which sequences of these lengths share a tensor: as few padding tokens and groups as are
    cheapest."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    cuts = length_groups([lengths[i] for i in order], GROUP_COST[device.type], most)
    return [order[start:end] for start, end in cuts]


def length_groups(lengths, cost, most=None):
    """Cuts (start, end) of ascending lengths into groups: the least Σ (rows · longest + cost), by dynamic
    programming. No group has more than `most` rows."""
    best = {0: (0, 0)}  # the first n rows: (least cost, start of their last group)
    for end in range(1, len(lengths) + 1):
        if end == len(lengths) or lengths[end - 1] < lengths[end]:
            longest = lengths[end - 1]
            best[end] = min((best[start][0] + (end - start) * longest + cost, start) for start in best)
    cuts, end = [], len(lengths)
    while end:
        cuts.append((best[end][1], end))
        end = best[end][1]
    most = most or len(lengths)
    return [(first, min(first + most, end)) for start, end in cuts[::-1] for first in range(start, end, most)]


def in_order(x, batch):
    """The rows of a batch's groups (places, ...), back in the order of the batch."""
    return x[torch.cat([places for places, *_ in batch]).argsort()]


def pad(rows, value):
    """(n, L) int64 of 1-D arrays, filled up with value."""
    tensors = [torch.from_numpy(row).long() for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)
