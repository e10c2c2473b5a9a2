"""The blocks of docs/drop-ins.md, run as they are printed, equal the losses that they replace: losses of
vectors are compared with formulas, and all losses with those of the installed libraries."""
import importlib.util
import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import loss_formulas as formulas
from running import NLI, ROOT, run_ranks, small_bert

PAGE = (ROOT / "docs/drop-ins.md").read_text("utf-8")
ST, METRIC = "sentence_transformers.sentence_transformer.losses", "pytorch_metric_learning.losses"
# {title: loss that the block replaces}, in the order of the page
LIBRARY = {"ranking": f"{ST}.MultipleNegativesRankingLoss",
           "cached": f"{ST}.CachedMultipleNegativesRankingLoss",
           "sorted": f"{ST}.CachedMultipleNegativesRankingLoss", "clip": "open_clip.loss.ClipLoss",
           "siglip": "open_clip.loss.SigLipLoss", "lightly": "lightly.loss.NTXentLoss",
           "bank": "lightly.loss.NTXentLoss", "sup con": f"{METRIC}.SupConLoss",
           "metric": f"{METRIC}.NTXentLoss"}
TEXT, PAIRS, LABELLED = ["ranking", "cached", "sorted"], ["clip", "siglip", "lightly"], ["sup con", "metric"]
GATHER = ["gather_rows", "ring_rows"]                          # as printed, and as the page allows
BLOCKS = dict(zip(LIBRARY, re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S), strict=True))
BEFORE = {"cached": ["ranking"], "sorted": ["ranking", "cached"]}              # blocks that must run first
LABELS = {"pairs": torch.arange(8) // 2, "single rows": torch.tensor([3, 1, 3, 7, 1, 3, 0, 9]),
          "one class": torch.zeros(8, dtype=torch.long), "all different": torch.arange(8),
          "one row": torch.tensor([2]), "many": torch.arange(60) * 7 % 9}


def ours(title, *args, code=None, gather=GATHER[0], **settings):
    """Return the loss that a block defines, or that `code`, a changed block, defines."""
    names, code = {}, (code or BLOCKS[title]).replace(GATHER[0], gather)
    exec("".join(BLOCKS[x] for x in BEFORE.get(title, ())) + code, names)
    return names[re.findall(r"^class (\w+)", code, re.M)[0]](*args, **settings)


def theirs(title, *args, **settings):
    """Return the loss of the library; skip the test if the library is not installed."""
    module, _, name = LIBRARY[title].rpartition(".")
    return getattr(pytest.importorskip(module), name)(*args, **settings)


def sup_con(x, labels):
    return formulas.sup_con_loss(x[:, None], labels, 0.1, normalize=True, per_view=True)


def positive_pairs(x, labels):
    """Return the mean of −log p over pairs of a class; p compares the pair with all rows of other classes."""
    logits, same = formulas.unit(x) @ formulas.unit(x).T / 0.07, labels == labels[:, None]
    negatives = logits.masked_fill(same, -torch.inf).logsumexp(1, keepdim=True)
    pairs = same & ~torch.eye(len(x), dtype=torch.bool)
    return (torch.logaddexp(logits, negatives) - logits)[pairs].mean()


FORMULAS = {"clip": lambda x, y, scale: formulas.clip_loss(x, y, 1 / scale),
            "siglip": lambda x, y, scale, bias: formulas.sigmoid_loss(x, y, 1 / scale, bias),
            "lightly": lambda x, y: formulas.nt_xent(x, y, 0.5, normalize=True),
            "sup con": sup_con, "metric": positive_pairs}


def results(loss, *inputs):
    """Return [loss, its gradient in each float tensor]."""
    inputs = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    value = loss(*inputs)
    return [value.detach(), *torch.autograd.grad(value, [x for x in inputs if x.requires_grad])]


def assert_equal(found, wanted, limit=1e-12):
    """Check that the norm of each difference is at most `limit` times the norm of the wanted tensor."""
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).norm() <= limit * b.norm()


