"""Test the recipes of docs/others.md: apply their code blocks to a copy of simcse.py, and train with it."""
import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModel

import kernels
import running
import simcse
from families import small_model
from kernels.training.loop import batches
from loss_check import numbers
from running import NLI, ONE_BATCH, embed_saved, embed_unbatched, run, write_table

PARTS = (running.ROOT / "docs/others.md").read_text("utf-8").split("\n### ")
SECTIONS = {part.split("\n")[0]: part for part in PARTS}
NAMES = {"matryoshka": "Matryoshka embeddings", "teacher": "Scores of a teacher", "lora": "LoRA",
         "mixed": "Several data sets"}
ROWS = [[*row, f"{i % 5 - 1.5}", f"{i % 3 - 2}"] for i, row in enumerate(NLI[:12])]      # two scores per row
COLUMNS = ["query", "positive", "negative"]


def blocks(name, language):
    """Return the code blocks of a recipe in a language: python or diff."""
    return re.findall(rf"^```{language}\n(.*?)^```$", SECTIONS[NAMES[name]], re.M | re.S)


def edit(text, diff):
    """Return the text after the changes of a diff block, which are separated by empty lines."""
    for change in diff.split("\n\n") if diff else ():
        lines = change.splitlines()
        old, new = ("".join(line[1:] + "\n" for line in lines if line[0] != sign) for sign in "+-")
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """Write the edited copies of simcse.py (one per recipe, and margin.py) to a folder on the import path."""
    folder = tmp_path_factory.mktemp("copies")
    for name in NAMES:
        assert f"cp simcse.py {name}.py\n" in SECTIONS[NAMES[name]]
        before, banner, main = (running.ROOT / "simcse.py").read_text("utf-8").partition("# ── main ─")
        text = f"{before}{blocks(name, 'python')[0]}\n\n{banner}{main}"
        for variant, diff in zip((name, "margin"), blocks(name, "diff") or [""]):
            text = edit(text, diff)
            (folder / f"{variant}.py").write_text(text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder


def test_matryoshka_loss_is_the_sum_over_widths(copies):
    torch.manual_seed(0)
    z1, z2, z3 = (torch.randn(shape).double() for shape in ((6, 128), (10, 128), (10, 2, 128)))
    settings = dict(temperature=0.1, offset=3, hard_negative_weight=0.5)
    widths = [[z[..., :width] for z in (z1, z2, z3)] for width in (16, 32, 64, 128)]
    expected = sum(simcse.simcse_loss(*z, **settings) for z in widths)
    found = importlib.import_module("matryoshka").simcse_loss(z1, z2, z3, **settings)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["teacher", "margin"])
def test_first_loss_of_a_teacher(name, copies, tmp_path, bert, monkeypatch):
    """The first loss equals the formula in float64, although rows are shuffled. The tested rank has the first
    7 rows of a batch of 12, and computes their part of the loss."""
    monkeypatch.setattr(importlib.import_module(name), "own_rows", lambda rows: slice(7))
    file = write_table(tmp_path / "scored.csv", ROWS, [*COLUMNS, "positive_score", "negative_score"])
    flags = ["--model", bert, "--pooling", "avg", *ONE_BATCH, "--columns", *COLUMNS, "--temperature", 0.2]
    losses = run(name, tmp_path / "out", "--data", file, *flags).losses
    own = [ROWS[i] for i in next(batches(12, 12, 42))[:7]]
    z1, z2, z3 = (F.normalize(embed_saved(bert, texts, "avg").double(), dim=1) for texts in [*zip(*own)][:3])
    student = torch.stack([(z1 * z2).sum(1), (z1 * z3).sum(1)], 1) / 0.2
    teacher = torch.tensor([[float(row[3]), float(row[4])] for row in own]).double()
    if name == "margin":
        expected = (student[:, 0] - student[:, 1] - teacher[:, 0] + teacher[:, 1]).square().sum() / 12
    else:
        p, q = teacher.softmax(1), student.softmax(1)
        expected = (p * (p / q).log()).sum() / 12
    assert losses == pytest.approx([expected.item()], rel=1e-4)


