"""Run the blocks of docs/drop-ins.md, as they are printed, and compare them with the losses they replace.

Without sentence-transformers, open_clip_torch, lightly or pytorch-metric-learning, its tests are skipped.
"""
import importlib.util
import os
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from running import NLI, ROOT, fork_context, free_port, small_bert

PAGE = (ROOT / "docs/drop-ins.md").read_text("utf-8")
TITLES = "ranking", "cached", "clip", "siglip", "lightly", "bank", "sup con", "metric"
BLOCKS = dict(zip(TITLES, re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S), strict=True))
CLASSES = {title: re.search(r"^class (\w+)", code, re.M)[1] for title, code in BLOCKS.items()}
PACKAGES = {"clip": "open_clip.loss", "siglip": "open_clip.loss", "lightly": "lightly.loss",
            "bank": "lightly.loss", "sup con": "pytorch_metric_learning.losses",
            "metric": "pytorch_metric_learning.losses"}
COLUMNS = "anchor", "positive", "negative"


def ours(title, *args, **settings):
    """Return the loss of a block."""
    names = {}
    exec(BLOCKS["ranking"] + BLOCKS["cached"] if title == "cached" else BLOCKS[title], names)
    return names[CLASSES[title]](*args, **settings)


def peers(title, *args, **settings):
    """Return the loss that the block replaces; skip the test if its package is missing."""
    if title in PACKAGES:
        name = {"bank": "NTXentLoss", "lightly": "NTXentLoss"}.get(title, CLASSES[title])
        return getattr(pytest.importorskip(PACKAGES[title]), name)(*args, **settings)
    losses = pytest.importorskip("sentence_transformers").sentence_transformer.losses
    return getattr(losses, f"{CLASSES[title].removesuffix('RankingLoss')}MultipleNegativesRankingLoss")(
        *args, **settings)


def results(loss, *inputs):
    """Return (loss, gradients of the float tensors)."""
    inputs = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    value = loss(*inputs)
    return value.detach(), torch.autograd.grad(value, [x for x in inputs if x.requires_grad])


def assert_equal(found, expected):
    """Compare two results: relative errors, in float32 that of all gradients together."""
    (loss, gradients), (wanted_loss, wanted) = found, expected
    tolerance = 1e-12 if loss.dtype == torch.float64 else 1e-6
    assert abs(loss - wanted_loss) <= tolerance * abs(wanted_loss)
    if loss.dtype == torch.float32:
        gradients, wanted = ([torch.cat([x.flatten() for x in xs])] for xs in (gradients, wanted))
    for gradient, want in zip(gradients, wanted, strict=True):
        assert (gradient - want).norm() <= tolerance * want.norm()


