"""Run the blocks of docs/drop-ins.md, as they are printed, and compare them with the losses they replace.

Tests whose library is not installed are skipped. With `pytest -s`, the largest differences are printed.
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
ST, METRIC = "sentence_transformers.sentence_transformer.losses", "pytorch_metric_learning.losses"
# {title: loss that the block replaces}, in the order of the page
LIBRARY = {"ranking": f"{ST}.MultipleNegativesRankingLoss",
           "cached": f"{ST}.CachedMultipleNegativesRankingLoss",
           "sorted": f"{ST}.CachedMultipleNegativesRankingLoss", "clip": "open_clip.loss.ClipLoss",
           "siglip": "open_clip.loss.SigLipLoss", "lightly": "lightly.loss.NTXentLoss",
           "bank": "lightly.loss.NTXentLoss", "sup con": f"{METRIC}.SupConLoss",
           "metric": f"{METRIC}.NTXentLoss"}
TEXT, VECTORS = ["ranking", "cached", "sorted"], ["clip", "siglip", "lightly", "bank"]
BLOCKS = dict(zip(LIBRARY, re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S), strict=True))
BEFORE = {"cached": ["ranking"], "sorted": ["ranking", "cached"]}              # blocks that a block needs
BANK = dict(temperature=0.1, memory_bank_size=(20, 16))
ERRORS = {}                                                    # {(title, dtype, loss or gradient): largest}


def ours(title, *args, code=None, **settings):
    """Return the loss of a block, or of its changed code."""
    names, code = {}, code or BLOCKS[title]
    exec("".join(BLOCKS[x] for x in BEFORE.get(title, ())) + code, names)
    return names[re.findall(r"^class (\w+)", code, re.M)[0]](*args, **settings)


def theirs(title, *args, **settings):
    """Return the loss of the library, or skip the test."""
    module, _, name = LIBRARY[title].rpartition(".")
    return getattr(pytest.importorskip(module), name)(*args, **settings)


def results(loss, *inputs):
    """Return (loss, gradients of the float tensors)."""
    inputs = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    value = loss(*inputs)
    return value.detach(), torch.autograd.grad(value, [x for x in inputs if x.requires_grad])


def assert_equal(title, found, expected):
    """Compare two results: relative errors, in float32 that of all gradients together."""
    (loss, gradients), (wanted_loss, wanted) = found, expected
    if loss.dtype == torch.float32:
        gradients, wanted = ([torch.cat([x.flatten() for x in xs])] for xs in (gradients, wanted))
    record(title, loss.dtype, "loss", loss, wanted_loss)
    for gradient, want in zip(gradients, wanted, strict=True):
        record(title, loss.dtype, "gradient", gradient, want)


def record(title, dtype, name, found, wanted):
    """Record the relative error and compare it with the largest allowed."""
    difference, size = (found - wanted).norm().item(), wanted.norm().item()
    assert difference <= (1e-12 if dtype == torch.float64 else 1e-6) * size
    ERRORS[title, dtype, name] = max(ERRORS.get((title, dtype, name), 0), difference / size if size else 0)


@pytest.fixture(scope="module", autouse=True)
def print_errors():
    yield
    for key, error in ERRORS.items():
        print(*key, f"{error:.1e}")


def inputs(title, n, dtype=torch.float64, seed=0):
    """Return the arguments of a loss for n samples: two unit views (n, 16), scale and bias."""
    x = torch.randn(2, n, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x[1] += 0.2 * x[0]
    scalars = torch.tensor([14.3, -5.0], dtype=dtype)[: {"clip": 1, "siglip": 2}.get(title, 0)]
    return *F.normalize(x, dim=2).to(dtype), *scalars


def test_blocks_are_short():
    assert {title: code for title, code in BLOCKS.items() if code.count("\n") > 20} == {}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("n", [1, 2, 7, 300])
@pytest.mark.parametrize("title", ["clip", "siglip", "lightly"])
def test_vectors(title, n, dtype):
    x = inputs(title, n, dtype)
    assert_equal(title, results(ours(title), *x), results(theirs(title), *x))


@pytest.mark.parametrize("columns", [2, 4])
def test_embeddings_in_float32(columns):
    x = torch.randn(columns, 300, 16, generator=torch.Generator().manual_seed(0))
    found = []
    for make in (ours, theirs):
        loss = make("ranking", torch.nn.Identity())
        found.append(results(lambda *x, loss=loss: loss([dict(sentence_embedding=z) for z in x], None), *x))
    assert_equal("ranking", *found)


@pytest.mark.parametrize("title", ["clip", "siglip"])
def test_call_of_the_training_loop_of_open_clip(title):
    """Some of its models return a bias although the loss is ClipLoss. Its gradient is 0, up to rounding."""
    x, y, scale, bias = inputs("siglip", 5)
    found = []
    for loss in (ours(title), theirs(title)):
        bias = bias.detach().requires_grad_()
        output = loss(image_features=x, text_features=y, logit_scale=scale, logit_bias=bias, output_dict=True)
        found.append((output["contrastive_loss"].detach(), torch.autograd.grad(sum(output.values()), [bias])))
    if title == "clip":
        assert all(abs(gradient) < 1e-15 for _, (gradient,) in found)
        found = [(loss, ()) for loss, _ in found]
    assert_equal(title, *found)


@pytest.mark.parametrize("impl", ["auto", "eager"])            # eager, like Triton, uses the bank in backward
@pytest.mark.parametrize("size", [5, 7, 20])
def test_memory_bank(size, impl):
    """The bank has fewer or more rows than the batches of 7 and 3; an evaluation does not change it."""
    settings = BANK | dict(memory_bank_size=(size, 16))
    code = BLOCKS["bank"].replace("self.temperature)", f"self.temperature, impl={impl!r})")
    assert code.count("impl=") == 1
    torch.manual_seed(0)                                       # for the bank
    mine, other = ours("bank", code=code, **settings).double(), theirs("bank", **settings).double()
    other.memory_bank.bank.copy_(mine.bank)
    for seed, n in enumerate([7, 3, 7, 7, 3]):
        x, y = inputs("bank", n, seed=seed)
        assert mine(x, y).item() == pytest.approx(other(x, y).item(), rel=1e-12)
        assert_equal("bank", results(mine, 3 * x, y), results(other, 3 * x, y))
        assert torch.equal(mine.bank, other.memory_bank.bank)


LABELS = {"pairs": torch.arange(8) // 2, "single rows": torch.tensor([3, 1, 3, 7, 1, 3, 0, 9]),
          "one class": torch.zeros(8, dtype=torch.long), "all different": torch.arange(8),
          "two rows": torch.tensor([4, 4]), "one row": torch.tensor([2]),
          "large": torch.randint(0, 9, (60,), generator=torch.Generator().manual_seed(0))}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("title", ["sup con", "metric"])
def test_labels(title, labels, dtype):
    x = 3 * inputs(title, len(LABELS[labels]), dtype)[0]
    assert_equal(title, *(results(make(title), x, LABELS[labels]) for make in (ours, theirs)))


@pytest.mark.parametrize("title", ["sup con", "metric"])
def test_trainer_and_multiple_losses_of_metric_learning(title):
    """Three steps with SGD change the weights as with the library's loss. A miner's pairs are refused."""
    trainers, x = pytest.importorskip("pytorch_metric_learning.trainers"), inputs(title, 60)[0]
    data, weights, (mine, other) = [*zip(x, LABELS["large"].tolist())], [], (ours(title), theirs(title))
    multiple = pytest.importorskip(METRIC).MultipleLosses([mine, other])
    for loss in mine, other, multiple:
        torch.manual_seed(0)
        model = torch.nn.Linear(16, 8).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1 if loss is not multiple else 0.05)
        trainer = trainers.MetricLossOnly(
            dict(trunk=model), dict(trunk_optimizer=optimizer), 20, dict(metric_loss=loss), data,
            data_device="cpu", dataloader_num_workers=0)
        trainer.train()
        weights.append(model.weight.detach())
    for found in weights:
        record(title, torch.float64, "trainer", found, weights[1])
    with pytest.raises(ValueError, match="indices_tuple: found the pairs of a miner, expected None"):
        mine(x, LABELS["large"], (torch.tensor([0]),) * 4)


def test_losses_that_round_to_zero():
    """SupConLoss of the library leaves them out of its mean; here they are those of the first class."""
    labels, angles = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([0, 0, 3, 3.1, 3.2, 3.3])
    x = torch.stack([angles.cos(), angles.sin()], 1)
    mine, other = ours("sup con"), theirs("sup con")
    exact = other(x.double(), labels).item()
    assert mine(x, labels).item() == pytest.approx(exact, rel=1e-6)
    assert other(x, labels).item() == pytest.approx(exact * 6 / 4, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("title", [*VECTORS, "sup con", "metric"])
def test_autocast(title, dtype):
    """Under autocast the loss is near that of float32, for rows of either type."""
    x = inputs(title, 32, torch.float32)
    x = (x[0], torch.arange(32) // 2) if title in ("sup con", "metric") else x
    found = []
    for cast, is_enabled in ((torch.float32, False), (torch.float32, True), (dtype, True)):
        torch.manual_seed(0)                                   # for the bank
        loss = ours(title, **(BANK if title == "bank" else {}))
        rows = [z.to(cast) if z.dim() == 2 else z for z in x]
        with torch.autocast("cpu", dtype, enabled=is_enabled):
            value, gradients = results(loss, *rows)
        assert all(gradient.isfinite().all() for gradient in gradients)
        found.append(value.item())
    assert found == pytest.approx([found[0]] * 3, rel=0.02)


def texts(n, columns=3):
    """Return `columns` lists of n texts of different lengths."""
    return [[NLI[i][j % 3] + " It is so." * (i % 3) * (j > 2) for i in range(n)] for j in range(columns)]


def text_losses(title, model, **settings):
    """Return [our loss, the library's]; cached losses get mini-batches of 3."""
    settings |= {} if title == "ranking" else dict(mini_batch_size=3)
    return [make(title, model, **settings) for make in (ours, theirs)]


def text_results(loss, model, columns):
    """Return (loss, [gradient of all weights])."""
    model.zero_grad()
    value = loss([dict(model.preprocess(column)) for column in columns], None)   # the trainer's type
    value.backward()
    return value.detach(), [torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])]


