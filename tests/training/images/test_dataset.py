"""Test ImageDataset, image encoders with their saved folders and evaluation, and runs of two processes."""
import os
from types import SimpleNamespace
from unittest.mock import Mock, call

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from test_formats import write
from transformers import AutoImageProcessor, AutoModel

import memory_bank
import moco
import simclr
from kernels.training.errors import UserError
from kernels.training.images import dataset, encoders, evaluation
from kernels.training.loop import batches
from running import equal, free_port, run

IMAGES = np.random.default_rng(0).integers(0, 256, (12, 8, 8, 3)).astype(np.uint8)
encoders.RESNETS["tiny"] = encoders.BASIC | dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
MOCO = ["--model", "tiny", "--batch-size", 6, "--steps", 2, "--probe-epochs", 0, "--bn-splits", 2,
        "--queue-size", 24]


def make_dataset(data, crops=simclr.CROPS, **more):
    """Return an ImageDataset on the CPU, made with these flags."""
    defaults = dict(dev=None, evaluate=False, batch_size=1, seed=3, image_size=None, workers=0,
                    skip_damaged=False, model="tiny")
    images = dataset.ImageDataset(SimpleNamespace(data=data, **defaults | more), crops)
    images.to_device(SimpleNamespace(device=torch.device("cpu")))
    return images


@pytest.mark.parametrize("size, share", [(32, 1), (33, 0.875)])
def test_evaluation_uses_centre_crop(size, share, tmp_path):
    """Views of up to 32 pixels show the whole shorter side of an image, larger views show 0.875 of it."""
    photo = Image.fromarray(IMAGES[0]).resize((120, 80), Image.Resampling.BICUBIC)
    photo.save(tmp_path / "a.png")
    left, top = 60 - 40 * share, 40 - 40 * share
    part = photo.crop((left, top, 120 - left, 80 - top))
    expected = part.resize((size, size), Image.Resampling.BICUBIC)
    images = make_dataset(tmp_path, image_size=size)
    view, = next(images.views(images.train, [(0, [0])]))
    assert np.array_equal((255 * view).round().byte().permute(1, 2, 0), np.asarray(expected))


