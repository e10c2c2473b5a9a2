"""The contract of the losses: value and gradients of each public loss equal those of its formula in float64.

Matrices are small, or of several Triton tiles, or large. Other tests compare several processes, and chunks,
with the whole batch. The tests use only public names, so they hold for any implementation of the losses.
"""
import pytest
import torch
from loss_ranks import compute_shares, save_shares

import kernels
import loss_formulas as formulas
from loss_check import cases, check, error_of, numbers
from running import run_ranks

# ── the losses of kernels ───────────────────────────────────────────────────────────────────────────────────


def unit_rows(n, seed):
    return formulas.unit(numbers(n, 20, seed=seed))


def topk(n, impl, **arguments):
    """Return two equal blocks: the n largest products of each row, and those of the returned columns."""
    products, columns = kernels.similarity_topk(n=n, impl=impl, **arguments)
    q, k = (arguments[x].detach().double() for x in "qk")
    q, k = (formulas.unit(q), formulas.unit(k)) if arguments.get("normalize") else (q, k)
    found = (q @ k.T).gather(1, columns.clamp(min=0)).to(products.dtype)
    return torch.cat([products, found.masked_fill(columns < 0, -torch.inf)])


T, N, M = torch.tensor(0.1).double(), torch.arange(37), torch.arange(53)
Q, K = unit_rows(37, 1), unit_rows(53, 2).T.contiguous().T     # K is stored column by column
QUEUE = unit_rows(61, 3)
TILES = dict(q=unit_rows(150, 4), k=unit_rows(170, 5))         # Triton splits these logits into tiles
LARGE = dict(q=unit_rows(1031, 6), k=unit_rows(1051, 7))       # blockwise splits these logits into strips
LONG, LONG_PAIRS = dict(q=3 * Q, k=K / 2, normalize=True), dict(text=3 * K[:37], normalize=True)
IDS, GROUPS = (N % 5 - 2, M * 7 % 9 - 2), (N // 4, M // 6)     # no column has the group of row 36
# features are whole numbers, so their products are exact in all dtypes; some products equal the threshold
SIMILAR = (N[:, None] * 5 + N[:6]).double() % 7 - 3, (M[:, None] * 3 + M[:6]).double() % 5 - 2, 4.0
MASKS = [{}, dict(exclude="diagonal", offset=3), dict(exclude=IDS), dict(within=GROUPS), dict(within=IDS),
         dict(exclude=("diagonal", *IDS), offset=1), dict(similar=SIMILAR),
         dict(exclude="diagonal", within=(N % 3, M % 4), similar=SIMILAR), LONG]
VIEWS, LABELS = unit_rows(60, 8).view(20, 3, 20), torch.arange(20) * 3 % 7
TARGETS = (N * 7 % 53).where(N % 4 > 0, 9)
CASES = {
    "info_nce": cases(
        kernels.info_nce, formulas.info_nce, dict(offset=5), LONG, TILES, LARGE,
        dict(symmetric=True, k=K[:37]), dict(symmetric=True, normalize=True, q=3 * Q, k=K[:37]),
        dict(symmetric=True, q=LARGE["q"], k=LARGE["k"][:1031]), q=Q, k=K, temperature=T),
    "clip_loss": cases(
        kernels.clip_loss, formulas.clip_loss, {}, LONG_PAIRS,
        image=Q, text=K[:37], temperature=T),
    "nt_xent": cases(
        kernels.nt_xent, formulas.nt_xent, {}, dict(z1=3 * Q, normalize=True),
        dict(z1=TILES["q"][:75], z2=TILES["k"][:75]), dict(z1=LARGE["q"][:530], z2=LARGE["k"][:530]),
        z1=Q, z2=K[:37], temperature=T),
    "queue_loss": cases(
        kernels.queue_loss, formulas.queue_loss, {}, dict(k=3 * K[:37], queue=QUEUE / 2, normalize=True),
        dict(q=TILES["q"], k=TILES["k"][:150], queue=LARGE["q"][:170]),
        dict(q=LARGE["q"], k=LARGE["k"][:1031], queue=LARGE["k"]), q=Q, k=K[:37], queue=QUEUE, temperature=T),
    "sigmoid_loss": cases(
        kernels.sigmoid_loss, formulas.sigmoid_loss, dict(offset=9), LONG, TILES, LARGE,
        q=Q, k=K, temperature=T, bias=-30 * T),
    "sup_con_loss": cases(
        kernels.sup_con_loss, formulas.sup_con_loss, {}, dict(labels=None), dict(base_temperature=0.07),
        dict(z=3 * VIEWS, normalize=True), dict(z=VIEWS[:, :1], labels=torch.arange(20) * 3 % 13),
        dict(z=LARGE["q"].view(1031, 1, 20), labels=torch.arange(1031) * 3 % 700),
        z=VIEWS, labels=LABELS, temperature=T),
    "linear_cross_entropy": cases(
        kernels.linear_cross_entropy, formulas.linear_cross_entropy, {}, dict(ignore_index=9),
        dict(targets=TARGETS.where(N % 3 > 0, -100)), dict(targets=0 * TARGETS, ignore_index=0),
        dict(hidden=TILES["q"], weight=TILES["k"], targets=torch.arange(150) + 20),
        dict(hidden=LARGE["q"], weight=LARGE["k"], targets=torch.arange(1031) + 20),
        hidden=10 * Q, weight=K, targets=TARGETS, temperature=7 * T),
    "triplet_loss and margin_loss": [
        *cases(kernels.triplet_loss, formulas.triplet_loss, {}, dict(margin=0.1),
               anchor=Q, positive=K[:37] * (1 + N[:, None] / 9), negative=QUEUE[:37]),
        *cases(kernels.margin_loss, formulas.margin_loss, {}, dict(margin=1.4),
               x1=Q, x2=K[:37], same=N % 3 == 0)],
    "similarity_lse": [
        *cases(kernels.similarity_lse, formulas.similarity_lse, *MASKS, TILES | dict(exclude="diagonal"),
               LARGE, LARGE | dict(exclude="diagonal", offset=7), q=Q, k=K, temperature=T),
        *cases(kernels.similarity_lse, formulas.similarity_lse, {}, dict(exclude="diagonal"),
               dict(exclude="pair"), dict(exclude=(N[:36] % 5, N[:36] % 7)),
               dict(q=3 * Q[:36], exclude="diagonal", normalize=True),
               dict(q=LARGE["q"][:1030], exclude="pair"), q=Q[:36], temperature=T)],
    "similarity_topk": cases(topk, formulas.similarity_topk, *MASKS, LARGE, *(
        TILES | dict(n=n) for n in (1, 64, 65)), q=Q, k=K, n=11)}


@pytest.mark.parametrize("name", CASES)
def test_loss_of_kernels(name):
    for loss, formula, arguments in CASES[name]:
        check(loss, formula, arguments)


# ── several processes, chunks ───────────────────────────────────────────────────────────────────────────────


def test_losses_of_three_ranks(tmp_path):
    """The losses of three ranks and their gradients add up to those of one process without gathered rows."""
    run_ranks(save_shares, 3, tmp_path)
    alone, saved = compute_shares(alone=True), [torch.load(tmp_path / str(rank)) for rank in range(3)]
    for ranks in zip(*saved):                                  # first with gathered rows, then with a ring
        for name in ranks[0]:
            for part, exact in alone[name].items():
                assert error_of(sum(rank[name][part] for rank in ranks), exact) <= 1e-12, f"{name}, {part}"
    assert len(alone) > 20 and all(parts["value"] for parts in alone.values())
    errors = [(tmp_path / f"error {rank}").read_text() for rank in range(3)]
    assert all(error.startswith("gather_rows: found create_graph=True") for error in errors)


def test_embed_in_chunks():
    """Loss, gradients and the next random number equal those of one graph over all rows, dropout included.
    Batch norm normalises each chunk by the chunk's own statistics, and counts each chunk once."""
    torch.manual_seed(0)
    layers = torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Dropout(0.4), torch.nn.Linear(16, 5)
    module, x = torch.nn.Sequential(torch.nn.Linear(6, 16), *layers).double(), numbers(34, 6)

    def step(embed_all):
        torch.manual_seed(1)
        layers[0].reset_running_stats()
        z = embed_all() + 0.1 * torch.rand(1)                  # a loss may use random numbers, too
        module.zero_grad()
        loss = kernels.info_nce(*z.chunk(2), 0.3, symmetric=True, normalize=True)
        loss.backward()
        statistics = [x.clone() for x in module.buffers()]
        return [loss.detach(), *(p.grad.clone() for p in module.parameters()), *statistics, torch.rand(1)]

    for size, training in ((2, True), (5, True), (32, True), (1, False), (5, False), (33, False)):
        module.train(training)
        chunks = x.split(size)
        found = step(lambda: kernels.embed_in_chunks(module, chunks, module))
        exact = step(lambda: torch.cat([module(chunk) for chunk in chunks]) if training else module(x))
        errors = list(map(error_of, found, exact))
        assert max(errors) <= 1e-10, f"chunks of {size}, training {training}, {errors}"
