"""Pictures: reading, the encoder, neighbours, probes, saving; small whole runs of both picture scripts."""
import json
import os
import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoImageProcessor,
    AutoModel,
    ConvNextImageProcessor,
    SegformerConfig,
    SegformerModel,
)

import moco
import simclr
from kernels.training.cli import Fault
from kernels.training.images import dataset, evaluation
from kernels.training.images import encoders as nets
from kernels.training.images.augmentation import Crops
from running import DATA, equal, free_port, refuse, run

SCRIPTS = {"simclr": simclr, "moco": moco}
FLAGS = ["--model", "tiny", "--batch-size", 12, "--epochs", 4, "--eval-every", 4, "--probe-epochs", 0]
OWN = {"simclr": ["--warmup", 0], "moco": ["--bn-splits", 6, "--queue", 24]}
CASES = {"moco": "--symmetric", "moco 2": "--memory-bank",
         "simclr": "--batch-size 11", "simclr 2": "--batch-size 11 --supervised",
         "simclr 3": "--batch-size 11 --from-layer 0 --finetune DATA"}
nets.RESNETS["tiny"] = nets.BASIC | dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])


def write(path, content):
    """A file of bytes, of arrays, or of a picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, dict):
        np.savez(path, **content)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        Image.fromarray(content).save(path)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """30 pictures and 30 for tests, a class in a colour: two steps of 12 an epoch, six left over."""
    with np.load(DATA / "shapes.npz") as file:
        x, y = file["images"][:60, ::2, ::2] // 2, file["labels"][:60] % 3
    x[np.arange(60), :, :, y] += 120
    arrays = dict(images=x[:30], labels=y[:30], test_images=x[30:], test_labels=y[30:])
    return write(tmp_path_factory.mktemp("data") / "x.npz", arrays)


COLOURS = np.random.default_rng(0).integers(0, 256, (10, 32, 32, 3)).astype(np.uint8)
GOOD = COLOURS[:8, :8, :8]


def pictures_of(data, script=simclr, **more):
    """Pictures on the CPU, as by these flags."""
    usual = dict(dev=None, evaluate=False, batch_size=1, seed=3, size=None, workers=0, skip_damaged=False)
    args = SimpleNamespace(data=data, **usual | dict(model="tiny") | more)
    pictures = dataset.Pictures(args, script.CROPS)
    pictures.join(SimpleNamespace(device=torch.device("cpu"), known={}))
    return pictures


def middles(pictures, side):
    """(N, S, S, 3) float32 from 0 to 255 of a side, as they are judged."""
    order = ((0, range(i, min(i + 4, len(side)))) for i in range(0, len(side), 4))
    return 255 * torch.cat([*pictures.views(side, order)]).permute(0, 2, 3, 1)


def test_a_folder_and_cifars_batches_hold_the_same_pictures(tmp_path):
    for i, picture in enumerate(COLOURS):
        write(tmp_path / "folder" / f"class{i // 4}" / f"{i:03}.png", picture)
    pictures, wanted = pictures_of(tmp_path / "folder"), torch.from_numpy(COLOURS).float()
    torch.testing.assert_close(middles(pictures, pictures.train), wanted)
    assert pictures.train.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 2 and pictures.test is None
    assert pictures.classes == ["class0", "class1", "class2"]
    batch = {b"data": COLOURS.transpose(0, 3, 1, 2).reshape(10, -1), b"labels": list(range(10))}
    for name in ("data_batch_1", "data_batch_2", "test_batch"):
        write(tmp_path / "cifar" / name, pickle.dumps(batch))
    pictures = pictures_of(tmp_path / "cifar")
    torch.testing.assert_close(middles(pictures, pictures.train), torch.cat([wanted, wanted]))
    torch.testing.assert_close(middles(pictures, pictures.test), wanted)
    assert pictures.train.labels.tolist() == [*range(10)] * 2
    assert pictures.test.labels.tolist() == [*range(10)]


@pytest.mark.parametrize("size, share", [(32, 1), (33, 0.875)])
def test_the_middle_is_judged(size, share, tmp_path):
    """Of files of any shape: all of it up to 32 pixels, of a larger one 0.875 of the shorter side."""
    photo = Image.fromarray(COLOURS[0]).resize((120, 80), Image.Resampling.BICUBIC)
    photo.save(tmp_path / "a.png")
    side = round(80 * share)
    left, top = (120 - side) // 2, (80 - side) // 2
    part = photo.crop((left, top, left + side, top + side))
    wanted = part.resize((size, size), Image.Resampling.BICUBIC)
    pictures = pictures_of(tmp_path, size=size)
    assert np.array_equal(middles(pictures, pictures.train)[0].round().byte(), np.asarray(wanted))


def test_fewer_pictures_than_ranks_are_read_by_each(tmp_path, monkeypatch):
    pictures = pictures_of(write(tmp_path / "x.npz", dict(images=COLOURS)))
    wanted = middles(pictures, pictures.train).flatten(1)
    for name, value in dict(is_initialized=True, get_world_size=11, get_rank=10).items():
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    model = SimpleNamespace(encode_batches=lambda batches, logits: torch.cat([255 * x for x in batches]))
    found = pictures.encode_side(pictures.train, model).permute(0, 2, 3, 1).flatten(1)
    torch.testing.assert_close(found, wanted)


def test_size_of_views(tmp_path):
    """Of arrays theirs; of files that of the model, 224, or that of the largest."""
    for i, (width, height) in enumerate([(50, 40), (300, 45), (30, 30)]):
        write(tmp_path / "x" / f"{i}.png", np.zeros((height, width, 3), np.uint8))
    arrays = write(tmp_path / "x.npz", dict(images=np.resize(COLOURS, (3, 40, 48, 3))))
    model = tmp_path / "model"
    write(model / "preprocessor_config.json", b'{"size": {"shortest_edge": 36}}')
    assert pictures_of(tmp_path / "x").size == 45 and pictures_of(arrays).size == 40
    assert pictures_of(tmp_path / "x", model=model).size == 36 and pictures_of(arrays, model=model).size == 40
    assert pictures_of(tmp_path / "x", size=16).size == pictures_of(arrays, size=16).size == 16
    write(tmp_path / "x" / "3.png", np.zeros((230, 240, 3), np.uint8))
    assert pictures_of(tmp_path / "x").size == 224
    assert [pictures_of(arrays, size=size).small for size in (32, 33)] == [True, False]
    with pytest.raises(Fault, match=r"--size 1000000: 1 pictures would need .* GB of memory, .*"):
        pictures_of(arrays, size=10**6)


def test_a_share_is_of_each_class(tmp_path):
    """Drawn by the seed, at least one of each; the same pictures, with their labels."""
    labels = np.repeat([4, 7, 9], [100, 30, 2])
    looks = np.arange(132, dtype=np.uint8)[:, None, None, None].repeat(3, 3)
    data, kept = write(tmp_path / "x.npz", dict(images=looks, labels=labels)), {}
    for seed, share in ((1, 0.1), (1, 0.1), (2, 0.1), (1, 1)):
        pictures = pictures_of(data, seed=seed)
        pictures.keep_share(share)
        rows = middles(pictures, pictures.train)[:, 0, 0, 0].round().int().tolist()
        assert pictures.train.labels.tolist() == [[4, 7, 9].index(labels[row]) for row in rows]
        assert pictures.train.labels.bincount().tolist() == ([10, 3, 1] if share < 1 else [100, 30, 2])
        assert rows == sorted(set(rows)) and kept.setdefault((seed, share), rows) == rows
    assert kept[1, 0.1] != kept[2, 0.1]


X, A, B = {"x.npz": dict(images=GOOD)}, {"x/a/0.png": GOOD[0]}, "--queue 8 --bn-splits 2"


@pytest.mark.parametrize("name, files, flags, wanted", [
    ("simclr", {}, "", r"x: No such file or directory"),
    ("simclr", {"x": b"x"}, "", r"x: wanted a folder of pictures, CIFAR's python batches, .*"),
    ("moco", A | {"x/b/1.png": GOOD[1][:4]}, "", "x: 2 pictures, wanted at least --batch-size, which is 4"),
    ("moco", {"x.npz": b"PK\3\4"}, "", r"x\.npz: File is not a zip file"),
    ("simclr", X, "--batch-size 9", r"x\.npz: 8 pictures, wanted at least --batch-size, which is 9"),
    ("simclr", X, "--supervised", r"--supervised wants labels, and x\.npz has none: sub-folders, .*"),
    ("simclr", X, "--distill=", "--distill: an empty name, which would be this folder"),
    ("simclr", X, "--finetune=", "--finetune: an empty name, which would be this folder"),
    ("moco", X, "--queue 10", r"--queue 10 is no multiple of the 4 keys of a step; try 8"),
    ("moco", X, "--queue 12 --symmetric", r"--queue 12 is no multiple of the 8 keys of a step; try 8"),
    ("moco", X, "--queue 8", r"--bn-splits 8 does not divide --batch-size, which is 4"),
    ("moco", X, f"{B} --chunk-size 3", r"--chunk-size 3: wanted a multiple of 2, --batch-size / --bn-splits"),
    ("moco", X, f"{B} --memory-bank --symmetric", "--symmetric: a memory bank takes one view of a picture.*"),
    ("moco", X, f"{B} --momentum 1.5", r"argument --momentum: 1\.5: wanted a number from 0 to 1"),
    ("moco", X, f"{B} --model none/such", r"--model none/such: no such folder, and the hub does not give .*"),
    ("moco", X | {"m/a": b""}, f"{B} --model m", r"--model m: no config\.json in this folder, so .*"),
    ("moco", X | {"m/config.json": b"{"}, f"{B} --model m", r"--model m: \w+: .*"),
    ("moco", X, f"{B} --model BERT", r"--model .*: bert is no image encoder like ResNet")])
def test_bad_pictures_and_flags(name, files, flags, wanted, bert, here, capfd):
    for file, content in files.items():
        write(Path(file), content)
    data, flags = "x.npz" if "x.npz" in files else "x", flags.replace("BERT", str(bert)).split()
    refuse(name, capfd, wanted, "--data", data, "--batch-size", 4, *flags)


def test_neighbours_vote():
    bank, labels = torch.eye(4).repeat(3, 1), torch.arange(4).repeat(3)
    assert evaluation.knn_accuracy(bank, labels, torch.eye(4), torch.tensor([1, 1, 2, 3]), k=3) == 75
    bank, labels = torch.tensor([[1.0, 0], [1, 2], [1, -2]]), torch.tensor([0, 1, 1])
    assert evaluation.knn_accuracy(bank, labels, bank[:1], labels[:1]) == 100    # one near outweighs two far
    assert simclr.knn_accuracy is moco.knn_accuracy is evaluation.knn_accuracy


@pytest.mark.parametrize("size", [8, 112])
def test_saved_encoders_load_as_they_were(size, tmp_path):
    """Small ones by our own module, without any code in the folder; of pictures without a test set the last
    is saved."""
    out, smooth = tmp_path / "out", [Image.fromarray(x).resize((size, size)) for x in COLOURS[:, :5, :5]]
    pictures = np.resize(COLOURS, (16, 8, 8, 3)) if size == 8 else np.stack([*map(np.asarray, smooth)] * 2)
    flags = ["--data", write(tmp_path / "x.npz", dict(images=pictures)), *FLAGS, *OWN["moco"], "--steps", 1]
    result = run("moco", out, *flags)
    model, seen = result.model, pictures_of(flags[1], moco)
    wanted, line = seen.encode_side(seen.train, model), result.said["load"]
    assert "auto_map" not in (out / "config.json").read_text() and line in (out / "README.md").read_text()
    assert [file.name for file in out.glob("*.py")] == ["moco.py"]
    words = f"v2: {len(pictures)} pictures from .*, views of {size} px, no labelled test set: no evaluation"
    assert re.fullmatch(words, result.said["moco"])
    try:
        processor = AutoImageProcessor.from_pretrained(out)
    except ImportError:                    # some versions of transformers (5.17) want torchvision here
        processor = ConvNextImageProcessor.from_pretrained(out)
    prepared = processor([*pictures], return_tensors="pt")
    given = {"AutoModel": AutoModel}
    exec(re.sub(r"(\w+(\.\w+)?\(.*\))$", r"theirs = \1", line), given)
    theirs = given["theirs"].eval()(**prepared).pooler_output.flatten(1)
    if size == 8:
        torch.testing.assert_close(theirs, wanted, rtol=1e-4, atol=1e-5)
    else:                                                      # all of it is resized, and cut then
        x = prepared["pixel_values"] * model.std + model.mean
        x, middle = 255 * x.permute(0, 2, 3, 1), middles(seen, seen.train)
        assert (x - middle).abs().mean() < 2 and torch.cosine_similarity(theirs, wanted).min() > 0.99
    if size == 8:                                              # never another net in silence
        with pytest.raises(RuntimeError, match="mismatched"):
            AutoModel.from_pretrained(out)
    model.encoder = nets.load_image_encoder(str(out), True)    # as --model: the checkpoint decides
    assert torch.equal(seen.encode_side(seen.train, model), wanted) and not (out / ".saving").exists()


def change(folder, **settings):
    """Changes the config.json of a folder."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


