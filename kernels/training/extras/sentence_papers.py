"""Train simcse.py's encoder with the views, losses and schedules of ConSERT, DeCLUTR and SimCLS.

sentence_flags.py has their flags and recipes, text_views.py their views, optimizers.py their optimizers.
"""
import torch
import torch.nn.functional as F

from kernels import embed_in_chunks, gather_rows, nt_xent, own_rows

from ..loop import epoch_steps, half_products, set_lr, sum_gradients
from ..text.mlm import masked_lm_loss, mean_over_ranks, read_masked
from ..text.tokens import in_order, tokenise_table
from .equal_texts import say_equal, text_ids
from .optimizers import clip_gradient, make_optimizer, rate_of
from .ranking import ranking_loss
from .text_views import TextViews, anchors_of, behind_anchors


def train(args, run, model, table, held_out, simcse_loss):
    """Train the model on a table of texts; the loop of simcse.py, with what these papers change.

    simcse_loss     the script's loss, for --objective infonce
    """
    def loss_of(model, batch, rows, ids):
        return compute_loss(model, batch, rows, args, simcse_loss, ids)

    optimizer = make_optimizer(model, args)
    views = TextViews(args, model, table)
    total = args.steps or args.epochs * epoch_steps(len(views.kept), args.batch_size, run.world)
    run.begin(model, optimizer, total)
    tokens = tokenise_table(table, model, run, whole=args.views == ["spans"])
    if args.ignore_equal:
        say_equal(tokens)
    held_out.before(model, run)
    model.train()
    for step, rows in run.steps(total, views.kept):
        set_lr(optimizer, rate_of(step - 1, total, args))
        batch = views.batch(tokens, rows[own_rows(len(rows))])
        ids = text_ids(tokens, rows).to(run.device) if args.ignore_equal else None
        if args.adversarial:
            batch = views.against(batch, loss_of, len(rows), ids)
        loss, values = loss_of(model, batch, len(rows), ids)
        optimizer.zero_grad()
        loss.backward()
        sum_gradients(model)
        clip_gradient(model, args)
        optimizer.step()
        run.note(values, lr=optimizer.param_groups[0]["lr"])
        if run.due:
            held_out.judge(model, run)
    held_out.after(model, run)


def compute_loss(model, batch, rows, args, simcse_loss, ids=None):
    """This rank's part of the loss of a batch of `rows` rows; ids as in simcse.compute_loss."""
    z1, keys, mlm = embed_views(model, batch, args)
    if args.objective == "ranking":
        scores = torch.stack([F.cosine_similarity(z1, z, dim=1) for z in keys], 1)
        loss = ranking_loss(scores[:, 1:], scores[:, 0], args.margin, args.form)
    else:
        loss = contrast(z1, keys, rows, args, simcse_loss, ids)
    loss = loss * (len(z1) / (rows * args.anchors))
    values = {"loss": loss.detach()}
    if mlm is not None:
        loss, values["mlm"] = loss + args.mlm_weight * mlm, mlm.detach()
    return loss, values


def contrast(z1, keys, rows, args, simcse_loss, ids=None):
    """The mean loss of this rank's anchors against the keys of all ranks; of all anchors with nt-xent."""
    def gather(z):  # a document's anchors stay together
        return gather_rows(z.unflatten(0, (-1, args.anchors)), rows).flatten(0, 1)

    z2, *hard = (gather(z) for z in keys)
    with half_products(z1, args):
        if args.objective == "nt-xent":
            z1, z2 = (F.normalize(z, dim=1, eps=1e-8) for z in (gather(z1), z2))
            return nt_xent(z1, z2, args.temperature, impl=args.impl)
        return simcse_loss(z1, z2, torch.stack(hard, 1) if hard else None, args.temperature,
                           args.hard_negative_weight, offset=own_rows(rows).start * args.anchors, ids=ids,
                           impl=args.impl)


def embed_views(model, batch, args):
    """(z1 (n, H), keys [(n, H)], this rank's part of the masked LM's loss or None) of a batch of TextViews:
    anchors, positives, further views; of spans the mean of an anchor's positives."""
    rows = sum(len(places) for places, *_ in batch) // args.count
    anchors, others = (part(batch, rows) for part in (anchors_of, behind_anchors))
    if args.masked:                                            # DeCLUTR's code embeds the masked anchors
        z1, mlm = masked_embeddings(model, anchors, args.impl)
        keys = model(others).chunk(args.count - 1)
    else:
        z1, *keys = model(batch).chunk(args.count)
        read = anchors if args.views == ["spans"] else batch
        mlm = None if model.lm is None else masked_lm_loss(model, read, args.impl)
    return z1, [torch.stack(keys).mean(0)] if args.views == ["spans"] else [*keys], mlm


def masked_embeddings(model, batch, impl="auto"):
    """(embeddings (rows, H) of a SentenceEncoder's batch whose tokens are masked, this rank's part of the
    mean cross entropy of these tokens): one pass gives both (DeCLUTR's released code)."""
    def both(group):
        """(n, H + 2): the sums stand in the first row."""
        z, sums = read_masked(model, group, impl)
        return torch.cat([z, F.pad(sums, (0, 0, 0, len(z) - 1))], 1)

    found = embed_in_chunks(both, batch, model.lm if model.chunk_size else None)
    z, sums = found.split([found.shape[1] - 2, 2], 1)
    return in_order(z, batch), mean_over_ranks(sums)