def test_training_views_are_flipped_crops_of_shuffled_images(tmp_path, monkeypatch):
    """Crops cover at least the share min_area of an image."""
    flipped = []
    monkeypatch.setattr(dataset, "flip", lambda x: flipped.append(len(x)) or x)
    images = make_dataset(write(tmp_path / "x.npz", dict(images=IMAGES)))
    images.start_training_views(SimpleNamespace(args=SimpleNamespace(batch_size=5), step=0), 5, min_area=0.3)
    found = [*images.training_views]
    order = [(step // 2, rows) for step, rows in zip(range(5), batches(12, 5, seed=3, min_rows=5))]
    expected = images.views(images.train, order, simclr.CROPS._replace(min_area=0.3), 2)
    assert flipped == [10] * 5 and equal(found, [*expected])


def test_labels_are_numbered_without_gaps(tmp_path):
    """Labels may be large. The test set may have new labels. Folders of the same name are one class, also if
    an é has one character or two. A link to a parent folder adds no images."""
    large = dict(images=IMAGES[:4], labels=np.array([5, 10**12] * 2), test_images=IMAGES[:3],
                 test_labels=np.array([4, 5, 6]))
    images = make_dataset(write(tmp_path / "x.npz", large))
    assert images.train.labels.tolist() == [0, 1, 0, 1] and images.test.labels.tolist() == [2, 0, 3]
    assert images.classes == ["5", "1000000000000", "4", "6"]
    for name in ("data/a", "data/caf\u00e9", "dev/b", "dev/cafe\u0301"):
        write(tmp_path / name / "0.png", IMAGES[0])
    os.symlink(tmp_path / "data", tmp_path / "data" / "a" / "again")
    images = make_dataset(tmp_path / "data", dev=tmp_path / "dev")
    assert images.train.labels.tolist() == [0, 1] and images.test.labels.tolist() == [2, 1]
    write(tmp_path / "other/A/0.png", IMAGES[0])
    with pytest.raises(UserError, match="other: found the classes A, expected classes of .*: a, caf"):
        make_dataset(tmp_path / "data", dev=tmp_path / "other")


def test_neighbours_are_at_most_the_smallest_class():
    """With 200 neighbours, all 14 images of both classes would vote, and the larger class would win."""
    labels = torch.tensor([0] * 6 + [1] * 8)
    bank = SimpleNamespace(labels=labels, x=F.one_hot(labels).float() + 0.01 * torch.randn(14, 2))
    images = SimpleNamespace(train=bank, test=bank, encode_split=lambda split, _: split.x)
    assert evaluation.neighbours(images) == 6 and evaluation.evaluate_knn(None, images) == 100


@pytest.mark.parametrize("k", [1, 7, 60])
def test_knn_accuracy(k, monkeypatch):
    """The k nearest images by cosine vote for their labels with weight exp(cosine / 0.1)."""
    torch.manual_seed(0)
    bank, queries, labels = torch.randn(60, 3), 9 * torch.randn(200, 3), torch.arange(60) % 4
    predicted = []
    for query in queries:
        cosine = F.cosine_similarity(query, bank)
        votes = torch.zeros(4)
        for row in cosine.argsort(descending=True)[:k]:
            votes[labels[row]] += (cosine[row] / 0.1).exp()
        predicted.append(votes.argmax())
    truth = torch.arange(200) % 4
    splits = [SimpleNamespace(x=x, labels=labels) for x, labels in ((bank, labels), (queries, truth))]
    images = SimpleNamespace(train=splits[0], test=splits[1], encode_split=lambda split, _: split.x)
    monkeypatch.setattr(evaluation, "neighbours", lambda images: k)
    exact = 100 * (torch.stack(predicted) == truth).double().mean().item()
    assert evaluation.evaluate_knn(None, images) == pytest.approx(exact)


def test_linear_probe(tmp_path, monkeypatch):
    """The probe is gradient descent with Nesterov momentum and weight decay on features of random crops of at
    least 0.08, whatever --crop is. The score is the percentage of test images with correct labels."""
    monkeypatch.setattr(dataset, "flip", lambda x: x)
    labels, colours = np.arange(12) % 3, np.random.default_rng(1).integers(0, 256, (999, 1, 1, 3))
    test = np.broadcast_to(colours, (999, 8, 8, 3)).astype(np.uint8)
    arrays = dict(images=IMAGES, labels=labels, test_images=test, test_labels=np.arange(999) % 3)
    images = make_dataset(write(tmp_path / "x.npz", arrays), simclr.CROPS._replace(min_area=0.9))
    weights, velocity, one_hot = torch.zeros(3, 4), torch.zeros(3, 4), torch.eye(3)[torch.from_numpy(labels)]

    def add_one(x):
        return F.pad(x, (0, 1), value=1)                       # the last weight is the bias

    for step, rows in zip(range(4), batches(12, 5, seed=3, min_rows=5)):           # two batches per epoch
        views, = images.views(images.train, [(step // 2, rows)], simclr.CROPS)
        x = add_one(views.mean((2, 3)))
        gradient = ((x @ weights.T).softmax(1) - one_hot[rows]).T @ x / 5 + 0.05 * weights
        velocity = 0.9 * velocity + gradient
        weights = weights - (8 - step) * (gradient + 0.9 * velocity)
    predicted = (add_one(torch.from_numpy(colours[:, 0, 0] / 255).float()) @ weights.T).argmax(1)
    model = Mock(feature_dim=3, features=lambda x: x.mean((2, 3)), training=True)
    run = SimpleNamespace(args=SimpleNamespace(seed=3, probe_epochs=2), device="cpu")
    found = evaluation.train_probe(model, images, run, batch=5, nesterov=True, weight_decay=0.05,
                                   lr_schedule=lambda step, total: 4 + total - step)
    assert found == pytest.approx(100 * (predicted == images.test.labels).double().mean().item())
    assert model.mock_calls[0] == call.eval()                  # eval() keeps statistics of batch norms


@pytest.mark.parametrize("name, millions", [("resnet-18", 11.18), ("resnet-50", 23.51)])
def test_sizes_of_resnets(name, millions):
    """ResNets have the papers' numbers of parameters. For 32 pixels, the stem keeps the size of the image."""
    with torch.device("meta"):
        large, small = (encoders.load_image_encoder(name, small=is_small) for is_small in (False, True))
        x = torch.zeros(1, 3, 32, 32)
        assert small.embedder(x).shape[2:] == (32, 32) and large.embedder(x).shape[2:] == (8, 8)
    assert sum(x.numel() for x in large.parameters()) / 1e6 == pytest.approx(millions, abs=0.005)


@pytest.mark.parametrize("size", [8, 40])
def test_saved_encoder(size, tmp_path):
    """The printed code loads an encoder with the same features. Our own function loads a ResNet for small
    images, transformers loads other models. --model loads both."""
    smooth = [Image.fromarray(x[:5, :5]).resize((size, size)) for x in IMAGES]
    pixels, out = np.stack([*map(np.asarray, smooth)]), tmp_path / "out"
    data = write(tmp_path / "x.npz", dict(images=pixels))
    result = run("moco", out, "--data", data, *MOCO)
    model, images = result.model, make_dataset(data, moco.CROPS)
    expected = images.encode_split(images.train, model)
    names = dict(AutoModel=AutoModel, AutoImageProcessor=AutoImageProcessor)
    exec(result.said["load"], names)
    inputs = names["processor"]([*pixels], return_tensors="pt")
    features = names["model"].eval()(**inputs).pooler_output.flatten(1)
    if size == 8:
        torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-5)
    else:                                                      # the processor resizes before it crops
        assert torch.cosine_similarity(features, expected).min() > 0.99
    encoder, normalisation = encoders.load_image_encoder(str(out)), encoders.read_mean_std(str(out))
    again = encoders.ImageEncoder(encoder, None, None, *normalisation)
    assert torch.equal(images.encode_split(images.train, again), expected)


def test_moco_updates_the_key_encoder_before_it_encodes_keys(tmp_path, monkeypatch):
    """With momentum 0, key encoder and query encoder have equal weights whenever keys are encoded. Both keys
    of an image enter the queue."""
    def checked(model, *rest, encode=moco.encode_keys):
        weights = dict(model.key.named_parameters())
        assert equal(weights, {name: w for name, w in model.named_parameters() if name in weights})
        return encode(model, *rest)

    monkeypatch.setattr(moco, "encode_keys", checked)
    data = write(tmp_path / "x.npz", dict(images=IMAGES))
    result = run("moco", tmp_path / "out", "--data", data, *MOCO, "--momentum", 0, "--symmetric")
    assert result.run.extra_state["pointer"] == 2 * 2 * 6 % 24                 # 2 steps, 2 keys per image


CASES = ["moco --symmetric", "memory_bank", "simclr", "simclr --ring", "simclr --supervised",
         "simclr_v2 --from-layer 0"]


def same_views(x, args):
    """Replace augmentation: colours stay unchanged, and the second view is flipped."""
    first, second = x.chunk(2)
    return torch.cat([first, second.flip(3)])


def run_cases(rank, port, folder):
    """Train all CASES twice: ranks 0 and 1 together, and rank 2 alone. With float64, equal runs agree to nine
    digits. SimCLR runs without batch statistics, because SyncBatchNorm does not exist for CPUs."""
    os.chdir(folder)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double
    torch.cuda.is_available = lambda: False
    # Random colours and flips would differ between ranks, so replace both. Random crop boxes do not differ.
    moco.augment = simclr.augment = same_views
    memory_bank.augment = lambda x, _: x
    dataset.flip = lambda x: x
    for i, case in enumerate(CASES):
        name, *flags = case.split()
        if rank < 2:
            place = dict(RANK=rank, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port + i)
            os.environ.update({variable: str(value) for variable, value in place.items()})
        own = MOCO[6:]
        if name.startswith("simclr"):
            own = ["--batch-size", 5, "--warmup-epochs", 0]
            own += ["--probe-epochs", 0] if name == "simclr" else []
            torch.nn.BatchNorm2d.forward = lambda norm, x: x * norm.weight[:, None, None]
        own += [*flags, "--keep-state", "always", "--out", f"{i}-{rank // 2}"]
        __import__(name).main([*map(str, ["--data", "x.npz", *MOCO[:6], *own])])


def test_two_processes_equal_one(tmp_path):
    """Two processes end with the weights of one. CASES include labelled batches that the two ranks share
    unequally, the memory bank, and MoCo's shuffling, split batch norms, queue and pointer."""
    write(tmp_path / "x.npz", dict(images=IMAGES, labels=np.arange(12) % 3))
    given = free_port(), tmp_path
    torch.multiprocessing.start_processes(run_cases, given, nprocs=3, start_method="forkserver")
    for i, case in enumerate(CASES):
        one, two = (torch.load(tmp_path / f"{i}-{alone}" / "state.pt") for alone in (1, 0))
        assert one["progress"] == two["progress"], case
        torch.testing.assert_close(two["model"], one["model"], rtol=1e-9, atol=1e-9)