def load(folder):
    return pytest.importorskip("sentence_transformers").SentenceTransformer(str(folder), device="cpu")


@pytest.mark.parametrize("n, columns", [(1, 2), (2, 3), (7, 2), (8, 5)])
@pytest.mark.parametrize("title", TEXT)
def test_texts(title, n, columns, bert):
    model, columns = load(bert).double(), texts(n, columns)
    mine, other = text_losses(title, model, scale=15.0)
    wanted = text_results(other, model, columns)
    assert_equal(title, text_results(mine, model, columns), wanted)
    with torch.no_grad():
        value = mine([model.preprocess(column) for column in columns], None)
    assert value.item() == pytest.approx(wanted[0].item(), rel=1e-12)
    with torch.autocast("cpu", torch.bfloat16):
        value, gradients = text_results(mine, model.float(), columns)
    assert value.item() == pytest.approx(wanted[0].item(), abs=0.1) and gradients[0].isfinite().all()


def test_inside_matryoshka_loss(bert):
    model = load(bert).double()
    nested = [pytest.importorskip(ST).MatryoshkaLoss(model, loss, [32, 8])
              for loss in text_losses("ranking", model)]
    assert_equal("matryoshka", *(text_results(loss, model, texts(6)) for loss in nested))


@pytest.mark.parametrize("title", TEXT)
def test_trainer(title, bert, tmp_path):
    """Eight steps, the last one with fewer rows, change the weights as with the library's loss.

    Gradients of key biases are 0 up to rounding, and AdamW divides them by their size plus epsilon. With an
    epsilon of 1e-6 these updates stay small.
    """
    st, datasets = map(pytest.importorskip, ["sentence_transformers", "datasets"])
    pytest.importorskip("accelerate")
    data = datasets.Dataset.from_dict(dict(zip(("anchor", "positive", "negative"), texts(45))))
    changes, losses = [], []
    for i in range(2):
        model = load(bert)
        start = torch.cat([p.detach().flatten() for p in model.parameters()])
        settings = st.SentenceTransformerTrainingArguments(
            str(tmp_path / str(i)), per_device_train_batch_size=6, num_train_epochs=1, learning_rate=1e-3,
            adam_epsilon=1e-6, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
            eval_strategy="epoch", logging_steps=1)
        trainer = st.SentenceTransformerTrainer(model, settings, data, data.select(range(9)),
                                                loss=text_losses(title, model)[i])
        trainer.train()
        trainer.save_model()                                   # with a model card
        changes.append(torch.cat([p.detach().flatten() for p in model.parameters()]) - start)
        losses.append([row.get("loss", row.get("eval_loss")) for row in trainer.state.log_history[:-1]])
    mine, other = changes
    assert len(losses[0]) == 9 and losses[0] == pytest.approx(losses[1], rel=1e-3)
    ERRORS[title, "trainer"] = ((mine - other).norm() / other.norm()).item()
    assert ERRORS[title, "trainer"] < 1e-3 and other.norm() > 0.1
    assert load(tmp_path / "0").encode("A man eats.").shape == (32,)
    assert type(trainer.loss).__name__ in (tmp_path / "1/README.md").read_text("utf-8")