@pytest.fixture
def folder(here):
    """A small encoder in a folder."""
    nets.load_image_encoder("tiny", True).save_pretrained("model")
    return Path("model")


def test_code_of_a_folder_is_never_run(folder):
    """Folders from before, with the code of their stem, load without it; any other code is refused."""
    weights = nets.load_image_encoder("model").state_dict()
    for file in ("modeling.py", "evil.py"):
        (folder / file).write_text("raise SystemExit('it ran')\n")
    change(folder, auto_map=nets.OLD_CODE, small_stem=None)
    loaded = nets.load_image_encoder("model")
    assert loaded.config.small_stem and equal(loaded.state_dict(), weights)
    loaded.save_pretrained("again")
    assert equal(nets.load_image_encoder("again").state_dict(), weights)
    assert "auto_map" not in Path("again/config.json").read_text()
    for code in ({"AutoModel": "evil.Evil"}, nets.OLD_CODE | {"AutoConfig": "evil.Evil"}, None):
        change(folder, auto_map=code)
        if not code:
            write(folder / "preprocessor_config.json", b'{"auto_map": {"AutoImageProcessor": "evil.Evil"}}')
        with pytest.raises(Fault, match="--model model: wants to run Python that lies in it, which is never"):
            nets.load_image_encoder("model")


