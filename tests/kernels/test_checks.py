"""Every public function rejects a bad argument with one line that names it; queues must have unit rows."""
import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import kernels
from childtuning import ood_contrastive_loss, rdrop_loss, supcon_loss, task_loss
from cline import contrastive_loss, replaced_token_loss, total_loss
from dclr import dclr_loss, instance_weights, noise_negatives
from ease import ease_loss
from kernels import check_rows, check_unit, choose_impl, embed_in_chunks, gather_rows, own_rows
from kernels.training.extras.adversarial import adversarial_noise
from moco import enqueue, moco_loss, update_bank
from selfguided import selfguided_loss
from simclr import distillation_loss, simclr_loss, sup_con_loss
from simcse import ranking_loss, simcse_loss
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
    (lambda: simclr_loss(Z, Z, gathered=(Z, WIDE)), "gathered: z2: 7 features per row, expected 6 like z2"),
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
    (lambda: gather_rows(Z, 9), r"rows: found 9, of which this process \(1 of 1\) has 9, but x has 8; "),
    (lambda: gather_rows(Z, 4), r"rows: found 4, of which this process \(1 of 1\) has 4, but x has 8"),
    (lambda: gather_rows(Z.sum(), 1), "x: found a tensor without dimensions, expected"),
    (lambda: choose_impl("auto", None), "x: found NoneType, expected a tensor"),
    (lambda: simclr_loss(Z, Z, offset=3), "offset: 3, expected 0 if gathered is None"),
    (lambda: selfguided_loss(Z, HARD, offset=3), r"gathered_c: 8 rows, expected at least 8 \+ offset 3"),
    (lambda: task_loss(Z, LABELS), "labels: found 6, expected 0 to 5, or -100"),
    (lambda: replaced_token_loss(HARD[:, :, :3], LABELS[:, None].repeat(1, 3), "code"), "labels: found 3"),
    (lambda: perturb(Z, LABELS[:, None] - 1), "neighbours: found -1, expected 0 to 7"),
    (lambda: perturbed_loss(Z, LABELS[:, None] + 1), "neighbours: found 8, expected 0 to 7"),
    (lambda: embed_in_chunks(lambda x: x[:, : len(x)], Z.split([5, 3]), NET), r"embed: found rows \(5,\)"),
    (lambda: own_rows(8, 2, 2), "rank, world: found 2 and 2, expected 0 ≤ rank < world, or neither"),
    (lambda: own_rows(8, 1), "rank, world: found 1 and None"),
    (lambda: embed_in_chunks(NET, Z, None), "chunks: found one tensor"),
    (lambda: embed_in_chunks(NET, CHUNKS, FROZEN), "module: no parameter requires a gradient"),
    (lambda: embed_in_chunks(NET, list(Z), NET), r"embed: found a tensor \(3,\) for a chunk, expected"),
    (lambda: embed_in_chunks(NET, list(Z), None), r"embed: found a tensor \(3,\) for a chunk"),
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


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_losses_skip_the_checks(dynamic):
    """Checks that read values would break the graph, so compiled losses skip them."""
    ids = LABELS[:, None].repeat(1, 4)
    losses = {"simcse": lambda z: simcse_loss(z, Z, HARD, ids=ids), "moco": lambda z: moco_loss(z, Z, UNIT),
              "ease": lambda z: ease_loss(z, Z, HARD)}
    for name, loss in losses.items():
        torch.compiler.reset()
        compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend="eager")
        torch.testing.assert_close(compiled(Z), loss(Z), msg=name)


def test_mixed_dtypes_are_accepted():
    """A queue may have autocast's dtype. check_rows allows size 0 for lower-case letters, as n in "n D"."""
    labels = LABELS.int(), "N", int
    check_rows(z1=(Z, "N D"), z2=(None, "M n D", None), z3=(Z[:0].half(), "n D"), labels=labels)
    with torch.autocast("cpu", torch.float16):
        assert moco_loss(Z, Z, UNIT.half()).isfinite()


# ── invalid values for every argument of every public function ──────────────────────────────────────────────

CLASSES, NEAR = torch.arange(8) % 2, torch.stack([LABELS.roll(1), LABELS.roll(2)], 1)
MASKED, IDS, Z8 = torch.ones(8, 3, dtype=torch.bool), torch.arange(32).view(8, 4), torch.randn(8, 6)
tau, tau_impl = dict(temperature=0.5), dict(temperature=0.5, impl="auto")
offset_normalize = dict(offset=0, normalize=False)
MASK_ARGUMENTS = dict(exclude="diagonal", within=(CLASSES, CLASSES), similar=(Z, Z, 9.0), impl="auto",
                      **offset_normalize)
