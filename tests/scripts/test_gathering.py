"""The losses of the scripts on three ranks: their sum equals one process, and no rank repeats another's work.

compute_loss of each script gets a stand-in for the encoder that returns given embeddings. One process with
the textbook formulas (impl="eager") gives the expected loss, gradients and number of multiplications.
"""
import functools
import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import dclr
import declutr
import ease
import finetune
import kernels
import selfguided
import simclr
import simcse
import vascl
from kernels import gather, own_rows
from running import fork_context, free_port, multiplications

ROWS, WIDTH, RANKS = 64, 48, 3                                 # 21, 21 and 22 rows per rank
SHARE = 0.75                                                   # of what eager multiplies in one process
ARGS = SimpleNamespace(
    temperature=0.1, precision="fp32", normalize=True, supervised=False, hard_negative_weight=0.3, count=3,
    form="paper", objective="opt3", anchors=2, radius=1.0, relative_radius=None, neighbours=4, ascent_steps=2,
    noise_per_sentence=1, noise_steps=2, noise_step_size=0.1, noise_temperature=0.1, phi=0.9, mlm_weight=0,
    negative_group_size=0, equal_entities="mask", entity_temperature=1.0, simcse_weight=1.0,
    entity_weight=1.0)


def args(impl, **changed):
    return SimpleNamespace(**vars(ARGS) | changed, impl=impl)


def embeddings(*shape, seed):
    """Return random rows of the whole batch that require a gradient; every rank has the same ones."""
    numbers = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, *shape, WIDTH, generator=numbers).requires_grad_()


def stand_in(z, **attributes):
    """Return a model whose forward pass returns the views of this rank's rows of z (rows, views, D)."""
    class Model(SimpleNamespace):
        def __call__(self, batch):
            return z[own_rows(ROWS)].transpose(0, 1).flatten(0, 1)
    return Model(lm=None, device=torch.device("cpu"), bf16=False, **attributes)


LABELS = torch.arange(ROWS) * 7 % 10
IDS = torch.arange(ROWS)[:, None] * torch.tensor([3, 5, 7]) % 40


def linear(seed):
    """Return a linear layer, the same on each rank."""
    layer = torch.nn.Linear(WIDTH, WIDTH)
    layer.weight.data = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed))
    return layer.requires_grad_()


def simclr_case(impl, **changed):
    z = embeddings(2, seed=1)
    labels = LABELS if changed.get("supervised") else None
    return simclr.compute_loss(stand_in(z), (None, labels), ROWS, args(impl, **changed))[0], [z]


def simcse_case(impl, equal_texts):
    z = embeddings(3, seed=2)
    ids = (IDS[:, :2], IDS[:, 2]) if equal_texts else ()
    return simcse.compute_loss(stand_in(z), None, ROWS, args(impl), *ids)[0], [z]


def bf16_case(impl):
    """With --precision bf16, the loss multiplies float16 rows, and only these are sent."""
    def send_half(gathered, sent, group):
        assert sent.dtype == torch.float16
        all_gather(gathered, sent, group)

    z, all_gather = embeddings(3, seed=2).detach().float().requires_grad_(), gather.ALL_GATHER
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "ALL_GATHER", send_half)
        return simcse.compute_loss(stand_in(z), None, ROWS, args(impl, precision="bf16"))[0], [z]


