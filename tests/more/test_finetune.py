"""finetune.py: losses and adversarial views of a batch, detectors, and contrast sets by their definitions."""
import importlib.util
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForSequenceClassification, pipeline

import finetune
import finetune_detectors as detectors
import loss_formulas as formulas
from kernels.training.errors import UserError
from loss_check import numbers
from running import DATA, metrics, run

# ── losses ──


@pytest.mark.parametrize("form", ["paper", "code"])
def test_loss_of_two_passes(form, monkeypatch):
    """R-Drop and SCL together: SCL sees the passes as views of the texts."""
    logits, z, labels = numbers(2, 3, 3), numbers(2, 3, 4, seed=1), torch.tensor([0, 1, 1])
    monkeypatch.setattr(finetune, "classify_with_features", Mock(side_effect=zip(logits, z)))
    args = SimpleNamespace(rdrop_weight=0.7, supcon_weight=0.2, form=form, temperature=None)
    found, _ = finetune.compute_loss(None, ({}, labels), 3, args)
    supcon = formulas.supcon_loss(z.transpose(0, 1), labels, 0.3)
    torch.testing.assert_close(found, 0.8 * formulas.rdrop_loss(*logits, labels, 0.7, form) + 0.2 * supcon)


@pytest.mark.parametrize("form", ["paper", "code"])
def test_shares_of_two_passes(form, monkeypatch):
    """R-Drop's losses of ranks with two and four rows add up to the loss of all six rows."""
    logits, labels, ranks = numbers(2, 6, 3), torch.arange(6) % 3, (slice(0, 2), slice(2, 6))
    passes = [one_pass[own] for own in ranks for one_pass in logits]
    monkeypatch.setattr(finetune, "classify", Mock(side_effect=passes))
    args = SimpleNamespace(rdrop_weight=0.7, supcon_weight=0, form=form)
    found = sum(finetune.compute_loss(None, ({}, labels[own]), 6, args)[0] for own in ranks)
    torch.testing.assert_close(found, formulas.rdrop_loss(*logits, labels, 0.7, form))


def test_adversarial_view(bert):
    """compute_ood_loss compares the clean features with those after a step of the word embeddings along the
    gradient of the summed cross entropy. The noise is detached, and the head gets a gradient of zeros."""
    model = AutoModelForSequenceClassification.from_pretrained(bert, num_labels=3).double().train()
    model.tokenizer, model.bf16 = None, False
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [1] * 6 + [0]])
    ids, classes = torch.arange(5, 26).view(3, 7), torch.tensor([2, 0, 2])
    words = model.get_input_embeddings()

    def features(x):
        return model.bert(inputs_embeds=x, attention_mask=mask).pooler_output

    rows = words(ids)
    loss = F.cross_entropy(model.classifier(features(rows)), classes, reduction="sum")
    gradient, = torch.autograd.grad(loss, rows)
    moved = words(ids) + 0.5 * F.normalize(gradient, dim=2) * mask[:, :, None]
    expected = formulas.ood_contrastive_loss(features(words(ids)), features(moved), classes, 0.1, "code")
    args = Mock(adversarial=0.5, temperature=None, form="code")
    batch = dict(input_ids=ids, attention_mask=mask), classes
    found, _ = finetune.compute_ood_loss(model, batch, 3, args)
    assert found.item() == pytest.approx(expected.item(), rel=1e-4)
    weights = [w for name, w in model.named_parameters() if "classifier" not in name]
    results = [torch.autograd.grad(value, weights, retain_graph=True) for value in (found, expected)]
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)                 # features are float32
    assert torch.autograd.grad(found, model.classifier.weight)[0].eq(0).all() and not words._forward_hooks


def test_model_without_one_word_embedding_per_token():
    """T5, which embeds the words of encoder and decoder, is refused."""
    config = AutoConfig.for_model("t5", d_model=16, num_layers=1, num_heads=2, d_kv=8, d_ff=16, vocab_size=30,
                                  eos_token_id=3, decoder_start_token_id=0, num_labels=3)
    model, ids = AutoModelForSequenceClassification.from_config(config), torch.tensor([[5, 6, 3], [8, 9, 3]])
    model.bf16, inputs = False, dict(input_ids=ids, attention_mask=torch.ones_like(ids))
    with pytest.raises(UserError, match=r"^T5ForSequenceClassification .* needs a model like BERT$"):
        finetune.adversarial_views(model, inputs, torch.tensor([0, 2]), 0.5)