PAPER_FORM, BY_ID = dict(form="paper"), dict(q=Z, k=Z, temperature=0.5, exclude=(LABELS, LABELS))
DIAGONAL_AND_ID = dict(q=Z, k=Z, exclude=("diagonal", LABELS, LABELS), offset=0)
DCLR = dict(z1=Z, z2=Z8, noise=Z, f1=Z, f2=Z, phi=0.9, temperature=0.5)
GOOD_CALLS = [
    (kernels.similarity_lse, dict(q=Z, k=Z8, **tau, **MASK_ARGUMENTS)), (kernels.similarity_lse, BY_ID),
    (kernels.similarity_lse, DIAGONAL_AND_ID),
    (kernels.similarity_topk, dict(q=Z, k=Z8, n=2, **MASK_ARGUMENTS)),
    (kernels.info_nce, dict(q=Z, k=Z8, symmetric=False, **offset_normalize, **tau_impl)),
    (kernels.clip_loss, dict(image=Z, text=Z8, normalize=False, **tau_impl)),
    (kernels.info_nce, dict(q=Z, k=Z8, symmetric=True, gathered=(Z, Z8), **offset_normalize, **tau_impl)),
    (kernels.clip_loss, dict(image=Z, text=Z8, gathered=(Z, Z8), **offset_normalize, **tau_impl)),
    (kernels.queue_loss, dict(q=Z, k=Z8, queue=UNIT, normalize=False, **tau_impl)),
    (kernels.sigmoid_loss, dict(q=Z, k=Z8, bias=-10.0, **offset_normalize, **tau_impl)),
    (kernels.nt_xent, dict(z1=Z, z2=Z8, normalize=False, **tau_impl)),
    (kernels.nt_xent, dict(z1=Z, z2=Z8, gathered=(Z, Z8), **offset_normalize, **tau_impl)),
    (kernels.sup_con_loss, dict(z=HARD, labels=CLASSES, base_temperature=0.07, normalize=False, **tau_impl)),
    (kernels.sup_con_loss, dict(z=HARD, labels=CLASSES, gathered=(HARD, CLASSES), **offset_normalize,
                                **tau_impl)),
    (kernels.linear_cross_entropy, dict(hidden=Z, weight=Z8, targets=LABELS, ignore_index=-100, **tau_impl)),
    (kernels.triplet_loss, dict(anchor=Z, positive=Z8, negative=Z, margin=1.0, mining="hard")),
    (kernels.margin_loss, dict(x1=Z, x2=Z8, same=CLASSES, margin=1.0)),
    (gather_rows, dict(x=Z, rows=8, group=None, dtype=torch.float16)),
    (own_rows, dict(rows=8, rank=0, world=1, group=None)),
    (check_unit, dict(name="x", x=UNIT)),
    (embed_in_chunks, dict(embed=NET, chunks=CHUNKS, module=NET)),
    (simclr_loss, dict(z1=Z, z2=Z8, gathered=(Z, Z8), **offset_normalize, **tau_impl)),
    (distillation_loss, dict(logits=Z, teacher_logits=Z8, **tau)),
    (sup_con_loss, dict(features=HARD, labels=CLASSES, base_temperature=0.07, **tau_impl)),
    (moco_loss, dict(q=Z, k=Z8, queue=UNIT, **tau_impl)),
    (enqueue, dict(queue=torch.zeros(5, 6), pointer=0, keys=UNIT[:2])),
    (update_bank, dict(bank=torch.zeros(9, 6), rows=LABELS[:2], q=UNIT[:2], momentum=0.5)),
    (simcse_loss, dict(z1=Z, z2=Z8, z3=HARD, hard_negative_weight=0.5, offset=0, ids=IDS, **tau_impl)),
    (ranking_loss, dict(scores=Z, reference=Z[:, 0], margin=0.01, **PAPER_FORM)),
    (selfguided_loss, dict(c=Z, h=HARD, objective="opt3", gathered=(Z, HARD), offset=0, **tau_impl)),
    (contrastive_loss, dict(original=Z, synonym=Z8, antonym=Z, **PAPER_FORM)),
    (replaced_token_loss, dict(logits=HARD[:, :, 0], labels=IDS[:, :3] % 2, form="paper")),
    (replaced_token_loss, dict(logits=HARD[:, :, :3], labels=IDS[:, :3] % 3, form="code")),
    (total_loss, dict(losses=Z[0], log_variances=[Z[0, 0]] * 6)),
    (tacl_loss, dict(student=HARD, teacher=HARD, masked=MASKED, attention_mask=MASKED, similarity="cosine",
                     **PAPER_FORM, **tau_impl)),
    (ease_loss, dict(z=Z, entity=Z8, hard=HARD, hard_logit=0.5, entity_ids=LABELS, hard_ids=IDS[:, 1:] + 9,
                     offset=0, **tau_impl)),
    (nearest_neighbours, dict(e=Z, k=2, impl="auto")),
    (virtual_augmentation, dict(e=Z, head=torch.tanh, neighbours=NEAR, noise=Z, radius=1.0, steps=1, **tau,
                                **PAPER_FORM)),
    (neighbourhood_loss, dict(e=Z, perturbed=Z8, head=torch.tanh, neighbours=NEAR, **tau, **PAPER_FORM)),
    (noise_negatives, dict(z1=Z, z2=Z8, noise=Z, steps=1, step_size=0.1, **PAPER_FORM, **tau_impl)),
    (instance_weights, dict(f1=Z, f2=Z8, phi=0.9, offset=0)),
    (dclr_loss, dict(**DCLR, form="paper", offset=0, impl="auto")), (dclr_loss, dict(**DCLR, form="code")),
    (task_loss, dict(logits=Z, labels=CLASSES)), (task_loss, dict(logits=Z[:, :1], labels=Z[:, 0])),
    (rdrop_loss, dict(logits1=Z, logits2=Z8, labels=CLASSES, alpha=1.0, **PAPER_FORM)),
    (supcon_loss, dict(z=HARD, labels=CLASSES, **tau)),
    (adversarial_noise, dict(gradient=HARD, mask=IDS[:, :3], size=0.1)),
    (ood_contrastive_loss, dict(z=Z, z_adv=Z8, labels=CLASSES, form="paper", **tau)),
    (ood_contrastive_loss, dict(z=Z, z_adv=Z8, labels=CLASSES, form="code", **tau))]
