"""Pictures: reading, the encoder, neighbours, the probe, saving; and small whole runs of both picture scripts."""
import json
import math
import os
import pickle
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel, BertConfig, BertModel

import moco
import simclr
from kernels.training import images
from kernels.training.command import Fault

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {"simclr": simclr, "moco": moco}
every_script = pytest.mark.parametrize("name", SCRIPTS)
TINY = dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
FLAGS = ["--model", "tiny", "--batch-size", 12, "--epochs", 3, "--eval-every", 4, "--probe-epochs", 2]
OWN = {"simclr": ["--optimizer", "sgd", "--lr", 0.1, "--warmup", 1], "moco": ["--bn-splits", 3, "--queue", 24]}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A network of two layers, on the CPU in one thread: equal runs are equal to the bit."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(images.RESNETS, "tiny", TINY)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def some_pictures(n, size=8, seed=0):
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (n, size, size, 3)).astype(np.uint8), (np.arange(n) % 3).astype(np.uint8)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """40 pictures of 8 pixels and 20 for tests: three steps of 12 an epoch, and four pictures left over."""
    path, (found, labels) = tmp_path_factory.mktemp("data") / "p.npz", some_pictures(60)
    np.savez(path, images=found[:40], labels=labels[:40], test_images=found[40:], test_labels=labels[40:])
    return path


def train(name, data, out, *flags):
    """Runs the script; the progress, model and optimizer of its state.pt, and the rows of metrics.jsonl."""
    flags = ["--data", data, "--out", out, *FLAGS, *OWN[name], *flags]
    SCRIPTS[name].main([*map(str, flags)])
    rows = [json.loads(line) for line in open(out / "metrics.jsonl")]
    return torch.load(out / "state.pt", weights_only=True), [row | {"seconds": 0} for row in rows]


def a_run(out, chunk_size=None, **flags):
    """What furniture wants of a Run."""
    args = SimpleNamespace(chunk_size=chunk_size, out=str(out), model="tiny", data="p.npz", seed=0, **flags)
    return SimpleNamespace(args=args, out=Path(out), rank=0, device=torch.device("cpu"), bf16=False, impl="auto",
                           script=Path("simclr.py"), progress={"best": {"step": 3, "knn": 50.0}})


def an_encoder(run, small=True):
    torch.manual_seed(0)
    return images.PictureEncoder(images.load_encoder("tiny", small), nn.Linear(16, 4), run, (0.5,) * 3, (0.2,) * 3)


# ── reading ──


