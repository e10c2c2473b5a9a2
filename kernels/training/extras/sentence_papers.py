"""Train simcse.py's encoder with the views, losses and schedules of ConSERT, DeCLUTR and SimCLS.

The flags and recipes are in sentence_flags.py, the views in text_views.py, the optimizers in optimizers.py.
"""
import torch
import torch.nn.functional as F

from kernels import embed_in_chunks, nt_xent, own_rows

from ..equal_texts import log_equal_texts, text_ids
from ..loop import all_reduce_gradients, set_lr, steps_per_epoch
from ..precision import gather_keys, loss_autocast
from ..text.mlm import embed_masked, masked_lm_loss, share_of_mean
from ..text.tokens import restore_order, tokenise_table
from .optimizers import clip_gradient, learning_rate, make_optimizer
from .ranking import ranking_loss
from .text_views import TextViews, drop_anchors, select_anchors


def train(args, run, model, table, evaluator, simcse_loss):
    """Train the model on a table of texts. This is the loop of simcse.py with the changes of these papers.

    simcse_loss     the loss function of simcse.py, for --objective infonce
    """
    def loss_of(model, batch, rows, ids):
        return compute_loss(model, batch, rows, args, simcse_loss, ids)

    optimizer = make_optimizer(model, args)
    views = TextViews(args, model, table)
    total = args.steps or args.epochs * steps_per_epoch(len(views.used_rows), args.batch_size, run.world_size)
    run.begin(model, optimizer, total)
    tokens = tokenise_table(table, model, run, whole=args.views == ["spans"])
    if args.ignore_equal:
        log_equal_texts(tokens)
    evaluator.evaluate_before(model, run)
    model.train()
    for step, rows in run.steps(total, views.used_rows):
        set_lr(optimizer, learning_rate(step - 1, total, args))
        batch = views.make_batch(tokens, rows[own_rows(len(rows))])
        ids = text_ids(tokens, rows).to(run.device) if args.ignore_equal else None
        if args.adversarial:
            batch = views.add_adversarial_noise(batch, loss_of, len(rows), ids)
        loss, values = loss_of(model, batch, len(rows), ids)
        optimizer.zero_grad()
        loss.backward()
        all_reduce_gradients(model)
        clip_gradient(model, args)
        optimizer.step()
        run.log_metrics(values, lr=optimizer.param_groups[0]["lr"])
        if run.eval_due:
            evaluator.evaluate_and_save(model, run)
    evaluator.finish(model, run)


def compute_loss(model, batch, rows, args, simcse_loss, ids=None):
    """Return this rank's part of the loss of a global batch of `rows` rows, and the values to log.

    batch   of TextViews, with this rank's rows
    ids     see compute_loss of simcse.py
    """
    z1, keys, mlm = embed_views(model, batch, args)
    if args.objective == "ranking":
        scores = torch.stack([F.cosine_similarity(z1, z, dim=1) for z in keys], 1)
        loss = ranking_loss(scores[:, 1:], scores[:, 0], args.margin, args.form)
    else:
        loss = contrastive_loss(z1, keys, rows, args, simcse_loss, ids)
    loss = loss * (len(z1) / (rows * args.anchors))
    values = {"loss": loss.detach()}
    if mlm is not None:
        loss, values["mlm"] = loss + args.mlm_weight * mlm, mlm.detach()
    return loss, values


def contrastive_loss(z1, keys, rows, args, simcse_loss, ids=None):
    """Return the mean loss of this rank's anchors (--objective nt-xent: also of its keys) against the keys of
    all ranks."""
    def gather(z):                                 # the anchors of a document stay together
        return gather_keys(z.unflatten(0, (-1, args.anchors)), rows, args).flatten(0, 1)

    common = dict(offset=own_rows(rows).start * args.anchors, impl=args.impl)
    if args.objective == "nt-xent":
        views, gathered = (z1, keys[0]), None
        if len(z1) < rows * args.anchors:
            gathered = [gather(z) for z in views]
        with loss_autocast(z1, args):
            return nt_xent(*views, args.temperature, gathered=gathered, normalize=True, **common)
    z2, *hard = (gather(z) for z in keys)
    with loss_autocast(z1, args):
        return simcse_loss(z1, z2, torch.stack(hard, 1) if hard else None, args.temperature,
                           args.hard_negative_weight, ids=ids, **common)


def embed_views(model, batch, args):
    """Embed a batch of TextViews.

    returns   (anchors z1 (n, H), keys [(n, H)], this rank's part of the masked-LM loss or None). The keys are
              the positives and then the other views; with --views spans the mean of each anchor's positives
    """
    rows = sum(len(row_indices) for row_indices, *_ in batch) // args.count
    anchors, others = (part(batch, rows) for part in (select_anchors, drop_anchors))
    if args.masked:                                            # DeCLUTR's code embeds the masked anchors
        z1, mlm = masked_embeddings(model, anchors, args.impl)
        keys = model(others).chunk(args.count - 1)
    else:
        z1, *keys = model(batch).chunk(args.count)
        mlm_input = anchors if args.views == ["spans"] else batch
        mlm = None if model.lm is None else masked_lm_loss(model, mlm_input, args.impl)
    return z1, [torch.stack(keys).mean(0)] if args.views == ["spans"] else [*keys], mlm


def masked_embeddings(model, batch, impl="auto"):
    """Mask tokens of a SentenceEncoder's batch, and return (its embeddings (rows, H), this rank's part of the
    mean cross entropy of the masked tokens). One forward pass gives both (DeCLUTR's released code)."""
    def embed_group(group):
        """Return (n, H + 2): the embeddings, and two columns with the masked LM's sums in their first row."""
        z, sums = embed_masked(model, group, impl)
        return torch.cat([z, F.pad(sums, (0, 0, 0, len(z) - 1))], 1)

    found = embed_in_chunks(embed_group, batch, model.lm if model.in_chunks else None)
    z, sums = found.split([found.shape[1] - 2, 2], 1)
    return restore_order(z, batch), share_of_mean(sums)