def test_lora(copies, tmp_path, monkeypatch):
    """Only LoRA matrices train. Three models give the embeddings of the trained model: the base with the
    saved adapter, the saved folder, and the folder that the printed code merges."""
    peft = pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    small_model("Qwen2", Path("base"))
    base, texts = AutoModel.from_pretrained("base").state_dict(), [row[0] for row in NLI[:6]]
    data = write_table(Path("data.csv"), NLI[:36], COLUMNS)
    result = run("lora", Path("whole"), "--data", data, "--model", "base", "--batch-size", 8, "--lr", 0.01,
                 "--dev", running.few_pairs(Path()), "--steps", 6, "--eval-every", 3)
    names = dict(result.model.encoder.named_parameters())
    trained = {name for name, weight in names.items() if weight.requires_grad}
    assert trained == {name for name in names if "lora_" in name} and len(trained) == 3 * 7 * 2
    for name, weight in result.model.encoder.state_dict().items():
        if "lora_" not in name:
            assert torch.equal(weight, base[name.replace(".base_layer", "")]), name
    (z, indices), tokenizer = result.model.embed(texts), result.model.tokenizer
    code = blocks("lora", "python")[1].replace("Qwen/Qwen3-0.6B", "base")
    exec(code.replace("out/lora", "whole").replace("out/merged", "merged"), {})
    adapted = peft.PeftModel.from_pretrained(AutoModel.from_pretrained("base"), "whole")
    models = [adapted, *(AutoModel.from_pretrained(folder) for folder in ("whole", "merged"))]
    found = [embed_unbatched(model, tokenizer, texts, "last") for model in models]
    if importlib.util.find_spec("sentence_transformers"):
        from sentence_transformers import SentenceTransformer
        found += [torch.tensor(SentenceTransformer(x).encode(texts)) for x in ("whole", "merged")]
    before = embed_unbatched(AutoModel.from_pretrained("base"), tokenizer, texts, "last")
    assert (before - z[indices]).abs().max() > 0.01
    for embeddings in found:
        torch.testing.assert_close(embeddings, z[indices], atol=1e-5, rtol=1e-5)


def test_a_batch_has_rows_of_one_dataset(copies, tmp_path, bert):
    """Batches are full. Data sets are drawn in proportion to their size, and each pass over a data set has
    each row at most once. The first loss of a run is that of the first batch."""
    names = sorted(24 * ["a"] + 11 * ["b"], key=lambda name: torch.rand(()).item())
    rows = [[name, *row[:2]] for name, row in zip(names, NLI)]
    file = write_table(tmp_path / "mixed.csv", rows, ["dataset", *COLUMNS[:2]])
    args = SimpleNamespace(data=file, batch_size=4, seed=1)
    order = importlib.import_module("mixed").one_dataset_per_batch
    found = [*order(args, 0, 400)]
    assert [*order(args, 7, 400)] == found[7:] and len(found) == 400
    kinds = ["".join(sorted({names[i] for i in batch})) for batch in found]
    assert {*kinds} == {"a", "b"} and abs(kinds.count("a") / 400 - 24 / 35) < 0.07
    assert all(len(batch) == len({*batch}) == 4 for batch in found)
    for kind, steps, count in ("a", 6, 24), ("b", 2, 8):       # check the first pass over each data set
        of_kind = [batch for batch, name in zip(found, kinds) if name == kind]
        assert len({row for batch in of_kind[:steps] for row in batch}) == count
    flags = ["--data", file, "--model", bert, "--pooling", "avg", "--steps", 6, "--max-length", 512,
             "--columns", *COLUMNS[:2], "--batch-size", 4]
    result = run("mixed", tmp_path / "out", *flags)
    first = next(importlib.import_module("mixed").one_dataset_per_batch(result.args, 0, 6))
    z1, z2 = (embed_saved(bert, texts, "avg") for texts in zip(*(NLI[i][:2] for i in first)))
    assert result.losses[0] == pytest.approx(simcse.simcse_loss(z1, z2).item(), abs=1e-4)


