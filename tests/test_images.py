"""Pictures: reading, the encoder, neighbours, probes, saving; small whole runs of both picture scripts."""
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from transformers import AutoImageProcessor, AutoModel

import moco
import simclr
from kernels.training import images
from kernels.training.command import Fault
from running import DATA, equal, free_port, refuse, run

SCRIPTS = {"simclr": simclr, "moco": moco}
every_script = pytest.mark.parametrize("name", SCRIPTS)
FLAGS = ["--model", "tiny", "--batch-size", 12, "--epochs", 4, "--eval-every", 4, "--probe-epochs", 0]
OWN = {"simclr": ["--warmup", 0, "--optimizer", "sgd"], "moco": ["--bn-splits", 6, "--queue", 24]}
images.RESNETS["tiny"] = images.BASIC | dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])


def some(n, size=8):
    """Pictures and labels."""
    pictures = np.random.default_rng(0).integers(0, 256, (n, size, size, 3)).astype(np.uint8)
    return pictures, (np.arange(n) % 3).astype(np.uint8)


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
    """30 pictures and as many for tests: two steps of 12 an epoch, six pictures left over."""
    with np.load(DATA / "shapes.npz") as file:
        x, y = file["images"][:60, ::2, ::2], file["labels"][:60]
    arrays = dict(images=x[:30], labels=y[:30], test_images=x[30:], test_labels=y[30:])
    return write(tmp_path_factory.mktemp("data") / "x.npz", arrays)


def a_run(out="out", **flags):
    """What furniture wants of a Run."""
    args = SimpleNamespace(**{"chunk_size": None, "out": str(out), "model": "tiny", "data": "x.npz"} | flags)
    return SimpleNamespace(args=args, out=Path(out), rank=0, device=torch.device("cpu"), bf16=False,
                           script=Path("simclr.py"), progress={"best": {"step": 3, "knn": 50.0}})


def an_encoder(run, small=True):
    torch.manual_seed(0)
    encoder = images.load_encoder("tiny", small)
    return images.PictureEncoder(encoder, nn.Linear(16, 4), run, (0.5,) * 3, (0.2,) * 3)


def test_a_folder_and_cifars_batches_hold_the_same_pictures(tmp_path):
    pictures, labels = some(10, 32)
    for i, (picture, label) in enumerate(zip(pictures, labels)):
        write(tmp_path / "folder" / f"class{label}" / f"{i:03}.png", picture)
    (read, classes), test = images.read_pictures(tmp_path / "folder")
    order = np.argsort(labels, kind="stable")
    assert test is None and np.array_equal(read, pictures[order])
    assert classes.tolist() == labels[order].tolist()
    batch = {b"data": pictures.transpose(0, 3, 1, 2).reshape(10, -1), b"labels": list(range(10))}
    for name in ("data_batch_1", "data_batch_2", "test_batch"):
        write(tmp_path / "cifar" / name, pickle.dumps(batch))
    train, test = images.read_pictures(tmp_path / "cifar")
    assert np.array_equal(train[0], np.concatenate([pictures, pictures]))
    assert np.array_equal(test[0], pictures) and test[1].tolist() == list(range(10))


GOOD, LABELS = some(8)
PNG = {"a/0.png": GOOD[0]}


@pytest.mark.parametrize("path, files, said", [
    ("none", {}, r"none: No such file or directory"),
    ("", {}, r"no pictures; wanted \.bmp, "),
    ("", PNG | {"a/1.png": b"text"}, r"a/1\.png: not readable \(UnidentifiedImageError\); repair or delete"),
    ("", PNG | {"a/1.png": GOOD[1][:4]}, r"a/1\.png: 8 x 4, 0\.png is 8 x 8; bring all"),
    ("", PNG | {"1.png": GOOD[1]}, r"pictures beside the folders a; "),
    ("x.txt", {"x.txt": b"x"}, r"x\.txt: wanted a folder of pictures, CIFAR-10's python batches, "),
    ("x.npz", {"x.npz": dict(images=GOOD / 255)}, r"images are float64 \(8, 8, 8, 3\), wanted uint8"),
    ("x.npz", {"x.npz": dict(pictures=GOOD)}, r"holds pictures; wanted images, and labels, test_images, "),
    ("x.npz", {"x.npz": dict(images=GOOD, labels=LABELS[:3])}, r"labels are uint8 \(3,\), wanted 8 integers"),
    ("x.npz", {"x.npz": dict(images=GOOD, test_images=GOOD[0])}, r"test_images are uint8 \(8, 8, 3\)"),
    ("x.npz", {"x.npz": b"PK\3\4"}, r"x\.npz: File is not a zip file"),
    ("", {"data_batch_1": pickle.dumps([1, 2])}, r"list indices must be integers"),
    ("", {"data_batch_1": pickle.dumps(os.system)}, r"holds posix\.system, which no CIFAR batch does")])
