"""Views of a text beside dropout: what differs between two that are pulled together (simcse.py --views).

of its words              crop, delete, synonym: the comparison of Gao et al. 2021 (SimCSE)
of its embedded tokens    feature_cutoff, token_cutoff, embedding_dropout: Yan et al. 2021 (ConSERT), zeros
                          without rescaling in what the first layer reads; shuffle: other positions; and
                          noise along the gradient (--adversarial)
of a document             spans: Giorgi et al. 2021 (DeCLUTR)

Every random number comes from PyTorch's generator of the rank: --resume and --chunk-size repeat them.
"""
import random
from contextlib import ExitStack

import numpy as np
import torch

from ..cli import fail, say
from ..progress import progress
from ..text.tokens import WHOLE, portions, tokenise
from .adversarial import changed, changed_at, find_place, noise
from .sentence_flags import CUTS, EMBEDDINGS, WORDS
from .wordnet import WordNet, tag_words

SHORTEST = 32                                                  # tokens of a span (DeCLUTR)


class TextViews:
    """Makes the batches of a SentenceEncoder.

    kept       the rows of the table that are used
    """

    def __init__(self, args, model, table):
        self.args, self.model, self.views = args, model, list(zip(args.views, args.view_rates))
        self.longest, self.kept = min(args.max_length, model.longest), range(len(table))
        self.wordnet = WordNet(args.wordnet) if args.wordnet else None
        model.tokenizer.backend_tokenizer.no_padding()         # a folder's own may have some
        added = model.tokenizer.backend_tokenizer.encode("a").special_tokens_mask
        self.first, self.last = added.index(0), added[::-1].index(0)           # special tokens at the ends
        model.change_pass = self.alter
        if args.views == ["spans"]:
            self.find_documents(table)
        self.cuts, moved = {*args.views} & {*CUTS}, "shuffle" in args.views
        if args.adversarial or self.cuts or moved:             # what alter refuses, before --out is begun
            ids, _ = tokenise(["a"], model.tokenizer, self.longest)
            if args.adversarial or self.cuts:
                words = torch.from_numpy(ids[0]).long().repeat(2, 1).to(model.device)
                words[1] = words[0].flip(0)
                self.place = find_place(model.encoder, words)
            model([[*group, group[0]] for group in model.batch([ids[0]] * len(self.views))])   # one a view

    def batch(self, tokens, places):
        """What the encoder takes of the rows at these places: groups of (places, ids, mask), and the view of
        each text where embedded tokens change."""
        names = {name for name, _ in self.views}
        if names & {"spans", *WORDS}:
            draw = random.Random(int(torch.randint(2**62, ())))
        if "spans" in names:
            return self.model.batch(*self.spans([tokens[i][0] for i in places], draw))
        views = [self.reworded(view, name, rate, draw) if name in WORDS else view
                 for view, (name, rate) in zip(tokens.views(places, self.args.count), self.views)]
        if self.args.candidate_length:
            views[2:] = [[self.cut(ids) for ids in view] for view in views[2:]]
        batch = self.model.batch(*views)
        if self.args.adversarial or names & {*EMBEDDINGS}:
            batch = [[*group, group[0] // len(places)] for group in batch]
        return batch

    def cut(self, ids):
        """The tokens of a candidate without those beyond --candidate-length; the special ones stay."""
        most = self.args.candidate_length
        return ids if len(ids) <= most else np.append(ids[: most - self.last], ids[len(ids) - self.last :])

    # ── words ───────────────────────────────────────────────────────────────────────────────────────────────

    def reworded(self, rows, name, rate, draw):
        """Tokens of the texts, after at least one word of each was changed."""
        texts = self.model.tokenizer.batch_decode(rows, skip_special_tokens=True)
        if name == "synonym":
            tagged = tag_words(texts, None, self.wordnet)
            texts = [self.with_synonyms(text, words, rate, draw) for text, words in zip(texts, tagged)]
        else:
            texts = [" ".join(without(text.split(), name, rate, draw)) for text in texts]
        return tokenise(texts, self.model.tokenizer, self.longest)[0]

    def with_synonyms(self, text, words, rate, draw):
        left, new = share_of(words, rate), {}
        for start, end, pos in draw.sample(words, len(words)):
            options = self.wordnet.options("synonym", text[start:end].lower(), pos) if pos and left else []
            if options:
                new[start, end], left = draw.choice(options), left - 1
        for start, end in sorted(new, reverse=True):
            text = text[:start] + new[start, end] + text[end:]
        return text

    # ── embedded tokens ─────────────────────────────────────────────────────────────────────────────────────

    def alter(self, mask, view, step=None):
        """A context in which the encoder's tokens (n, L, D) are as their view has them, view (n,): word
        embeddings at other positions, what its first layer reads a step away and cut."""
        encoder, context = self.model.encoder, ExitStack()
        rows = lambda name: [(view == number).nonzero()[:, 0] for number, (its, _) in enumerate(self.views)
                             if its == name]
        if any(map(len, rows("shuffle"))):
            moved = torch.cat(rows("shuffle"))
            order = torch.arange(mask.shape[1], device=mask.device).repeat(len(mask), 1)
            order[moved] = drawn(mask[moved].bool()).argsort(dim=1, stable=True)
            step = step if step is None else reordered(step, order)            # a token takes its own along

            def in_place(_, __, output):                       # pooling may look for the first or last token
                output.last_hidden_state = reordered(output.last_hidden_state, order.argsort(1))
                return output
            context.enter_context(changed(encoder, mask, lambda x: reordered(x, order)))
            context.callback(encoder.register_forward_hook(in_place).remove)

        def change(x):
            x = x if step is None else x + step
            for number, (name, rate) in enumerate(self.views):
                rows = (view == number).nonzero()[:, 0]
                if name in self.cuts and len(rows):
                    x = x.index_put((rows,), zeroed(x[rows], mask[rows].bool(), name, rate))
            return x
        if self.cuts or step is not None:
            context.enter_context(changed_at(self.place, mask, change))
        return context

    def against(self, batch, loss_of, *rest):
        """The batch with --adversarial noise on its first view, along the gradient of loss_of(model, batch,
        *rest)[0]."""
        steps = [torch.zeros(*group[1].shape, self.place.width, device=group[1].device, requires_grad=True)
                 for group in batch]
        loss_of(self.model, [[*group, step] for group, step in zip(batch, steps)], *rest)[0].backward()
        size = self.args.adversarial
        return [[places, ids, mask, view, noise(step.grad, mask * (view == 0)[:, None], size)]
                for (places, ids, mask, view), step in zip(batch, steps)]

    # ── documents ───────────────────────────────────────────────────────────────────────────────────────────

    def find_documents(self, table):
        """Keeps documents with room for anchors, none beside another, in cells of --max-length tokens."""
        need, lengths = 2 * self.args.anchors * self.longest, []
        bar = progress(table, "documents")
        texts = (self.model.prompted(cells)[0] for _, cells in bar)
        for part in portions(texts, rows=1000):
            rows, _ = tokenise(part, self.model.tokenizer, WHOLE)
            lengths += [len(row) - self.first - self.last for row in rows]
        self.kept = [i for i, length in enumerate(lengths) if length >= need]
        few = (f"{len(self.kept):,} of {len(table):,} documents have {need:,} tokens, "
               f"2 · {self.args.anchors} · --max-length {self.longest}")
        if len(self.kept) < self.args.batch_size:
            fail(f"{table}: {few}, wanted at least --batch-size, which is {self.args.batch_size}")
        say("spans", f"{few}; the others are left out")

    def spans(self, documents, draw):
        """[anchors, positives, positives, ...] of documents' tokens, --spans A P: A anchors of each document,
        in a view each P positives that overlap or touch it. Drawn one after the other, as released."""
        views = [[] for _ in range(self.args.count)]
        for tokens in documents:
            ends = tokens[: self.first], tokens[len(tokens) - self.last :]
            tokens = tokens[self.first : len(tokens) - self.last]
            cells = [*range(len(tokens) // self.longest)]
            for left in range(self.args.anchors, 0, -1):
                length, cell = self.span_length(4, 2, draw), drawn_cell(cells, left, draw)
                start = cell * self.longest + draw.randint(0, self.longest - length)
                cuts = [(start, length)]
                for _ in views[1:]:
                    size = self.span_length(2, 4, draw)
                    least, most = max(0, start - size), min(start + length, len(tokens) - size)
                    cuts.append((draw.randint(least, most), size))
                for view, (at, size) in zip(views, cuts):
                    room = self.longest - self.first - self.last               # of the encoder
                    view.append(np.concatenate([ends[0], tokens[at : at + size][:room], ends[1]]))
        return views

    def span_length(self, a, b, draw):
        least = min(SHORTEST, self.longest // 2)
        return int(draw.betavariate(a, b) * (self.longest - least) + least)


def drawn_cell(cells, left, draw):
    """Takes a cell for the next of `left` anchors, and its neighbours, out of those that are free. It is the
    first or the last free one where others could leave too few."""
    room = len(cells) // left >= left
    at = draw.randrange(len(cells)) if room else draw.choice([0, len(cells) - 1])
    cell = cells[at]
    del cells[max(0, at - 1) : at + 2]
    return cell


def anchors_of(batch, count):
    """The first `count` texts of a batch, in its groups."""
    return chosen(batch, lambda places: places < count)


def behind_anchors(batch, count):
    return chosen(batch, lambda places: places >= count)


def chosen(batch, which):
    groups = ((group, which(group[0])) for group in batch)
    return [[x[kept] for x in group] for group, kept in groups if kept.any()]


def share_of(words, rate):
    """How many of them are changed, one at the least."""
    return max(1, int(len(words) * rate))


def without(words, name, rate, draw):
    """The words less a share of them: of a crop at the ends, else anywhere; one is left."""
    kept = len(words) - share_of(words, rate)
    if kept < 1:
        return words
    if name == "crop":
        start = draw.randint(0, len(words) - kept)
        return words[start : start + kept]
    return [words[i] for i in sorted(draw.sample(range(len(words)), kept))]


def drawn(may):
    """A random number for each of those that may be, 2 for the others."""
    return torch.rand(may.shape, device=may.device, dtype=torch.float64).masked_fill_(~may, 2)


def some(may, rate):
    """bool like may (n, C): in each row this share, rounded down, of those that may be, at random."""
    numbers, counts = drawn(may), (may.sum(1, keepdim=True).double() * rate).long()
    return numbers < numbers.sort(1).values.gather(1, counts)


def zeroed(x, mask, name, rate):
    """Embeddings x (n, L, D) of tokens (n, L), a fixed number of random columns, rows or entries 0."""
    may = mask[:, :, None]
    if name == "feature_cutoff":
        may = torch.ones_like(x[:, :1], dtype=torch.bool)
    elif name == "embedding_dropout":
        may = may.expand_as(x)
    return x.masked_fill(some(may.flatten(1), rate).view(may.shape), 0)


def reordered(x, order):
    """Rows of x (n, L, D), each in its order (n, L)."""
    return x.gather(1, order[:, :, None].expand_as(x))
