"""Every public loss rejects a bad argument with a message of one line, which names the argument."""
import pytest
import torch
from comparing import DEVICE, patch_kernels

import kernels
from dclr import noise_negatives
from ease import ease_loss
from finetune import rdrop_loss
from kernels import embed_in_chunks, info_nce, nt_xent, similarity_lse
from kernels.training.text.classifier import task_loss
from moco import moco_loss
from simcse import simcse_loss
from tacl import tacl_loss

Z, WIDE, HARD = torch.randn(8, 6), torch.randn(8, 7), torch.randn(8, 3, 6)
LABELS, TOKENS = torch.arange(8), torch.ones(8, 3)
FOUR, OWN = LABELS[:4], slice(2, 5)                            # OWN: one rank's rows
RING, RING_3D = (kernels.RingRows(x[OWN], [slice(0, 2), OWN, slice(5, 8)], 1) for x in (Z, HARD))


def of_a_rank(loss, *gathered, offset=2, **options):
    """Call a loss for a rank that has rows 2 to 4 of Z, with `gathered` as the rows of all ranks."""
    return loss(Z[OWN], Z[OWN], gathered=gathered, offset=offset, **options)


MISTAKES = [
    (lambda: similarity_lse(Z[0]), r"q: found \(6,\), expected \(N, D\)"),
    (lambda: similarity_lse(Z, WIDE), r"k: found \(8, 7\), expected \(K, 6\)"),
    (lambda: similarity_lse(Z, Z.double()), "k: dtype torch.float64, expected torch.float32 like q"),
    (lambda: similarity_lse(Z, Z, 0.0), "temperature: 0.0, expected a number above 0"),
    (lambda: similarity_lse(Z.double(), impl="triton"), "impl: 'triton' does not support float64"),
    (lambda: kernels.similarity_topk(Z, Z, 9), "n: 9, expected an integer from 1 to the 8 rows of k"),
    (lambda: info_nce(Z, Z[:5]), r"k: 5 rows, expected at least 8 \+ offset 0"),
    (lambda: info_nce(Z[:5], Z, symmetric=True), "k: 8 rows, expected 5 like q"),
    (lambda: nt_xent(Z, Z[:5]), "z2: 5 rows, expected 8 like z1"),
    (lambda: kernels.margin_loss(Z, Z, LABELS), "same: found 2, expected 0 or 1"),
    (lambda: kernels.sup_con_loss(Z), r"z: found \(8, 6\), expected \(N, V, D\)"),
    (lambda: kernels.sup_con_loss(HARD, FOUR), r"labels: found \(4,\), expected \(8,\)"),
    (lambda: of_a_rank(nt_xent, Z, Z, offset=6), r"gathered: z1: 8 rows, .* 3 \+ offset 6"),
    (lambda: nt_xent(Z, Z, offset=1), "offset: 1, expected 0 if gathered is None"),
    (lambda: similarity_lse(Z, Z, offset=1), 'offset: 1, expected 0 unless exclude is "diagonal"'),
    (lambda: kernels.sup_con_loss(Z[:, None]), "labels: found None, expected labels, .* only 1 view"),
    (lambda: of_a_rank(info_nce, Z, Z), "gathered: needs symmetric=True"),
    (lambda: info_nce(Z[OWN], RING), "offset: found 0 for 3 queries, expected 2 for 3 queries: the posi"),
    (lambda: info_nce(Z[2:4], RING, offset=2), "offset: found 2 for 2 queries, expected 2 for 3 queries"),
    (lambda: info_nce(Z[OWN], RING, symmetric=True), "k: 8 rows, expected 3 like q"),
    (lambda: of_a_rank(nt_xent, RING, RING, offset=1), "offset: found 1 for 6 queries, expected 2 "),
    (lambda: similarity_lse(Z, RING, impl="eager"), "impl: found 'eager', which needs all keys"),
    (lambda: similarity_lse(Z, RING, similar=(Z, Z, 0.5)), "similar: not supported with ring_rows"),
    (lambda: kernels.similarity_topk(Z, RING, 1), "k: found RingRows, expected a tensor"),
    (lambda: kernels.queue_loss(Z, RING, Z), "k: found RingRows, expected a tensor"),
    (lambda: simcse_loss(Z[OWN], RING, offset=1), r"ring_rows: found slice\(1, 4, None\), expec.* slice\(2"),
    (lambda: kernels.sup_con_loss(HARD[OWN], gathered=(RING_3D, None), offset=2), "gathered: z: found RingR"),
    (lambda: embed_in_chunks(torch.nn.Linear(6, 3), Z, None), "chunks: found Tensor, expected a list"),
    (lambda: simcse_loss(Z, Z[:4]), r"z2: 4 rows, expected at least 8 \+ offset 0: one positive for each"),
    (lambda: simcse_loss(Z, Z, HARD[:, :, :5]), r"z3: found \(8, 3, 5\), expected \(8, n, 6\)"),
    (lambda: moco_loss(Z, Z, WIDE), r"queue: found \(8, 7\), expected \(K, 6\)"),
    (lambda: tacl_loss(HARD, HARD[:, :2], TOKENS), r"teacher: found \(8, 2, 6\), expected \(8, 3, 6\)"),
    (lambda: ease_loss(Z, Z, HARD[:4]), r"hard: found \(4, 3, 6\), expected \(8, m, 6\)"),
    (lambda: noise_negatives(Z, Z, WIDE), r"noise: found \(8, 7\), expected \(k, 6\)"),
    (lambda: task_loss(Z, LABELS), "labels: found 6, expected 0 to 5, or -100"),
    (lambda: rdrop_loss(Z, Z[:4], LABELS, 1.0), r"logits2: found \(4, 6\), expected \(8, 6\)")]


@pytest.mark.parametrize("call, message", MISTAKES)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("impl", ["eager", "blockwise", "triton"])
def test_a_nan_makes_all_results_that_it_reaches_nan(impl, precision, monkeypatch):
    """The NaN has the bits of NVIDIA's NaN, 0x7FFFFFFF. Rounding to TF32 must not let them overflow."""
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    patch_kernels(monkeypatch, {"gpu.lse_forward.table_block_shape": lambda q, k, square: (128, 128)})
    for keys in (30, 300):                                     # 30 keys: one block of logits; 300: several
        q, k = (torch.randn(n, 8, device=DEVICE) for n in (20, keys))
        q[3] = torch.tensor(2 ** 31 - 1, dtype=torch.int32).view(torch.float32)
        rows = torch.arange(20, device=DEVICE)
        assert torch.equal(kernels.similarity_lse(q, k, impl=impl).isnan(), rows == 3)
        assert kernels.similarity_lse(k, q, impl=impl).isnan().all()
        for loss in (kernels.info_nce, kernels.sigmoid_loss):
            assert loss(q, k, impl=impl).isnan()


@pytest.mark.parametrize("impl", ["eager", "blockwise", "triton"])
def test_a_wrong_target_on_a_gpu_makes_the_loss_nan(impl, monkeypatch):
    """Reading targets on a GPU would make the host wait, so only wrong targets on the CPU raise an error."""
    monkeypatch.setattr(torch.Tensor, "is_cpu", False, raising=False)
    h, w = (torch.randn(n, 8, device=DEVICE, requires_grad=True) for n in (5, 12))
    for target in (-1, 12, 2 ** 40, 5):
        targets = torch.tensor([0, 11, -100, target, 3], device=DEVICE)
        loss = kernels.linear_cross_entropy(h, w, targets, impl=impl)
        gradients = torch.autograd.grad(loss, (h, w))
        assert all(x.isnan().any() == (target != 5) for x in (loss, *gradients))
