"""Losses of one rank's rows against the rows of all ranks: parts of the loss of one process.

Ranks are simulated in one process here: each part gets its slice of the rows, and all rows as gathered rows.
test_distributed_mistakes.py and tests/contract use processes.
"""
import pytest
import torch

from kernels import clip_loss, info_nce, nt_xent, own_rows, sigmoid_loss, sup_con_loss
from running import multiplications

ROWS, WIDTH = 13, 6                                            # on 3 ranks 4, 4 and 5 rows
LABELS = torch.arange(66) * 5 % 4
STRIPS = {"blockwise.ONE_STRIP": 0, "blockwise.MIN_STRIP_ROWS": 3}
IMPLS = {"eager": ("eager", {}), "one strip": ("blockwise", {}), "strips": ("blockwise", STRIPS)}


def symmetric(q, k, t, **options):
    return info_nce(q, k, t, symmetric=True, **options)


def with_keys(loss):
    """Return a loss of (q, k), with all ranks' keys as `gathered`, from one that takes them as k."""
    def f(q, k, t, gathered=None, **options):
        return loss(q, k if gathered is None else gathered[1], t, **options)
    return f


def sup_con(labels, base):
    """Return sup_con_loss of two views, as a function of the views."""
    def f(z1, z2, t, gathered=None, offset=0, **options):
        own = slice(offset, offset + len(z1))
        if gathered is not None:
            gathered = torch.stack(gathered, 1), labels if labels is None else labels[:len(gathered[0])]
        return sup_con_loss(torch.stack([z1, z2], 1), labels if labels is None else labels[own], t, base,
                            gathered=gathered, offset=offset, **options)
    return f


LOSSES = {"nt_xent": nt_xent, "clip_loss": clip_loss, "info_nce": with_keys(info_nce),
          "info_nce, symmetric": symmetric, "sigmoid_loss": with_keys(sigmoid_loss),
          "sup_con_loss": sup_con(LABELS, None), "sup_con_loss, no labels": sup_con(None, 0.07)}


def patch(monkeypatch, settings):
    for name, value in settings.items():
        monkeypatch.setattr(f"kernels.{name}", value)


def views(rows=ROWS, width=WIDTH):
    """Return two views (rows, width) and a temperature, float64, each with a gradient."""
    numbers = torch.Generator().manual_seed(rows)
    z = torch.randn(2, rows, width, generator=numbers, dtype=torch.float64)
    return [*z.unbind(), torch.tensor(0.3, dtype=torch.float64)]


def gradients(f, *inputs):
    """Return [f(*inputs), its gradients]."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    loss = f(*inputs)
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]


def sum_of_parts(loss, ranks, **options):
    """Return a function of (z1, z2, t): the sum of each rank's loss, weighted with its share of the rows."""
    def f(z1, z2, t):
        total = 0
        for rank in range(ranks):
            own = own_rows(len(z1), rank, ranks)
            part = loss(z1[own], z2[own], t, gathered=(z1, z2), offset=own.start, **options)
            total = total + part * ((own.stop - own.start) / len(z1))
        return total
    return f


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 13])
@pytest.mark.parametrize("normalize", [False, True])
def test_parts_add_up_to_one_process(name, impl, ranks, normalize, monkeypatch):
    impl, settings = IMPLS[impl]
    patch(monkeypatch, settings)
    loss, options = LOSSES[name], dict(normalize=normalize)
    expected = gradients(lambda *x: loss(*x, impl="eager", **options), *views())
    found = gradients(sum_of_parts(loss, ranks, impl=impl, **options), *views())
    for a, b in zip(found, expected):
        assert (a - b).abs().max() < 1e-9 * b.abs().max()


