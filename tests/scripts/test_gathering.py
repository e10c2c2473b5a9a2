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

import childtuning
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
ARGS = dict(
    temperature=0.1, precision="fp32", normalize=True, supervised=False, hard_negative_weight=0.3, count=3,
    form="paper", objective="opt3", anchors=2, radius=1.0, relative_radius=None, neighbours=4, ascent_steps=2,
    noise_per_sentence=1, noise_steps=2, noise_step_size=0.1, noise_temperature=0.1, phi=0.9, mlm_weight=0,
    negative_group_size=0, equal_entities="mask", entity_temperature=1.0, simcse_weight=1.0,
    entity_weight=1.0, spans=[2, 1])
LABELS = torch.arange(ROWS) * 7 % 10
IDS = torch.arange(ROWS)[:, None] * torch.tensor([3, 5, 7]) % 40


def random(*shape):
    """Return random rows of the whole batch that require a gradient; every rank has the same ones."""
    numbers = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, WIDTH, generator=numbers).requires_grad_()


def random_layer():
    layer = torch.nn.Linear(WIDTH, WIDTH)
    layer.weight.data = random(WIDTH).data
    return layer


def loss_of(script, z, impl, batch=None, ids=(), leaves=(), attributes=None, **changed):
    """Return (script.compute_loss of a stand-in for its model, [z, leaves]).

    z            (rows, views, D) embeddings; the stand-in returns this rank's rows, one view after the other
    leaves       other tensors that get a gradient
    attributes   of the stand-in
    changed      changes of ARGS
    """
    class Model(SimpleNamespace):
        def __call__(self, batch):
            return z[own_rows(ROWS)].transpose(0, 1).flatten(0, 1)

    model = Model(lm=None, device=torch.device("cpu"), bf16=False, **attributes or {})
    args = SimpleNamespace(**ARGS | changed, impl=impl)
    return script.compute_loss(model, batch, ROWS, args, *ids)[0], [z, *leaves]


def bf16_case(impl):
    """With --precision bf16, the loss multiplies float16 rows, and only these are sent."""
    def send_half(gathered, sent, group):
        assert sent.dtype == torch.float16
        all_gather(gathered, sent, group)

    z, all_gather = random(ROWS, 3).detach().float().requires_grad_(), gather.ALL_GATHER
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "ALL_GATHER", send_half)
        return loss_of(simcse, z, impl, precision="bf16")


def declutr_case(impl):
    z, own = random(ROWS, 2), own_rows(ROWS // 2)              # documents with two anchors each
    views = z.unflatten(0, (-1, 2))[own].flatten(0, 1).unbind(1)
    args = SimpleNamespace(**ARGS, impl=impl)
    return declutr.compute_loss(lambda view: views[view], (0, 1), ROWS // 2, args)[0], [z]


def vascl_case(impl, form):
    head = random_layer()
    return loss_of(vascl, random(ROWS, 2), impl, leaves=head.parameters(), attributes=dict(projection=head),
                   form=form)


def dclr_case(impl, form):
    batch = None, random(ROWS, 1).detach()[own_rows(ROWS), 0]  # guide embeddings
    return loss_of(dclr, random(ROWS, 2), impl, batch, form=form)


def ease_case(impl):
    entities, layer = random(ROWS), random_layer()
    attributes = dict(entities=lambda ids: entities[ids], entity_map=layer)
    return loss_of(ease, random(ROWS, 2), impl, (None, IDS[own_rows(ROWS)]), attributes=attributes,
                   leaves=[entities, *layer.parameters()])


def selfguided_case(impl, objective):
    z, own = random(ROWS, 3 if objective == "opt3" else 2), own_rows(ROWS)
    torch.randint = lambda *_, **__: torch.zeros(own.stop - own.start, 1, 1, dtype=torch.int64)
    attributes, batch = dict(projection=torch.nn.Identity()), (None, z[own, 1:])
    loss, _ = loss_of(selfguided, z[:, :1], impl, batch, attributes=attributes, objective=objective)
    return loss, [z]


def finetune_case(impl, loss):
    z, own = random(ROWS, 2), own_rows(ROWS)
    finetune.sup_con_loss = functools.partial(kernels.sup_con_loss, impl=impl)
    gathered = finetune.gathered_rows(z[own], LABELS[own], ROWS)
    views = [z[own]] if loss == "supcon_loss" else z[own].unbind(1)
    part = getattr(finetune, loss)(*views, LABELS[own], 0.2, **gathered)
    return part * (own.stop - own.start) / ROWS, [z]


CASES = {
    "simclr": lambda impl: loss_of(simclr, random(ROWS, 2), impl, (None, None)),
    "simclr --no-normalize": lambda impl: loss_of(
        simclr, random(ROWS, 2), impl, (None, None), normalize=False),
    "simclr --supervised": lambda impl: loss_of(
        simclr, random(ROWS, 2), impl, (None, LABELS), supervised=True),
    "simcse": lambda impl: loss_of(simcse, random(ROWS, 3), impl),
    "simcse --ignore-equal": lambda impl: loss_of(
        simcse, random(ROWS, 3), impl, ids=(IDS[:, :2], IDS[:, 2])),
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


def one_rank(rank, port, folder):
    """Save the results of one of three ranks with blockwise, or, as rank 3, of one process with eager."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    if rank < RANKS:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    results = {name: compute(name, "blockwise" if rank < RANKS else "eager") for name in CASES}
    batches = list(random(10))[rank if rank < RANKS else 0 :: RANKS if rank < RANKS else 1]
    model = torch.nn.ParameterDict(dict(w=torch.zeros(WIDTH)))
    child = childtuning.fisher_mask(model, batches, lambda model, x: (model["w"] * x).sum(), 0.3)
    torch.save((results, child), folder / str(rank))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return what one_rank saved for each rank, and for one process."""
    folder = tmp_path_factory.mktemp("ranks")
    fork_context()
    torch.multiprocessing.start_processes(one_rank, (free_port(), folder), RANKS + 1,
                                          start_method="forkserver")
    return [torch.load(folder / str(rank)) for rank in range(RANKS + 1)]


@pytest.mark.parametrize("name", CASES)
def test_ranks_together_equal_one_process(name, saved):
    *parts, (loss, gradients, _) = (results[name] for results, _ in saved)
    limit = 1e-6 if "selfguided" in name else 1e-9             # its projections are cast to float32
    limit = 1e-3 if "bf16" in name else limit
    torch.testing.assert_close(sum(part[0] for part in parts), loss, rtol=limit, atol=0)
    for found, expected in zip(zip(*(part[1] for part in parts)), gradients):
        assert (sum(found) - expected).abs().max() < limit * expected.abs().max()


@pytest.mark.parametrize("name", CASES)
def test_no_rank_repeats_anothers_work(name, saved):
    *parts, (_, _, alone) = (results[name] for results, _ in saved)
    shares = [part[2] / alone for part in parts]
    print(f"{name}: {max(shares):.2f} of eager's {alone / 1e6:.1f} Mflop")
    assert 0.1 < min(shares) and max(shares) < SHARE


def test_ranks_have_the_same_child_network(saved):
    """The Fisher information of childtuning.py is that of all rows, of which ranks have 4, 3 and 3."""
    *ranks, (masks, threshold) = (child for _, child in saved)
    assert 0 < masks["w"].sum() < WIDTH
    for found, found_threshold in ranks:
        assert torch.equal(found["w"], masks["w"]) and found_threshold == pytest.approx(threshold)
