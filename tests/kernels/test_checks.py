"""Every public loss rejects a bad argument with one line that names it; queues must have unit rows."""
import weakref

import pytest
import torch
import torch.nn.functional as F
from comparing import DEVICE

import kernels
from cline import replaced_token_loss
from dclr import dclr_loss, noise_negatives
from ease import ease_loss
from finetune import ood_contrastive_loss, rdrop_loss
from kernels import embed_in_chunks, gather_rows, info_nce, nt_xent, own_rows, similarity_lse
from kernels.training.text.classifier import task_loss
from moco import enqueue, moco_loss
from selfguided import selfguided_loss
from simclr import simclr_loss
from simcse import simcse_loss
from tacl import tacl_loss
from vascl import nearest_neighbours, neighbourhood_loss, virtual_augmentation

Z, WIDE, HARD = torch.randn(8, 6), torch.randn(8, 7), torch.randn(8, 3, 6)
LABELS, UNIT, TOKENS = torch.arange(8), F.normalize(torch.randn(5, 6), dim=1), torch.ones(8, 3)
FOUR, OWN, PAIRS = LABELS[:4], slice(2, 5), torch.stack([Z, Z], 1)             # OWN: one rank's rows
NET, CHUNKS = torch.nn.Linear(6, 3), Z.split(4)
FROZEN = torch.nn.Linear(6, 3).requires_grad_(False)


def of_a_rank(loss, *gathered, offset=2, **options):
    """Call a loss with rows 2 to 4 of Z as one rank's rows, and these as those of all ranks."""
    return loss(Z[OWN], Z[OWN], gathered=gathered, offset=offset, **options)


def sup_con_of_a_rank(z, labels, offset=2):
    return kernels.sup_con_loss(PAIRS[OWN], LABELS[OWN], gathered=(z, labels), offset=offset)


def perturb(neighbours):
    """Call VaSCL's virtual_augmentation with these and otherwise valid arguments."""
    return virtual_augmentation(Z, torch.tanh, neighbours, Z, 1.0, 0.05)


def perturbed_loss(perturbed, neighbours):
    """Call VaSCL's neighbourhood_loss with these and otherwise valid arguments."""
    return neighbourhood_loss(Z, perturbed, torch.tanh, neighbours, 0.05)