# ── detectors ──


@pytest.mark.parametrize("last", [1.0, 0.0])
def test_mahalanobis(last):
    """It equals the definition with a pseudo-inverse, also if Σ has no inverse, and for a class of one."""
    scale = torch.tensor([1.0, 1, 1, last], dtype=torch.float64)
    train, classes = numbers(30, 4) * scale, torch.tensor([*range(3)] * 9 + [4, 4, 8])
    x = torch.cat([numbers(6, 4, seed=1) * scale, 3 * numbers(6, 4, seed=2) * scale, train[:2]])
    means = {c: train[classes == c].mean(0) for c in classes.tolist()}
    apart = torch.stack([z - means[c] for z, c in zip(train, classes.tolist())]).numpy()
    inverse = np.linalg.pinv(apart.T @ apart / 30, hermitian=True)
    expected = [-min((z - mean).numpy() @ inverse @ (z - mean).numpy() for mean in means.values()) for z in x]
    np.testing.assert_allclose(detectors.mahalanobis(train, classes, x), expected, 1e-6)


@pytest.mark.parametrize("known, unseen, auroc, fpr, f1", [
    ([3, 4, 5], [0, 1], 100, 0, 100), ([0, 1], [3, 4, 5], 0, 100, 0), ([1, 1], [1, 1], 50, 100, 0),
    # 2 of 40 known rows may be rejected, so the threshold is 3; unseen rows below it are detected
    ([*range(1, 41)], [0.5, 2.5, 3, 20], 100 * (40 + 38 + 37.5 + 20.5) / 160, 50, 100 * 4 / (4 + 2 + 2))])
def test_ood_metrics(known, unseen, auroc, fpr, f1):
    found = detectors.ood_metrics(np.array(known, float)[::-1], np.array(unseen, float))
    assert found == pytest.approx({"AUROC": auroc, "FPR95": fpr, "F1": f1})


@pytest.fixture
def scikit_learn(monkeypatch):
    """Return a spy of scikit-learn's class of local outlier factors. If scikit-learn is not installed, the
    class likes short vectors."""
    if importlib.util.find_spec("sklearn"):
        from sklearn.neighbors import LocalOutlierFactor
        factor = Mock(wraps=LocalOutlierFactor)
    else:
        factor = Mock()
        factor.return_value.fit.return_value.score_samples = lambda x: -np.square(x).sum(1)
        monkeypatch.setitem(sys.modules, "sklearn", Mock())
    monkeypatch.setitem(sys.modules, "sklearn.neighbors", Mock(LocalOutlierFactor=factor))
    return factor


def test_detectors(scikit_learn):
    """Texts of known classes have higher scores in each of three detectors."""
    train, labels = numbers(30, 4), torch.arange(30) % 3
    known, unseen = (5 * F.one_hot(labels), train), (torch.ones(5, 3), 9 + train[:5])
    found = detectors.detector_scores(known, unseen, (None, train), labels)
    assert [*found] == ["maximum softmax", "local outlier factor", "Mahalanobis"]
    assert all((scores["AUROC"], scores["FPR95"]) == (100, 0) for scores in found.values())
    scikit_learn.assert_called_with(n_neighbors=20, novelty=True)              # released code


# ── runs ──