def test_a_folder_and_cifars_batches_hold_the_same_pictures(tmp_path):
    found, labels = some_pictures(10, 32)
    for i, (picture, label) in enumerate(zip(found, labels)):
        (tmp_path / "folder" / f"class{label}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(tmp_path / "folder" / f"class{label}" / f"{i:03}.png")
    (read, classes), test = images.read_pictures(tmp_path / "folder")
    order = np.argsort(labels, kind="stable")
    assert test is None and np.array_equal(read.numpy(), found[order])
    assert classes.tolist() == labels[order].tolist()
    (tmp_path / "cifar").mkdir()
    for name in ("data_batch_1", "data_batch_2", "test_batch"):
        batch = {b"data": found.transpose(0, 3, 1, 2).reshape(10, -1), b"labels": list(range(10))}
        (tmp_path / "cifar" / name).write_bytes(pickle.dumps(batch))
    train, test = images.read_pictures(tmp_path / "cifar")
    assert np.array_equal(train[0].numpy(), np.concatenate([found, found]))
    assert np.array_equal(test[0].numpy(), found) and test[1].tolist() == list(range(10))


class Evil:
    def __reduce__(self):
        return os.system, ("true",)


def bad_folder(folder):
    (folder / "a").mkdir()
    Image.fromarray(some_pictures(1)[0][0]).save(folder / "a" / "0.png")
    return folder


GOOD = some_pictures(8)
BAD = {
    "absent": (lambda f: f / "none", r"none: No such file or directory"),
    "text": (lambda f: (bad_folder(f) / "a" / "1.png").write_bytes(b"no picture") and f,
             r"a/1\.png: not readable \(UnidentifiedImageError\); repair or delete it"),
    "sizes": (lambda f: Image.fromarray(GOOD[0][0][:4]).save(bad_folder(f) / "a" / "1.png") or f,
              r"a/1\.png: 8 x 4, 0\.png is 8 x 8; bring all"),
    "beside": (lambda f: Image.fromarray(GOOD[0][0]).save(bad_folder(f) / "1.png") or f,
               r"pictures beside the folders a; "),
    "no pictures": (lambda f: f, r"no pictures; wanted \.bmp, "),
    "other file": (lambda f: save(f / "x.txt", b"x"), r"x\.txt: wanted a folder of pictures, CIFAR-10's"),
    "floats": (lambda f: save(f / "x.npz", images=GOOD[0] / 255), r"images are float64 \(8, 8, 8, 3\), wanted uint8"),
    "names": (lambda f: save(f / "x.npz", pictures=GOOD[0]), r"holds pictures; wanted images, and labels, test_i"),
    "labels": (lambda f: save(f / "x.npz", images=GOOD[0], labels=GOOD[1][:3]),
               r"labels are uint8 \(3,\), wanted 8 integers from 0 up"),
    "test": (lambda f: save(f / "x.npz", images=GOOD[0], test_images=GOOD[0][0]), r"test_images are uint8 \(8, 8, 3"),
    "cut off": (lambda f: save(f / "x.npz", b"PK\3\4"), r"x\.npz: File is not a zip file"),
    "no batch": (lambda f: save(f / "data_batch_1", pickle.dumps([1, 2])) and f, r"list indices must be integers"),
    "code": (lambda f: save(f / "data_batch_1", pickle.dumps(Evil())) and f,
             r"holds posix\.system, which no CIFAR batch does")}


def save(path, content=None, **arrays):
    np.savez(path, **arrays) if arrays else path.write_bytes(content)
    return path


@pytest.mark.parametrize("make, said", BAD.values(), ids=BAD)
def test_bad_pictures_are_named(make, said, tmp_path):
    with pytest.raises(Fault, match=said) as fault:
        images.read_pictures(make(tmp_path))
    assert "\n" not in str(fault.value)


def test_pictures_that_cannot_be_used(tmp_path, capsys):
    found, labels = some_pictures(8)
    path, other = save(tmp_path / "x.npy", b""), save(tmp_path / "y.npz", images=found[:, :4], labels=labels)
    np.save(path, found)
    args = SimpleNamespace(data=path, dev=other, batch_size=4)
    with pytest.raises(Fault, match=r"y\.npz: test pictures are 8 x 4, the others 8 x 8"):
        images.Pictures(args)
    args.dev = None
    assert images.Pictures(args).describe() == f"8 pictures of 8 x 8 from {path}, no labelled test set: no evaluation"
    with pytest.raises(SystemExit) as end:
        simclr.main(["--data", str(path), "--batch-size", "9"])
    wanted = f"simclr.py: {path}: 8 pictures, wanted at least --batch-size, which is 9\n"
    assert end.value.code == 2 and capsys.readouterr().err == wanted


# ── encoder, neighbours, probe ──


def test_chunks_have_the_gradients_and_the_statistics_of_their_parts():
    views = torch.rand(10, 3, 8, 8)
    whole, chunked = an_encoder(a_run("out")), an_encoder(a_run("out", chunk_size=4))
    z = [torch.cat([whole(part) for part in views.split(4)]), chunked(views)]
    for one in z:
        one.square().sum().backward()
    torch.testing.assert_close(z[1], z[0])
    for (name, a), b in zip(whole.state_dict().items(), chunked.state_dict().values()):
        torch.testing.assert_close(b, a, msg=name)
    for a, b in zip(whole.parameters(), chunked.parameters()):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-5)


def test_read_is_at_rest_and_scaled():
    model = an_encoder(a_run("out")).train()
    found = torch.from_numpy(some_pictures(6)[0])
    before = {name: x.clone() for name, x in model.state_dict().items()}
    z = model.read(found)
    assert model.training and all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    x = (found.permute(0, 3, 1, 2) / 255 - 0.5) / 0.2
    torch.testing.assert_close(z, model.eval().encoder(x).pooler_output.flatten(1))
    assert "mean" not in before


