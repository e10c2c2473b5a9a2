"""Texts of unseen classes: losses and detectors compared with their definitions, and small runs."""
import functools
import math
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForSequenceClassification, BertForSequenceClassification

import childtuning
from childtuning import ood_contrastive_loss
from kernels.training.errors import UserError
from kernels.training.extras import classifier_losses, ood, trials
from kernels.training.extras.adversarial import adversarial_noise, adversarial_views, patched_word_embeddings
from kernels.training.extras.classifier_losses import classify_with_features
from kernels.training.text import classifier
from running import DATA, equal, metrics, rejects, run, run_distributed

tune = functools.partial(run, "childtuning")


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reference_loss(z, z_adv, classes, t, form):
    """Zeng et al.'s loss, of the paper or the released code, term by term, for unit rows."""
    if form == "paper":
        rows, classes, total = [*z, *z_adv], classes * 2, 0
        for i, u in enumerate(rows):
            others = [j for j in range(len(rows)) if j != i]
            norm = sum((u @ rows[j] / t).exp() for j in others)
            near = [j for j in others if classes[j] == classes[i]]
            total -= sum(((u @ rows[j] / t).exp() / norm).log() for j in near) / len(near)
        return total / len(rows)
    total = 0
    for one, other in ((z, z_adv), (z_adv, z)):
        for i, u in enumerate(one):
            norm = sum((u @ x / t).exp() + (u @ y / t).exp() for x, y in zip(one, other)) - math.exp(1 / t)
            near = [j for j in range(len(one)) if classes[j] == classes[i]]
            total -= sum(((((u @ one[j] / t).exp() if j != i else 0) + (u @ other[j] / t).exp()) / norm).log()
                         for j in near) / len(near)
    return total / len(z)


@pytest.mark.parametrize("form", ["paper", "code"])
@pytest.mark.parametrize("classes", [[0, 5, 0, 0, 5, 7], [1] * 4, [0, 1, 2], [9]])
def test_contrastive_loss(classes, form):
    """The value and the gradients of both views are right, also if e^{1/τ} overflows in float32."""
    leaves = [draw(len(classes), 5, seed=seed).requires_grad_() for seed in (1, 2)]
    unit = [x / x.square().sum(1, keepdim=True).sqrt() for x in leaves]
    values = (ood_contrastive_loss(*leaves, torch.tensor(classes), 0.2, form),
              reference_loss(*unit, classes, 0.2, form))
    results = [(value, *torch.autograd.grad(value, leaves)) for value in values]
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-10)
    single, double = (ood_contrastive_loss(*(x.to(dtype) for x in leaves), torch.tensor(classes), 0.004, form)
                      for dtype in (torch.float32, torch.float64))
    assert single.item() == pytest.approx(double.item(), rel=1e-5, abs=1e-4)


def test_invalid_arguments():
    good = dict(z=draw(3, 2), z_adv=draw(3, 2), labels=torch.tensor([0, 1, 1]))
    for name, wrong in (("z", dict(z=draw(3))), ("z_adv", dict(z_adv=draw(2, 2))), ("form", dict(form="old")),
                        ("labels", dict(labels=draw(3))), ("temperature", dict(temperature=0.0)),
                        ("temperature", dict(temperature=math.nan, form="code"))):
        with pytest.raises(ValueError, match=f"^{name}: .*expected"):
            ood_contrastive_loss(**good | wrong)
    good = dict(gradient=draw(2, 3, 4), mask=torch.ones(2, 3, dtype=torch.int64), size=1.0)
    for wrong in (dict(gradient=draw(2, 3)), dict(mask=torch.ones(2, 4, dtype=torch.int64))):
        with pytest.raises(ValueError, match=f"^{min(wrong)}: .*expected"):
            adversarial_noise(**good | wrong)