def test_two_stages_and_detection(tmp_path, monkeypatch, capsys, scikit_learn):
    """An epoch of the contrastive loss and then the steps of the task share a schedule. Detectors score the
    texts of --dev and of unseen topics; --evaluate prints these scores again."""
    rows = [line.split("\t") for line in (DATA / "topics.tsv").read_text().splitlines()[1:]]
    known = ["\t".join(row) for row in rows if row[1] != "music"]
    unseen = [row[0] for row in rows if row[1] == "music"]
    head, files = "sentence\tlabel", {name: tmp_path / f"{name}.tsv" for name in ("data", "dev", "ood")}
    for file, part in zip(files.values(), ([head, *known[:36]], [head, *known[:30]], unseen[:20])):
        file.write_text("\n".join(part))
    stages = {name: Mock(wraps=getattr(finetune, name))
              for name in ("compute_ood_loss", "compute_loss", "detector_scores")}
    for name, stage in stages.items():
        monkeypatch.setattr(finetune, name, stage)
    flags = [str(word) for name, file in files.items() for word in (f"--{name}", file)]
    result = run("finetune", tmp_path / "out", "--model", "scratch", *flags, "--ood-epochs", 1, "--steps", 3,
                 "--warmup-ratio", 0.5, "--batch-size", 8)
    assert [stage.call_count for stage in stages.values()] == [5, 3, 1]
    rates = [2e-3 * x for x in (0, 0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25)]
    assert [step["lr"] for step in result.steps] == pytest.approx(rates)
    *parts, labels = stages["detector_scores"].call_args[0]
    assert [len(features) for _, features in parts] == [30, 20, 36] and len(labels) == 36
    found = [f"ood      {name}: {finetune.describe_scores(x)}" for name, x in result.steps[-1]["ood"].items()]
    capsys.readouterr()
    finetune.main(["--evaluate", *flags, "--model", str(tmp_path / "out")])
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("ood ")] == found


def test_contrast_set(tmp_path, bert, capsys):
    """A training run and --evaluate agree with transformers' pipeline. The labels are its answers, except for
    every fourth original and every fifth edited text: 40 % are wrong in at least one of the copies."""
    flags = ["--data", DATA / "topics.tsv", "--model", bert, "--steps", 20, "--lr", 1e-3,
             "--batch-size", 8]
    run("finetune", tmp_path / "out", *flags)
    topics = [line.split("\t") for line in (DATA / "topics_dev.tsv").read_text().splitlines()[1:41]]
    ask, labels = pipeline("text-classification", str(tmp_path / "out")), sorted({row[1] for row in topics})
    answers = [ask(text)[0]["label"] for text, _ in topics]
    assert len(set(answers)) > 1
    sets = []
    for wrong in (4, 5):
        sets.append(tmp_path / f"{wrong}.tsv")
        given = [labels[labels.index(x) - 1] if i % wrong == 0 else x for i, x in enumerate(answers)]
        rows = [f"{text}\t{label}" for (text, _), label in zip(topics, given)]
        sets[-1].write_text("\n".join(["sentence\tlabel", *rows]))
    wanted = f"original 75.00, edited 80.00, consistency 60.00  {sets[0]} {sets[1]}"
    found = run("finetune", tmp_path / "again", *flags, "--contrast-set", *sets)
    assert found.said["test"] == wanted
    assert metrics(tmp_path / "again")[-1]["contrast"] == dict(original=75, edited=80, consistency=60)
    finetune.main(["--evaluate", "--model", str(tmp_path / "out"), "--contrast-set", *map(str, sets)])
    assert capsys.readouterr().out.splitlines()[-1] == f"test     {wanted}"


def test_columns_of_an_ood_file(tmp_path, scikit_learn):
    """The text columns are found by name; without a header, they are all columns if the number is right."""
    file = tmp_path / "a.csv"
    args = SimpleNamespace(ood=file, dev="dev.tsv", data="a.tsv", text_columns=["premise", "hypothesis"])
    for content, texts in ("label,Hypothesis,premise\n,A,B\n", ("B", "A")), ("A,B\n", ("A", "B")):
        file.write_text(content)
        assert finetune.load_unseen(args) == [(texts, 0)]
    file.write_text("text,label\nA,x\n")
    with pytest.raises(UserError, match="columns text, label; expected those of a.tsv, premise, hypothesis"):
        finetune.load_unseen(args)


def test_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(UserError, match="^--ood needs the package scikit-learn; run pip install .*"):
        finetune.load_unseen(SimpleNamespace(ood="a.csv", dev="dev.tsv", data="a.tsv"))