def vectors_of_process(title, rank):
    """Return [ours, the library's] (loss, gradients) of this process's four of eight rows."""
    distributed = dict(gather_distributed=True)
    mine, other = {"clip": ({}, dict(local_loss=True, gather_with_grad=True, rank=rank, world_size=2)),
                   "siglip": ({}, dict(rank=rank, world_size=2)), "lightly": (distributed, distributed),
                   "bank": (BANK, BANK | distributed)}[title]
    x, y, *scalars = inputs(title, 8)
    x, y = (z[4 * rank : 4 * rank + 4] for z in (x, y))
    code, whole = BLOCKS[title], "gather_rows(out1.detach(), len(out1) * dist.get_world_size())"
    if title == "bank":                                        # as the page says
        assert f"`{whole}`" in PAGE and code.count("out1.detach()") == 1
        code = "import torch.distributed as dist\nfrom kernels import gather_rows\n" + code.replace(
            "out1.detach()", whole)
    torch.manual_seed(rank)                                    # for the bank
    losses = [ours(title, code=code, **mine).double(), theirs(title, **other).double()]
    if title == "bank":
        losses[1].memory_bank.bank.copy_(losses[0].bank)
        for loss in losses:
            loss(x.clone().requires_grad_(), y)
    return [results(loss, x, y, *scalars) for loss in losses]