def test_adversarial_noise():
    """All tokens move by the same length, even if their gradients differ in length. Padding and tokens with a
    zero gradient do not move."""
    gradient = draw(2, 3, 4) * torch.tensor([1e-6, 1, 1e6], dtype=torch.float64)[:, None]
    gradient[1, 0] = 0
    step = adversarial_noise(gradient, torch.tensor([[1, 1, 0], [1, 1, 1]]), 0.3)
    lengths = torch.tensor([[0.3, 0.3, 0], [0, 0.3, 0.3]], dtype=torch.float64)
    torch.testing.assert_close(step.norm(dim=2), lengths)
    torch.testing.assert_close(step * gradient.norm(dim=2, keepdim=True), gradient * lengths[:, :, None])
    assert adversarial_noise(gradient.half(), torch.ones(2, 3, dtype=torch.int64), 1).dtype == torch.float32


def test_adversarial_view(bert):
    """compute_ood_loss compares the clean features with those after a step of the word embeddings along the
    gradient of the summed cross entropy. The noise is detached, and the head gets a gradient of zeros."""
    model = BertForSequenceClassification.from_pretrained(bert, num_labels=3).double().train()
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
    views = (F.normalize(features(x)) for x in (words(ids), moved))
    expected = reference_loss(*views, classes.tolist(), 0.1, "code")
    args = Mock(adversarial=0.5, temperature=None, form="code")
    batch = dict(input_ids=ids, attention_mask=mask), classes
    found, logged = childtuning.compute_ood_loss(model, batch, 3, args)
    assert found.item() == pytest.approx(expected.item(), rel=1e-4) and logged["loss"] == found
    weights = [w for name, w in model.named_parameters() if "classifier" not in name]
    results = [torch.autograd.grad(value, weights, retain_graph=True) for value in (found, expected)]
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)                 # features are float32
    assert torch.autograd.grad(found, model.classifier.weight)[0].eq(0).all() and not words._forward_hooks


def test_patched_word_embeddings():
    """The hook is removed after an error. UserError unless the embeddings are called once, for all tokens."""
    words, x, mask = torch.nn.Identity(), torch.ones(2, 3, 1), torch.ones(2, 3)
    model = SimpleNamespace(get_input_embeddings=lambda: words)
    for change in (lambda x: x + 1, lambda x: 2 * x):
        with pytest.raises(KeyError), patched_word_embeddings(model, mask, change):
            assert torch.equal(words(x), change(x))
            raise KeyError
        assert words(x) is x
    message = "does not embed the words of a batch in one call"
    for outputs in ([], [x, x], [x[:, :2]], [(x, x)]):
        with pytest.raises(UserError, match=message), patched_word_embeddings(model, mask, lambda x: x):
            for out in outputs:
                words(out)
    model.get_input_embeddings = Mock(side_effect=NotImplementedError)
    with pytest.raises(UserError, match=message), patched_word_embeddings(model, mask, lambda x: x):
        pass


SHAPE = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=30, pad_token_id=0)
FAMILIES = dict(distilbert={}, gpt2={}, electra=dict(embedding_size=8), xlnet=dict(d_head=8),
             qwen2=dict(num_key_value_heads=2, intermediate_size=16),
             t5=dict(d_kv=8, d_ff=16, eos_token_id=3, decoder_start_token_id=0))


