"""finetune.py: losses and adversarial views of a batch, detectors, and contrast sets by their definitions."""
import sys
from pathlib import Path
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
from running import DATA, metrics, rejects, run

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


SHAPE = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=30, pad_token_id=0)
FAMILIES = dict(distilbert={}, gpt2={}, xlnet=dict(d_head=8),
                t5=dict(d_kv=8, d_ff=16, eos_token_id=3, decoder_start_token_id=0))


@pytest.mark.parametrize("family", FAMILIES)
def test_adversarial_views_of_other_models(family):
    """The noise changes the features. T5 and XLNet, which embed words differently, are refused."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SHAPE, **FAMILIES[family], num_labels=3)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    model.bf16, ids = False, torch.tensor([[5, 6, 7, 3], [8, 3, 0, 0]])
    arguments = model, dict(input_ids=ids, attention_mask=(ids > 0).long()), torch.tensor([0, 2]), 0.5
    if family in ("t5", "xlnet"):
        with pytest.raises(UserError, match=r"^(T5|XLNet)ForSequenceClassification .* BERT$"):
            finetune.adversarial_views(*arguments)
    else:
        _, z, z_adv = finetune.adversarial_views(*arguments)
        assert (z - z_adv).abs().amax(1).gt(1e-4).all()


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


# ── runs ──


def files(folder, size=36):
    """Write `size` rows of six topics for training and 30 for --dev, and texts of the other two for --ood.
    Return flags that name the files, --ood last."""
    rows = [line.split("\t") for line in (DATA / "topics.tsv").read_text().splitlines()[1:]]
    known = ["\t".join(row) for row in rows if row[1] not in ("music", "weather")]
    for name, part in (("train", known[:size]), ("dev", known[size : size + 30])):
        (folder / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *part]) + "\n")
    unseen = [row[0] for row in rows if row[1] in ("music", "weather")]
    (folder / "unseen.txt").write_text("\n".join(unseen) + "\n")
    data = ["--data", folder / "train.tsv", "--dev", folder / "dev.tsv"]
    return ["--model", "scratch", "--batch-size", 8, *data, "--ood", folder / "unseen.txt"]


def test_two_stages(tmp_path, monkeypatch):
    """An epoch of the contrastive loss and then the steps of the task share a schedule."""
    stages = {name: Mock(wraps=getattr(finetune, name)) for name in ("compute_ood_loss", "compute_loss")}
    for name, stage in stages.items():
        monkeypatch.setattr(finetune, name, stage)
    found = run("finetune", tmp_path / "out", *files(tmp_path)[:6], "--ood-epochs", 1, "--steps", 3,
                "--warmup-ratio", 0.5, "--lr", 1e-3)
    assert [stage.call_count for stage in stages.values()] == [5, 3]
    rates = [1e-3 * x for x in (0, 0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25)]
    assert [step["lr"] for step in found.steps] == pytest.approx(rates)


def test_detection_of_unseen_topics(tmp_path, capsys):
    """A new model, trained on six topics, detects the other two. --evaluate prints the final scores again."""
    pytest.importorskip("sklearn.neighbors")
    flags = files(tmp_path, 200)
    found = run("finetune", tmp_path / "out", *flags, "--epochs", 5, "--ood-epochs", 1).steps[-1]["ood"]
    assert [*found] == ["maximum softmax", "local outlier factor", "Mahalanobis"]
    assert all(60 < scores["AUROC"] <= 100 for scores in found.values()), found
    lines = [f"ood      {name}: {finetune.describe_scores(scores)}" for name, scores in found.items()]
    capsys.readouterr()
    finetune.main(["--evaluate", *map(str, flags[2:]), "--model", str(tmp_path / "out")])
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("ood ")] == lines


def test_contrast_set(tmp_path, bert, capsys):
    """A training run and --evaluate agree with transformers' pipeline. The labels are its answers, except for
    every fourth original and every fifth edited text: 40 % are wrong in at least one of the copies."""
    flags = ["--data", DATA / "topics.tsv", "--model", bert, "--steps", 30, "--lr", 1e-3]
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


# ── bad input ──


@pytest.fixture
def scikit_learn(monkeypatch):
    """Pretend that scikit-learn is installed."""
    for name in ("sklearn", "sklearn.neighbors"):
        monkeypatch.setitem(sys.modules, name, Mock())


def test_columns_of_an_ood_file(tmp_path, scikit_learn):
    """The text columns are found by name; without a header, they are all columns if the number is right."""
    file, args = tmp_path / "a.csv", dict(ood=tmp_path / "a.csv", dev="dev.tsv", data="a.tsv")
    for content, texts in ("label,Hypothesis,premise\n,A,B\n", ("B", "A")), ("A,B\n", ("A", "B")):
        file.write_text(content)
        args["text_columns"] = ["premise", "hypothesis"]
        assert finetune.load_unseen(SimpleNamespace(**args)) == [(texts, 0)]


GOOD = "sentence\tlabel\nI ran.\tmotion\nI sat.\trest\nHe ran.\tmotion\nHe sat.\trest\n"
NUMBERS = "sentence\tlabel\nI ran.\t1.5\nI sat.\t2\nHe ran.\t3\n"


@pytest.mark.parametrize("content, flags, expected", [
    (GOOD, "--ood b.txt", r"--ood b\.txt: expected training texts in --data, and .* in --dev"),
    (NUMBERS, "--ood b.txt --dev a.tsv", r".*--ood.*: the task is regression, expected classification"),
    (GOOD, "--ood d.tsv --dev a.tsv", r"d\.tsv: columns text, label; expected those of a\.tsv, sentence"),
    (GOOD, "--contrast-set a.tsv f.tsv", "--contrast-set a.tsv f.tsv: 4 and 1 rows; expected .*")])
def test_mistakes(tmp_path, monkeypatch, capfd, scikit_learn, content, flags, expected):
    monkeypatch.chdir(tmp_path)
    for name, text in {"a.tsv": content, "b.txt": "It rains.\n", "d.tsv": "text\tlabel\nA\tx\n",
                       "f.tsv": "sentence\tlabel\nA\tmotion\n"}.items():
        Path(name).write_text(text)
    rejects("finetune", capfd, expected, *f"--data a.tsv --model scratch --batch-size 2 {flags}".split())


def test_without_scikit_learn(tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    rejects("finetune", capfd, "--ood needs the package scikit-learn; run pip install scikit-learn",
            *files(tmp_path))