@pytest.mark.parametrize("settings, wanted", [
    (dict(depths=[10**9, 1]), r"config\.json has depths 1000000000; wanted at most 1,000,000"),
    (dict(hidden_sizes=[8, 10**9]), r".* a model of more than .*, its weight files have [\d,]+ bytes; .*"),
    (dict(embedding_size=10**9), r".* a model of more than .*"),
    (dict(depths=[1, -1]), "config.json has -1 layers or channels, wanted at least 1"),
    (dict(depths="many"), r"\w+: .*"),
    (dict(num_channels=1), "reads pictures of 1 channels, wanted 3"),
    (dict(hidden_sizes=[8, 17]), r"\d+ weights, such as .*, are missing or do not fit its config\.json"),
    (dict(small_stem=False), r"1 weights, such as embedder.*, are missing or do not fit its config\.json")])
def test_a_config_that_is_not_of_its_weights(settings, wanted, folder):
    change(folder, **settings)
    with pytest.raises(Fault, match=f"--model model: {wanted}$"):
        nets.load_image_encoder("model")


@pytest.mark.parametrize("content, wanted", [
    ("{", "ValueError.*"), ("[]", "AttributeError.*"), ('{"image_std": [1, 0, 1]}', "image_mean .*"),
    ('{"image_mean": ["a", 0, 0]}', ".*"), ('{"image_mean": [0, 0, 1e999]}', "image_mean .*inf.*")])