MISTAKES = [
    # kernels
    (lambda: similarity_lse(Z[0]), r"q: found \(6,\), expected \(N, D\)"),
    (lambda: similarity_lse(Z, WIDE), r"k: found \(8, 7\), expected \(K, 6\)"),
    (lambda: similarity_lse(Z, Z.double()), "k: dtype torch.float64, expected torch.float32 like q"),
    (lambda: similarity_lse(Z, Z.to("meta")), "k: on meta, expected cpu like the other tensors"),
    (lambda: similarity_lse(Z, Z, 0.0), "temperature: 0.0, expected a number above 0"),
    (lambda: similarity_lse(Z, Z, exclude="pair"), 'exclude: "pair" needs k=None .* found a k'),
    (lambda: similarity_lse(Z, Z, exclude=(LABELS, FOUR)), r"column ids: found \(4,\), expected \(8,\)"),
    (lambda: similarity_lse(Z.double(), impl="triton"), "impl: 'triton' does not support float64"),
    (lambda: kernels.similarity_topk(Z, Z, 9), "n: 9, expected an integer from 1 to the 8 rows of k"),
    (lambda: info_nce(Z, Z[:5]), r"k: 5 rows, expected at least 8 \+ offset 0"),
    (lambda: info_nce(Z[:5], Z, symmetric=True), "k: 8 rows, expected 5 like q"),
    (lambda: nt_xent(Z, Z[:5]), "z2: 5 rows, expected 8 like z1"),
    (lambda: kernels.clip_loss(Z, None), "text: found NoneType, expected a tensor"),
    (lambda: kernels.triplet_loss(Z, Z, WIDE), r"negative: found \(8, 7\), expected \(8, 6\)"),
    (lambda: kernels.margin_loss(Z, Z, LABELS), "same: found 2, expected 0 or 1"),
    (lambda: kernels.sup_con_loss(Z), r"z: found \(8, 6\), expected \(N, V, D\)"),
    (lambda: kernels.sup_con_loss(HARD, FOUR), r"labels: found \(4,\), expected \(8,\)"),
    # rows of all ranks
    (lambda: of_a_rank(nt_xent, Z, Z, offset=6), r"gathered: z1: 8 rows, .* 3 \+ offset 6"),
    (lambda: nt_xent(Z, Z, offset=1), "offset: 1, expected 0 if gathered is None"),
    (lambda: of_a_rank(info_nce, Z, Z), "gathered: needs symmetric=True"),
    (lambda: sup_con_of_a_rank(PAIRS, None), "gathered: expected labels"),
    (lambda: sup_con_of_a_rank(PAIRS, LABELS, offset=3), "labels: not equal to the gathered labels"),
    (lambda: gather_rows(Z, 9), r"rows: found 9, of which this process \(1 of 1\) has 9, but x has 8; "),
    (lambda: own_rows(8, 2, 2), "rank, world: found 2 and 2, expected 0 ≤ rank < world, or neither"),
    # chunks
    (lambda: embed_in_chunks(NET, Z, None), "chunks: found Tensor, expected a list of what embed takes"),
    (lambda: embed_in_chunks(NET, CHUNKS, FROZEN), "module: no parameter requires a gradient"),
    # papers
    (lambda: simcse_loss(Z, Z[:4]), r"z2: 4 rows, expected at least 8 \+ offset 0: one positive for each"),
    (lambda: simcse_loss(Z, Z, HARD[:, :, :5]), r"z3: found \(8, 3, 5\), expected \(8, n, 6\)"),
    (lambda: simcse_loss(Z, Z, HARD, ids=HARD[:, :, 0].long()), r"ids: found \(8, 3\), expected \(8, 4\)"),
    (lambda: simclr_loss(Z, Z[:4]), "z2: 4 rows, expected 8 like z1"),
    (lambda: moco_loss(Z, Z, 2 * UNIT), "queue: rows of norm 2 to 2, expected unit rows"),
    (lambda: selfguided_loss(Z, WIDE), r"h: found \(8, 7\), expected \(8, 6\)"),
    (lambda: selfguided_loss(Z, HARD, gathered=(Z[:4], HARD[:4])), "gathered_c: 4 rows, expected at least 8"),
    (lambda: tacl_loss(HARD, HARD[:, :2], TOKENS), r"teacher: found \(8, 2, 6\), expected \(8, 3, 6\)"),
    (lambda: ease_loss(Z, Z, HARD[:4]), r"hard: found \(4, 3, 6\), expected \(8, m, 6\)"),
    (lambda: nearest_neighbours(Z[:1], 2), "e: 1 row, expected at least 2"),
    (lambda: perturb(LABELS[:, None] - 1), "neighbours: found -1, expected 0 to 7"),
    (lambda: perturbed_loss(Z[:4], LABELS[:, None]), r"perturbed: found \(4, 6\), expected \(8, 6\)"),
    (lambda: noise_negatives(Z, Z, WIDE), r"noise: found \(8, 7\), expected \(k, 6\)"),
    (lambda: dclr_loss(Z, Z[:4], Z, Z, Z[:4], 0.9), r"z2: 4 rows, expected at least 8 \+ offset 0"),
    (lambda: task_loss(Z, LABELS), "labels: found 6, expected 0 to 5, or -100"),
    (lambda: rdrop_loss(Z, Z[:4], LABELS, 1.0), r"logits2: found \(4, 6\), expected \(8, 6\)"),
    (lambda: ood_contrastive_loss(Z, WIDE, LABELS), r"z_adv: found \(8, 7\), expected \(8, 6\)")]


