"""Data augmentations of a text other than dropout (simcse.py --views): how the views of a text differ.

word level         crop, delete, synonym: the comparison of Gao et al. 2021 (SimCSE)
embedding level    feature_cutoff, token_cutoff, embedding_dropout: Yan et al. 2021 (ConSERT), zeros in the
                   input of the first layer, without rescaling; shuffle: permuted positions; and noise along
                   the gradient (--adversarial)
document level     spans: Giorgi et al. 2021 (DeCLUTR)

Every random number comes from the rank's PyTorch generator, so that --resume and --chunk-size reproduce them.
"""
import random
from contextlib import ExitStack

import numpy as np
import torch

from ..errors import fail, log
from ..papers.cline_wordnet import WordNet, tag_words
from ..progress import progress
from ..text.tokens import NO_LIMIT, text_batches, tokenise
from .adversarial import adversarial_noise, find_hook_point, patched_embedding_output, patched_word_embeddings
from .sentence_flags import CUTOFF_VIEWS, EMBEDDING_VIEWS, WORD_VIEWS

MIN_SPAN = 32                                                  # tokens of a span (DeCLUTR)


class TextViews:
    """Make the batches of a SentenceEncoder, with one augmentation per view.

    A batch is a list of groups [row_indices, ids, mask] as SentenceEncoder.batch returns them. The text of
    row i in view v has the row index v · rows + i. If embeddings are augmented, a group also has the view v
    (n,) of each text, and with --adversarial the noise (n, L, D).

    used_rows  numbers of the table's rows that are used for training
    """

    def __init__(self, args, model, table):
        self.args, self.model = args, model
        self.views = list(zip(args.views, args.view_rates))
        self.max_length, self.used_rows = min(args.max_length, model.max_length), range(len(table))
        self.wordnet = WordNet(args.wordnet) if args.wordnet else None
        backend = model.tokenizer.backend_tokenizer
        backend.no_padding()                                   # the tokenizer's file may turn padding on
        special = backend.encode("a").special_tokens_mask
        self.n_start, self.n_end = special.index(0), special[::-1].index(0)    # special tokens around a text
        model.change_pass = self.augment_pass
        if args.views == ["spans"]:
            self.select_documents(table)
        self.cutoffs = {*args.views} & {*CUTOFF_VIEWS}
        if args.adversarial or self.cutoffs or "shuffle" in args.views:
            # let augment_pass fail now for models that it does not support, before --out is written
            ids, _ = tokenise(["a"], model.tokenizer, self.max_length)
            if args.adversarial or self.cutoffs:
                words = torch.from_numpy(ids[0]).long().repeat(2, 1).to(model.device)
                words[1] = words[0].flip(0)
                self.hook_point = find_hook_point(model.encoder, words)
            one_per_view = model.batch([ids[0]] * len(self.views))
            model([[*group, group[0]] for group in one_per_view])

    def make_batch(self, tokens, row_indices):
        """Return the batch of the rows with these indices: a list of groups, see the class."""
        names = {name for name, _ in self.views}
        if names & {"spans", *WORD_VIEWS}:
            rng = random.Random(int(torch.randint(2**62, ())))
        if "spans" in names:
            return self.model.batch(*self.sample_spans([tokens[i][0] for i in row_indices], rng))
        views = [self.change_words(view, name, rate, rng) if name in WORD_VIEWS else view
                 for view, (name, rate) in zip(tokens.views(row_indices, self.args.count), self.views)]
        if self.args.candidate_length:
            views[2:] = [[self.truncate_candidate(ids) for ids in view] for view in views[2:]]
        batch = self.model.batch(*views)
        if self.args.adversarial or names & {*EMBEDDING_VIEWS}:
            batch = [[*group, group[0] // len(row_indices)] for group in batch]
        return batch

    def truncate_candidate(self, ids):
        """Truncate a candidate to --candidate-length tokens; the special tokens at its end stay."""
        most = self.args.candidate_length
        return ids if len(ids) <= most else np.append(ids[: most - self.n_end], ids[len(ids) - self.n_end :])

    # ── words ───────────────────────────────────────────────────────────────────────────────────────────────

    def change_words(self, rows, name, rate, rng):
        """Return the tokens of the texts after the word-level augmentation `name`."""
        texts = self.model.tokenizer.batch_decode(rows, skip_special_tokens=True)
        if name == "synonym":
            tagged = tag_words(texts, None, self.wordnet)
            texts = [self.replace_by_synonyms(text, words, rate, rng) for text, words in zip(texts, tagged)]
        else:
            texts = [" ".join(remove_words(text.split(), name, rate, rng)) for text in texts]
        return tokenise(texts, self.model.tokenizer, self.max_length)[0]

    def replace_by_synonyms(self, text, words, rate, rng):
        """Replace a fraction of the words, chosen at random among those that have synonyms."""
        left, new = number_to_change(words, rate), {}
        for start, end, pos in rng.sample(words, len(words)):
            options = []
            if pos and left:
                options = self.wordnet.replacements("synonym", text[start:end].lower(), pos)
            if options:
                new[start, end], left = rng.choice(options), left - 1
        for start, end in sorted(new, reverse=True):
            text = text[:start] + new[start, end] + text[end:]
        return text

    # ── embeddings ──────────────────────────────────────────────────────────────────────────────────────────

    def augment_pass(self, mask, view, step=None):
        """Return a context in which the encoder augments each text as its view says.

        shuffle permutes the word embeddings over the positions of the text. Then, in the input of the first
        layer, `step` is added and the cutoffs set zeros.

        mask   (n, L) attention mask of the texts
        view   (n,) number of each text's view
        step   (n, L, D) noise, or None
        """
        encoder, context = self.model.encoder, ExitStack()
        shuffled = [(view == number).nonzero()[:, 0] for number, (name, _) in enumerate(self.views)
                    if name == "shuffle"]
        if any(map(len, shuffled)):
            rows = torch.cat(shuffled)
            order = torch.arange(mask.shape[1], device=mask.device).repeat(len(mask), 1)
            order[rows] = random_keys(mask[rows].bool()).argsort(dim=1, stable=True)
            step = step if step is None else reorder(step, order)              # a token keeps its own step

            def undo_shuffle(_, __, output):                   # pooling may need the first or last token
                output.last_hidden_state = reorder(output.last_hidden_state, order.argsort(1))
                return output
            context.enter_context(patched_word_embeddings(encoder, mask, lambda x: reorder(x, order)))
            context.callback(encoder.register_forward_hook(undo_shuffle).remove)

        def change(x):
            x = x if step is None else x + step
            for number, (name, rate) in enumerate(self.views):
                rows = (view == number).nonzero()[:, 0]
                if name in self.cutoffs and len(rows):
                    x = x.index_put((rows,), apply_cutoff(x[rows], mask[rows].bool(), name, rate))
            return x
        if self.cutoffs or step is not None:
            context.enter_context(patched_embedding_output(self.hook_point, change))
        return context

    def add_adversarial_noise(self, batch, loss_of, *rest):
        """Return the batch with --adversarial noise on its first view. The noise goes along the gradient of
        loss_of(model, batch, *rest)[0]."""
        width = self.hook_point.width
        steps = [torch.zeros(*group[1].shape, width, device=group[1].device, requires_grad=True)
                 for group in batch]
        loss_of(self.model, [[*group, step] for group, step in zip(batch, steps)], *rest)[0].backward()
        size = self.args.adversarial
        return [[indices, ids, mask, view, adversarial_noise(step.grad, mask * (view == 0)[:, None], size)]
                for (indices, ids, mask, view), step in zip(batch, steps)]

    # ── documents ───────────────────────────────────────────────────────────────────────────────────────────

    def select_documents(self, table):
        """Use only documents that are long enough for their anchors. A document is divided into cells of
        --max-length tokens. At most one anchor starts in a cell, and never one in both of two neighbouring
        cells."""
        need, lengths = 2 * self.args.anchors * self.max_length, []
        bar = progress(table, "documents")
        texts = (self.model.add_prompts(cells)[0] for _, cells in bar)
        for part in text_batches(texts, rows=1000):
            rows, _ = tokenise(part, self.model.tokenizer, NO_LIMIT)
            lengths += [len(row) - self.n_start - self.n_end for row in rows]
        self.used_rows = [i for i, length in enumerate(lengths) if length >= need]
        found = (f"{len(self.used_rows):,} of {len(table):,} documents have at least {need:,} tokens, "
                 f"2 · {self.args.anchors} anchors · --max-length {self.max_length}")
        if len(self.used_rows) < self.args.batch_size:
            fail(f"{table}: {found}; expected at least {self.args.batch_size}, which is --batch-size")
        log("spans", f"{found}; the others are left out")

    def sample_spans(self, documents, rng):
        """Return the views [anchors, positives, positives, ...] of documents for --spans A P, in tokens. Each
        document gives A anchors, and for each anchor P positives that overlap or touch it, one per view. They
        are sampled one after the other, as in the released code."""
        views = [[] for _ in range(self.args.count)]
        for tokens in documents:
            start_tokens, end_tokens = tokens[: self.n_start], tokens[len(tokens) - self.n_end :]
            tokens = tokens[self.n_start : len(tokens) - self.n_end]
            cells = [*range(len(tokens) // self.max_length)]
            for left in range(self.args.anchors, 0, -1):
                length = self.span_length(4, 2, rng)
                cell = sample_cell(cells, left, rng)
                start = cell * self.max_length + rng.randint(0, self.max_length - length)
                spans = [(start, length)]
                for _ in views[1:]:
                    size = self.span_length(2, 4, rng)
                    least, most = max(0, start - size), min(start + length, len(tokens) - size)
                    spans.append((rng.randint(least, most), size))
                for view, (at, size) in zip(views, spans):
                    room = self.max_length - self.n_start - self.n_end         # in the encoder's input
                    view.append(np.concatenate([start_tokens, tokens[at : at + size][:room], end_tokens]))
        return views

    def span_length(self, a, b, rng):
        """Sample a length from MIN_SPAN to --max-length tokens, by a Beta(a, b) distribution."""
        least = min(MIN_SPAN, self.max_length // 2)
        return int(rng.betavariate(a, b) * (self.max_length - least) + least)


def sample_cell(cells, left, rng):
    """Sample a cell for the next anchor, and remove it and its neighbours from the list of free cells.

    If a cell from the middle could leave too few free cells for the remaining anchors, take the first or the
    last free cell.

    left    number of anchors that still need a cell, including this one
    """
    enough = len(cells) // left >= left
    at = rng.randrange(len(cells)) if enough else rng.choice([0, len(cells) - 1])
    cell = cells[at]
    del cells[max(0, at - 1) : at + 2]
    return cell


def select_anchors(batch, count):
    """Return the groups of a batch with only its first `count` texts, the anchors."""
    return select_texts(batch, lambda row_indices: row_indices < count)


def drop_anchors(batch, count):
    """Return the groups of a batch without its first `count` texts."""
    return select_texts(batch, lambda row_indices: row_indices >= count)


def select_texts(batch, condition):
    """Return the groups of a batch with only the texts whose row indices satisfy a condition."""
    groups = ((group, condition(group[0])) for group in batch)
    return [[x[kept] for x in group] for group, kept in groups if kept.any()]


def number_to_change(words, rate):
    """Return how many of the words a word-level augmentation changes, at least one."""
    return max(1, int(len(words) * rate))


def remove_words(words, name, rate, rng):
    """Remove a fraction of the words: crop removes them at the ends, delete anywhere. At least one stays."""
    kept = len(words) - number_to_change(words, rate)
    if kept < 1:
        return words
    if name == "crop":
        start = rng.randint(0, len(words) - kept)
        return words[start : start + kept]
    return [words[i] for i in sorted(rng.sample(range(len(words)), kept))]


def random_keys(eligible):
    """Return uniform random numbers where the mask is True, and 2 elsewhere, so that those sort last."""
    return torch.rand(eligible.shape, device=eligible.device, dtype=torch.float64).masked_fill_(~eligible, 2)


def random_subset(eligible, rate):
    """Return a mask like `eligible` (n, C), with a random fraction, rounded down, of the True in each row."""
    keys, counts = random_keys(eligible), (eligible.sum(1, keepdim=True).double() * rate).long()
    return keys < keys.sort(1).values.gather(1, counts)


def apply_cutoff(x, mask, name, rate):
    """Set a fixed fraction of features, tokens or entries of each text's embeddings x (n, L, D) to 0.

    mask   (n, L) bool, False for padding
    name   which of CUTOFF_VIEWS
    """
    eligible = mask[:, :, None]
    if name == "feature_cutoff":
        eligible = torch.ones_like(x[:, :1], dtype=torch.bool)
    elif name == "embedding_dropout":
        eligible = eligible.expand_as(x)
    return x.masked_fill(random_subset(eligible.flatten(1), rate).view(eligible.shape), 0)


def reorder(x, order):
    """Reorder the tokens of each row of x (n, L, D) by its order (n, L)."""
    return x.gather(1, order[:, :, None].expand_as(x))