def test_damaged_statistics(content, wanted, data, folder, capfd):
    (folder / "preprocessor_config.json").write_text(content)
    given = ["--evaluate", "--data", data, "--model", "model", "--probe-epochs", 0]
    capfd.readouterr()                                         # the bar of saving
    refuse("moco", capfd, rf"--model model: (its preprocessor_config\.json is damaged \()?{wanted}", *given)


def test_what_pools_otherwise_is_refused(here):
    names = "depths sr_ratios hidden_sizes strides mlp_ratios patch_sizes num_attention_heads"
    config = SegformerConfig(num_encoder_blocks=1, **{name: [1] for name in names.split()})
    SegformerModel(config).save_pretrained("m")
    with pytest.raises(Fault, match="--model m: segformer is no image encoder like ResNet"):
        nets.load_image_encoder("m")


def test_pictures_of_other_sizes_are_judged(data, tmp_path):
    """--dev may be files where --data is an .npz: views are of one size."""
    for i in range(6):
        colour = np.zeros((20 + i, 30, 3), np.uint8) + np.eye(3, dtype=np.uint8)[i % 3] * 120
        write(tmp_path / "dev" / "012"[i % 3] / f"{i}.png", colour)
    flags = ["--data", data, "--dev", tmp_path / "dev", *FLAGS, *OWN["simclr"], "--workers", 1]
    result = run("simclr", tmp_path / "out", *flags)
    assert "views of 8 px, 3 classes, 6 test pictures" in result.said["simclr"]
    assert 0 <= result.steps[-1]["dev_knn"] <= 100