@pytest.mark.parametrize("call, message", MISTAKES)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_a_missing_offset_is_an_error():
    """Elsewhere, without an offset the loss is finite and wrong. Here gathered rows know where they start."""
    z = torch.randn(7, 4)
    z.own_rows = 2, 4                                          # as gather_rows marks its result on rank 1
    for call in (lambda: info_nce(z[2:4], z), lambda: nt_xent(z[2:4], z[2:4], gathered=(z, z))):
        with pytest.raises(ValueError, match=r"offset: 0, but .* expected offset=own_rows\(7\)\.start"):
            call()


def test_swapped_gathered_rows_are_an_error():
    texts, images = torch.randn(2, 4), torch.randn(2, 4)
    both = [torch.cat([x, x]) for x in (texts, images)]
    for x, rows in zip((texts, images), both):
        rows.gathered_from = weakref.ref(x)                    # as gather_rows marks its result
    with pytest.raises(ValueError, match=r"gathered: found \(k, q\), expected \(q, k\)"):
        info_nce(images, texts, symmetric=True, gathered=both)
    with pytest.raises(ValueError, match=r"gathered: found \(z2, z1\), expected \(z1, z2\)"):
        nt_xent(images, texts, gathered=both)


@pytest.mark.parametrize("impl", ["eager", "blockwise", "triton"])
def test_a_wrong_target_on_a_gpu_makes_the_loss_nan(impl, monkeypatch):
    """Reading the targets would make the host wait for the GPU, so only targets on the CPU raise."""
    monkeypatch.setattr(torch.Tensor, "is_cpu", False, raising=False)
    h, w = (torch.randn(n, 8, device=DEVICE, requires_grad=True) for n in (5, 12))
    for target in (-1, 12, 2 ** 40, 5):
        targets = torch.tensor([0, 11, -100, target, 3], device=DEVICE)
        loss = kernels.linear_cross_entropy(h, w, targets, impl=impl)
        gradients = torch.autograd.grad(loss, (h, w))
        assert all(x.isnan().any() == (target != 5) for x in (loss, *gradients))


def test_a_queue_is_checked_at_first_use_and_after_the_first_keys(monkeypatch):
    """Keys may be unnormalised. More checks would make the host wait for the GPU."""
    checked, aminmax = [], torch.Tensor.aminmax
    monkeypatch.setattr(torch.Tensor, "aminmax", lambda x: checked.append(x) or aminmax(x))
    queue, raw = (F.normalize(torch.randn(12, 6), dim=1) for _ in range(2))
    for _ in range(3):
        moco_loss(Z, Z, queue)
        enqueue(queue, 0, F.normalize(Z[:4], dim=1))
    assert len(checked) == 2
    moco_loss(Z, Z, raw)
    enqueue(raw, 0, Z)
    with pytest.raises(ValueError, match="queue: rows of norm .* expected unit rows"):
        moco_loss(Z, Z, raw)


def test_a_queue_may_have_the_dtype_of_autocast():
    with torch.autocast("cpu", torch.float16):
        assert moco_loss(Z, Z, UNIT.half()).isfinite()


@pytest.mark.parametrize("loss, ids, dtype", [
    (lambda ids: ease_loss(Z[:3], Z[3:6], HARD[:3], 1.0, entity_ids=ids), [0, 255, 3], torch.uint8),
    (lambda ids: ease_loss(Z[:3], Z[3:6], HARD[:3], 1.0, entity_ids=ids), [-128, 127, 3], torch.int8),
    (lambda ids: task_loss(Z.repeat(1, 50), ids), list(range(0, 120, 15)), torch.int8),
    (lambda ids: replaced_token_loss(Z[0, :5], ids), [0, 156, 156, 0, 1], torch.uint8)])
def test_ids_and_labels_of_small_dtypes_do_not_wrap_around(loss, ids, dtype):
    """EASE's id of hard negatives is min(ids) − 1; 300 classes and ignore_index −100 do not fit either."""
    assert loss(torch.tensor(ids, dtype=dtype)) == loss(torch.tensor(ids))
