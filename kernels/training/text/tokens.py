"""Tokenise sentences, store their tokens in files, and group them by length into batches."""
import itertools

import numpy as np
import torch
import torch.distributed as dist

from ..errors import fail, log
from ..out import writing

# estimated fixed cost of a group (kernel launches, a pass over all gradients), measured in tokens
GROUP_COST = {"cpu": 100, "cuda": 8192}
NO_LIMIT = 2**31 - 1                           # a maximum length that means no truncation
MAX_CHARS = 2**21                              # per tokenizer call, which needs 30 to 120 bytes per character


def text_batches(texts):
    """Divide texts, in order, into lists for one tokenizer call each. A list of two or more texts has at most
    MAX_CHARS characters: a call with a million long sentences would need 4 to 14 GB."""
    part, size = [], 0
    for text in texts:
        if part and size + len(text) > MAX_CHARS:
            yield part
            part, size = [], 0
        part.append(text)
        size += len(text)
    if part:
        yield part


def tokenise(sentences, tokenizer, max_length):
    """Tokenise sentences with special tokens and without padding, truncated to `max_length` tokens.

    returns     ([int32 ids (L,)], number of truncated sentences)
    """
    backend, rows, cut = tokenizer.backend_tokenizer, [], 0
    nothing = [tokenizer.pad_token_id or 0]    # ids of an empty text, if there are no special tokens
    backend.no_padding()
    backend.enable_truncation(max_length, direction=tokenizer.truncation_side)
    for part in text_batches(sentences):
        encoded = backend.encode_batch_fast(part)
        rows += [np.array(encoding.ids or nothing, np.int32) for encoding in encoded]
        cut += sum(bool(encoding.overflowing) for encoding in encoded)
    return rows, cut


def tokenise_table(table, model, run, name="tokens", whole=False):
    """Tokenise all sentences of a table for a SentenceEncoder and return them as TokenRows.

    Rank 0 writes the tokens into the folder `name` in --out. All ranks read this folder row by row, so that
    the tokens need not fit into memory. A resumed run writes the folder again.

    whole       if true, do not truncate the sentences to --max-length
    """
    columns, folder = len(next(iter(table))[1]), run.out / name
    max_length = NO_LIMIT if whole else min(run.args.max_length, model.max_length)
    if run.rank == 0:
        with writing(folder):
            cut, unknown = write_tokens(table, model, max_length, folder)
        if not whole:
            token = model.tokenizer.unk_token
            log(name, f"{cut:,} of {columns * len(table):,} sentences truncated to {max_length} tokens"
                      + (f"; {100 * unknown:.1f} % of the tokens are {token}" if unknown else ""))
    if run.world_size > 1:
        dist.barrier()
    if not folder.is_dir():
        fail(f"--out {run.out}: this rank cannot see the files of rank 0, expected a folder on a shared disk",
             every_rank=True)
    return TokenRows(folder, columns)


def write_tokens(table, model, max_length, folder):
    """Write the table's tokens into a folder. Return (number of truncated sentences, share of [UNK]).

    The folder gets two files. `ids` (int32): the token ids of all sentences, in order. `ends` (int64): 0,
    then for each sentence the position in `ids` where the sentence ends.
    """
    done = cut = unknown = 0
    sentences = itertools.chain.from_iterable(model.add_prompts(cells) for _, cells in table)
    folder.mkdir(exist_ok=True)
    with open(folder / "ids", "wb") as ids, open(folder / "ends", "wb") as ends:
        ends.write(bytes(8))
        for part in text_batches(sentences):
            tokens, more = tokenise(part, model.tokenizer, max_length)
            part_ends = done + np.cumsum([len(sentence) for sentence in tokens])
            part_ids = np.concatenate(tokens)
            unknown += int((part_ids == model.tokenizer.unk_token_id).sum())
            ids.write(part_ids.tobytes())
            ends.write(part_ends.tobytes())
            done, cut = part_ends[-1], cut + more
    return cut, unknown / done


class TokenRows:
    """The tokens in a folder from write_tokens. Item i is row i: a tuple of int32 ids (L,), one per cell."""

    def __init__(self, folder, columns):
        self.columns = columns
        self.ids = np.memmap(folder / "ids", np.int32, "r")
        self.ends = np.memmap(folder / "ends", np.int64, "r")

    def __len__(self):
        return (len(self.ends) - 1) // self.columns

    def __getitem__(self, i):
        first = range(len(self))[i] * self.columns             # range allows i = −1 and raises IndexError
        ends = self.ends[first : first + self.columns + 1].tolist()
        return tuple(np.array(self.ids[start:end]) for start, end in zip(ends, ends[1:]))

    def views(self, indices, count):
        """Return `count` views of the rows. View i is a list with the ids (L,) of column i of each row. After
        the last column, further views start again with the first column."""
        columns = list(zip(*(self[i] for i in indices)))
        return [columns[i % self.columns] for i in range(count)]


def group_by_length(lengths, device, max_rows=None):
    """Divide sequences into groups with the least total cost. Each group will be padded to one tensor.
    The cost of a group is its number of tokens, including padding, plus GROUP_COST.

    max_rows    maximum number of sequences in a group, or None
    returns     [[index of a sequence, ...] per group]
    """
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    groups = []
    for start, end in cheapest_groups([lengths[i] for i in order], GROUP_COST[device.type]):
        size = max_rows or end - start
        groups += [order[i : min(end, i + size)] for i in range(start, end, size)]
    return groups


def cheapest_groups(lengths, cost):
    """Divide ascending lengths into groups [(start, end)] that minimise Σ (rows · longest + cost), by dynamic
    programming."""
    best = {0: (0, [])}                        # {n: (least cost of the first n rows, groups of these rows)}
    for end in range(1, len(lengths) + 1):
        if end == len(lengths) or lengths[end - 1] < lengths[end]:
            longest = lengths[end - 1]
            least, start = min((best[i][0] + (end - i) * longest + cost, i) for i in best)
            best[end] = least, [*best[start][1], (start, end)]
    return best[len(lengths)][1]


def restore_order(x, batch):
    """Sort the rows of x by row index. In x, the rows are in the order of the groups of `batch`."""
    return x[torch.cat([indices for indices, *_ in batch]).argsort()]


def pad(rows, value):
    """Pad 1-D arrays with `value` on the right to one int64 tensor (n, L)."""
    tensors = [torch.from_numpy(row).long() for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)
