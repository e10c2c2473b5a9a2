"""ImageDataset, image encoders and their evaluation, and small complete runs of simclr.py and moco.py."""
import json
import os
import pickle
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from transformers import (
    AutoImageProcessor,
    AutoModel,
    ConvNextImageProcessor,
)

import moco
import simclr
from kernels.training.errors import UserError
from kernels.training.images import dataset, encoders, evaluation
from kernels.training.images.augmentation import Crops
from running import DATA, equal, free_port, rejects, run

SCRIPTS = {"simclr": simclr, "moco": moco}
FLAGS = ["--model", "tiny", "--batch-size", 12, "--epochs", 4, "--eval-every", 4, "--probe-epochs", 0]
OWN = {"simclr": ["--warmup-epochs", 0], "moco": ["--bn-splits", 6, "--queue-size", 24]}
# flags of the runs that test_three_processes_equal_one compares; the first word of a name is the script
CASES = {"moco": "--symmetric", "moco 2": "--memory-bank",
         "simclr": "--batch-size 11", "simclr 2": "--batch-size 11 --supervised",
         "simclr 3": "--batch-size 11 --from-layer 0 --finetune DATA"}
encoders.RESNETS["tiny"] = encoders.BASIC | dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])


def write(path, content):
    """Write a file with these bytes, arrays or image, and return its path."""
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
    """Write an .npz of 30 training and 30 test images; each of the 3 classes has its own colour. With
    batches of 12, an epoch has two steps, and six images are left over."""
    with np.load(DATA / "shapes.npz") as file:
        x, y = file["images"][:60, ::2, ::2] // 2, file["labels"][:60] % 3
    x[np.arange(60), :, :, y] += 120
    arrays = dict(images=x[:30], labels=y[:30], test_images=x[30:], test_labels=y[30:])
    return write(tmp_path_factory.mktemp("data") / "x.npz", arrays)


COLOURS = np.random.default_rng(0).integers(0, 256, (10, 32, 32, 3)).astype(np.uint8)
GOOD = COLOURS[:8, :8, :8]


def make_dataset(data, script=simclr, **more):
    """Return an ImageDataset on the CPU, made with these flags."""
    defaults = dict(dev=None, evaluate=False, batch_size=1, seed=3, image_size=None, workers=0,
                    skip_damaged=False, model="tiny")
    args = SimpleNamespace(data=data, **defaults | more)
    images = dataset.ImageDataset(args, script.CROPS)
    images.to_device(SimpleNamespace(device=torch.device("cpu"), known_checksums={}))
    return images


def centre_crops(images, split):
    """Return the evaluation views of a split, (N, S, S, 3) float32 in [0, 255]."""
    order = ((0, range(i, min(i + 4, len(split)))) for i in range(0, len(split), 4))
    return 255 * torch.cat([*images.views(split, order)]).permute(0, 2, 3, 1)


def test_a_folder_and_cifar_batches_of_the_same_images_are_equal(tmp_path):
    for i, image in enumerate(COLOURS):
        write(tmp_path / "folder" / f"class{i // 4}" / f"{i:03}.png", image)
    images, expected = make_dataset(tmp_path / "folder"), torch.from_numpy(COLOURS).float()
    torch.testing.assert_close(centre_crops(images, images.train), expected)
    assert images.train.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 2 and images.test is None
    assert images.classes == ["class0", "class1", "class2"]
    batch = {b"data": COLOURS.transpose(0, 3, 1, 2).reshape(10, -1), b"labels": list(range(10))}
    for name in ("data_batch_1", "data_batch_2", "test_batch"):
        write(tmp_path / "cifar" / name, pickle.dumps(batch))
    images = make_dataset(tmp_path / "cifar")
    torch.testing.assert_close(centre_crops(images, images.train), torch.cat([expected, expected]))
    torch.testing.assert_close(centre_crops(images, images.test), expected)
    assert images.train.labels.tolist() == [*range(10)] * 2
    assert images.test.labels.tolist() == [*range(10)]


