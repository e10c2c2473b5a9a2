"""Evaluate sentence encoders on retrieval: the texts that are closest to a query should be its positives."""
from typing import NamedTuple

import torch

from kernels import similarity_topk

from ..data import SCORED_PAIR, SENTENCE_COLUMNS, describe_table, empty_cell, log_first_row, read_table
from ..errors import fail, log


class Retrieval(NamedTuple):
    """Queries, and the corpus that they search.

    queries     distinct texts
    corpus      distinct texts: all positives and all hard negatives of the file
    positives   for each query, the set of indices in `corpus` of its positives, from all rows of the query
    """
    queries: list
    corpus: list
    positives: list


def load_retrieval(path, columns=None):
    """Read a Retrieval from a file with columns as in --data: query, positive and any hard negatives, which
    may be lists in JSON. columns: their names or numbers (--dev-columns); None: found as in --data."""
    header, table = read_table(path, empty_cell, roles=SENTENCE_COLUMNS, columns=columns, names=SCORED_PAIR,
                               any_width=True, flag="--dev-columns")
    if len(table.cell_roles) < 2:
        fail(f"{path}: found 1 column; expected query, positive and any hard negatives, or "
             f"{', '.join(SCORED_PAIR)}; choose them by --dev-columns")
    corpus, positives = {}, {}                                 # {text: index}, {query: indices}
    for query, positive, *negatives in ([*map(str.strip, cells)] for _, cells in table):
        for text in (positive, *negatives):
            corpus.setdefault(text, len(corpus))
        positives.setdefault(query, set()).add(corpus[positive])
    if len(corpus) < 2:
        fail(f"{path}: all positives and negatives are the same text, expected at least 2 different texts")
    log("data", f"{len(positives):,} queries, {len(corpus):,} texts: {describe_table(table, header)}")
    log_first_row(table)
    return Retrieval([*positives], [*corpus], [*positives.values()])


@torch.no_grad()
def evaluate_retrieval(model, data, impl="auto"):
    """Rank the corpus of a Retrieval by cosines with each query. Queries get the prompt of the first column,
    all other texts get the prompt of the second column. Return 100 × the means over queries of

    mrr@10       1 / rank of the first positive; 0 if the first 10 texts have none
    accuracy@1   1 if the first text is a positive, else 0
    recall@10    share of the query's positives that are among the first 10 texts
    ndcg@10      Σ 1 / log2(1 + rank) over the positives among the first 10 texts, divided by the largest
                 possible sum
    source       InformationRetrievalEvaluator of sentence-transformers
    """
    prompts = model.prompts[0], model.prompts[:2][-1]
    q, k = (torch.nan_to_num(z)[rows] for z, rows in map(model.embed, data[:2], prompts))
    n = min(10, len(k))
    _, found = similarity_topk(q, k, n, normalize=True, impl=impl)
    hits = [[i in positives for i in row] for row, positives in zip(found.tolist(), data.positives)]
    hits = torch.tensor(hits).double()                         # (queries, n): 1 for a positive, else 0
    counts = torch.tensor([*map(len, data.positives)])
    ranks = torch.arange(1, n + 1)
    discounts = 1 / (1 + ranks.double()).log2()
    scores = {"mrr@10": (hits / ranks).amax(1), "accuracy@1": hits[:, 0], "recall@10": hits.sum(1) / counts,
              "ndcg@10": (hits @ discounts) / discounts.cumsum(0)[counts.clamp(max=n) - 1]}
    return {name: 100 * score.mean().item() for name, score in scores.items()}