def texts_of_process(title, rank, bert):
    """Return [ours, the library's] (loss, averaged gradient) of this process's four of eight rows."""
    found = []
    for i in range(2):
        model = load(bert).double()
        loss = text_losses(title, model, gather_across_devices=True)[i]
        loss.model = DistributedDataParallel(model, find_unused_parameters=True)         # as in the trainer
        loss.model.preprocess = model.preprocess
        columns = [column[4 * rank : 4 * rank + 4] for column in texts(8)]
        text_results(loss, loss.model, columns)
        found.append(text_results(loss, loss.model, columns))  # the second step fails if DDP is not ready
    return found


def one_process(rank, port, bert, folder):
    """Run one of two processes: save {title: results} for the installed packages."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    found = {}
    for title in (*TEXT, *VECTORS):
        if importlib.util.find_spec(LIBRARY[title].split(".")[0]):
            of_process, args = (texts_of_process, [bert]) if title in TEXT else (vectors_of_process, [])
            found[title] = of_process(title, rank, *args)
    dist.barrier()
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


def both_processes(_, *args):
    """Import the slowest package once, and fork both processes."""
    if importlib.util.find_spec("sentence_transformers"):
        importlib.import_module(ST)
    torch.multiprocessing.start_processes(one_process, args, 2, start_method="fork")


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """Return {title: [ours, the library's] results} of both processes."""
    folder = tmp_path_factory.mktemp("processes")
    fork_context()
    args = free_port(), small_bert(folder / "bert"), folder
    torch.multiprocessing.start_processes(both_processes, args, 1, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("title", [*TEXT, *VECTORS])
def test_two_processes(title, processes, bert):
    """The averaged gradients of texts also are those of one process with all rows."""
    pytest.importorskip(LIBRARY[title].split(".")[0])
    for found in processes:
        assert_equal(f"{title}, 2 processes", *found[title])
    if title in TEXT:
        (loss, gradients), (other, _) = (found[title][0] for found in processes)
        model = load(bert).double()
        one = text_results(ours("ranking", model), model, texts(8))
        assert_equal(f"{title}, 2 processes and 1", ((loss + other) / 2, gradients), one)