@pytest.mark.parametrize("size, share", [(32, 1), (33, 0.875)])
def test_evaluation_uses_centre_crop(size, share, tmp_path):
    """Views of up to 32 pixels show the whole shorter side of an image, larger views show 0.875 of it."""
    photo = Image.fromarray(COLOURS[0]).resize((120, 80), Image.Resampling.BICUBIC)
    photo.save(tmp_path / "a.png")
    side = round(80 * share)
    left, top = (120 - side) // 2, (80 - side) // 2
    part = photo.crop((left, top, left + side, top + side))
    expected = part.resize((size, size), Image.Resampling.BICUBIC)
    images = make_dataset(tmp_path, image_size=size)
    assert np.array_equal(centre_crops(images, images.train)[0].round().byte(), np.asarray(expected))


def test_with_fewer_images_than_ranks_each_rank_encodes_all(tmp_path, monkeypatch):
    images = make_dataset(write(tmp_path / "x.npz", dict(images=COLOURS)))
    expected = centre_crops(images, images.train).flatten(1)
    for name, value in dict(is_initialized=True, get_world_size=11, get_rank=10).items():
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    model = SimpleNamespace(encode_batches=lambda batches, logits: torch.cat([255 * x for x in batches]))
    found = images.encode_split(images.train, model).permute(0, 2, 3, 1).flatten(1)
    torch.testing.assert_close(found, expected)


def test_default_view_size(tmp_path):
    """Arrays: their shorter side. Files: the largest shorter side, at most 224 or the model's input size."""
    for i, (width, height) in enumerate([(50, 40), (300, 45), (30, 30)]):
        write(tmp_path / "x" / f"{i}.png", np.zeros((height, width, 3), np.uint8))
    arrays = write(tmp_path / "x.npz", dict(images=np.resize(COLOURS, (3, 40, 48, 3))))
    model = tmp_path / "model"
    write(model / "preprocessor_config.json", b'{"size": {"shortest_edge": 36}}')
    files = tmp_path / "x"
    assert make_dataset(files).size == 45 and make_dataset(arrays).size == 40
    assert make_dataset(files, model=model).size == 36 and make_dataset(arrays, model=model).size == 40
    assert make_dataset(files, image_size=16).size == make_dataset(arrays, image_size=16).size == 16
    write(files / "3.png", np.zeros((230, 240, 3), np.uint8))
    assert make_dataset(files).size == 224
    assert [make_dataset(arrays, image_size=size).is_small for size in (32, 33)] == [True, False]


def test_subsample_keeps_a_share_of_each_class(tmp_path):
    """The seed decides which images are kept, at least one of each class, and images keep their labels."""
    labels = np.repeat([4, 7, 9], [100, 30, 2])
    arrays = np.arange(132, dtype=np.uint8)[:, None, None, None].repeat(3, 3)
    data, kept = write(tmp_path / "x.npz", dict(images=arrays, labels=labels)), {}
    for seed, share in ((1, 0.1), (1, 0.1), (2, 0.1), (1, 1)):
        images = make_dataset(data, seed=seed)
        simclr.subsample(images, share)
        rows = centre_crops(images, images.train)[:, 0, 0, 0].round().int().tolist()
        assert images.train.labels.tolist() == [[4, 7, 9].index(labels[row]) for row in rows]
        assert images.train.labels.bincount().tolist() == ([10, 3, 1] if share < 1 else [100, 30, 2])
        assert rows == sorted(set(rows)) and kept.setdefault((seed, share), rows) == rows
    assert kept[1, 0.1] != kept[2, 0.1]


X, A, B = {"x.npz": dict(images=GOOD)}, {"x/a/0.png": GOOD[0]}, "--queue-size 8 --bn-splits 2"


