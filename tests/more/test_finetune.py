"""finetune.py: losses, adversarial views and detectors against their definitions, and small runs."""
import functools
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
from finetune import adversarial_views, ood_contrastive_loss
from kernels.training.errors import UserError
from running import DATA, metrics, rejects, run, run_distributed
from whole_runs import check_resume

tune = functools.partial(run, "finetune")


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("form", ["paper", "code"])
@pytest.mark.parametrize("classes", [[0, 5, 0, 0, 5, 7], [1] * 4, [0, 1, 2], [9]])
def test_ood_contrastive_loss(classes, form):
    """It is right for single texts and classes, too, and if e^{1/τ} overflows in float32."""
    leaves, labels = [draw(len(classes), 5, seed=i).requires_grad_() for i in (1, 2)], torch.tensor(classes)
    results = []
    for loss in (ood_contrastive_loss, formulas.ood_contrastive_loss):
        value = loss(*leaves, labels, 0.2, form)
        results.append((value, *torch.autograd.grad(value, leaves)))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-10)
    single, double = (ood_contrastive_loss(*(x.to(dtype) for x in leaves), labels, 0.004, form)
                      for dtype in (torch.float32, torch.float64))
    assert single.item() == pytest.approx(double.item(), rel=1e-5, abs=1e-4)


@pytest.mark.parametrize("form", ["paper", "code"])
def test_loss_of_two_passes(form, monkeypatch):
    """R-Drop and SCL together: SCL sees the passes as views of the texts."""
    logits, z, labels = draw(2, 3, 3), draw(2, 3, 4, seed=1), torch.tensor([0, 1, 1])
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
    batch = dict(input_ids=ids, attention_mask=mask), classes
    args = Mock(adversarial=0.5, temperature=None, form="code")
    found, logged = finetune.compute_ood_loss(model, batch, 3, args)
    assert found.item() == pytest.approx(expected.item(), rel=1e-4) and logged["loss"] == found
    weights = [w for name, w in model.named_parameters() if "classifier" not in name]
    results = [torch.autograd.grad(value, weights, retain_graph=True) for value in (found, expected)]
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)                 # features are float32
    assert torch.autograd.grad(found, model.classifier.weight)[0].eq(0).all() and not words._forward_hooks


SHAPE = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=30, pad_token_id=0)
FAMILIES = dict(distilbert={}, gpt2={}, electra=dict(embedding_size=8), xlnet=dict(d_head=8),
                qwen2=dict(num_key_value_heads=2, intermediate_size=16), canine={},
                t5=dict(d_kv=8, d_ff=16, eos_token_id=3, decoder_start_token_id=0))


