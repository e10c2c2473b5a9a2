"""Every public loss refuses what does not fit in one line that names the argument; a queue has unit rows."""
import pytest
import torch
import torch.nn.functional as F

from childtuning import rdrop_loss, task_loss
from cline import contrastive_loss, replaced_token_loss, total_loss
from dclr import dclr_loss, instance_weights, noise_negatives
from ease import ease_loss
from kernels import check_rows, embed_in_chunks, gather_rows, own_rows
from moco import enqueue, moco_loss
from selfguided import selfguided_loss
from simclr import simclr_loss, sup_con_loss
from simcse import simcse_loss
from tacl import tacl_loss
from vascl import nearest_neighbours, neighbourhood_loss, virtual_augmentation

Z, WIDE, HARD = torch.randn(8, 6), torch.randn(8, 7), torch.randn(8, 3, 6)
LABELS, UNIT, TOKENS = torch.arange(8), F.normalize(torch.randn(5, 6), dim=1), torch.ones(8, 3)
augment = lambda e, near: virtual_augmentation(e, torch.tanh, near, Z, 1.0, 0.05)
NET, CUT = torch.nn.Linear(6, 3), Z.split(4)
AT_REST = torch.nn.Linear(6, 3).requires_grad_(False)
neighbourhood = lambda perturbed, near: neighbourhood_loss(Z, perturbed, torch.tanh, near, 0.05)
dclr = lambda z1=Z, z2=Z, noise=Z, f1=Z, f2=Z, **how: dclr_loss(z1, z2, noise, f1, f2, 0.9, **how)