def test_bad_pictures_are_named(path, files, said, tmp_path):
    for name, content in files.items():
        write(tmp_path / name, content)
    with pytest.raises(Fault, match=said) as fault:
        images.read_pictures(tmp_path / path)
    assert "\n" not in str(fault.value)


def test_pictures_that_do_not_fit(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    x, y = (write(Path(name), dict(images=part)) for name, part in (("x.npz", GOOD), ("y.npz", GOOD[:, :4])))
    said = "8 pictures of 8 x 8 from x.npz, no labelled test set: no evaluation"
    assert images.Pictures(SimpleNamespace(data=x, dev=None, batch_size=4)).describe() == said
    wanted = r"y\.npz: test pictures are 8 x 4, the others 8 x 8"
    refuse("moco", capfd, wanted, "--data", x, "--dev", y, "--batch-size", 4)
    wanted = r"x\.npz: 8 pictures, wanted at least --batch-size, which is 9"
    refuse("simclr", capfd, wanted, "--data", x, "--batch-size", 9)
    wanted = r"--supervised wants labels, and x\.npz has none: sub-folders, or labels in the \.npz"
    refuse("simclr", capfd, wanted, "--data", x, "--batch-size", 8, "--supervised")


def test_chunks_have_the_gradients_and_the_statistics_of_their_parts():
    views, whole, chunked = torch.rand(10, 3, 8, 8), an_encoder(a_run()), an_encoder(a_run(chunk_size=4))
    z = [torch.cat([whole(part) for part in views.split(4)]), chunked(views)]
    for one in z:
        one.square().sum().backward()
    torch.testing.assert_close(z[1], z[0])
    torch.testing.assert_close(chunked.state_dict(), whole.state_dict())
    gradients = [[weight.grad for weight in model.parameters()] for model in (chunked, whole)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_neighbours_vote():
    bank, labels = torch.eye(4).repeat(3, 1), torch.arange(4).repeat(3)
    assert images.knn_accuracy(bank, labels, torch.eye(4), torch.arange(4), k=3) == 100
    assert images.knn_accuracy(bank, labels, torch.eye(4), torch.tensor([1, 1, 2, 3]), k=3) == 75
    bank, labels = torch.tensor([[1.0, 0], [1, 2], [1, -2]]), torch.tensor([0, 1, 1])
    assert images.knn_accuracy(bank, labels, bank[:1], labels[:1]) == 100  # one near outweighs two far ones
    assert simclr.knn_accuracy is moco.knn_accuracy is images.knn_accuracy


@every_script
def test_probe_learns_and_moves_nothing(name, tmp_path):
    """Classes are colours, which features of a random network tell."""
    labels, colours = np.arange(60) % 3, np.zeros((60, 8, 8, 3), np.uint8)
    colours[np.arange(60), :, :, labels] = 200
    arrays = dict(images=colours, labels=labels, test_images=colours, test_labels=labels)
    path = write(tmp_path / "x.npz", arrays)
    run = a_run(data=path, dev=None, batch_size=4, probe_epochs=30, supervised=False, crop=0.5, seed=0)
    pictures, model = images.Pictures(run.args), an_encoder(run)
    pictures.place(run.device)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    assert images.evaluate(model, pictures) == {"knn": 100.0}
    assert SCRIPTS[name].linear_probe(model, pictures, run) > 90
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("size", [8, 40])
def test_saved_encoders_load_as_they_were(size, tmp_path):
    run, pictures = a_run(tmp_path), torch.from_numpy(some(4, size)[0])
    model = an_encoder(run, small=size == 8)
    images.save(model, run, (size, size))
    wanted, code = model.read(pictures), dict(trust_remote_code=True) if size == 8 else {}
    assert images.load_line(model, run).endswith("trust_remote_code=True)") == (size == 8)
    prepared = AutoImageProcessor.from_pretrained(tmp_path)([*pictures.numpy()], return_tensors="pt")
    theirs = AutoModel.from_pretrained(tmp_path, **code).eval()(**prepared).pooler_output.flatten(1)
    torch.testing.assert_close(theirs, wanted, rtol=1e-4, atol=1e-5)
    model.encoder = images.load_encoder(str(tmp_path), True)  # as --model: the checkpoint decides on the stem
    assert torch.equal(model.read(pictures), wanted)
    nn.init.zeros_(model.encoder.embedder.embedder.convolution.weight)
    model.restore(tmp_path)
    assert torch.equal(model.read(pictures), wanted)
    assert "knn 50" in (tmp_path / "README.md").read_text() and not (tmp_path / ".saving").exists()


def test_bad_models_are_named(tmp_path, bert):
    an_encoder(a_run(), small=False).encoder.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"x" * 20)
    (tmp_path / "empty").mkdir()
    for model, said in ((tmp_path, "SafetensorError"), (tmp_path / "empty", "no config.json in this folder"),
                        (bert, "BertModel is no image encoder like"), ("no/such", "no such folder, and the")):
        with pytest.raises(Fault, match=f"--model {model}: {said}"):
            images.load_encoder(str(model), True)


def same_views(pictures, args):
    """Views without chance: the picture, and the picture in a mirror."""
    x = images.scaled(pictures)
    return torch.cat([x[: len(x) // 2], x[len(x) // 2 :].flip(3)])


@pytest.mark.parametrize("name, flags, least", [
    ("simclr", "--form code --head-layers 3", 0.4), ("simclr", "--supervised --chunk-size 48", 0.8),
    ("simclr", "--optimizer lars --lr 10", 0.6), ("moco", "--queue 60", 0.4),
    ("moco", "--queue 60 --symmetric", 0.8), ("moco", "--queue 60 --v1 --chunk-size 10", 0.4)])
def test_one_batch_is_learnt(name, flags, least, data, tmp_path, monkeypatch):
    monkeypatch.setattr(SCRIPTS[name], "augment", same_views)
    own = [*OWN[name], "--lr", {"simclr": 2, "moco": 1}[name], "--probe-epochs", 2, "--steps", 30]
    own = ["--data", data, *FLAGS, *own, "--batch-size", 30, "--temperature", 0.2, *flags.split()]
    result = run(name, tmp_path / "out", *own)
    assert result.losses[-1] < result.losses[4] - least        # MoCo's first steps fill the queue
    assert [*result.steps[-1]][:5] == ["step", "loss", "lr", "dev_knn", "best"]
    assert "dev_knn" not in result.steps[-2] and "linear" in result.said["done"] and "load" in result.said
    assert {key.split(".")[0] for key in result.state["model"]} <= {"encoder", "head", "key", "queue"}


@every_script
def test_resume_is_exact(name, data, tmp_path, monkeypatch):
    """Steps 5 and 6, which the interrupted run did after its evaluation, are done again."""
    flags = ["--data", data, *FLAGS, *OWN[name]]
    whole = run(name, tmp_path / "whole", *flags)
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="130"):
        patch.setattr(SCRIPTS[name], "sum_gradients", Mock(side_effect=[None] * 6 + [KeyboardInterrupt]))
        SCRIPTS[name].main([*map(str, flags), "--out", str(tmp_path / "parts")])
    parts = run(name, tmp_path / "parts", *flags, "--resume")
    assert whole.losses == parts.losses and equal(whole.state["model"], parts.state["model"])
    assert whole.state["progress"] == parts.state["progress"]
    assert equal(*(load_file(tmp_path / out / "model.safetensors") for out in ("whole", "parts")))


CASES = {"moco": [], "moco symmetric": ["--symmetric"], "simclr": ["--batch-size", 11],
         "simclr supervised": ["--batch-size", 11, "--supervised"]}


def all_cases(rank, world, port, data, out):
    """Each case as one of several processes, or alone; in float64, so that equal runs stay equal to nine
    digits; SimCLR's without batch statistics, because processes on CPUs have statistics of their own."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        patch.setattr(torch.cuda, "is_available", lambda: False)
        for i, (case, flags) in enumerate(CASES.items()):
            place = dict(RANK=rank, WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=port + i)
            os.environ.update({variable: str(value) for variable, value in place.items() if world > 1})
            script = SCRIPTS[case.split()[0]]
            patch.setattr(script, "augment", same_views)
            if script is simclr:
                patch.setattr(nn.BatchNorm2d, "forward", lambda norm, x: x * norm.weight[:, None, None])
            flags = [*FLAGS, *OWN[case.split()[0]], *flags, "--steps", 3, "--out", out / case]
            script.main([*map(str, ["--data", data, *flags])])


def test_three_processes_equal_one(data, tmp_path):
    """Unequal shares of SimCLR's rows; MoCo's shuffled and split batch norms, queue and pointer."""
    try:
        all_cases(0, 1, 0, data, tmp_path / "one")
    finally:
        torch.set_default_dtype(torch.float32)
    given = 3, free_port(), data, tmp_path / "three"
    torch.multiprocessing.start_processes(all_cases, given, nprocs=3, start_method="forkserver")
    for case in CASES:
        one, three = (torch.load(tmp_path / world / case / "state.pt") for world in ("one", "three"))
        assert one["progress"] == three["progress"]
        torch.testing.assert_close(three["model"], one["model"], rtol=1e-9, atol=1e-9)