def test_losses_without_a_copy():
    """Captions of the same image are no negatives. Rows that share labels are positives, weighted by their
    number. Label smoothing is that of PyTorch."""
    losses = {}
    for block in re.findall(r"^```python\n(.*?)^```$", PARTS[0], re.M | re.S)[-3:]:
        exec(block, losses)
    ids, images = torch.arange(64).repeat_interleave(5), F.normalize(numbers(64, 16), dim=1)
    captions, images = F.normalize(images[ids] + 0.1 * numbers(320, 16), dim=1), images[ids]
    is_same = (ids[:, None] == ids).fill_diagonal_(False)
    s = (images @ captions.T / 0.1).masked_fill(is_same, -torch.inf)
    wanted = sum(F.cross_entropy(logits, torch.arange(320)) for logits in (s, s.T)) / 2
    torch.testing.assert_close(losses["captions_loss"](images, captions, ids, 0.1), wanted)
    assert losses["captions_loss"](images, images, ids, 0.01) < 1e-3
    assert 1.609 < kernels.clip_loss(images, images, 0.01) < 1.61
    z, labels = F.normalize(numbers(12, 16), dim=1), (torch.rand(12, 4) < 0.4).double()
    weights = (labels @ labels.T).fill_diagonal_(0)
    log_p = (z @ z.T / 0.2).fill_diagonal_(-torch.inf).log_softmax(1).fill_diagonal_(0)
    wanted = -(weights * log_p).sum(1) / weights.sum(1).clamp(min=1)
    torch.testing.assert_close(losses["multi_label_loss"](z, labels, 0.2), wanted.mean())
    one = F.one_hot(torch.arange(12) % 5, 5).double()
    wanted = kernels.sup_con_loss(z[:, None], one.argmax(1), 0.07)
    torch.testing.assert_close(losses["multi_label_loss"](z, one), wanted)
    h, weight, targets = numbers(9, 16), numbers(30, 16, seed=1), torch.arange(9)
    wanted = F.cross_entropy(h @ weight.T, targets, label_smoothing=0.1)
    torch.testing.assert_close(losses["smoothed_loss"](h, weight, targets), wanted)


def test_tensorboard(tmp_path, monkeypatch):
    """All numbers in metrics.jsonl are sent with their steps."""
    tensorboard = MagicMock()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    rows = '{"step": 0, "dev_knn": 9.5}\n{"step": 2, "loss": 1.5, "x": [1]}\n'
    (tmp_path / "metrics.jsonl").write_text(rows)
    code, = re.findall(r"^```python\n(.*?)^```$", SECTIONS["Weights & Biases, TensorBoard"], re.M | re.S)
    exec(code.replace("out/first", str(tmp_path)), {})
    sent = [call.args for call in tensorboard.SummaryWriter.return_value.add_scalar.call_args_list]
    assert sent == [("step", 0, 0), ("dev_knn", 9.5, 0), ("step", 2, 2), ("loss", 1.5, 2)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the folder of an encoder that the recipes call out/first."""
    pytest.importorskip("sentence_transformers")
    folder = tmp_path_factory.mktemp("first") / "out"
    run("simcse", folder, "--model", "scratch", "--data", running.DATA / "nli.csv", "--steps", 30)
    return folder


def test_mined_hard_negatives(trained, tmp_path, monkeypatch):
    """A negative is a positive of another row, or a text of the corpus, and simcse.py finds the columns."""
    pytest.importorskip("datasets")
    monkeypatch.chdir(running.ROOT)
    code, = re.findall(r"^```python\n(.*?)^```$", SECTIONS["Mined hard negatives"], re.M | re.S)
    exec(code.replace("out/first", str(trained)).replace("triples.csv", str(tmp_path / "a.csv")), {})
    args = simcse.make_parser().parse_args(["--data", str(tmp_path / "a.csv"), "--model", "scratch"])
    rows = [cells for _, cells in simcse.load_data(args.data, args)]
    positives, corpus = {row[1] for row in NLI}, {text for text, in running.SENTENCES}
    assert args.mode == "supervised" and len(rows) > 100
    assert all(negative in positives | corpus and negative != positive for _, positive, negative in rows)
    assert {row[2] for row in rows} & corpus and {row[2] for row in rows} & positives


def test_labelled_texts(trained, capsys, monkeypatch):
    """The topic of a sentence can be read from its embedding."""
    pytest.importorskip("sklearn")
    monkeypatch.chdir(running.ROOT)
    code, = re.findall(r"^```python\n(.*?)^```$", SECTIONS["Scores on labelled texts"], re.M | re.S)
    exec(code.replace("out/first", str(trained)), {})
    accuracy, v_measure = (float(line.split()[1]) for line in capsys.readouterr().out.splitlines())
    assert accuracy > 60 and 5 < v_measure < 100