@pytest.mark.parametrize("family", FAMILIES)
def test_adversarial_views_of_other_models(family):
    """The noise changes the features. T5, XLNet and CANINE embed words differently."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SHAPE, **FAMILIES[family], num_labels=3)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    model.bf16, ids = False, torch.tensor([[5, 6, 7, 3], [8, 3, 0, 0]])
    arguments = model, dict(input_ids=ids, attention_mask=(ids > 0).long()), torch.tensor([0, 2]), 0.5
    if family in ("t5", "xlnet", "canine"):
        with pytest.raises(UserError, match=r"^(T5|XLNet|Canine)ForSequenceClassification .* BERT$"):
            adversarial_views(*arguments)
    else:
        _, z, z_adv = adversarial_views(*arguments)
        assert (z - z_adv).abs().amax(1).gt(1e-4).all()


@pytest.mark.parametrize("last", [1.0, 0.0])
def test_mahalanobis(last):
    """It equals the definition with a pseudo-inverse, also if Σ has no inverse, and for a class of one."""
    scale = torch.tensor([1.0, 1, 1, last], dtype=torch.float64)
    train, classes = draw(30, 4) * scale, torch.tensor([*range(3)] * 9 + [4, 4, 8])
    x = torch.cat([draw(6, 4, seed=1) * scale, 3 * draw(6, 4, seed=2) * scale, train[:2]])
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
    return ["--batch-size", 8, *data, "--ood", folder / "unseen.txt"]


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


def test_two_stages(tmp_path, monkeypatch):
    """An epoch of the contrastive loss and then the steps of the task share a schedule. --resume is exact."""
    flags = [*files(tmp_path)[:4], "--model", "scratch", "--ood-epochs", 1, "--steps", 3, "--form", "code"]
    flags += ["--warmup-ratio", 0.5, "--lr", 1e-3, "--supcon-weight", 0.5, "--rdrop-weight", 0.5]
    stages = {name: Mock(wraps=getattr(finetune, name)) for name in ("compute_ood_loss", "compute_loss")}
    for name, stage in stages.items():
        monkeypatch.setattr(finetune, name, stage)
    dev = ["--dev", tmp_path / "dev.tsv", "--eval-every", 3]
    whole = check_resume("finetune", tmp_path, [*flags, *dev], flags, 4, [3, 0])
    assert [stage.call_count for stage in stages.values()] == [5 + 7 + 5, 9]   # two are repeated
    rates = [1e-3 * x for x in (0, 0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25)]
    assert [step["lr"] for step in whole.steps] == pytest.approx(rates)


def test_several_processes_equal_one(tmp_path, bert):
    """Two processes, each with a part of the global batch, have the losses and gradients of one, in both
    stages."""
    flags = [*files(tmp_path)[:6], "--model", bert, "--ood-epochs", 1, "--supcon-weight", 0.5, "--steps", 3]
    flags += ["--lr", 1e-3, "--rdrop-weight", 0.5, "--form", "code"]
    one = tune(tmp_path / "one", *flags)
    norms = run_distributed(2, "finetune", tmp_path / "two", flags)
    assert [step["loss"] for step in metrics(tmp_path / "two")] == pytest.approx(one.losses, rel=1e-3)
    assert norms == pytest.approx(one.norms, rel=1e-2) and len(set(one.losses)) == 8


def test_training_improves_the_scores(tmp_path, capsys):
    """A new model, trained on six topics, knows them, and detects the other two. --evaluate prints the final
    scores again."""
    flags = [*files(tmp_path, 200)[:6], "--model", "scratch", "--epochs", 5]
    found = tune(tmp_path / "plain", *flags, "--rdrop-weight", 0.3, "--supcon-weight", 0.1)
    assert found.steps[-1]["dev_accuracy"] > 60
    pytest.importorskip("sklearn.neighbors")
    flags += files(tmp_path, 200)[6:]
    for name, more in ("ood", []), ("stages", ["--ood-epochs", 1]):
        found = tune(tmp_path / name, *flags, *more).steps[-1]["ood"]
        assert [*found] == ["maximum softmax", "local outlier factor", "Mahalanobis"]
        assert all(60 < scores["AUROC"] <= 100 for scores in found.values()), found
    lines = [f"ood      {name}: {finetune.describe_scores(scores)}" for name, scores in found.items()]
    capsys.readouterr()
    finetune.main(["--evaluate", *map(str, flags), "--model", str(tmp_path / "stages")])
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("ood ")] == lines


def test_contrast_set(tmp_path, capsys):
    """Both accuracies and the consistency agree with transformers' pipeline on single texts. --evaluate
    prints the same scores. The model starts from an encoder of cline.py. Every fourth original and every
    fifth edited label is wrong."""
    flags = ["--data", DATA / "sentences.txt", "--wordnet", DATA / "wordnet", "--batch-size", 8]
    run("cline", tmp_path / "cline", *flags, "--model", "scratch", "--steps", 1)
    texts, labels = zip(*(x.split("\t") for x in (DATA / "topics_dev.tsv").read_text().splitlines()[1:41]))
    files = [tmp_path / "original.tsv", tmp_path / "edited.tsv"]
    columns = [[labels[i - 1] if i % wrong == 0 else labels[i] for i in range(40)] for wrong in (4, 5)]
    for file, column in zip(files, columns):
        rows = ["\t".join(row) for row in zip(texts, column)]
        file.write_text("\n".join(["sentence\tlabel", *rows]))
    flags = ["--data", DATA / "topics.tsv", "--contrast-set", *files, "--model", tmp_path / "cline"]
    flags += ["--epochs", 8, "--lr", 2e-3]
    result, ask = tune(tmp_path / "out", *flags), pipeline("text-classification", str(tmp_path / "out"))
    predicted = np.array([ask(text)[0]["label"] for text in texts])
    right = predicted == np.array(columns)
    original, edited, consistency = 100 * np.array([*right.mean(1), right.all(0).mean()])
    wanted = f"original {original:.2f}, edited {edited:.2f}, consistency {consistency:.2f}"
    wanted = f"{wanted}  {' '.join(map(str, files))}"
    assert 0 < consistency < min(original, edited) and result.said["test"] == wanted
    assert [*result.steps[-1]["contrast"].values()] == pytest.approx([original, edited, consistency])
    finetune.main(["--evaluate", "--model", str(tmp_path / "out"), "--contrast-set", *map(str, files)])
    assert capsys.readouterr().out.splitlines()[-1] == f"test     {wanted}"


GOOD = "sentence\tlabel\nI ran.\tmotion\nI sat.\trest\nHe ran.\tmotion\nHe sat.\trest\n"
NUMBERS = "sentence\tlabel\nI ran.\t1.5\nI sat.\t2\nHe ran.\t3\n"


@pytest.mark.parametrize("content, flags, expected", [
    (GOOD, "--ood b.txt", r"--ood b\.txt: expected training texts in --data, and .* in --dev"),
    (NUMBERS, "--ood b.txt --dev a.tsv", r".*--ood.*: the task is regression, expected classification"),
    (NUMBERS, "--contrast-set a.tsv a.tsv", r".*--contrast-set: the task is regression, .*"),
    (GOOD, "--ood d.tsv --dev a.tsv", r"d\.tsv: columns text, label; expected those of a\.tsv, sentence"),
    (GOOD, "--ood e.tsv --dev a.tsv", r"e\.tsv line 3: an empty cell; .*"),
    (GOOD, "--supcon-weight 1.5", r"argument --supcon-weight: 1\.5: expected a number from 0 to 1"),
    (GOOD, "--contrast-set a.tsv f.tsv", "--contrast-set a.tsv f.tsv: 4 and 1 rows; expected .*"),
    (GOOD, "--contrast-set a.tsv g.tsv", r"g\.tsv line 2: label 'sleep', expected one of the labels .*")])
def test_bad_input(tmp_path, monkeypatch, capfd, scikit_learn, content, flags, expected):
    monkeypatch.chdir(tmp_path)
    for name, text in {"a.tsv": content, "b.txt": "It rains.\n", "d.tsv": "text\tlabel\nA\tx\n",
                       "e.tsv": "label\tsentence\nx\tA\nx\t \n", "f.tsv": "sentence\tlabel\nA\tmotion\n",
                       "g.tsv": "sentence\tlabel\nA\tsleep\n"}.items():
        Path(name).write_text(text)
    rejects("finetune", capfd, expected, *f"--data a.tsv --model scratch --batch-size 2 {flags}".split())


def test_without_scikit_learn(tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    rejects("finetune", capfd, "--ood needs the package scikit-learn; run pip install scikit-learn",
            *files(tmp_path), "--model", "scratch")