def test_neighbours_vote():
    bank, labels = torch.eye(4).repeat(3, 1), torch.arange(4).repeat(3)
    assert images.knn_accuracy(bank, labels, torch.eye(4), torch.arange(4), k=3) == 100
    assert images.knn_accuracy(bank, labels, torch.eye(4), torch.tensor([1, 1, 2, 3]), k=3) == 75
    assert simclr.knn_accuracy is moco.knn_accuracy is images.knn_accuracy
    far = torch.nn.functional.normalize(torch.tensor([[1.0, 0.0], [0.5, 0.9], [0.5, -0.9]]), dim=1)
    near = images.knn_accuracy(far, torch.tensor([0, 1, 1]), torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    assert near == 100                                         # one that is near outweighs two that are far


@every_script
def test_probe_learns_and_moves_nothing(name, tmp_path):
    """Pictures of one colour a class: features of a random network tell them apart."""
    classes = np.arange(60) % 3
    found = np.zeros((60, 8, 8, 3), np.uint8)
    found[np.arange(60), :, :, classes] = 200
    path = save(tmp_path / "x.npz", images=found, labels=classes, test_images=found, test_labels=classes)
    run = a_run("out", dev=None, batch_size=4, impl="auto", probe_epochs=30, supervised=False, crop=0.5)
    run.args.data = path
    pictures, model = images.Pictures(run.args), an_encoder(run)
    pictures.place(run.device)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    assert images.evaluate(model, pictures) == {"knn": 100.0}
    assert SCRIPTS[name].linear_probe(model, pictures, run) > 90
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())


# ── saving and loading ──


@pytest.mark.parametrize("size", [8, 40])
def test_saved_encoders_load_as_they_were(size, tmp_path):
    run, found = a_run(tmp_path), torch.from_numpy(some_pictures(4, size)[0])
    model = an_encoder(run, small=size == 8)
    images.save(model, run, (size, size))
    wanted, code = model.read(found), dict(trust_remote_code=True) if size == 8 else {}
    assert images.load_line(model, run).endswith("trust_remote_code=True)") == (size == 8)
    again = images.PictureEncoder(images.load_encoder(str(tmp_path), True), None, run, (0.5,) * 3, (0.2,) * 3)
    assert torch.equal(again.read(found), wanted)
    scaled = (found.permute(0, 3, 1, 2) / 255 - 0.5) / 0.2
    theirs = AutoModel.from_pretrained(tmp_path, **code).eval()
    torch.testing.assert_close(theirs(scaled).pooler_output.flatten(1), wanted)
    prepare = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert prepare["size"] == dict(height=size, width=size) and prepare["image_std"] == pytest.approx([0.2] * 3)
    assert "knn 50" in (tmp_path / "README.md").read_text() and not (tmp_path / ".saving").exists()
    nn.init.zeros_(model.encoder.embedder.embedder.convolution.weight)
    model.restore(tmp_path)
    assert torch.equal(model.read(found), wanted)


@pytest.mark.parametrize("damage, said", [
    (lambda f: (f / "config.json").unlink(), r"no config\.json in this folder"),
    (lambda f: (f / "model.safetensors").write_bytes(b"x" * 20), r"SafetensorError"),
    (lambda f: BertModel(BertConfig(**dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads",
                                                     "intermediate_size", "vocab_size"), 2))).save_pretrained(f),
     r"BertModel is no image encoder like ResNet"),
    (lambda f: shutil.rmtree(f), r"no such folder, and the hub does not give it; .* or take resnet-18")])
def test_bad_models_are_named(damage, said, tmp_path):
    folder = tmp_path / "model"
    an_encoder(a_run("out"), small=False).encoder.save_pretrained(folder)
    damage(folder)
    with pytest.raises(Fault, match=said):
        images.load_encoder(str(folder), True)


# ── whole runs ──


@pytest.mark.parametrize("name, flags", [
    ("simclr", ["--supervised", "--form", "code", "--head-layers", 3]), ("simclr", ["--optimizer", "lars"]),
    ("moco", ["--v1"]), ("moco", ["--symmetric", "--chunk-size", 8])], ids=str)
def test_runs(name, flags, data, tmp_path, capsys):
    state, rows = train(name, data, tmp_path / "out", *flags)
    said = capsys.readouterr().out
    assert "kNN" in said and "linear" in said and "load     AutoModel" in said
    assert [row["step"] for row in rows] == [*range(1, 10)] and all(math.isfinite(row["loss"]) for row in rows)
    assert [*rows[-1]][:5] == ["step", "loss", "lr", "dev_knn", "best"] and "dev_knn" not in rows[-3]
    assert {key.split(".")[0] for key in state["model"]} <= {"encoder", "head", "key", "queue"}