def test_labels_are_numbered_without_gaps(tmp_path):
    """However large they are, and whichever of them a test set has; of folders a name is one label."""
    large = dict(images=GOOD, labels=np.array([5, 10**12] * 4))
    large |= dict(test_images=GOOD, test_labels=np.arange(4, 12))
    pictures = pictures_of(write(tmp_path / "x.npz", large))
    assert pictures.train.labels.tolist() == [0, 1] * 4
    assert pictures.test.labels.tolist() == [2, 0, 3, 4, 5, 6, 7, 8]
    assert pictures.classes == [*map(str, (5, 10**12, 4, 6, 7, 8, 9, 10, 11))]
    for name in ("data/a", "data/c", "dev/b", "dev/c"):
        write(tmp_path / name / "0.png", GOOD[0])
    pictures = pictures_of(tmp_path / "data", dev=tmp_path / "dev")
    assert pictures.train.labels.tolist() == [0, 1] and pictures.test.labels.tolist() == [2, 1]
    assert pictures.classes == ["a", "c", "b"]
    for name in ("5", "1000000000000"):                        # numbers on one side, names on the other
        write(tmp_path / "named" / name / "0.png", GOOD[0])
    pictures = pictures_of(tmp_path / "x.npz", dev=tmp_path / "named")
    assert pictures.train.labels.tolist() == [0, 1] * 4 and pictures.test.labels.tolist() == [1, 0]


@pytest.mark.parametrize("name, flags", [
    ("moco", "--bn-splits 12"), ("simclr", "--chunk-size 1"), ("simclr", "--chunk-size 1 --form code")])
def test_norms_want_more_than_one_value(name, flags, here, capfd):
    np.save("x.npy", COLOURS[:1, :2, :2].repeat(12, 0))
    wanted = r"batch norms see a single value of each channel; wanted more pictures at a time: .*"
    own = ["--queue", 12] if name == "moco" else []
    with pytest.raises(SystemExit, match="2"):
        SCRIPTS[name].main([*map(str, ["--data", "x.npy", *FLAGS, *own, *flags.split(), "--model", "tiny"])])
    assert re.fullmatch(rf"{name}\.py: {wanted}\n", capfd.readouterr().err)


def same_views(x, args):
    """No colours: the second view, where there are two, is in a mirror."""
    if getattr(args, "memory_bank", False):
        return x
    first, second = x.chunk(2)
    return torch.cat([first, second.flip(3)])


@pytest.mark.parametrize("name, flags, least, tracked", [
    ("simclr", "--optimizer sgd --lr 2 --form code --head-layers 3", 0.4, 30),
    ("simclr", "--optimizer sgd --lr 0.5 --supervised --chunk-size 48", 0.6, 60),
    ("simclr", "--lr 10", 0.6, 30), ("moco", "--queue 60", 0.4, 30),
    ("moco", "--queue 60 --symmetric", 0.8, 60), ("moco", "--queue 60 --v1 --chunk-size 10", 0.4, 90),
    ("moco", "--memory-bank", 0.4, 30)])
def test_one_batch_is_learnt(name, flags, least, tracked, data, tmp_path, monkeypatch):
    """A chunk moves batch statistics once; the probe on what was saved learns, and moves nothing."""
    monkeypatch.setattr(SCRIPTS[name], "augment", same_views)
    monkeypatch.setattr(dataset, "flip", lambda x: x)
    own = ["--data", data, *FLAGS, *OWN[name], "--batch-size", 30, "--temperature", 0.2, "--steps", 30]
    result = run(name, tmp_path / "out", *own, "--crop", 1, "--lr", 1, "--probe-epochs", 60, *flags.split())
    first = result.losses[4 if name == "moco" else 0]          # MoCo's first steps fill the queue
    assert result.losses[-1] < first - least
    assert result.said["30/30"].endswith(" saved")             # the last is kept, whether best or not
    assert [*result.steps[-1]][:5] == ["step", "loss", "lr", "dev_knn", "saved"]
    assert "dev_knn" not in result.steps[-2] and result.steps[-1]["dev_knn"] > 90
    assert float(re.search(r"linear ([\d.]+) %", result.said["done"])[1]) > 90
    state = dict(result.model.encoder.state_dict())
    assert equal(state, load_file(tmp_path / "out" / "model.safetensors"))
    assert state["embedder.embedder.normalization.num_batches_tracked"] == tracked


@pytest.mark.parametrize("name, precision", [
    ("simclr", "fp32"), ("moco", "fp32"), ("moco", "bf16"), ("moco", "bf16 --memory-bank")])
