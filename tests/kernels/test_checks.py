"""Every public function rejects a bad argument with one line that names it; queues must have unit rows."""
import pytest
import torch
import torch.nn.functional as F

import kernels
from cline import contrastive_loss, replaced_token_loss, total_loss
from dclr import dclr_loss, instance_weights, noise_negatives
from ease import ease_loss
from finetune import adversarial_noise, ood_contrastive_loss, rdrop_loss, supcon_loss
from kernels import check_rows, choose_impl, embed_in_chunks, gather_rows, own_rows
from kernels.training.text.classifier import task_loss
from moco import enqueue, moco_loss
from selfguided import selfguided_loss
from simclr import simclr_loss, sup_con_loss
from simcse import simcse_loss
from tacl import tacl_loss
from vascl import nearest_neighbours, neighbourhood_loss, virtual_augmentation

Z, WIDE, HARD = torch.randn(8, 6), torch.randn(8, 7), torch.randn(8, 3, 6)
LABELS, UNIT, TOKENS = torch.arange(8), F.normalize(torch.randn(5, 6), dim=1), torch.ones(8, 3)
NET, CHUNKS = torch.nn.Linear(6, 3), Z.split(4)
FROZEN = torch.nn.Linear(6, 3).requires_grad_(False)


def perturb(e, neighbours):
    """Call VaSCL's virtual_augmentation with these and otherwise valid arguments."""
    return virtual_augmentation(e, torch.tanh, neighbours, Z, 1.0, 0.05)


def perturbed_loss(perturbed, neighbours):
    """Call VaSCL's neighbourhood_loss with these and otherwise valid arguments."""
    return neighbourhood_loss(Z, perturbed, torch.tanh, neighbours, 0.05)


def dclr_with(z1=Z, z2=Z, noise=Z, f1=Z, f2=Z, **options):
    return dclr_loss(z1, z2, noise, f1, f2, 0.9, **options)


