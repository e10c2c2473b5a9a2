"""Compute the losses on three processes with unequal shares of a batch.

Every process makes the whole batch, selects its rows, and computes its share of each loss, with gathered rows
and then with a ring. The shares of all processes, and their gradients, add up to those of one process with
all rows, without gathering.
"""
import torch
import torch.distributed as dist

import dclr
import ease
import finetune
import kernels
import ood
import selfguided
import simclr
import simcse
import vascl

ROWS, T = 13, 0.3                                              # the processes have 4, 4 and 5 rows
LABELS, IDS, PHI = torch.arange(ROWS) * 5 % 4, torch.arange(ROWS) * 5 % 9, 0.3


class Share:
    """The rows of a batch that this process has. leaves: tensors of the whole batch, which get gradients."""

    def __init__(self, alone, gather):
        numbers = torch.Generator().manual_seed(0)
        shapes = dict(x=(ROWS, 6), y=(ROWS, 6), z=(ROWS, 6), views=(ROWS, 3, 6), queue=(7, 6), weight=(5, 6),
                      t=(), bias=())
        self.leaves = {name: torch.randn(shape, generator=numbers, dtype=torch.float64).requires_grad_()
                       for name, shape in shapes.items()}
        with torch.no_grad():
            self.leaves["t"].fill_(0.4)
        self.alone, self.gather, self.own = alone, gather, kernels.own_rows(ROWS)
        self.x, self.y, self.z, self.views = (x[self.own] for x in list(self.leaves.values())[:4])
        self.queue, self.weight, self.t, self.bias = list(self.leaves.values())[4:]
        self.labels, self.ids = LABELS[self.own], IDS[self.own]
        self.offset = self.own.start

    def all(self, x):
        """Return the rows x of all processes in one tensor."""
        return x if self.alone else self.gather(x, ROWS)

    def gathered(self, *rows):
        """Return the arguments `gathered` and `offset` of a loss, as a dict; {} if this process is alone."""
        return {} if self.alone else dict(gathered=tuple(map(self.all, rows)), offset=self.offset)


def vascl_loss(s, form):
    head, noise = torch.nn.functional.silu, torch.linspace(-2, 3, ROWS * 6).sin().double().view(ROWS, 6)
    rows = {} if s.alone else dict(gathered=s.all(s.x.detach()), offset=s.offset)
    near = vascl.nearest_neighbours(s.x.detach(), 4, **rows)
    gather = None if s.alone else s.all
    delta = vascl.virtual_augmentation(s.x @ s.weight.T, head, near, noise[s.own, :5], 2.0, T, gather=gather)
    e = s.x @ s.weight.T
    return vascl.neighbourhood_loss(e, e + delta, lambda x: head(x @ s.weight), near, T, form, gather=gather)


def dclr_loss(s, form):
    z2, noise, f2 = s.all(s.y), s.queue.detach(), s.all(s.z.detach())
    all_reduce = None if s.alone else dist.all_reduce
    noise = dclr.noise_negatives(s.x, z2, noise, 3, 0.1, T, form, all_reduce=all_reduce)
    return dclr.dclr_loss(s.x, z2, noise, s.views[:, 0], f2, PHI, T, form, offset=s.offset)