every_function = pytest.mark.parametrize("loss, good", GOOD_CALLS, ids=[f.__name__ for f, _ in GOOD_CALLS])

# invalid values for an argument that expects a number, a positive number, ...
NOT_REAL = {"none": None, "text": "0.5", "list": [0.5], "complex": 1j, "True": True, "array": np.ones((2, 2))}
BAD_NUMBERS = NOT_REAL | {
    "nan": math.nan, "1e300": 1e300, "integer": 10**400, "digits": 10**5000, "vector": torch.ones(1),
    "matrix": torch.ones(2, 2), "integers": torch.tensor(1), "bool": torch.tensor(True),
    "complex0": torch.tensor(1j), "sparse": torch.tensor(0.5).to_sparse(),
    "meta": torch.ones((), device="meta"), "float8": torch.tensor(0.5).to(torch.float8_e5m2)}
BAD_POSITIVE = BAD_NUMBERS | {
    "0": 0, "-1": -1.0, "inf": math.inf, "-inf": -math.inf, "1e-300": 1e-300, "-0.0": -0.0}
BAD_INTEGERS = NOT_REAL | {"1.5": 1.5, "1.0": 1.0, "nan": math.nan, "tensor": torch.tensor(1), "matrix": Z}
BAD_COUNTS = BAD_INTEGERS | {"-1": -1, "-1e30": -10**30}
BAD_STRINGS = {
    "none": None, "other": "papr", "lines": "a\nb", "long": "x" * 3000, "bytes": b"paper", "number": 1,
    "list": ["paper"], "matrix": Z, "array": np.ones((2, 2)), "True": True}
BAD_FLAGS = {
    "none": None, "text": "no", "2": 2, "1.0": 1.0, "list": [], "matrix": Z, "bool": torch.tensor(True),
    "array": np.ones(3)}
BAD_TUPLES = {"none": None, "number": 3, "text": "xy", "matrix": Z, "set": {1, 2}, "one": (Z,)}
BAD_VALUES = {
    "temperature base_temperature": BAD_POSITIVE, "margin": BAD_NUMBERS | {"inf": math.inf},
    "bias alpha step_size size": BAD_NUMBERS | {"inf": math.inf, "-inf": -math.inf},
    "phi hard_logit hard_negative_weight": BAD_NUMBERS | {"digits": 10**5000},
    "radius": BAD_NUMBERS | {"-1": -1.0, "inf": math.inf}, "n k": BAD_COUNTS | {"0": 0},
    "rows rank world steps pointer": BAD_COUNTS,
    "offset": BAD_INTEGERS | {"1e30": 10**30, "-1e30": -10**30, "2^62": 2**62, "digits": 10**5000},
    "ignore_index": BAD_INTEGERS | {"1e30": 10**30}, "symmetric normalize": BAD_FLAGS,
    "head embed": BAD_TUPLES, "name": {}, "impl form objective similarity mining": BAD_STRINGS,
    "group": {"text": "x", "number": 3, "list": [], "matrix": Z},
    "dtype": BAD_STRINGS | {"float64": torch.float64, "integers": torch.int32},
    "momentum": BAD_NUMBERS | {"2": 2.0, "-1": -1.0},
    "module": {"text": "x", "list": [NET], "matrix": Z},
    "chunks": {"none": None, "number": 3, "text": "xy", "matrix": Z, "array": np.ones((2, 2)), "empty": []},
    "losses log_variances": {"none": None, "number": 3, "text": "xyxyxy", "texts": ["x"] * 6, "empty": [],
                             "rows": [Z[0]] * 6, "sparse": Z[0].to_sparse(), "matrix": Z,
                             "complex": [torch.tensor(1j)] * 6}}