def inputs(title, n, seed=0):
    """Return the arguments of a loss for n pairs: unit rows x and y (n, 16), and scale and bias if needed."""
    x = torch.randn(2, n, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x[1] += 0.2 * x[0]
    scalars = torch.tensor([14.3, -5.0]).double()[: {"clip": 1, "siglip": 2}.get(title, 0)]
    return [*F.normalize(x, dim=2), *scalars]


@pytest.mark.parametrize("n", [1, 7, 300])
@pytest.mark.parametrize("title", PAIRS)
def test_pairs(title, n):
    x = inputs(title, n)
    assert_equal(results(ours(title), *x), results(FORMULAS[title], *x))
    single = [part.float() for part in x]
    assert_equal(results(ours(title), *single), results(FORMULAS[title], *x), 3e-6)


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("title", LABELLED)
def test_labels(title, labels):
    """If there are no positives, or no negatives, the formula is not defined and the loss is 0."""
    x, labels = 3 * inputs(title, len(LABELS[labels]))[0], LABELS[labels]
    found = results(ours(title), x, labels)
    if 1 < len(labels.unique()) < len(labels):
        assert_equal(found, results(FORMULAS[title], x, labels))
    else:
        assert not any(part.any() for part in found)


@pytest.mark.parametrize("title", [*PAIRS, *LABELLED])
def test_library(title):
    x = inputs(title, 60)
    x = x if title in PAIRS else (3 * x[0], LABELS["many"])
    assert_equal(results(ours(title), *x), results(theirs(title), *x))


@pytest.mark.parametrize("size", [5, 20])
def test_memory_bank(size):
    """As in lightly, keys enter the bank after the loss, and keys that do not fit at its end are dropped."""
    loss = ours("bank", temperature=0.1, memory_bank_size=(size, 16)).double()
    bank, row = loss.bank.clone(), 0
    for seed, n in enumerate([7, 3, 7, 7, 3]):
        x, y = inputs("bank", n, seed)
        expected = results(lambda *x: formulas.queue_loss(*map(formulas.unit, x), bank, 0.1), 3 * x, y)
        before = loss.bank.clone()
        assert loss(x, y).item() == pytest.approx(expected[0].item()) and torch.equal(loss.bank, before)
        assert_equal(results(loss, 3 * x, y), expected)
        bank[row : row + n] = y[: size - row]
        row = (row + len(y[: size - row])) % size
        assert torch.allclose(loss.bank, bank, rtol=0, atol=1e-15)


# ── sentence-transformers ───────────────────────────────────────────────────────────────────────────────────


def texts(n, columns=3):
    """Return `columns` lists of n texts of different lengths."""
    return [[NLI[i][j % 3] + " It is so." * (i % 3) * (j > 2) for i in range(n)] for j in range(columns)]


def text_losses(title, model, **settings):
    """Return [our loss, the library's loss]; cached losses get mini-batches of 3."""
    settings |= {} if title == "ranking" else dict(mini_batch_size=3)
    return [make(title, model, **settings) for make in (ours, theirs)]


def text_results(loss, model, columns):
    """Return [loss, gradients of all weights as one vector]. One entry of a column has a number per text."""
    model.zero_grad()
    value = loss([dict(model.preprocess(column), prompt_length=torch.zeros(len(column)))
                  for column in columns], None)
    value.backward()
    return [value.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])]


def load(folder):
    return pytest.importorskip("sentence_transformers").SentenceTransformer(str(folder), device="cpu")


@pytest.mark.parametrize("n, columns", [(1, 2), (7, 2), (8, 5)])
@pytest.mark.parametrize("title", TEXT)
def test_texts(title, n, columns, bert):
    """Our loss has the value and gradients of the library's. It works under no_grad and autocast, too."""
    model, columns = load(bert).double(), texts(n, columns)
    mine, other = text_losses(title, model, scale=15.0)
    wanted = text_results(other, model, columns)
    assert_equal(text_results(mine, model, columns), wanted)
    with torch.no_grad():
        value = mine([model.preprocess(column) for column in columns], None)
    assert value.item() == pytest.approx(wanted[0].item(), rel=1e-12)
    with torch.autocast("cpu", torch.bfloat16):
        value, gradient = text_results(mine, model.float(), columns)
    assert value.item() == pytest.approx(wanted[0].item(), abs=0.1) and gradient.isfinite().all()


def test_inside_matryoshka_loss(bert):
    model = load(bert).double()
    nested = [pytest.importorskip(ST).MatryoshkaLoss(model, loss, [32, 8])
              for loss in text_losses("ranking", model)]
    assert_equal(*(text_results(loss, model, texts(6)) for loss in nested))