@pytest.mark.parametrize("call, message", [
    (lambda: simcse_loss(Z, Z[:4]), r"z2: 4 rows, expected at least 8 \+ offset 0: one positive for each"),
    (lambda: simcse_loss(Z, Z, offset=1), r"z2: 8 rows, expected at least 8 \+ offset 1"),
    (lambda: simcse_loss(Z, Z, offset=-1), "offset: -1, expected this rank's first row among the 8 of z2"),
    (lambda: simcse_loss(Z, WIDE), r"z2: found \(8, 7\), expected \(M, 6\)"),
    (lambda: simcse_loss(Z, Z, Z[:4]), r"z3: found \(4, 6\), expected \(8, 6\)"),
    (lambda: simcse_loss(Z, Z, Z[0]), r"z3: found \(6,\), expected \(8, 6\)"),
    (lambda: simcse_loss(Z, Z, HARD[:, :, :5]), r"z3: found \(8, 3, 5\), expected \(8, n, 6\)"),
    (lambda: simcse_loss(Z, Z, HARD, ids=HARD[:, :, 0].long()), r"ids: found \(8, 3\), expected \(8, 4\)"),
    (lambda: simcse_loss(Z, Z, ids=LABELS), r"ids: found \(8,\), expected \(8, 1\)"),
    (lambda: simcse_loss(Z[:0], Z), r"z1: found \(0, 6\), expected \(N, D\), not empty"),
    (lambda: simclr_loss(Z, Z[:4]), "z2: 4 rows, expected 8 like z1"),
    (lambda: simclr_loss(Z, Z, gathered=(Z, Z), offset=2), "gathered: z1: 8 rows, expected .* offset 2"),
    (lambda: simclr_loss(Z, Z, gathered=(Z, WIDE)), r"gathered: z2: found \(8, 7\), expected \(K, 6\)"),
    (lambda: sup_con_loss(Z), r"features: found \(8, 6\), expected \(N, V, D\)"),
    (lambda: sup_con_loss(HARD, LABELS[:4]), r"labels: found \(4,\), expected \(8,\)"),
    (lambda: moco_loss(Z, Z[:4], UNIT), r"k: found \(4, 6\), expected \(8, 6\)"),
    (lambda: moco_loss(Z, Z, UNIT[:, :4]), r"queue: found \(5, 4\), expected \(K, 6\)"),
    (lambda: moco_loss(Z, Z, 2 * UNIT), "queue: rows of norm 2 to 2, expected unit rows"),
    (lambda: moco_loss(Z, Z, UNIT * torch.nan), "queue: rows of norm nan to nan, expected unit rows"),
    (lambda: enqueue(UNIT, 0, WIDE[:2]), r"keys: found \(2, 7\), expected \(n, 6\)"),
    (lambda: selfguided_loss(Z, WIDE), r"h: found \(8, 7\), expected \(8, 6\)"),
    (lambda: selfguided_loss(HARD, HARD), r"c: found \(8, 3, 6\), expected \(N, D\)"),
    (lambda: selfguided_loss(Z, HARD, gathered=(Z[:4], HARD[:4])), "gathered_c: 4 rows, expected at least 8"),
    (lambda: selfguided_loss(Z, HARD, gathered=(Z, HARD[:, :2])), r"gathered_h: found \(8, 2, 6\), expected"),
    (lambda: contrastive_loss(Z, Z, WIDE), r"antonym: found \(8, 7\), expected \(8, 6\)"),
    (lambda: replaced_token_loss(Z, LABELS), r"logits: found \(8, 6\), expected \(8,\)"),
    (lambda: total_loss([Z.sum()], Z[0]), "log_variances: found 6, expected 1, one per loss"),
    (lambda: tacl_loss(HARD, HARD[:, :2], TOKENS), r"teacher: found \(8, 2, 6\), expected \(8, 3, 6\)"),
    (lambda: tacl_loss(Z, Z, TOKENS[:, 0]), r"masked: found \(8,\), expected \(B, L\)"),
    (lambda: ease_loss(Z, Z[:4]), r"entity: 4 rows, expected at least 8 \+ offset 0"),
    (lambda: ease_loss(Z, Z, HARD[:4]), r"hard: found \(4, 3, 6\), expected \(8, m, 6\)"),
    (lambda: ease_loss(Z, Z, HARD, entity_ids=LABELS, hard_ids=LABELS), r"hard_ids: found \(8,\), expected"),
    (lambda: nearest_neighbours(HARD, 2), r"e: found \(8, 3, 6\), expected \(N, D\)"),
    (lambda: nearest_neighbours(Z[:1], 2), "e: 1 row, expected at least 2"),
    (lambda: perturb(Z, LABELS), r"neighbours: found \(8,\), expected \(8, k\)"),
    (lambda: perturbed_loss(Z[:4], LABELS[:, None]), r"perturbed: found \(4, 6\), expected \(8, 6\)"),
    (lambda: perturbed_loss(Z, LABELS[:4, None]), r"neighbours: found \(4, 1\), expected \(8, k\)"),
    (lambda: noise_negatives(Z, Z[:4], Z), r"z2: found \(4, 6\), expected \(8, 6\)"),
    (lambda: noise_negatives(Z, Z, WIDE), r"noise: found \(8, 7\), expected \(k, 6\)"),
    (lambda: instance_weights(Z, WIDE, 0.9), r"f2: found \(8, 7\), expected \(M, 6\)"),
    (lambda: instance_weights(Z, Z, 0.9, offset=1), r"f2: 8 rows, expected at least 8 \+ offset 1"),
    (lambda: dclr_with(z2=Z[:4], f2=Z[:4]), r"z2: 4 rows, expected at least 8 \+ offset 0"),
    (lambda: dclr_with(noise=WIDE, form="code"), r"noise: found \(8, 7\), expected \(k, 6\)"),
    (lambda: dclr_with(f2=WIDE), r"f2: found \(8, 7\), expected \(8, 6\)"),
    (lambda: task_loss(Z, LABELS[:4]), r"labels: found \(4,\), expected \(8,\)"),
    (lambda: task_loss(Z, LABELS / 8), r"logits: found \(8, 6\), expected \(N, 1\)"),
    (lambda: task_loss(Z[:, :1], Z[:, :1]), r"labels: found \(8, 1\), expected \(8,\)"),
    (lambda: rdrop_loss(Z, Z[:4], LABELS, 1.0), r"logits2: found \(4, 6\), expected \(8, 6\)"),
    (lambda: rdrop_loss(Z, Z, LABELS % 6, 1.0, "old"), r"form: 'old', expected"),
    (lambda: supcon_loss(Z, LABELS), r"z: found \(8, 6\), expected \(N, V, D\)"),
    (lambda: ood_contrastive_loss(Z, WIDE, LABELS), r"z_adv: found \(8, 7\), expected \(8, 6\)"),
    (lambda: ood_contrastive_loss(Z, Z, LABELS / 8), r"labels: found"),
    (lambda: ood_contrastive_loss(Z, Z, LABELS, 0.0), r"temperature: 0\.0, expected"),
    (lambda: adversarial_noise(HARD, TOKENS.long()[:4], 1.0), r"mask: found \(4, 3\), expected \(8, 3\)"),
    (lambda: gather_rows(Z, 9), r"rows: found 9, of which this process \(1 of 1\) has 9, but x has 8; "),
    (lambda: gather_rows(Z.sum(), 1), "x: found a tensor without dimensions, expected"),
    (lambda: choose_impl("auto", None), "x: found NoneType, expected a tensor"),
    (lambda: kernels.clip_loss(Z, None), r"text: found NoneType, expected a tensor"),
    (lambda: kernels.queue_loss(Z, None, Z), r"k: found NoneType, expected a tensor"),
    (lambda: simclr_loss(Z, Z, offset=3), "offset: 3, expected 0 if gathered is None"),
    (lambda: selfguided_loss(Z, HARD, offset=3), r"gathered_c: 8 rows, expected at least 8 \+ offset 3"),
    (lambda: task_loss(Z, LABELS), "labels: found 6, expected 0 to 5, or -100"),
    (lambda: replaced_token_loss(HARD[:, :, :3], LABELS[:, None].repeat(1, 3), "code"), "labels: found 3"),
    (lambda: perturb(Z, LABELS[:, None] - 1), "neighbours: found -1, expected 0 to 7"),
    (lambda: perturbed_loss(Z, LABELS[:, None] + 1), "neighbours: found 8, expected 0 to 7"),
    (lambda: embed_in_chunks(lambda x: x[:, : len(x)], Z.split([5, 3]), NET),
     r"embed: found rows \[\(3,\), \(5,\)\]"),
    (lambda: own_rows(8, 2, 2), "rank, world: found 2 and 2, expected 0 ≤ rank < world, or neither"),
    (lambda: embed_in_chunks(NET, Z, None), "chunks: found Tensor, expected a list of what embed takes"),
    (lambda: embed_in_chunks(NET, CHUNKS, FROZEN), "module: no parameter requires a gradient"),
    (lambda: embed_in_chunks(NET, list(Z), NET), r"embed: found a tensor \(3,\) for a chunk, expected"),
    (lambda: embed_in_chunks(len, CHUNKS, NET), "embed: found int for a chunk, expected a tensor")])