def rows(n, dtype=torch.float64, seed=0):
    """Return two unit views (n, 16) of n samples."""
    x = torch.randn(2, n, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x[1] += 0.2 * x[0]
    return F.normalize(x, dim=2).to(dtype)


def test_blocks_are_short():
    for title, code in BLOCKS.items():
        assert code.count("\n") <= 20, title


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("n", [1, 2, 7, 300])
@pytest.mark.parametrize("title", ["clip", "siglip", "lightly"])
def test_pairs(title, n, dtype):
    x, y = rows(n, dtype)
    scale, bias = torch.tensor([14.3, -5.0], dtype=dtype)
    inputs = {"clip": (x, y, scale), "siglip": (x, y, scale, bias), "lightly": (3 * x, y)}[title]
    settings = dict(temperature=0.1) if title == "lightly" else {}
    assert_equal(results(ours(title, **settings), *inputs), results(peers(title, **settings), *inputs))


@pytest.mark.parametrize("title", ["clip", "siglip"])
def test_arguments_of_the_training_loop_of_open_clip(title):
    """It calls loss(**model_out, output_dict=True); some models have a bias although the loss is ClipLoss."""
    x, y = rows(5)
    found = []
    for loss in (ours(title), peers(title)):
        scale, bias = torch.tensor([[9.0], [-3.0]], dtype=torch.float64, requires_grad=True)[:, 0]
        output = loss(image_features=x, text_features=y, logit_scale=scale, logit_bias=bias,
                      output_dict=True)
        found.append((output["contrastive_loss"].detach(), torch.autograd.grad(sum(output.values()), [bias])))
    assert_equal(*found) if title == "siglip" else assert_equal((found[0][0], ()), (found[1][0], ()))
    assert title == "siglip" or abs(found[0][1][0]) < 1e-15 > abs(found[1][1][0])


@pytest.mark.parametrize("size", [5, 7, 20])
def test_memory_bank(size):
    """The bank has fewer or more rows than the batches of 7, 3 and 7; an evaluation does not change it."""
    settings = dict(temperature=0.1, memory_bank_size=(size, 16))
    mine, other = ours("bank", **settings).double(), peers("bank", **settings).double()
    other.memory_bank.bank.copy_(mine.bank)
    for seed, n in enumerate([7, 3, 7, 7, 3]):
        x, y = rows(n, seed=seed)
        assert mine(x, y).item() == pytest.approx(other(x, y).item(), rel=1e-12)
        assert_equal(results(mine, 3 * x, y), results(other, 3 * x, y))
        assert torch.equal(mine.bank, other.memory_bank.bank)


LABELS = {"pairs": torch.arange(8) // 2, "single rows": torch.tensor([3, 1, 3, 7, 1, 3, 0, 9]),
          "one class": torch.zeros(8, dtype=torch.long), "all different": torch.arange(8),
          "two rows": torch.tensor([4, 4]), "one row": torch.tensor([2]),
          "large": torch.randint(0, 9, (60,), generator=torch.Generator().manual_seed(0))}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("title", ["sup con", "metric"])
def test_labels(title, labels, dtype):
    labels = LABELS[labels]
    x = 3 * rows(len(labels), dtype)[0]
    assert_equal(results(ours(title), x, labels), results(peers(title), x, labels))


def test_losses_that_round_to_zero():
    """SupConLoss of the library leaves them out of its mean; here they are those of the first class."""
    labels, angles = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([0, 0, 3, 3.1, 3.2, 3.3])
    x = torch.stack([angles.cos(), angles.sin()], 1)
    mine, other = ours("sup con"), peers("sup con")
    exact = other(x.double(), labels).item()
    assert mine(x, labels).item() == pytest.approx(exact, rel=1e-6)
    assert other(x, labels).item() == pytest.approx(exact * 6 / 4, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("title", list(TITLES[2:]))
def test_autocast(title, dtype):
    """Under autocast the loss is near that of float32, for rows of either type."""
    x, y = rows(32, torch.float32)
    settings = dict(memory_bank_size=(64, 16)) if title == "bank" else {}
    inputs = (torch.arange(32) // 2,) if title in ("sup con", "metric") else (y,)
    inputs += (torch.tensor(10.0),) * (title in ("clip", "siglip")) + (torch.tensor(-9.0),) * (title == "siglip")
    torch.manual_seed(0)
    loss = ours(title, **settings)
    want, _ = results(loss, x, *inputs)
    for cast in (torch.float32, dtype):
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype):
            few = [z.to(cast) if z.dim() == 2 else z for z in (x, *inputs)]
            value, gradients = results(ours(title, **settings), *few)
        assert value.item() == pytest.approx(want.item(), rel=0.02) and all(g.isfinite().all() for g in gradients)


@pytest.fixture(scope="module")
def st():
    return pytest.importorskip("sentence_transformers")


def texts(n, columns=3):
    """Return `columns` lists of n texts of different lengths."""
    return [[NLI[i][j % 3] + " It is so." * (i % 3) * (j > 2) for i in range(n)] for j in range(columns)]


def text_losses(title, model, **settings):
    """Return our loss and the peer's; both cached losses get mini-batches of 3."""
    settings |= dict(mini_batch_size=3) if title == "cached" else {}
    return ours(title, model, **settings), peers(title, model, **settings)


def text_results(loss, model, columns):
    """Return (loss, gradients of the weights)."""
    model.zero_grad()
    value = loss([dict(model.preprocess(column)) for column in columns], None)   # the trainer's type
    value.backward()
    return value.detach(), [torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])]


@pytest.mark.parametrize("n, columns", [(1, 2), (2, 3), (7, 2), (8, 5)])
@pytest.mark.parametrize("title", ["ranking", "cached"])
def test_text_losses(title, n, columns, st, bert):
    model = st.SentenceTransformer(str(bert), device="cpu").double()
    mine, other = text_losses(title, model, scale=15.0)
    columns = texts(n, columns)
    found, wanted = (text_results(loss, model, columns) for loss in (mine, other))
    assert_equal(found, wanted)
    with torch.no_grad():
        features = [model.preprocess(column) for column in columns]
        assert mine(features, None).item() == pytest.approx(wanted[0].item(), rel=1e-12)
    with torch.autocast("cpu", torch.bfloat16):
        value, gradients = text_results(mine, model.float(), columns)
    assert abs(value - wanted[0]) < 0.1 and all(g.isfinite().all() for g in gradients)


def test_inside_matryoshka_loss(st, bert):
    model = st.SentenceTransformer(str(bert), device="cpu").double()
    nested = [st.sentence_transformer.losses.MatryoshkaLoss(model, loss, [32, 8])
              for loss in text_losses("ranking", model)]
    assert_equal(*(text_results(loss, model, texts(6)) for loss in nested))