def test_resume_is_exact(name, precision, data, tmp_path, monkeypatch):
    """Steps 5 and 6, which the interrupted run did after its evaluation, are done again."""
    flags = ["--data", data, *FLAGS, *OWN[name], "--precision", *precision.split()]
    whole = run(name, tmp_path / "whole", *flags)
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="130"):
        patch.setattr(SCRIPTS[name], "sum_gradients", Mock(side_effect=[None] * 6 + [KeyboardInterrupt]))
        run(name, tmp_path / "parts", *flags)
    parts = run(name, tmp_path / "parts", *flags, "--resume")
    assert whole.losses == parts.losses and equal(whole.state, parts.state)
    if name == "moco":                                         # its queue waits in the type of its products
        queue, keys = parts.state["model"]["queue"], parts.model.queue
        assert queue.dtype == keys.dtype == (torch.float32 if precision == "fp32" else torch.float16)
        torch.testing.assert_close(queue.float().norm(dim=1), torch.ones(len(queue)), atol=1e-3, rtol=0)


def test_crops_of_training_and_of_the_probe(data, tmp_path, monkeypatch):
    """--crop is for training alone."""
    drawn, draw = [], Crops.draw
    monkeypatch.setattr(Crops, "draw", lambda crops, seed, epoch, rows, sizes, views: drawn.append(
        (crops.least, views, epoch)) or draw(crops, seed, epoch, rows, sizes, views))
    run("moco", tmp_path, "--data", data, *FLAGS, *OWN["moco"], "--crop", 0.7, "--probe-epochs", 2)
    assert drawn == [(0.7, 2, epoch // 2) for epoch in range(8)] + [(0.08, 1, epoch) for epoch in range(2)]


def test_keys_are_encoded_by_what_followed(data, tmp_path, monkeypatch):
    """With momentum 0 every weight of the copy is the encoder's when keys are encoded."""
    def checked(model, *rest, encode=moco.encode_keys):
        followed = dict(model.key.named_parameters())
        assert equal(followed, {name: w for name, w in model.named_parameters() if name in followed})
        return encode(model, *rest)
    monkeypatch.setattr(moco, "encode_keys", checked)
    run("moco", tmp_path / "out", "--data", data, *FLAGS, *OWN["moco"], "--momentum", 0)


def test_profile_times_and_writes_nothing(data, here, capsys):
    simclr.main(["--profile", "--data", str(data), "--model", "tiny", "--batch-size", "8"])
    said = re.search(r"step ([\d.]+) ms, loss ([\d.]+) ms, ([\d.]+) % of it", capsys.readouterr().out)
    step, loss, share = map(float, said.groups())
    assert 0 < loss < step and share == pytest.approx(100 * loss / step, abs=0.5)
    assert [*map(str, Path().iterdir())] == ["good.csv"]


def all_cases(rank, port, data, out):
    """As one of three processes, or, the fourth, alone; in float64, so that equal runs stay equal to nine
    digits; SimCLR's without batch statistics, because processes on CPUs have statistics of their own."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float, torch.cuda.is_available = torch.Tensor.double, lambda: False
    moco.augment = simclr.augment = same_views                 # fine-tuning has none
    dataset.flip = lambda x: x                                  # boxes are drawn, the same for any rank
    for i, (case, flags) in enumerate(CASES.items()):
        name = case.split()[0]
        if rank < 3:
            place = dict(RANK=rank, WORLD_SIZE=3, MASTER_ADDR="127.0.0.1", MASTER_PORT=port + i)
            os.environ.update({variable: str(value) for variable, value in place.items()})
        if name == "simclr":
            nn.BatchNorm2d.forward = lambda norm, x: x * norm.weight[:, None, None]
        flags = [data if flag == "DATA" else flag for flag in flags.split()]
        flags = ["--data", data, *FLAGS, *OWN[name], *flags, "--steps", 3, "--keep-state", "always"]
        SCRIPTS[name].main([*map(str, flags), "--out", str(out / f"{case}{rank // 3}")])


def test_three_processes_equal_one(data, tmp_path):
    """Unequal shares of SimCLR's rows; MoCo's shuffled and split batch norms, queue and pointer."""
    given = free_port(), data, tmp_path
    torch.multiprocessing.start_processes(all_cases, given, nprocs=4, start_method="forkserver")
    for case in CASES:
        one, three = (torch.load(tmp_path / f"{case}{alone}" / "state.pt") for alone in (1, 0))
        assert one["progress"] == three["progress"]
        torch.testing.assert_close(three["model"], one["model"], rtol=1e-9, atol=1e-9)