@pytest.mark.parametrize("name", LOSSES)
def test_a_rank_multiplies_only_its_share(name, monkeypatch):
    """With three ranks, each rank computes at most 0.75 times the products of one process with eager.
    clip_loss needs 2/3: its rows and columns have separate products, which one process shares."""
    z1, z2, t = views(66, 40)
    _, alone = multiplications(lambda: gradients(lambda *x: LOSSES[name](*x, impl="eager"), z1, z2, t))

    def one_rank(z1, z2, t):
        return LOSSES[name](z1[22:44], z2[22:44], t, gathered=(z1, z2), offset=22, impl="blockwise")

    _, own = multiplications(lambda: gradients(one_rank, z1, z2, t))
    print(f"{name}: {own / alone:.2f} of eager's {alone / 1e6:.1f} Mflop")
    assert 0.3 < own / alone < 0.75


Z, T = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3
PAIRS = torch.stack([Z, Z], 1)
OWN = slice(2, 5)


@pytest.mark.parametrize("call, message", [
    (lambda: nt_xent(Z[OWN], Z[OWN], gathered=(Z[:, :5], Z), offset=2),
     r"gathered: z1: found \(8, 5\), expected \(K, 6\)"),
    (lambda: nt_xent(Z[OWN], Z[OWN], gathered=(Z, Z[:-1]), offset=2), "gathered: z2: 7 rows, expected 8"),
    (lambda: nt_xent(Z[OWN], Z[OWN], gathered=(Z, Z), offset=6), "gathered: z1: 8 rows, .* 3 \\+ offset 6"),
    (lambda: nt_xent(Z[OWN], Z[OWN], gathered=(Z, Z), offset=8), "offset: 8, expected this rank's first row"),
    (lambda: nt_xent(Z[OWN], Z[OWN], gathered=(Z, Z), offset=-1), "offset: -1, expected"),
    (lambda: nt_xent(Z, Z, offset=1), "offset: 1, expected 0 if gathered is None"),
    (lambda: nt_xent(Z[OWN], Z[OWN], gathered=Z, offset=2), "gathered: found Tensor, expected a pair"),
    (lambda: clip_loss(Z[OWN], Z[OWN], gathered=(Z, Z.double()), offset=2), "gathered: text: dtype"),
    (lambda: clip_loss(Z[OWN], Z[OWN], gathered=(Z[:4], Z), offset=2), "gathered: image: 4 rows, expected"),
    (lambda: clip_loss(Z[OWN], Z[:2], gathered=(Z, Z), offset=2), "text: 2 rows, expected 3 like image"),
    (lambda: clip_loss(Z, Z, offset=2), "offset: 2, expected 0"),
    (lambda: info_nce(Z, Z, symmetric=True, offset=2), "offset: 2, expected 0"),
    (lambda: info_nce(Z[OWN], Z[OWN], symmetric=True, gathered=(Z, Z), offset=9), "offset: 9, expected"),
    (lambda: info_nce(Z[OWN], Z[OWN], gathered=(Z, Z), offset=2), "gathered: needs symmetric=True"),
    (lambda: sup_con_loss(PAIRS[OWN], T[OWN], gathered=(PAIRS, T[:5]), offset=2), "gathered: labels: found"),
    (lambda: sup_con_loss(PAIRS[OWN], T[:2], gathered=(PAIRS, T), offset=2), "labels: found \\(2,\\)"),
    (lambda: sup_con_loss(PAIRS[OWN], T[OWN], gathered=(PAIRS[:, :1], T), offset=2), "gathered: z: found"),
    (lambda: sup_con_loss(PAIRS[OWN], T[OWN], gathered=(PAIRS, None), offset=2), "gathered: expected labels"),
    (lambda: sup_con_loss(PAIRS[OWN], None, gathered=(PAIRS, T), offset=2), "gathered: expected labels"),
    (lambda: sup_con_loss(PAIRS[OWN], T[OWN], gathered=(PAIRS, T), offset=3), "labels: not equal to"),
    (lambda: sup_con_loss(PAIRS[OWN], T[OWN], gathered=(PAIRS, T), offset=6), "gathered: z: 8 rows"),
    (lambda: sup_con_loss(PAIRS, T, offset=1), "offset: 1, expected 0")])
def test_bad_gathered_rows_name_the_argument(call, message):
    with pytest.raises(ValueError, match=f"^{message}") as error:
        call()
    assert "expected" in str(error.value) and "\n" not in str(error.value)