def test_bad_shapes_and_values_name_the_argument(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_a_queue_is_checked_twice(monkeypatch):
    """Unit rows are checked at first use, and once after an enqueue: its keys may be unnormalised."""
    checked, aminmax = [], torch.Tensor.aminmax
    monkeypatch.setattr(torch.Tensor, "aminmax", lambda x: checked.append(x) or aminmax(x))
    queue, raw = (F.normalize(torch.randn(12, 6), dim=1) for _ in range(2))
    for step in range(4):
        moco_loss(Z, Z, queue)                                 # two calls, as for two views
        moco_loss(Z, Z, queue)
        enqueue(queue, 4 * step % 12, F.normalize(Z[:4], dim=1))
    assert len(checked) == 2
    moco_loss(Z, Z, raw)
    enqueue(raw, 0, Z)
    with pytest.raises(ValueError, match="queue: rows of norm .* expected unit rows"):
        moco_loss(Z, Z, raw)


def test_mixed_dtypes_are_accepted():
    """A queue may have autocast's dtype. check_rows allows size 0 for lower-case letters, as n in "n D"."""
    labels = LABELS.int(), "N", int
    check_rows(z1=(Z, "N D"), z2=(None, "M n D", None), z3=(Z[:0].half(), "n D"), labels=labels)
    with torch.autocast("cpu", torch.float16):
        assert moco_loss(Z, Z, UNIT.half()).isfinite()


@pytest.mark.parametrize("dtype, ids", [(torch.uint8, [0, 255, 3]), (torch.int8, [-128, 127, 3])])
def test_hard_negative_ids_do_not_wrap_around(dtype, ids):
    """EASE gives hard negatives the id min(ids) − 1, which would wrap around in a small dtype."""
    def loss(ids):
        return ease_loss(Z[:3], Z[3:6], HARD[:3], 1.0, entity_ids=ids)

    ids = torch.tensor(ids)
    assert loss(ids.to(dtype)) == loss(ids)


def test_labels_of_small_dtypes_do_not_wrap_around():
    """The labels' dtype cannot hold the number of classes or ignore_index; both are compared correctly."""
    wide, labels = torch.randn(8, 300), torch.arange(8) * 15
    assert task_loss(wide, labels.to(torch.int8)) == task_loss(wide, labels)
    logits, labels = wide[0, :5], torch.tensor([0, 156, 156, 0, 1])
    assert replaced_token_loss(logits, labels.to(torch.uint8)) == replaced_token_loss(logits, labels)
