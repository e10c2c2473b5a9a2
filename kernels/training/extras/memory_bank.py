"""The memory bank (Wu, Xiong, Yu, Lin, CVPR 2018, arXiv 1805.01978), which moco.py has as --memory-bank."""
import torch
import torch.distributed as dist
import torch.nn.functional as F

from kernels import check_rows, checks, gather_rows, own_rows, queue_loss

from ..loop import half_products


def compute_bank_loss(model, views, rows, args):
    """What compute_loss is in moco.py without a bank, for this rank's views (n, 3, S, S) of the pictures
    `rows` of all ranks. The bank, model.queue, then holds their queries."""
    bank, rows = model.queue, torch.tensor(rows, device=views.device)
    drawn = torch.randint(len(bank), (args.queue,), device=views.device)       # own slots too, as released
    if dist.is_initialized():
        dist.broadcast(drawn, 0)
    q, own = F.normalize(model(views), dim=1), rows[own_rows(len(rows))]
    with half_products(q, args):                               # moco_loss would wait for a look at the slots
        mean = queue_loss(q, bank[own], bank[drawn], args.temperature, impl=args.impl)
    update_bank(bank, rows, gather_rows(q.detach(), len(rows)), args.momentum)
    loss = mean * (len(q) / len(rows))
    return loss, {"loss": loss.detach()}


@torch.no_grad()
def update_bank(bank, rows, q, momentum):
    """The slots of pictures, in place, become unit vectors along m · slot + (1 − m) · query.

    bank       (M, D) unit vectors, one of each picture
    rows, q    (n,) integers, different ones, and (n, D) unit queries
    source     Wu et al. 2018, released code
    """
    check_rows(bank=(bank, "M D"), rows=(rows, "n", int), q=(q, "n D"))
    checks.check_number("momentum", momentum, 0, 1)
    rows = rows.long()
    bank[rows] = F.normalize(torch.lerp(q.float(), bank[rows].float(), momentum), dim=1).to(bank.dtype)