@pytest.mark.parametrize("call, wanted", [
    (lambda: simcse_loss(Z, Z[:4]), r"z2: 4 rows, wanted at least 8 \+ offset 0: one positive for each row"),
    (lambda: simcse_loss(Z, Z, offset=1), r"z2: 8 rows, wanted at least 8 \+ offset 1"),
    (lambda: simcse_loss(Z, Z, offset=-1), "offset -1"),
    (lambda: simcse_loss(Z, Z, offset=0.5), "offset: 0.5, wanted an integer"),
    (lambda: simcse_loss(Z, WIDE), r"z2: found \(8, 7\), wanted \(M, 6\)"),
    (lambda: simcse_loss(Z, Z, Z[:4]), r"z3: found \(4, 6\), wanted \(8, 6\)"),
    (lambda: simcse_loss(Z, Z, Z[0]), r"z3: found \(6,\), wanted \(8, 6\)"),
    (lambda: simcse_loss(Z, Z, HARD[:, :, :5]), r"z3: found \(8, 3, 5\), wanted \(8, n, 6\)"),
    (lambda: simcse_loss(Z, Z, HARD, ids=HARD[:, :, 0].long()), r"ids: found \(8, 3\), wanted \(8, 4\)"),
    (lambda: simcse_loss(Z, Z, ids=LABELS), r"ids: found \(8,\), wanted \(8, 1\)"),
    (lambda: simcse_loss(Z, Z, ids=Z[:, :1]), "ids: found torch.float32, wanted integers"),
    (lambda: simcse_loss(Z, Z, ids=LABELS[:, None].to("meta")), "ids: on meta, wanted cpu as the others"),
    (lambda: simcse_loss(Z.long(), Z), "z1: found torch.int64, wanted floating point"),
    (lambda: simcse_loss(Z.tolist(), Z), r"z1: found list, wanted a tensor \(N, D\)"),
    (lambda: simcse_loss(Z[:0], Z), r"z1: found \(0, 6\), wanted \(N, D\), none 0"),
    (lambda: simclr_loss(Z, Z[:4]), r"z2: found \(4, 6\), wanted \(8, 6\)"),
    (lambda: simclr_loss(Z, Z, gathered=(Z, Z), offset=2), r"gathered_z1: 8 rows, wanted .* offset 2"),
    (lambda: simclr_loss(Z, Z, gathered=(Z, WIDE)), r"gathered_z2: found \(8, 7\), wanted \(8, 6\)"),
    (lambda: sup_con_loss(Z), r"features: found \(8, 6\), wanted \(N, V, D\)"),
    (lambda: sup_con_loss(HARD, LABELS[:4]), r"labels: found \(4,\), wanted \(8,\)"),
    (lambda: sup_con_loss(HARD, LABELS / 2), "labels: found torch.float32, wanted integers"),
    (lambda: moco_loss(Z, Z[:4], UNIT), r"k: found \(4, 6\), wanted \(8, 6\)"),
    (lambda: moco_loss(Z, Z, UNIT[:, :4]), r"queue: found \(5, 4\), wanted \(K, 6\)"),
    (lambda: moco_loss(Z, Z, 2 * UNIT), "queue: rows of length 2 to 2, wanted unit rows"),
    (lambda: moco_loss(Z, Z, UNIT * torch.nan), "queue: rows of length nan to nan, wanted unit rows"),
    (lambda: enqueue(UNIT, 0, WIDE[:2]), r"keys: found \(2, 7\), wanted \(n, 6\)"),
    (lambda: selfguided_loss(Z, WIDE), r"h: found \(8, 7\), wanted \(8, 6\)"),
    (lambda: selfguided_loss(HARD, HARD), r"c: found \(8, 3, 6\), wanted \(N, D\)"),
    (lambda: selfguided_loss(Z, HARD, gathered=(Z[:4], HARD[:4])), "gathered_c: 4 rows, wanted at least 8"),
    (lambda: selfguided_loss(Z, HARD, gathered=(Z, HARD[:, :2])), r"gathered_h: found \(8, 2, 6\), wanted"),
    (lambda: contrastive_loss(Z, Z, WIDE), "original, synonym, antonym: found .* thrice"),
    (lambda: replaced_token_loss(Z, LABELS), r"logits: found \(8, 6\), wanted \(8,\) for these labels"),
    (lambda: total_loss([Z.sum()], Z[0]), "zip"),
    (lambda: tacl_loss(HARD, HARD[:, :2], TOKENS), r"(student|teacher): \(8, ., 6\), wanted"),
    (lambda: tacl_loss(Z, Z, TOKENS[:, 0]), r"masked: \(8,\), wanted \(B, L\)"),
    (lambda: ease_loss(Z, Z[:4]), r"entity: 4 rows, wanted at least 8 \+ offset 0"),
    (lambda: ease_loss(Z, Z, HARD[:4]), r"hard: found \(4, 3, 6\), wanted \(8, m, 6\)"),
    (lambda: ease_loss(Z, Z, HARD, entity_ids=LABELS, hard_ids=LABELS), r"hard_ids: found \(8,\), wanted"),
    (lambda: ease_loss(Z, Z, entity_ids=Z[:, 0]), "entity_ids: found torch.float32, wanted integers"),
    (lambda: nearest_neighbours(HARD, 2), r"e: found \(8, 3, 6\), wanted \(N, D\)"),
    (lambda: nearest_neighbours(Z[:1], 2), "e: 1 rows, k: 2, wanted at least 2 and 1"),
    (lambda: augment(Z, LABELS), r"neighbours: found \(8,\), wanted \(8, k\)"),
    (lambda: augment(Z, Z), "neighbours: found torch.float32, wanted integers"),
    (lambda: neighbourhood(Z[:4], LABELS[:, None]), r"perturbed: found \(4, 6\), wanted \(8, 6\)"),
    (lambda: neighbourhood(Z, LABELS[:4, None]), r"neighbours: found \(4, 1\), wanted \(8, k\)"),
    (lambda: noise_negatives(Z, Z[:4], Z), r"z2: found \(4, 6\), wanted \(8, 6\)"),
    (lambda: noise_negatives(Z, Z, WIDE), r"noise: found \(8, 7\), wanted \(k, 6\)"),
    (lambda: instance_weights(Z, WIDE, 0.9), r"f2: found \(8, 7\), wanted \(M, 6\)"),
    (lambda: instance_weights(Z, Z, 0.9, offset=1), r"f2: 8 rows, wanted at least 8 \+ offset 1"),
    (lambda: dclr(z2=Z[:4], f2=Z[:4]), r"z2: 4 rows, wanted at least 8 \+ offset 0"),
    (lambda: dclr(noise=WIDE, form="code"), r"noise: found \(8, 7\), wanted \(k, 6\)"),
    (lambda: dclr(f2=WIDE), r"f2: found \(8, 7\), wanted \(8, 6\)"),
    (lambda: task_loss(Z, LABELS[:4]), r"labels: found \(4,\), wanted \(8,\)"),
    (lambda: task_loss(Z, LABELS / 8), r"logits: found \(8, 6\), wanted \(N, 1\)"),
    (lambda: task_loss(Z[:, :1], Z[:, :1]), r"labels: found \(8, 1\), wanted \(8,\)"),
    (lambda: rdrop_loss(Z, Z[:4], LABELS, 1.0), r"logits2: found \(4, 6\), wanted \(8, 6\)"),
    (lambda: rdrop_loss(Z, Z, LABELS, 1.0, "papr"), "form: 'papr', wanted paper or code"),
    (lambda: gather_rows(Z, 9), "rows: of 9 over 1 processes, 9 are this one's, x has 8; wanted"),
    (lambda: gather_rows(Z, 4), "rows: of 4 over 1 processes, 4 are this one's, x has 8"),
    (lambda: gather_rows(Z, -8), "rows: found -8, wanted the number of rows of the whole batch"),
    (lambda: gather_rows(Z, Z), "rows: found Tensor, wanted the number of rows"),
    (lambda: gather_rows([1, 2], 2), r"x: found list, wanted a tensor of this process's rows, \(n, ...\)"),
    (lambda: gather_rows(Z.sum(), 1), "x: found a tensor without dimensions, wanted"),
    (lambda: own_rows(8.0), "rows: found 8.0, wanted the number of rows"),
    (lambda: own_rows(8, 2, 2), "rank, world: found 2 and 2, wanted 0 ≤ rank < world, or neither"),
    (lambda: own_rows(8, 1), "rank, world: found 1 and None"),
    (lambda: embed_in_chunks(NET, Z, NET), r"chunks: found one tensor \(8, 6\), .* tensor.split\(size\)"),
    (lambda: embed_in_chunks(NET, Z, None), "chunks: found one tensor"),
    (lambda: embed_in_chunks(NET, [], NET), "chunks: found none, wanted at least one"),
    (lambda: embed_in_chunks(NET, CUT, NET.weight), "module: found Parameter, wanted the torch.nn.Module"),
    (lambda: embed_in_chunks(NET, CUT, AT_REST), "module: no parameter requires a gradient"),
    (lambda: embed_in_chunks(NET, list(Z), NET), r"embed: found a tensor \(3,\) for a chunk, wanted"),
    (lambda: embed_in_chunks(NET, list(Z), None), r"embed: found a tensor \(3,\) for a chunk"),
    (lambda: embed_in_chunks(len, CUT, NET), "embed: found int for a chunk, wanted a tensor")])