@every_script
def test_resume_is_exact(name, data, tmp_path, monkeypatch):
    """Steps 5 and 6, which the interrupted run did after its evaluation, are done again."""
    whole = train(name, data, tmp_path / "whole", "--probe-epochs", 0)
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="130"):
        patch.setattr(SCRIPTS[name], "sum_gradients", Mock(side_effect=[None] * 6 + [KeyboardInterrupt]))
        train(name, data, tmp_path / "parts", "--probe-epochs", 0)
    parts = train(name, data, tmp_path / "parts", "--probe-epochs", 0, "--resume")
    assert whole[1] == parts[1] and whole[0]["progress"] == parts[0]["progress"]
    assert all(torch.equal(x, parts[0]["model"][key]) for key, x in whole[0]["model"].items())
    one, two = (load_file(tmp_path / out / "model.safetensors") for out in ("whole", "parts"))
    assert all(torch.equal(one[key], two[key]) for key in one)


def without_chance(patch):
    """Float64 all through, and views without chance: equal runs stay equal to nine digits. SimCLR's batch norms
    stay at what they were made with: processes on CPUs have statistics of their own."""
    def same_views(pictures, args):
        x = pictures.permute(0, 3, 1, 2).double() / 255
        return torch.cat([x[: len(x) // 2], x[len(x) // 2 :].flip(3)])

    def still(*given, build=simclr.build_model):
        model = build(*given)
        for norm in (part for part in model.modules() if isinstance(part, nn.BatchNorm2d)):
            norm.train = lambda mode=True: None
            norm.training = False
        return model

    patch.setattr(torch.Tensor, "float", torch.Tensor.double)
    patch.setattr(moco, "augment", same_views)
    patch.setattr(simclr, "augment", same_views)
    patch.setattr(simclr, "build_model", still)
    patch.setitem(images.RESNETS, "tiny", TINY)
    torch.set_default_dtype(torch.float64)


CASES = {"simclr": ["--batch-size", 11], "supervised": ["--batch-size", 11, "--supervised"], "moco": [],
         "symmetric": ["--symmetric", "--chunk-size", 4]}


def all_cases(rank, world, port, data, out):
    """Each case, as one of several processes, or alone."""
    if world > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
        torch.set_num_threads(1)
    try:
        with pytest.MonkeyPatch.context() as patch:
            without_chance(patch)
            for i, (case, flags) in enumerate(CASES.items()):
                os.environ["MASTER_PORT"] = str(port + i)
                name = "moco" if case in ("moco", "symmetric") else "simclr"
                train(name, data, out / case, *flags, "--probe-epochs", 0, "--steps", 3)
    finally:
        torch.set_default_dtype(torch.float32)


def test_three_processes_equal_one(data, tmp_path):
    """Unequal shares of SimCLR's rows; MoCo's shuffled and split batch norms, queue and pointer."""
    all_cases(0, 1, 0, data, tmp_path / "one")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = 3, port, data, tmp_path / "three"
    torch.multiprocessing.start_processes(all_cases, given, nprocs=3, start_method="forkserver")
    for case in CASES:
        one, three = (torch.load(tmp_path / world / case / "state.pt") for world in ("one", "three"))
        assert one["progress"] == three["progress"]
        for key, x in one["model"].items():
            torch.testing.assert_close(three["model"][key], x, rtol=1e-9, atol=1e-9, msg=f"{case} {key}")


def test_scripts_run_where_only_kernels_is_beside_them(data, tmp_path):
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    code = "import sys\n"
    for name in SCRIPTS:
        shutil.copy(ROOT / f"{name}.py", tmp_path)
        flags = ["--model", "resnet-small", "--data", str(data), "--batch-size", "16", "--steps", "2", "--out", name,
                 "--probe-epochs", "1", *["--queue", "16"] * (name == "moco")]
        code += f"import {name}\n{name}.main({flags})\n"
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "TRITON_INTERPRET")}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env | {"CUDA_VISIBLE_DEVICES": ""},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in SCRIPTS:
        assert {file.name for file in (tmp_path / name).iterdir()} == {
            "README.md", "args.json", "config.json", "metrics.jsonl", "model.safetensors", "modeling.py",
            "preprocessor_config.json", "state.pt", "training", f"{name}.py"}