def declutr_case(impl):
    z, own = embeddings(2, seed=3), own_rows(ROWS // 2)        # documents with two anchors each
    views = z.unflatten(0, (-1, 2))[own].flatten(0, 1).unbind(1)
    settings = args(impl, spans=[2, 1])
    return declutr.compute_loss(lambda view: views[view], (0, 1), ROWS // 2, settings)[0], [z]


def vascl_case(impl, form):
    z, head = embeddings(2, seed=4), linear(5)
    model = stand_in(z, projection=head)
    return vascl.compute_loss(model, None, ROWS, args(impl, form=form))[0], [z, *head.parameters()]


def dclr_case(impl, form):
    z, f = embeddings(2, seed=6), embeddings(seed=7).detach()
    batch = None, f[own_rows(ROWS)]
    return dclr.compute_loss(stand_in(z), batch, ROWS, args(impl, form=form))[0], [z]


def ease_case(impl):
    z, entities, linear_map = embeddings(2, seed=8), embeddings(seed=9), linear(10)
    model = stand_in(z, entities=lambda ids: entities[ids], entity_map=linear_map)
    loss = ease.compute_loss(model, (None, IDS[own_rows(ROWS)]), ROWS, args(impl))[0]
    return loss, [z, entities, *linear_map.parameters()]


def selfguided_case(impl, objective):
    z = embeddings(3 if objective == "opt3" else 2, seed=11)
    own = own_rows(ROWS)
    model = stand_in(z[:, :1], projection=torch.nn.Identity())
    torch.randint = lambda *_, **__: torch.zeros(own.stop - own.start, 1, 1, dtype=torch.int64)
    batch = None, z[own, 1:]
    return selfguided.compute_loss(model, batch, ROWS, args(impl, objective=objective))[0], [z]


def finetune_case(impl, loss):
    z, own = embeddings(2, seed=12), own_rows(ROWS)
    finetune.sup_con_loss = functools.partial(kernels.sup_con_loss, impl=impl)
    gathered = finetune.gathered_rows(z[own], LABELS[own], ROWS)
    views = [z[own]] if loss == "supcon_loss" else z[own].unbind(1)
    part = getattr(finetune, loss)(*views, LABELS[own], 0.2, **gathered)
    return part * (own.stop - own.start) / ROWS, [z]


CASES = {
    "simclr": simclr_case,
    "simclr --no-normalize": functools.partial(simclr_case, normalize=False),
    "simclr --supervised": functools.partial(simclr_case, supervised=True),
    "simcse": functools.partial(simcse_case, equal_texts=False),
    "simcse --ignore-equal": functools.partial(simcse_case, equal_texts=True),
    "simcse --precision bf16": bf16_case,
    "declutr": declutr_case,
    "vascl": functools.partial(vascl_case, form="code"),
    "vascl --form paper": functools.partial(vascl_case, form="paper"),
    "dclr": functools.partial(dclr_case, form="paper"),
    "dclr --form code": functools.partial(dclr_case, form="code"),
    "ease": ease_case,
    "selfguided": functools.partial(selfguided_case, objective="opt3"),
    "selfguided --objective base": functools.partial(selfguided_case, objective="base"),
    "finetune --supcon-weight": functools.partial(finetune_case, loss="supcon_loss"),
    "finetune --ood-epochs": functools.partial(finetune_case, loss="ood_contrastive_loss")}


def compute(name, impl):
    """Return (this rank's part of the loss, its gradients, multiplications) of a case."""
    torch.manual_seed(13)                                      # for the noise of vascl and dclr

    def step():
        loss, leaves = CASES[name](impl)
        return loss.detach(), torch.autograd.grad(loss, leaves)

    (loss, gradients), count = multiplications(step)
    return loss, gradients, count


def compute_all(impl):
    """Return {case: compute(case)} in float64."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    return {name: compute(name, impl) for name in CASES}


def one_rank(rank, port, folder):
    """Run one of three ranks, or, as rank −1, one process with eager."""
    if rank == RANKS:
        torch.save(compute_all("eager"), folder / "alone")
        return
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    torch.save(compute_all("blockwise"), folder / str(rank))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return (results of one process, [results of each rank])."""
    folder = tmp_path_factory.mktemp("ranks")
    fork_context()
    torch.multiprocessing.start_processes(one_rank, (free_port(), folder), RANKS + 1,
                                          start_method="forkserver")
    return torch.load(folder / "alone"), [torch.load(folder / str(rank)) for rank in range(RANKS)]


@pytest.mark.parametrize("name", CASES)
def test_ranks_together_equal_one_process(name, results):
    loss, gradients, _ = results[0][name]
    parts = [rank[name] for rank in results[1]]
    limit = 1e-6 if "selfguided" in name else 1e-9             # its projections are cast to float32
    limit = 1e-3 if "bf16" in name else limit
    torch.testing.assert_close(sum(part[0] for part in parts), loss, rtol=limit, atol=0)
    for found, expected in zip(zip(*(part[1] for part in parts)), gradients):
        assert (sum(found) - expected).abs().max() < limit * expected.abs().max()


@pytest.mark.parametrize("name", CASES)
def test_no_rank_repeats_anothers_work(name, results):
    alone = results[0][name][2]
    shares = [rank[name][2] / alone for rank in results[1]]
    print(f"{name}: {max(shares):.2f} of eager's {alone / 1e6:.1f} Mflop")
    assert 0.1 < min(shares) and max(shares) < SHARE