def test_what_does_not_fit_is_named(call, wanted):
    with pytest.raises(ValueError, match=wanted) as error:
        call()
    assert "\n" not in str(error.value)


def test_a_queue_is_read_twice(monkeypatch):
    """As it is made, and after the first keys: raw keys are found out in the second step."""
    read, aminmax = [], torch.Tensor.aminmax
    monkeypatch.setattr(torch.Tensor, "aminmax", lambda x: read.append(x) or aminmax(x))
    queue, raw = (F.normalize(torch.randn(12, 6), dim=1) for _ in range(2))
    for step in range(4):
        moco_loss(Z, Z, queue), moco_loss(Z, Z, queue)         # as of two views
        enqueue(queue, 4 * step % 12, F.normalize(Z[:4], dim=1))
    assert len(read) == 2
    moco_loss(Z, Z, raw)
    enqueue(raw, 0, Z)
    with pytest.raises(ValueError, match="queue: rows of length .* wanted unit rows"):
        moco_loss(Z, Z, raw)


@pytest.mark.parametrize("dynamic", [False, True])
def test_checks_are_no_part_of_a_compiled_loss(dynamic):
    ids = LABELS[:, None].repeat(1, 4)
    losses = {"simcse": lambda z: simcse_loss(z, Z, HARD, ids=ids), "moco": lambda z: moco_loss(z, Z, UNIT),
              "ease": lambda z: ease_loss(z, Z, HARD)}
    for name, loss in losses.items():
        torch.compiler.reset()
        compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        torch.testing.assert_close(compiled(Z), loss(Z), msg=name)


def test_types_may_differ():
    """A queue in autocast's type; small letters may be 0, and None is not there."""
    check_rows(z1=(Z, "N D"), z2=(None, "M n D"), z3=(Z[:0].half(), "n D"), labels=(LABELS.int(), "N", int))
    with torch.autocast("cpu", torch.float16):
        assert moco_loss(Z, Z, UNIT.half()).isfinite()
