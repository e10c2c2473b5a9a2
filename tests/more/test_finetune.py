"""Test finetune.py and ood.py: losses, adversarial views, detectors, and two stages."""
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification

import finetune
import loss_formulas as formulas
import ood
from kernels.training.errors import UserError
from loss_check import numbers
from running import DATA, run


@pytest.mark.parametrize("form", ["paper", "code"])
def test_loss_of_two_passes(form, monkeypatch):
    """The loss has R-Drop and SCL (supervised contrastive loss), whose views are the two passes."""
    logits, z, labels = numbers(2, 3, 3), numbers(2, 3, 4, seed=1), torch.tensor([0, 1, 1])
    monkeypatch.setattr(finetune, "classify_with_features", Mock(side_effect=zip(logits, z)))
    args = SimpleNamespace(rdrop_weight=0.7, supcon_weight=0.2, form=form, temperature=0.3)
    found, _ = finetune.compute_loss(None, ({}, labels), 3, args)
    supcon = formulas.supcon_loss(z.transpose(0, 1), labels, 0.3)
    torch.testing.assert_close(found, 0.8 * formulas.rdrop_loss(*logits, labels, 0.7, form) + 0.2 * supcon)
    assert finetune.supcon_loss(z[:1].transpose(0, 1), torch.arange(3)) == 0   # no text has a positive


def test_adversarial_view(bert):
    """compute_ood_loss compares clean features with features of moved word embeddings. The move is along the
    gradient of the summed cross entropy, and is detached. The classifier gets a gradient of zeros."""
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
    args = Mock(adversarial=0.5, temperature=0.1, form="code")
    batch = dict(input_ids=ids, attention_mask=mask), classes
    found, _ = ood.compute_ood_loss(model, batch, 3, args)
    assert found.item() == pytest.approx(expected.item(), rel=1e-4)
    weights = [w for name, w in model.named_parameters() if "classifier" not in name]
    results = [torch.autograd.grad(value, weights, retain_graph=True) for value in (found, expected)]
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)                 # the features are float32
    assert torch.autograd.grad(found, model.classifier.weight)[0].eq(0).all() and not words._forward_hooks


def test_mahalanobis():
    """Scores equal the definition with a pseudo-inverse, as Σ is singular. One class has one text."""
    scale = torch.tensor([1.0, 1, 1, 0], dtype=torch.float64)
    train, classes = numbers(30, 4) * scale, torch.tensor([*range(3)] * 9 + [4, 4, 8])
    x = torch.cat([numbers(6, 4, seed=1) * scale, 3 * numbers(6, 4, seed=2) * scale, train[:2]])
    means = {c: train[classes == c].mean(0) for c in classes.tolist()}
    apart = torch.stack([z - means[c] for z, c in zip(train, classes.tolist())]).numpy()
    inverse = np.linalg.pinv(apart.T @ apart / 30, hermitian=True)
    expected = [-min((z - mean).numpy() @ inverse @ (z - mean).numpy() for mean in means.values()) for z in x]
    np.testing.assert_allclose(ood.mahalanobis(*map(np.asarray, (train, classes, x))), expected, 1e-6)


def test_ood_metrics():
    """The threshold is 3: 2 of 40 known texts (5 %) score lower. Unseen texts below 3 are detected."""
    pytest.importorskip("sklearn")
    found = ood.ood_metrics(np.arange(40.0, 0, -1), np.array([0.5, 2.5, 3, 20]))
    auroc = 100 * (40 + 38 + 37.5 + 20.5) / 160
    assert found == pytest.approx({"AUROC": auroc, "FPR95": 50, "F1": 100 * 4 / (4 + 2 + 2)})


def test_detectors(monkeypatch):
    """Each detector gives the texts of known classes higher scores than the unseen texts. LOF compares with
    20 neighbours (released code)."""
    neighbors = pytest.importorskip("sklearn.neighbors")
    factor = Mock(wraps=neighbors.LocalOutlierFactor)
    monkeypatch.setattr(neighbors, "LocalOutlierFactor", factor)
    train, labels = numbers(30, 4), torch.arange(30) % 3
    known = ood.detector_scores(5 * F.one_hot(labels), train, train, labels)
    unseen = ood.detector_scores(torch.ones(5, 3), 9 + train[:5], train, labels)
    assert [*known] == ["maximum softmax", "local outlier factor", "Mahalanobis"]
    assert all(known[name].min() > unseen[name].max() for name in known)
    factor.assert_called_with(n_neighbors=20, novelty=True)


def test_unseen_texts_have_the_text_columns_of_data(tmp_path):
    """With a header, these columns are found by name; without, the file has only these columns."""
    pytest.importorskip("sklearn")
    for name, text in ("a", "A.\nB.\n"), ("b", "id,sentence\n1,A.\n2,B.\n"), ("c", "A.,x.\nB.,y.\n"):
        (tmp_path / f"{name}.csv").write_text(text)
    for name, columns in ("a", None), ("a", ["sentence", "label"]), ("b", ["sentence", "label"]):
        args = SimpleNamespace(data="d", dev="d", ood=tmp_path / f"{name}.csv", columns=columns, widths=[2])
        assert ood.load_unseen(args) == [(("A.",), 0), (("B.",), 0)]
    args.ood = tmp_path / "c.csv"
    with pytest.raises(UserError, match="2 columns, expected 1, the texts per row"):
        ood.load_unseen(args)


def test_two_stages_and_detection(tmp_path, monkeypatch):
    """The epoch of the contrastive loss and the later steps of the task have one learning-rate schedule."""
    pytest.importorskip("sklearn")
    detector = Mock(side_effect=lambda logits, *_: {"first logit": logits[:, 0].numpy()})
    stages = [Mock(wraps=ood.compute_ood_loss), Mock(wraps=ood.compute_loss), detector]
    for name, stage in zip(("compute_ood_loss", "compute_loss", "detector_scores"), stages):
        monkeypatch.setattr(ood, name, stage)
    flags = ["--data", DATA / "topics.tsv", "--dev", DATA / "topics_dev.tsv", "--ood", DATA / "sentences.txt"]
    result = run("ood", tmp_path / "out", "--model", "scratch", *flags, "--ood-epochs", 1, "--steps", 3,
                 "--batch-size", 64)
    assert [stage.call_count for stage in stages] == [5, 3, 2]
    rates = [2e-3 * left / 7 for left in (0, 7, 6, 5, 4, 3, 2, 1)]             # the first step is the warm-up
    assert [step["lr"] for step in result.steps] == pytest.approx(rates)
    lengths = [[*map(len, call.args)] for call in detector.call_args_list]
    assert lengths == [[120, 120, 320, 320], [600, 600, 320, 320]] and result.steps[-1]["ood"]["first logit"]