@pytest.mark.parametrize("family", FAMILIES)
def test_adversarial_views_of_other_models(family):
    """The noise changes the features. UserError for T5 and XLNet, which embed words differently."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SHAPE, **FAMILIES[family], num_labels=3)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    model.bf16, ids = False, torch.tensor([[5, 6, 7, 3], [8, 3, 0, 0]])
    inputs = dict(input_ids=ids, attention_mask=(ids > 0).long())
    views = functools.partial(adversarial_views, model, lambda: classify_with_features(model, inputs),
                              inputs["attention_mask"], 0.5, lambda found: found[0].sum())
    if family in ("t5", "xlnet"):
        with pytest.raises(UserError, match="^(T5|XLNet)ForSequenceClassification does not embed .* BERT$"):
            views()
    else:
        clean, adversarial = views()
        logits, z = clean
        logits_adv, z_adv = adversarial
        assert (z - z_adv).abs().amax(1).gt(1e-4).all() and (logits_adv - logits).sum() > 0


@pytest.mark.parametrize("block", [2**24, 100])
def test_detectors(block, monkeypatch):
    """All equal their definitions, written as loops, also for fewer vectors than neighbours, equal vectors,
    and a class of one vector."""
    monkeypatch.setattr(ood, "BLOCK", block)
    train, classes = draw(30, 4), torch.tensor([*range(3)] * 9 + [4, 4, 8])
    rows = torch.cat([draw(6, 4, seed=1), 3 * draw(6, 4, seed=2), train[:2]])
    for k, part in ((20, train), (3, train), (20, train[:5])):
        point, n = part.numpy(), min(k, len(part) - 1)

        def near(x, own=-1, point=point, n=n):
            far = [(np.linalg.norm(x - o), j) for j, o in enumerate(point) if j != own]
            return sorted(far)[:n]

        kth_distance = [near(o, j)[-1][0] for j, o in enumerate(point)]

        def density(found, kth_distance=kth_distance):
            return 1 / np.mean([max(kth_distance[j], d) for d, j in found])

        densities = [density(near(o, j)) for j, o in enumerate(point)]
        expected = [-np.mean([densities[j] for _, j in near(x)]) / density(near(x)) for x in rows.numpy()]
        np.testing.assert_allclose(ood.local_outlier_factor(part, k)(rows), expected, rtol=1e-6)
    means = {c: train[classes == c].mean(0) for c in classes.tolist()}
    apart = torch.stack([z - means[c] for z, c in zip(train, classes.tolist())])
    for last in (1.0, 0.0):                                    # 0: Σ has no inverse
        scale = torch.tensor([1.0, 1, 1, last], dtype=torch.float64)
        inverse = np.linalg.pinv(((apart * scale).T @ (apart * scale) / 30).numpy(), hermitian=True)
        expected = [-min(((x - mean) * scale).numpy() @ inverse @ ((x - mean) * scale).numpy()
                       for mean in means.values()) for x in rows]
        np.testing.assert_allclose(ood.mahalanobis(train * scale, classes)(rows * scale), expected, rtol=1e-6)
    equal_rows = torch.ones(25, 4)
    assert ood.local_outlier_factor(equal_rows)(equal_rows[:2]).tolist() == pytest.approx([-1, -1])
    assert ood.mahalanobis(equal_rows, torch.arange(25))(rows).tolist() == [0] * len(rows)
    alone = ood.local_outlier_factor(train[:1])(rows)[-2:]
    assert alone.tolist() == pytest.approx([0, -(train[1] - train[0]).norm().item()])
    logits = torch.tensor([[0.0, math.log(3)], [40, -40]])
    assert ood.maximum_softmax(logits).tolist() == pytest.approx([0.75, 1])


@pytest.mark.parametrize("known, unseen, auroc, fpr, f1", [
    ([3, 4, 5], [0, 1], 100, 0, 100), ([0, 1], [3, 4, 5], 0, 100, 0), ([1, 1], [1, 1], 50, 100, 0),
    # 2 of 40 known rows may be rejected, so the threshold is 3; unseen rows below it are detected
    ([*range(1, 41)], [0.5, 2.5, 3, 20], 100 * (40 + 38 + 37.5 + 20.5) / 160, 50, 100 * 4 / (4 + 2 + 2)),
    ([*range(1, 20)], [0.5, 1, 2], 100 * (19 + 18.5 + 17.5) / 57, 100 * 2 / 3, 50)])
def test_ood_metrics(known, unseen, auroc, fpr, f1):
    found = ood.ood_metrics(np.array(known, float)[::-1], np.array(unseen, float))
    assert found == pytest.approx({"AUROC": auroc, "FPR95": fpr, "F1": f1})


def files(folder, size=36):
    """Write topics.tsv without two of its classes, `size` rows for training and 30 for --dev, and the texts
    of these two classes for --ood. Return flags that name the files."""
    rows = [line.split("\t") for line in (DATA / "topics.tsv").read_text().splitlines()[1:]]
    known = ["\t".join(row) for row in rows if row[1] not in ("music", "weather")]
    for name, part in (("train", known[:size]), ("dev", known[size : size + 30])):
        (folder / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *part]) + "\n")
    unseen = [row[0] for row in rows if row[1] in ("music", "weather")]
    (folder / "unseen.txt").write_text("\n".join(unseen) + "\n")
    flags = ["--dev", folder / "dev.tsv", "--ood", folder / "unseen.txt", "--data", folder / "train.tsv"]
    return ["--batch-size", 8, *flags]


@pytest.mark.parametrize("name, content, text, expected", [
    ("a.tsv", "label\tSentence\n\tA\n7\tB\n", ["sentence"], [("A",), ("B",)]),
    ("a.txt", "A b.\nC d.\n", ["sentence"], [("A b.",), ("C d.",)]),
    ("a.tsv", "A\tx\nB\ty\n", ["column 1"], [("A",), ("B",)]),
    ("a.jsonl", '{"b": "B", "id": 3, "a": "A"}\n', ["a", "b"], [("A", "B")]),
    ("a.csv", '"A, b",C\nD,E\n', ["premise", "hypothesis"], [("A, b", "C"), ("D", "E")])])
def test_columns_of_an_ood_file(name, content, text, expected, tmp_path):
    """The text columns are found by name; without a header, they are all columns if the number is right.
    Labels are ignored."""
    (tmp_path / name).write_text(content)
    args = Mock(ood=tmp_path / name, dev="dev.tsv", data="a.tsv", task="classification", text_columns=text)
    assert ood.load_unseen(args) == [(texts, 0) for texts in expected]


def test_two_stages(tmp_path, monkeypatch, capsys):
    """An epoch of the contrastive loss and then the steps of the task share one schedule. --resume is exact
    in both stages. --evaluate prints the final scores of the run; without --data, those of one detector."""
    data = files(tmp_path)
    flags = [*data, "--model", "scratch", "--mode", "D", "--ood-epochs", 1, "--steps", 3, "--eval-every", 3]
    flags += ["--form", "code", "--warmup-ratio", 0.5, "--lr", 1e-3, "--fisher-samples", 6]
    with monkeypatch.context() as patch:
        counts = [Mock(wraps=getattr(childtuning, name)) for name in ("compute_ood_loss", "compute_loss")]
        patch.setattr(childtuning, "compute_ood_loss", counts[0])
        patch.setattr(childtuning, "compute_loss", counts[1])
        whole = tune(tmp_path / "whole", *flags)
    assert [count.call_count for count in counts] == [5, 3]
    rates = [1e-3 * x for x in (0, 0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25)]
    assert [step["lr"] for step in whole.steps] == pytest.approx(rates)
    found = whole.steps[-1]["ood"]
    assert [*found] == ["maximum softmax", "local outlier factor", "Mahalanobis"]
    for stop in (4, 6):
        with monkeypatch.context() as patch, pytest.raises(SystemExit, match="130"):
            interrupted = Mock(side_effect=[None] * stop + [KeyboardInterrupt])
            patch.setattr(childtuning, "all_reduce_gradients", interrupted)
            tune(tmp_path / f"{stop}", *flags)
        parts = tune(tmp_path / f"{stop}", *flags, "--resume")
        assert [x | {"seconds": 0} for x in parts.steps] == [x | {"seconds": 0} for x in whole.steps]
        assert equal(parts.state, whole.state)
    lines = [f"ood      {name}: {classifier.describe_scores(scores)}" for name, scores in found.items()]
    for more, expected in ((data[-2:], lines), ([], lines[:1])):
        capsys.readouterr()
        childtuning.main(["--evaluate", "--model", str(tmp_path / "whole"), *map(str, data[2:-2] + more)])
        out = capsys.readouterr().out.splitlines()
        assert [line for line in out if line.startswith("ood ")] == expected
        assert any(line.startswith("note     --ood: local outlier factor") for line in out) == (not more)


def test_lowest_fpr95_is_best():
    """mean_and_spread treats a lower FPR95 as better, and other scores as better if higher."""
    runs = [{"AUROC": 80.0, "FPR95": 30.0}, {"AUROC": 90.0, "FPR95": 10.0}]
    expected = "AUROC 85.00 ± 7.07, best 90.00; FPR95 20.00 ± 14.14, best 10.00"
    assert trials.mean_and_spread(runs) == expected


def test_several_processes_equal_one(tmp_path, bert):
    """Two processes, each with a part of the global batch, have the losses, gradients and scores of one, in
    both stages."""
    flags = [*files(tmp_path), "--model", bert, "--mode", "none", "--ood-epochs", 1, "--supcon-weight", 0.5]
    flags += ["--steps", 3, "--lr", 1e-3]
    one = tune(tmp_path / "one", *flags)
    norms = run_distributed(2, "childtuning", tmp_path / "two", flags)
    assert [step["loss"] for step in metrics(tmp_path / "two")] == pytest.approx(one.losses, rel=1e-3)
    assert norms == pytest.approx(one.norms, rel=1e-2) and len(set(one.losses)) == 8
    for name, scores in one.steps[-1]["ood"].items():
        assert metrics(tmp_path / "two")[-1]["ood"][name] == pytest.approx(scores, abs=2), name


def test_trained_model_detects_unseen_classes(tmp_path):
    """A new model, trained on six topics, detects the other two, with the contrastive stage and without."""
    flags = [*files(tmp_path, 200), "--model", "scratch", "--mode", "none", "--epochs", 4]
    for more in ([], ["--ood-epochs", 1]):
        found = tune(tmp_path / f"out{len(more)}", *flags, *more).steps[-1]["ood"]
        assert all(60 < scores["AUROC"] <= 100 for scores in found.values()), found


GOOD = "sentence\tlabel\nI ran.\tmotion\nI sat.\trest\nHe ran.\tmotion\nHe sat.\trest\n"
NUMBERS = "sentence\tlabel\nI ran.\t1.5\nI sat.\t2\nHe ran.\t3\n"


@pytest.mark.parametrize("content, flags, expected", [
    (GOOD, "--ood b.txt", r"--ood b\.txt: classification without --dev; expected classification, .*"),
    (NUMBERS, "--ood b.txt --dev a.tsv", r"--ood b\.txt: regression with --dev; expected classification, .*"),
    (NUMBERS, "--ood-epochs 1", "--supcon-weight and --ood-epochs: the task is regression, .*"),
    (GOOD, "--ood none.txt --dev a.tsv", r"none\.txt: No such file or directory"),
    (GOOD, "--ood c.tsv --dev a.tsv", r"c\.tsv: no rows"),
    (GOOD, "--ood d.tsv --dev a.tsv", r"d\.tsv: columns text, label; expected those of a\.tsv, sentence"),
    (GOOD, "--ood e.tsv --dev a.tsv", r"e\.tsv line 3: an empty cell; .*"),
    (GOOD, "--ood-epochs -1", "argument --ood-epochs: -1: expected a number of at least 0"),
    (GOOD, "--adversarial nan", "argument --adversarial: nan: expected a number of at least 0"),
    (GOOD, "--adversarial -0.1", "argument --adversarial: -0.1: expected a number of at least 0")])
def test_bad_input(tmp_path, monkeypatch, capfd, content, flags, expected):
    monkeypatch.chdir(tmp_path)
    for name, text in {"a.tsv": content, "b.txt": "It rains.\n", "c.tsv": "", "d.tsv": "text\tlabel\nA\tx\n",
                       "e.tsv": "label\tsentence\nx\tA\nx\t \n"}.items():
        Path(name).write_text(text)
    rejects("childtuning", capfd, expected, *f"--data a.tsv --model scratch --batch-size 2 {flags}".split())


def test_features_are_read_only_if_needed(tmp_path, monkeypatch):
    """Training, Fisher information and the scores on --dev need logits only, so any classifier will do."""
    monkeypatch.setattr(classifier_losses, "classify_with_features", None)
    monkeypatch.setattr(ood, "classify_with_features", None)
    data = ["--data", DATA / "topics.tsv", "--dev", DATA / "topics_dev.tsv", "--model", "scratch"]
    result = tune(tmp_path / "out", *data, "--steps", 1, "--fisher-samples", 2)
    assert "dev_accuracy" in result.steps[0]
    model = SimpleNamespace(modules=lambda: [], config=SimpleNamespace(num_labels=8))
    monkeypatch.undo()
    with pytest.raises(UserError, match="has no linear layer from a text's features to its 8 labels"):
        classify_with_features(model, {})