BAD_BY_NAME = {name: values for names, values in BAD_VALUES.items() for name in names.split()}


def nested(x, layout=torch.strided):
    return torch.nested.nested_tensor(list(x.float().reshape(len(x), -1)), layout=layout)


def invalid_tensors(x):
    """Yield (kind, value): values that are never accepted in place of the tensor x."""
    wide, is_float = x[:, None] if x.dim() == 1 else x, x.is_floating_point()
    yield from {"coo": x.to_sparse(), "csr": wide.to_sparse_csr(), "csc": wide.to_sparse_csc(),
                "nested": nested(x), "jagged": nested(x, torch.jagged), "meta": x.to("meta"),
                "complex": x.to(torch.complex64), "float8": x.to(torch.float8_e4m3fn), "bool": x > 0,
                "u16": x.to(torch.uint16), "u64": x.to(torch.uint64), "class": torch.Tensor, "text": "xy",
                "list": x.tolist(), "array": x.numpy(), "number": 3, "none": None}.items()
    yield ("integers", x.long()) if is_float else ("floats", x / 2)
    if torch.backends.mkldnn.is_available():
        yield "mkldnn", x.float().to_mkldnn()
    if hasattr(torch, "quantize_per_tensor"):                  # deprecated
        yield "quantised", torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint32)


def mismatched_tensors(x):
    """Yield (kind, tensor): variants of x whose shape or dtype does not fit the other arguments."""
    yield from {"scalar": x.sum(), "row": x[0], "stack": x[None], "short": x[:-1], "empty": x[:0],
                "wide": torch.cat([x, x], -1), "half": x.half(), "double": x.double(),
                "byte": x.to(torch.uint8)}.items()


# the kinds of "invalid" values that an argument does accept: in all functions, or by (function, argument)
OPTIONAL = """k exclude within similar gathered labels negative base_temperature dtype module z3 ids hard
              entity_ids hard_ids""".split()
ACCEPTED = {name: ["none"] for name in OPTIONAL} | {
    "attention_mask": ["none", "bool", "floats"], "masked": ["bool", "floats"], "same": ["bool"],
    "x": "complex float8 bool u16 u64 integers".split(), (check_unit, "x"): [], (nearest_neighbours, "k"): [],
    (task_loss, "labels"): ["floats", "integers"],
    (rdrop_loss, "labels"): ["floats"]}
ACCEPTED |= {(loss, "k"): [] for loss in (
    kernels.info_nce, kernels.queue_loss, kernels.sigmoid_loss, moco_loss)}
ACCEPTED |= {(loss, "labels"): [] for loss in (ood_contrastive_loss, supcon_loss, replaced_token_loss)}


def bad_values(loss, argument, good):
    """Return [(kind, value)]: invalid values for the argument; in a tuple, one element is bad at a time."""
    if isinstance(good, torch.Tensor) and argument != "losses":
        found = invalid_tensors(good)
    elif isinstance(good, tuple) and argument != "chunks":
        found = list(BAD_TUPLES.items())
        for i, x in enumerate(good):
            bad_elements = invalid_tensors(x) if isinstance(x, torch.Tensor) else BAD_NUMBERS.items()
            found += [(f"{what} at {i}", (*good[:i], bad, *good[i + 1:])) for what, bad in bad_elements]
    elif argument == "exclude":
        found = (BAD_STRINGS | BAD_TUPLES).items()
    else:
        found = BAD_BY_NAME[argument].items()
    accepted = ACCEPTED.get((loss, argument), ACCEPTED.get(argument, []))
    return [(what, bad) for what, bad in found if what not in accepted]