@pytest.mark.parametrize("name, files, flags, expected", [
    ("simclr", {}, "", r"x: No such file or directory"),
    ("simclr", {"x": b"x"}, "", r"x: expected a folder of images, CIFAR's python batches, .*"),
    ("moco", A | {"x/b/1.png": GOOD[1][:4]}, "", "x: 2 images, expected at least --batch-size, which is 4"),
    ("moco", {"x.npz": b"PK\3\4"}, "", r"x\.npz: File is not a zip file"),
    ("simclr", X, "--batch-size 9", r"x\.npz: 8 images, expected at least --batch-size, which is 9"),
    ("simclr", X, "--supervised", r"--supervised needs labels, but x\.npz has none; .*"),
    ("simclr", X, "--distill=", "--distill: empty; expected a name"),
    ("simclr", X, "--finetune=", "--finetune: empty; expected a name"),
    ("moco", X, "--queue-size 10", "--queue-size 10: expected a multiple of 4, the keys per step; try 8"),
    ("moco", X, "--queue-size 12 --symmetric", "--queue-size 12: expected a multiple of 8, .*"),
    ("moco", X, "--queue-size 8", r"--bn-splits 8: expected a divisor of --batch-size, which is 4"),
    ("moco", X, f"{B} --chunk-size 3", "--chunk-size 3: expected a multiple of 2, --batch-size / .*"),
    ("moco", X, f"{B} --memory-bank --symmetric", "--symmetric: a memory bank uses one view per image.*"),
    ("moco", X, f"{B} --momentum 1.5", r"argument --momentum: 1\.5: expected a number from 0 to 1"),
    ("moco", X, f"{B} --model none/such", r"--model none/such: no such folder, and the hub .* failed; .*"),
    ("moco", X | {"m/a": b""}, f"{B} --model m", r"--model m: no config\.json in this folder; .*"),
    ("moco", X | {"m/config.json": b"{"}, f"{B} --model m", r"--model m: \w+: .*"),
    ("moco", X, f"{B} --model BERT", r"--model .*: bert is not an image encoder like ResNet, .*")])
def test_bad_data_and_flags_are_rejected(name, files, flags, expected, bert, cwd, capfd):
    for file, content in files.items():
        write(Path(file), content)
    data, flags = "x.npz" if "x.npz" in files else "x", flags.replace("BERT", str(bert)).split()
    rejects(name, capfd, expected, "--data", data, "--batch-size", 4, *flags)


def test_knn_votes_are_weighted_by_similarity():
    bank, labels = torch.eye(4).repeat(3, 1), torch.arange(4).repeat(3)
    assert evaluation.knn_accuracy(bank, labels, torch.eye(4), torch.tensor([1, 1, 2, 3]), k=3) == 75
    bank, labels = torch.tensor([[1.0, 0], [1, 2], [1, -2]]), torch.tensor([0, 1, 1])
    assert evaluation.knn_accuracy(bank, labels, bank[:1], labels[:1]) == 100    # near ones count more


@pytest.mark.parametrize("size", [8, 112])
def test_saved_encoder_reloads_to_equal_features(size, tmp_path):
    """A ResNet for small images is loaded by our own function, without any code in the folder. Without a test
    set, the last checkpoint is saved."""
    out, smooth = tmp_path / "out", [Image.fromarray(x).resize((size, size)) for x in COLOURS[:, :5, :5]]
    images = np.resize(COLOURS, (16, 8, 8, 3)) if size == 8 else np.stack([*map(np.asarray, smooth)] * 2)
    flags = ["--data", write(tmp_path / "x.npz", dict(images=images)), *FLAGS, *OWN["moco"], "--steps", 1]
    result = run("moco", out, *flags)
    model, seen = result.model, make_dataset(flags[1], moco)
    expected, line = seen.encode_split(seen.train, model), result.said["load"]
    assert "auto_map" not in (out / "config.json").read_text() and line in (out / "README.md").read_text()
    assert [file.name for file in out.glob("*.py")] == ["moco.py"]
    words = f"v2: {len(images)} images from .*, views of {size} px, no labelled test set: no evaluation"
    assert re.fullmatch(words, result.said["moco"])
    try:
        processor = AutoImageProcessor.from_pretrained(out)
    except ImportError:                    # some versions of transformers (5.17) need torchvision here
        processor = ConvNextImageProcessor.from_pretrained(out)
    prepared = processor([*images], return_tensors="pt")
    given = {"AutoModel": AutoModel}
    exec(re.sub(r"(\w+(\.\w+)?\(.*\))$", r"loaded = \1", line), given)
    features = given["loaded"].eval()(**prepared).pooler_output.flatten(1)
    if size == 8:
        torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-5)
    else:                      # the processor resizes first and crops then, so results are similar, not equal
        x = prepared["pixel_values"] * model.std + model.mean
        x, crops = 255 * x.permute(0, 2, 3, 1), centre_crops(seen, seen.train)
        assert (x - crops).abs().mean() < 2 and torch.cosine_similarity(features, expected).min() > 0.99
    if size == 8:              # AutoModel must fail instead of loading a different network silently
        with pytest.raises(RuntimeError, match="mismatched"):
            AutoModel.from_pretrained(out)
    model.encoder = encoders.load_image_encoder(str(out), True)    # as by --model OUT
    assert torch.equal(seen.encode_split(seen.train, model), expected) and not (out / ".saving").exists()