@pytest.mark.parametrize("title", ["ranking", "cached"])
def test_trainer(title, st, bert, tmp_path):
    """Eight steps, the last one with fewer rows, change the weights as with the library's loss."""
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("accelerate")
    data = datasets.Dataset.from_dict(dict(zip(COLUMNS, texts(45))))
    changes, losses = [], []
    for i in range(2):
        torch.manual_seed(0)
        model = st.SentenceTransformer(str(bert), device="cpu")
        start = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
        settings = st.SentenceTransformerTrainingArguments(
            str(tmp_path / str(i)), per_device_train_batch_size=6, num_train_epochs=1, learning_rate=1e-3,
            use_cpu=True, adam_epsilon=1e-6, report_to="none", save_strategy="no", disable_tqdm=True, eval_strategy="epoch",
            logging_steps=1)
        trainer = st.SentenceTransformerTrainer(model, settings, data, data.select(range(9)),
                                                loss=text_losses(title, model)[i])
        trainer.train()
        trainer.save_model()                                   # with a model card
        end = torch.cat([p.detach().flatten() for p in model.parameters()])
        changes.append(end - start)
        losses.append([row[key] for row in trainer.state.log_history for key in ("loss", "eval_loss")
                       if key in row])
    mine, other = changes
    assert len(losses[0]) == 9 and losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert (mine - other).norm() < 1e-3 * other.norm() and other.norm() > 0.1
    assert st.SentenceTransformer(str(tmp_path / "0"), device="cpu").encode("A man eats.").shape == (32,)
    assert CLASSES[title] in (tmp_path / "0/README.md").read_text("utf-8")


def vector_results(title, rank):
    """Return [ours, the peer's] (loss, gradients) of this process's four of eight rows."""
    settings = {"clip": dict(local_loss=True, gather_with_grad=True), "lightly": dict(gather_distributed=True)}
    world = dict(rank=rank, world_size=2) if title in ("clip", "siglip") else {}
    x, y = rows(8)[:, 4 * rank : 4 * rank + 4]
    scalars = torch.tensor([9.0, -5.0], dtype=torch.float64)[: {"clip": 1, "siglip": 2}.get(title, 0)]
    both = ours(title, **settings["lightly"] if title == "lightly" else {}), peers(
        title, **settings.get(title, {}), **world)
    return [results(loss, x, y, *scalars) for loss in both]


def text_results_of_process(title, rank, bert):
    """Return [ours, the peer's] (loss, averaged gradients) of this process's four of eight rows."""
    import sentence_transformers as st
    found = []
    for i in range(2):
        model = st.SentenceTransformer(str(bert), device="cpu").double()
        loss = text_losses(title, model, gather_across_devices=True)[i]
        loss.model = DistributedDataParallel(model, find_unused_parameters=True)         # as in the trainer
        loss.model.preprocess = model.preprocess
        columns = [column[4 * rank : 4 * rank + 4] for column in texts(8)]
        text_results(loss, loss.model, columns)
        found.append(text_results(loss, loss.model, columns))  # the second step fails if DDP is not ready
    return found


def one_process(rank, port, bert, folder):
    """Run one of two processes: save {title: results} of the packages that are installed."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    found = {title: vector_results(title, rank) for title in ("clip", "siglip", "lightly")
             if importlib.util.find_spec(PACKAGES[title].split(".")[0])}
    if importlib.util.find_spec("sentence_transformers"):
        found |= {title: text_results_of_process(title, rank, bert) for title in ("ranking", "cached")}
    dist.barrier()
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


def both_processes(_, *args):
    """Import the slow package once, and fork both processes."""
    if importlib.util.find_spec("sentence_transformers"):
        importlib.import_module("sentence_transformers")
    torch.multiprocessing.start_processes(one_process, args, 2, start_method="fork")


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """Return {title: [ours, the peer's] results} of both processes."""
    folder = tmp_path_factory.mktemp("processes")
    fork_context()
    args = free_port(), small_bert(folder / "bert"), folder
    torch.multiprocessing.start_processes(both_processes, args, 1, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("title", ["ranking", "cached", "clip", "siglip", "lightly"])
def test_two_processes(title, processes):
    for found in processes:
        if title not in found:
            pytest.skip("package not installed")
        assert_equal(*found[title])


@pytest.mark.parametrize("title", ["ranking", "cached"])
def test_two_processes_equal_one(title, processes, st, bert):
    """The gradients, averaged over both processes, are those of one process with all rows."""
    if title not in processes[0]:
        pytest.skip("package not installed")
    model = st.SentenceTransformer(str(bert), device="cpu").double()
    wanted = text_results(ours("ranking", model), model, texts(8))
    (loss, gradients), (other, _) = (found[title][0] for found in processes)
    assert_equal(((loss + other) / 2, gradients), wanted)