@pytest.mark.parametrize("title", TEXT)
def test_trainer(title, bert, tmp_path):
    """Eight steps, the last one with fewer rows, change the weights as the library's loss does.

    Gradients of the biases of attention keys are rounding errors. AdamW divides them by their size plus
    epsilon, so an epsilon of 1e-6 keeps the updates of these biases small.
    """
    st, datasets = map(pytest.importorskip, ["sentence_transformers", "datasets"])
    pytest.importorskip("accelerate")
    data = datasets.Dataset.from_dict(dict(zip(("anchor", "positive", "negative"), texts(45))))
    changes = []
    for i in range(2):
        model = load(bert)
        start = torch.cat([p.detach().flatten() for p in model.parameters()])
        settings = st.SentenceTransformerTrainingArguments(
            str(tmp_path / str(i)), per_device_train_batch_size=6, num_train_epochs=1, learning_rate=1e-3,
            adam_epsilon=1e-6, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True)
        trainer = st.SentenceTransformerTrainer(model, settings, data, loss=text_losses(title, model)[i])
        trainer.train()
        trainer.save_model()                                   # this also writes a model card
        changes.append(torch.cat([p.detach().flatten() for p in model.parameters()]) - start)
    assert changes[1].norm() > 0.1
    assert_equal(changes[:1], changes[1:], 1e-3)
    assert load(tmp_path / "0").encode("A man eats.").shape == (32,)


# ── two processes ───────────────────────────────────────────────────────────────────────────────────────────


def vectors_of_process(title, gather, rank):
    """Return this process's loss, the mean over its four of eight pairs, and the gradients of this loss."""
    settings = dict(gather=gather) | (dict(gather_distributed=True) if title == "lightly" else {})
    x, y, *scalars = inputs(title, 8)
    return results(ours(title, **settings), x[4 * rank : 4 * rank + 4], y[4 * rank : 4 * rank + 4], *scalars)


def texts_of_process(title, rank, bert):
    """Return the loss of this process, which has four of eight rows, and the gradient averaged by DDP."""
    model = load(bert).double()
    loss = ours(title, model, gather_across_devices=True)
    loss.model = DistributedDataParallel(model, find_unused_parameters=True)   # the trainer does so, too
    loss.model.preprocess = model.preprocess
    columns = [column[4 * rank : 4 * rank + 4] for column in texts(8)]
    text_results(loss, loss.model, columns)
    return text_results(loss, loss.model, columns)             # if DDP is not ready, the second step fails


def one_process(rank, bert, folder):
    """Save {title: results} of one of two processes."""
    found = {case: vectors_of_process(*case, rank) for case in itertools.product(PAIRS, GATHER)}
    if importlib.util.find_spec("sentence_transformers"):
        found |= {title: texts_of_process(title, rank, bert) for title in TEXT}
    torch.save(found, folder / f"{rank}.pt")


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """Return [{title: results} of process 0, {title: results} of process 1]."""
    folder = tmp_path_factory.mktemp("processes")
    run_ranks(one_process, 2, small_bert(folder / "bert"), folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("title, gather", [*itertools.product(PAIRS, GATHER)])
def test_pairs_of_two_processes(title, gather, processes):
    """The mean of both losses is the loss of one process with all rows. The gradients are twice those of one
    process, because each loss is a mean over half of the rows."""
    wanted_loss, *wanted = results(ours(title), *inputs(title, 8))
    (loss, *gradients), (other, *others) = (found[title, gather] for found in processes)
    rows = [torch.cat(parts) for parts in zip(gradients[:2], others[:2])]
    scalars = [sum(parts) for parts in zip(gradients[2:], others[2:])]
    assert_equal([(loss + other) / 2, *rows, *scalars], [wanted_loss, *(2 * part for part in wanted)])


@pytest.mark.parametrize("title", TEXT)
def test_texts_of_two_processes(title, processes, bert):
    """The mean loss and the averaged gradients are those of one process with all rows."""
    model = load(bert).double()
    (loss, gradient), (other, same) = (found[title] for found in processes)
    assert torch.equal(gradient, same)
    assert_equal([(loss + other) / 2, gradient], text_results(ours("ranking", model), model, texts(8)))