def change(folder, **settings):
    """Change settings in the config.json of a folder."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


@pytest.fixture
def folder(cwd):
    """Save a small encoder to a folder, and return the folder."""
    encoders.load_image_encoder("tiny", True).save_pretrained("model")
    return Path("model")


@pytest.mark.parametrize("settings, expected", [
    (dict(depths="many"), r"\w+: .*"),
    (dict(num_channels=1), "resnet is not an image encoder like ResNet, of images with 3 channels"),
    (dict(hidden_sizes=[8, 17]), r"\d+ weights, such as .*, are missing or do not fit its config\.json"),
    (dict(small_stem=False), r"1 weights, such as embedder.*, are missing or do not fit its config\.json")])
def test_a_config_that_does_not_fit_its_weights_is_rejected(settings, expected, folder):
    change(folder, **settings)
    with pytest.raises(UserError, match=f"--model model: {expected}$"):
        encoders.load_image_encoder("model")


def test_dev_images_may_differ_in_size_from_training_images(data, tmp_path):
    """--dev may be image files when --data is an .npz; all views have one size."""
    for i in range(6):
        colour = np.zeros((20 + i, 30, 3), np.uint8) + np.eye(3, dtype=np.uint8)[i % 3] * 120
        write(tmp_path / "dev" / "012"[i % 3] / f"{i}.png", colour)
    flags = ["--data", data, "--dev", tmp_path / "dev", *FLAGS, *OWN["simclr"], "--workers", 1]
    result = run("simclr", tmp_path / "out", *flags)
    assert "views of 8 px, 3 classes, 6 test images" in result.said["simclr"]
    assert 0 <= result.steps[-1]["dev_knn"] <= 100


def test_labels_are_numbered_without_gaps(tmp_path):
    """Labels may be large, and may differ in the test set. Equal folder names are equal labels."""
    large = dict(images=GOOD, labels=np.array([5, 10**12] * 4))
    large |= dict(test_images=GOOD, test_labels=np.arange(4, 12))
    images = make_dataset(write(tmp_path / "x.npz", large))
    assert images.train.labels.tolist() == [0, 1] * 4
    assert images.test.labels.tolist() == [2, 0, 3, 4, 5, 6, 7, 8]
    assert images.classes == [*map(str, (5, 10**12, 4, 6, 7, 8, 9, 10, 11))]
    for name in ("data/a", "data/c", "dev/b", "dev/c"):
        write(tmp_path / name / "0.png", GOOD[0])
    images = make_dataset(tmp_path / "data", dev=tmp_path / "dev")
    assert images.train.labels.tolist() == [0, 1] and images.test.labels.tolist() == [2, 1]
    assert images.classes == ["a", "c", "b"]
    for name in ("5", "1000000000000"):                        # numbers in --data, folder names in --dev
        write(tmp_path / "named" / name / "0.png", GOOD[0])
    images = make_dataset(tmp_path / "x.npz", dev=tmp_path / "named")
    assert images.train.labels.tolist() == [0, 1] * 4 and images.test.labels.tolist() == [1, 0]


def test_batch_norms_need_more_than_one_image(cwd, capfd):
    np.save("x.npy", COLOURS[:1, :2, :2].repeat(12, 0))
    expected = "--bn-splits 12: parts of a single image, which batch norm sets to 0; lower it"
    rejects("moco", capfd, expected, "--data", "x.npy", *FLAGS, "--queue-size", 12, "--bn-splits", 12)


@pytest.mark.parametrize("training, test, expected", [
    ("cat dog", "0 1", "no class of the test images (0, 1, ...) is a class of the training images (cat, dog"),
    (".", "cat dog", "--dev test: train has no labels, but kNN compares those of --dev and --data"),
    ("cat dog", ".", "--dev test: test has no labels, but kNN compares those of --dev and --data")])
def test_labels_of_dev_that_cannot_be_compared(training, test, expected, cwd):
    for folder, names in ("train", training), ("test", test):
        for i, name in enumerate(names.split() * 4):
            write(Path(folder, name, f"{i}.png"), COLOURS[0])
    with pytest.raises(UserError, match=re.escape(expected)):
        make_dataset("train", dev="test")


def same_views(x, args):
    """Replace augmentation: no colour changes; if there are two views, the second one is flipped."""
    if getattr(args, "memory_bank", False):
        return x
    first, second = x.chunk(2)
    return torch.cat([first, second.flip(3)])


def test_crops_of_training_and_of_the_probe(data, tmp_path, monkeypatch):
    """--crop changes the crops of training only, not those of the linear probe."""
    calls, sample_boxes = [], Crops.sample_boxes

    def record(crops, seed, epoch, rows, sizes, views):
        calls.append((crops.min_area, views, epoch))
        return sample_boxes(crops, seed, epoch, rows, sizes, views)

    monkeypatch.setattr(Crops, "sample_boxes", record)
    run("moco", tmp_path, "--data", data, *FLAGS, *OWN["moco"], "--crop", 0.7, "--probe-epochs", 2)
    assert calls == [(0.7, 2, epoch // 2) for epoch in range(8)] + [(0.08, 1, epoch) for epoch in range(2)]


def test_momentum_update_precedes_key_encoding(data, tmp_path, monkeypatch):
    """Momentum is 0, so key encoder and query encoder have equal weights whenever keys are encoded."""
    def checked(model, *rest, encode=moco.encode_keys):
        weights = dict(model.key.named_parameters())
        assert equal(weights, {name: w for name, w in model.named_parameters() if name in weights})
        return encode(model, *rest)
    monkeypatch.setattr(moco, "encode_keys", checked)
    run("moco", tmp_path / "out", "--data", data, *FLAGS, *OWN["moco"], "--momentum", 0)


def all_cases(rank, port, data, out):
    """Train all CASES: ranks 0 to 2 train together, rank 3 alone. float64 keeps equal runs equal to nine
    digits. SimCLR runs without batch statistics, because SyncBatchNorm does not exist for CPUs."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double
    torch.cuda.is_available = lambda: False
    # Random colours and flips differ between ranks, so replace them. Random crop boxes do not.
    moco.augment = same_views
    simclr.augment = same_views
    dataset.flip = lambda x: x
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
    """Ranks may have different numbers of rows (SimCLR). MoCo's shuffling, split batch norms, queue and
    pointer do not depend on the number of ranks either."""
    given = free_port(), data, tmp_path
    torch.multiprocessing.start_processes(all_cases, given, nprocs=4, start_method="forkserver")
    for case in CASES:
        one, three = (torch.load(tmp_path / f"{case}{alone}" / "state.pt") for alone in (1, 0))
        assert one["progress"] == three["progress"]
        torch.testing.assert_close(three["model"], one["model"], rtol=1e-9, atol=1e-9)