LOSSES = {
    "info_nce": lambda s: kernels.info_nce(s.x, s.all(s.y), s.t, offset=s.offset),
    "info_nce, symmetric": lambda s: kernels.info_nce(s.x, s.y, s.t, symmetric=True, **s.gathered(s.x, s.y)),
    "clip_loss": lambda s: kernels.clip_loss(s.x, s.y, s.t, normalize=True, **s.gathered(s.x, s.y)),
    "nt_xent": lambda s: kernels.nt_xent(s.x, s.y, s.t, **s.gathered(s.x, s.y)),
    "queue_loss": lambda s: kernels.queue_loss(s.x, s.y, s.queue, s.t),
    "sigmoid_loss": lambda s: kernels.sigmoid_loss(s.x, s.all(s.y), s.t, s.bias, offset=s.offset),
    "sup_con_loss": lambda s: kernels.sup_con_loss(
        s.views, s.labels, s.t, 0.07, **s.gathered(s.views, s.labels)),
    "sup_con_loss without labels": lambda s: kernels.sup_con_loss(
        s.views, None, s.t, **{} if s.alone else dict(gathered=(s.all(s.views), None), offset=s.offset)),
    "linear_cross_entropy": lambda s: kernels.linear_cross_entropy(s.x, s.weight, s.labels, temperature=s.t),
    "triplet_loss": lambda s: kernels.triplet_loss(s.x, s.y, s.z),
    "margin_loss": lambda s: kernels.margin_loss(s.x, s.y, s.labels > 1),
    "similarity_lse": lambda s: kernels.similarity_lse(
        s.x, s.all(s.y), s.t, exclude="diagonal", within=(s.ids % 2, IDS % 2), offset=s.offset).mean(),
    "simclr": lambda s: simclr.simclr_loss(s.x, s.y, T, **s.gathered(s.x, s.y)),
    "simclr, supervised": lambda s: simclr.sup_con_loss(
        s.views, s.labels, T, **s.gathered(s.views, s.labels)),
    "simcse": lambda s: simcse.simcse_loss(s.x, s.all(s.y), s.all(s.views), T, 0.4, offset=s.offset),
    "simcse, equal texts": lambda s: simcse.simcse_loss(
        s.x, s.all(s.y), s.all(s.z), T, ids=torch.stack([IDS, IDS * 3 % 7], 1), offset=s.offset),
    **{f"selfguided {objective}": lambda s, objective=objective: selfguided.selfguided_loss(
        s.x, s.y, T, objective, **s.gathered(s.x, s.y)) for objective in ("base", "opt1", "opt2")},
    "selfguided opt3": lambda s: selfguided.selfguided_loss(s.x, s.views, T, **s.gathered(s.x, s.views)),
    "ease": lambda s: ease.ease_loss(
        s.x, s.all(s.y), s.all(s.views), T, 0.5, s.all(s.ids), hard_ids=IDS[:, None] + 1 + torch.arange(3),
        offset=s.offset),
    "vascl": lambda s: vascl_loss(s, "paper"),
    "vascl, code": lambda s: vascl_loss(s, "code"),
    "dclr": lambda s: dclr_loss(s, "paper"),
    "dclr, code": lambda s: dclr_loss(s, "code"),
    "finetune, supcon": lambda s: finetune.supcon_loss(
        s.views, s.labels, T, **s.gathered(s.views, s.labels)),
    **{f"ood, {form}": lambda s, form=form: ood.ood_contrastive_loss(
        s.x, s.y, s.labels, T, form, **s.gathered(torch.stack([s.x, s.y], 1), s.labels))
       for form in ("paper", "code")}}

WITH_RING = "simclr", "simcse", "simcse, equal texts"   # tests/kernels/test_ring.py has the losses of kernels


def compute_shares(alone=False, gather=kernels.gather_rows, names=LOSSES):
    """Return {name: {part: tensor}}: this process's share of each loss and of its gradients."""
    found = {}
    for name in names:
        share, loss = Share(alone, gather), LOSSES[name]
        rows = share.own.stop - share.own.start
        value = loss(share) * (rows / ROWS)                    # each loss is a mean over the process's rows
        gradients = torch.autograd.grad(value, list(share.leaves.values()), materialize_grads=True)
        found[name] = dict(value=value.detach()) | {
            f"gradient of {leaf}": gradient for leaf, gradient in zip(share.leaves, gradients)}
    return found


def save_shares(rank, folder):
    """Save {name of the loss: {part: tensor}} of this process to the file FOLDER/RANK."""
    of_ring = compute_shares(gather=kernels.ring_rows, names=WITH_RING)
    torch.save([compute_shares(), of_ring], folder / str(rank))
    x = torch.ones(1, requires_grad=True)
    try:                                                       # gather_rows refuses second derivatives
        torch.autograd.grad(kernels.gather_rows(x, 3).sum(), x, create_graph=True)
    except RuntimeError as error:
        (folder / f"error {rank}").write_text(str(error))
