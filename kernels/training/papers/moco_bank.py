"""The memory bank of moco.py --memory-bank (Wu, Xiong, Yu, Lin, CVPR 2018, arXiv 1805.01978)."""
import torch
import torch.distributed as dist
import torch.nn.functional as F

from kernels import check_rows, checks, gather_rows, own_rows, queue_loss

from ..precision import loss_autocast


def compute_bank_loss(model, views, rows, args):
    """Return this rank's part of the loss, and the values to log. Update the memory bank, model.queue. With
    --memory-bank, this function replaces compute_loss of moco.py.

    views   (n, 3, S, S) views of this rank's images
    rows    indices of the images in the batches of all ranks
    """
    bank, rows = model.queue, torch.tensor(rows, device=views.device)
    # The negatives are sampled uniformly, and may include an image's own slot (released code).
    sampled = torch.randint(len(bank), (args.queue_size,), device=views.device)
    if dist.is_initialized():
        dist.broadcast(sampled, 0)
    q, own = F.normalize(model(views), dim=1), rows[own_rows(len(rows))]
    with loss_autocast(q, args):       # not moco_loss: it checks the bank's norms, and so waits for the GPU
        mean = queue_loss(q, bank[own], bank[sampled], args.temperature, impl=args.impl)
    update_bank(bank, rows, gather_rows(q.detach(), len(rows)), args.momentum)
    loss = mean * (len(q) / len(rows))
    return loss, {"loss": loss.detach()}


@torch.no_grad()
def update_bank(bank, rows, q, momentum):
    """Update the slots of n images in place: slot ← momentum · slot + (1 − momentum) · query, normalised.

    bank       (M, D) unit vectors: one slot per image
    rows       (n,) integers: slots of these images, each at most once
    q          (n, D) unit queries of these images
    momentum   weight of the old slot, from 0 to 1
    source     Wu et al. 2018, released code
    """
    check_rows(bank=(bank, "M D"), rows=(rows, "n", int), q=(q, "n D"))
    checks.check_number("momentum", momentum, 0, 1)
    rows = rows.long()
    bank[rows] = F.normalize(torch.lerp(q.float(), bank[rows].float(), momentum), dim=1).to(bank.dtype)