def assert_one_line_error(where, error, names):
    """Check that the error is a ValueError whose message is one line and begins with one of the names."""
    message = str(error)
    assert type(error) is ValueError, f"{where}: {type(error).__name__}: {message}"
    assert re.match(rf"[^:]*\b({'|'.join(names)})(_\w+)?\b", message), f"{where}: {message}"
    assert "\n" not in message and len(message) < 250 and "expected" in message, f"{where}: {message}"


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")   # from unusual tensors
@every_function
def test_invalid_values_are_rejected(loss, good):
    loss(**good)
    for argument, value in good.items():
        for what, bad in bad_values(loss, argument, value):
            where = f"{loss.__name__}({argument}={what})"
            try:
                loss(**good | {argument: bad})
            except Exception as error:
                assert_one_line_error(where, error, [argument])
            else:
                pytest.fail(f"{where} is accepted")


@every_function
def test_mismatched_tensors_work_or_are_rejected(loss, good):
    """A mismatched tensor works where that makes sense; else the one-line error may name any argument."""
    for argument, value in good.items():
        if isinstance(value, torch.Tensor) and value.dim():
            for what, bad in mismatched_tensors(value):
                try:
                    loss(**good | {argument: bad})
                except Exception as error:
                    assert_one_line_error(f"{loss.__name__}({argument}={what})", error, [*good, "logits"])


@every_function
def test_meta_tensors_are_rejected(loss, good):
    """They are rejected even if all tensors are on the meta device."""
    def to_meta(x):
        return x.to("meta") if isinstance(x, torch.Tensor) else x

    on_meta = {name: tuple(map(to_meta, value)) if isinstance(value, tuple) else to_meta(value)
               for name, value in good.items()}
    if any(isinstance(x, torch.Tensor) for x in good.values()):
        message = rf"^({'|'.join(good)}): found a meta tensor, expected one with data"
        with pytest.raises(ValueError, match=message):
            loss(**on_meta)


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("impl", ["eager", "blockwise"])
def test_tensor_subclasses_and_fake_tensors_are_accepted(impl):
    """A fake tensor is on the CPU, but has no data. So losses must not read values or τ."""
    rows = Z.as_subclass(Subclass), Z8.as_subclass(Subclass)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    fake_rows = [fake.from_tensor(x) for x in (Z, Z8)]
    fake_temperature = fake.from_tensor(torch.tensor(0.5))
    losses = kernels.info_nce, kernels.nt_xent, kernels.sigmoid_loss, simclr_loss, simcse_loss, plain_dclr
    for loss in losses:
        expected = loss(Z, Z8, temperature=0.5, impl=impl)
        torch.testing.assert_close(torch.Tensor(loss(*rows, temperature=0.5, impl=impl)), expected)
        for temperature in (0.5, fake_temperature):
            assert loss(*fake_rows, temperature=temperature, impl=impl).shape == ()
    assert distillation_loss(*fake_rows, fake_temperature).shape == ()
    assert torch.func.vmap(lambda x, y: task_loss(x, y))(HARD, torch.arange(3).repeat(8, 1)).shape == (8,)


def plain_dclr(z1, z2, temperature, impl):
    """Call dclr_loss with z1 and z2 also as the noise and the guide embeddings."""
    return dclr_loss(z1, z2, z1, z2, z1, 0.9, temperature, impl=impl)


@pytest.mark.parametrize("temperature", [1e-38, 1e38, 1, np.float64(0.5)])
def test_extreme_temperatures_are_accepted(temperature):
    for impl in ("eager", "blockwise"):
        assert kernels.info_nce(1e-3 * Z, 1e-3 * Z8, temperature, impl=impl).isfinite()


@pytest.mark.parametrize("dtype, ids", [(torch.uint8, [0, 255, 3]), (torch.int8, [-128, 127, 3])])
def test_hard_negative_ids_do_not_wrap_around(dtype, ids):
    """EASE gives hard negatives the id min(ids) − 1, which would wrap around in a small dtype."""
    def loss(ids):
        return ease_loss(Z[:3], Z8[:3], HARD[:3], 1.0, entity_ids=ids)

    ids = torch.tensor(ids)
    assert loss(ids.to(dtype)) == loss(ids)


def test_labels_of_small_dtypes_do_not_wrap_around():
    """The labels' dtype cannot hold the number of classes or ignore_index; both are compared correctly."""
    wide, labels = torch.randn(8, 300), torch.arange(8) * 15
    assert task_loss(wide, labels.to(torch.int8)) == task_loss(wide, labels)
    logits, labels = wide[0, :5], torch.tensor([0, 156, 156, 0, 1])
    assert replaced_token_loss(logits, labels.to(torch.uint8)) == replaced_token_loss(logits, labels)
