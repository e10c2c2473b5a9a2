"""Whole runs of the scripts. A script learns, resumes exactly, scores its saved model again, runs as a copy,
and has the same gradients in several processes as in one."""
import csv
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from transformers import AutoModel

from good import FLAGS, words
from kernels.training.text import mlm
from running import (
    DATA,
    MORE,
    ROOT,
    SCRIPTS,
    end,
    free_port,
    mask_every_fourth,
    metrics,
    run_command,
    start,
    start_rank,
    train,
    weights,
)

STS = ["--dev", DATA / "sts.tsv"]
SENTENCES = ["--model", "scratch", "--data", DATA / "sentences.txt", *STS]
IMAGES = ["--model", "resnet-small", "--data", DATA / "shapes.npz", "--batch-size", 60, "--probe-epochs", 0]
TOPICS = ["--model", "scratch", "--data", DATA / "topics.tsv", "--dev", DATA / "topics_dev.tsv"]
WORDNET = ["--tagger", "lexicon", "--wordnet", DATA / "wordnet", "--data", DATA / "sentences.txt"]
# {script: (flags of a run that learns, its steps, flags of --evaluate, pattern of the score before and after,
# smallest gain)}. `places` replaces names of fixtures and files, such as "bert", by paths.
RUNS = {
    "simclr": ([*IMAGES, "--optimizer", "sgd", "--lr", 0.4, "--warmup-epochs", 0], 30,
               IMAGES[2:4] + IMAGES[6:], r"kNN (\S+) → (\S+) %", -100),  # −100: only the loss must improve
    "moco": ([*IMAGES, "--queue-size", 120, "--bn-splits", 2, "--lr", 0.06], 30,
             IMAGES[2:4] + IMAGES[6:], r"kNN (\S+) → (\S+) %", -100),
    "simcse": (["--model", "scratch", "--data", DATA / "nli.csv", *STS], 30, STS, r"(\S+) → (\S+) at", 20),
    "selfguided": (["--model", "spoiled", *SENTENCES[2:], "--projection-dim", 128, "--pooling", "cls",
                    "--lr", 2e-3, "--batch-size", 12, "--view-pooling", "mean"], 40, STS,
                   r"(\S+) → (\S+) at", 4),
    "cline": (["--model", "scratch", *WORDNET, "--batch-size", 16, "--synonym-rate", 0.6,
               "--antonym-rate", 0.6, "--lr", 4e-3, "--held-out-rows", 60], 40, WORDNET,
              r"hits (\S+) → ([0-9.]+)", 10),
    "tacl": (["--model", "bert", "--data", "train.txt", "--dev", "held-out.txt", "--batch-size", 8,
              "--max-length", 48, "--lr", 3e-3], 30, ["--dev", "held-out.txt", "--max-length", 48],
             r"accuracy (\S+) → (\S+) %", 8),
    "ease": (["--model", "scratch", "--data", DATA / "entities.tsv", *STS], 30, STS, r"(\S+) → (\S+) at", 12),
    "vascl": ([*SENTENCES, "--neighbours", 4, "--radius", 0.2], 30, STS, r"(\S+) → (\S+) at", 4),
    "dclr": ([*SENTENCES, "--guide", "trained", "--phi", 0.994], 30, STS, r"(\S+) → (\S+) at", 8),
    "childtuning": ([*TOPICS, "--mode", "F"], 120, TOPICS[4:], r"accuracy ()([0-9.]+)", 30),
    "docs/more/consert": (SENTENCES, 40, STS, r"(\S+) → (\S+) at", 4),
    "docs/more/declutr": (["--model", "scratch", "--data", "articles.txt", *STS, "--max-length", 16], 40, STS,
                          r"(\S+) → (\S+) at", 1),
    "docs/more/simcls": (["--model", "scratch", "--data", "candidates.csv", "--dev", "candidates.csv"], 40,
                         ["--dev", "candidates.csv"], r"chosen (\S+) → (\S+) of", 10),
    "docs/more/cil": (["--model", "scratch", "--data", DATA / "relations.jsonl",
                       "--dev", DATA / "relations_dev.jsonl"], 60, ["--data", DATA / "relations_dev.jsonl"],
                      r"auc (\S+) → (\S+),", 10),
    "docs/more/finetune": ([*TOPICS, "--supcon-weight", 0.3], 120, TOPICS[4:], r"accuracy ()([0-9.]+)", 30),
    "docs/more/ood": ([*TOPICS, "--ood-epochs", 2], 60, TOPICS[4:], r"accuracy ()([0-9.]+)", 30),
    "docs/more/memory_bank": ([*IMAGES, "--bn-splits", 2, "--lr", 0.06], 30, IMAGES[2:4] + IMAGES[6:],
                              r"kNN (\S+) → (\S+) %", -100),
    "docs/more/simclr_v2": ([*IMAGES[:6], "--from-layer", 0], 4, IMAGES[2:4], r"top-1 ()(\S+) %", 0)}


def test_every_script_is_in_these_tables():
    assert FLAGS.keys() == RUNS.keys() == {*SCRIPTS, *MORE}


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Return the folder of an encoder that simcse.py has trained for 30 steps."""
    folder = tmp_path_factory.mktemp("trained")
    train(["simcse", "--model", "scratch", "--data", DATA / "nli.csv", "--steps", 30, "--out", "out"], folder)
    return folder / "out"


@pytest.fixture(scope="session")
def spoiled(trained, tmp_path_factory):
    """Return the trained encoder's folder with a random last layer, so that lower layers embed better."""
    folder = shutil.copytree(trained, tmp_path_factory.mktemp("spoiled") / "out")
    model = AutoModel.from_pretrained(trained)
    torch.manual_seed(0)
    for weight in model.encoder.layer[-1].parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def places(bert, trained, spoiled, documents, tmp_path):
    """Return {word in RUNS or RANKS that stands for a model or a data file: its path}."""
    lines = (DATA / "sentences.txt").read_text("utf-8").splitlines()
    articles, letters = tmp_path / "articles.txt", tmp_path / "letters.txt"
    candidates = tmp_path / "candidates.csv"
    starts = range(0, len(lines) - 19, 20)
    articles.write_text("\n".join(" ".join(lines[i : i + 20]) for i in starts), "utf-8")
    letters.write_text("".join(f"{letter} " * 16 + "\n" for letter in "abcdefghijkl"))  # all spans are equal
    rows = list(csv.reader(open(DATA / "nli.csv", newline="", encoding="utf-8")))[1:41]
    with open(candidates, "w", newline="", encoding="utf-8") as file:
        # a text, its reference, and candidates from best to worst: entailed, contradicting, unrelated
        csv.writer(file).writerows([*a[:2], a[1], a[2], b[1]] for a, b in zip(rows, rows[1:]))
    models = dict(bert=bert, trained=trained, spoiled=spoiled)
    return models | {path.name: path for path in (*documents, articles, letters, candidates)}


def check_learning(name, out, printed):
    """Check that a run with its flags in RUNS has improved its score; return its output from "done" on."""
    _, steps, _, pattern, gain = RUNS[name]
    done = printed[printed.index("\ndone "):]
    before, after = re.search(pattern, done).groups()
    assert metrics(out)[-1]["step"] >= steps and float(after) >= float(before or 0) + gain
    if name in ("simclr", "moco", "docs/more/memory_bank"):
        losses = [row["loss"] for row in metrics(out) if row["step"]]
        first = losses[4:7] if name == "moco" else losses[:3]  # MoCo's queue is random at first
        assert sum(losses[-3:]) < sum(first) - 0.3, losses
    return done


def die_after(steps):
    """Make this process kill itself with SIGKILL after `steps` steps of its optimizer."""
    def count(*_):
        nonlocal steps
        steps -= 1
        if not steps:
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_post_hook(count)


@pytest.mark.parametrize("name", RUNS)
def test_learning(name, tmp_path, places):
    """Training improves the score. --evaluate prints the score of the trained model again."""
    flags, steps, scored, pattern, _ = RUNS[name]
    flags, scored = ([places.get(flag, flag) for flag in words] for words in (flags, scored))
    often = steps // 2 if name.endswith("declutr") else steps  # DeCLUTR's score falls at the end
    printed = train([name, *flags, "--steps", steps, "--eval-every", often, "--out", "out"], tmp_path)
    done = check_learning(name, tmp_path / "out", printed)
    printed = train([name, "--evaluate", "--model", "out", *scored], tmp_path)
    if name == "cline":                                        # --evaluate scores more texts than training
        assert float(re.search(r"hits ([0-9.]+)", printed)[1]) > 50
        return
    if name == "tacl":                                         # in --evaluate, the saved model is the teacher
        pattern = r"(top layer) \S+ → (\S+),"
    assert re.search(rf" {re.escape(re.search(pattern, done)[2])}\b", printed), printed


@pytest.mark.parametrize("name", FLAGS)
def test_resume_after_a_kill(name, here):
    """A killed and resumed run has, bit for bit, the metrics and saved weights of an uninterrupted run. The
    run is killed in step 4 and resumes from the checkpoint of step 3. --out has a copy of the script, and of
    the files that only this script imports."""
    command = words(f"{name} --steps 6 --eval-every 3")
    train([*command, "--out", "whole"], here)
    killed = run_command(command, here, setup=functools.partial(die_after, 4))
    assert killed.code == -signal.SIGKILL and metrics(here / "out")[-1]["step"] < 6, killed.errors
    train([name, "--out", "out", "--resume"], here)
    rows, wanted = metrics(here / "out"), metrics(here / "whole")
    for row in rows + wanted:
        row["seconds"] = 0
    assert len(rows) >= 6 and rows == wanted
    assert weights(here / "out") and weights(here / "out") == weights(here / "whole")
    code = {path.name for path in (ROOT / name).parent.glob(f"{Path(name).name}*.py")}
    assert code and code <= {path.name for path in (here / "out").iterdir()}


def test_a_signal_to_the_process_group(here, tmp_path):
    """The processes that decode images get the signal, too, but the run saves its step. Before the signal, a
    second process may not resume the run. --out is beside the images, not inside their folder."""
    out = here / "photos-out"
    flags = ["--data", here / "photos", "--workers", 2, "--steps", 1000, "--out", out]
    process = start([*words("moco"), *flags], here, os.setpgrp)
    while not (rows := out / "metrics.jsonl").exists() or not rows.stat().st_size:
        assert process.is_alive(), (here / "errors").read_text()
        time.sleep(0.1)
    other = run_command(["moco", "--resume", "--out", out], tmp_path)
    os.killpg(process.pid, signal.SIGTERM)
    code = end(process)
    assert other.code == 2 and "another process is writing there" in other.errors, other.errors
    assert code == 130 and (out / "state.pt").exists(), (here / "errors").read_text()
    assert "saved; --resume continues" in (here / "printed").read_text()


def test_a_closed_stdout(here):
    """As in `simcse.py ... | head -1`: the run goes on without printing."""
    command = [sys.executable, ROOT / "simcse.py", *words("simcse")[1:]]
    with subprocess.Popen(command, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline().startswith(b"simcse ")
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 0 and weights(here / "out")


def test_a_short_run_is_evaluated_four_times(here):
    train(words("simcse --steps 16 --dev sts.tsv"), here)
    assert [row["step"] for row in metrics(here / "out") if "dev_spearman" in row] == [0, 4, 8, 12, 16]


def test_the_linear_probe_is_announced(here):
    """--resume may change its epochs, and does not read a folder with the name of a new model."""
    (here / "resnet-small").mkdir()
    for flags in (words("simclr --keep-state always"), ["simclr", "--out", "out", "--resume"]):
        (here / "resnet-small" / flags[1].strip("-")).touch()
        printed = train([*flags, "--probe-epochs", len(flags)], here)
        assert f", then {len(flags)} epochs of a linear probe (--probe-epochs), writing out\n" in printed


def test_copies_need_only_kernels(here):
    """All ten scripts run in a folder that has only the scripts, kernels/ and data, and without Triton, which
    does not exist for all operating systems."""
    shutil.copytree(ROOT / "kernels", here / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    commands = []
    for name in SCRIPTS:
        shutil.copy(ROOT / f"{name}.py", here)
        commands.append([f"{name}.py", *words(name)[1:], "--out", f"out/{name}"])
    code = "import runpy, sys\nsys.modules['triton'] = None\n"
    code += "for command in eval(sys.stdin.read()):\n    sys.argv = command\n"
    code += "    runpy.run_path(command[0], run_name='__main__')\n"
    env = {key: os.environ[key] for key in os.environ.keys() - {"PYTHONPATH", "TRITON_INTERPRET"}}
    env["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run([sys.executable, "-c", code], cwd=here, env=env, input=repr(commands),
                          capture_output=True, encoding="utf-8")
    assert done.returncode == 0 and done.stdout.count("\ndone ") == 10, done.stderr
    for name in SCRIPTS:
        assert {"args.json", "config.json"} <= {path.name for path in (here / "out" / name).iterdir()}
        assert weights(here / "out" / name)


def record_norms(path):
    """Append the gradient norms before clipping and before each step to a file; replace random masks."""
    mlm.mask_tokens = mask_every_fourth
    clip = torch.nn.utils.clip_grad_norm_

    def record(norm):
        with open(path, "a") as file:
            print(norm.item(), file=file)

    def clip_and_record(*args, **more):
        norm = clip(*args, **more)
        record(norm)
        return norm

    def before_step(optimizer, *_):
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        record(torch.nn.utils.get_total_norm([w.grad for w in weights if w.grad is not None]))

    torch.nn.utils.clip_grad_norm_ = clip_and_record
    register_optimizer_step_pre_hook(before_step)


def train_ranks(count, words, folder):
    """Train in `count` processes; return the losses and the gradient norms of rank 0."""
    port, processes = free_port(), []
    for rank in range(count):
        processes.append(start_rank(rank, count, port, [*words, "--out", folder / "out"], folder / str(rank),
                                    functools.partial(record_norms, folder / str(rank) / "norms")))
    for rank, process in enumerate(processes):
        assert end(process) == 0, (folder / str(rank) / "errors").read_text()
    norms = [float(line) for line in (folder / "0" / "norms").read_text().split()]
    return [row["loss"] for row in metrics(folder / "out") if row["step"]], norms


# {script: its flags in test_processes_equal_one}. With these flags only token masks are random. Scripts for
# images are tested in tests/training/images/test_dataset.py, which replaces their random augmentation.
POOLED, CIL = ["--pooling", "avg"], ["--classifier-dropout", 0]
FINETUNE = ["--data", TOPICS[-1], "--supcon-weight", 0.5, "--rdrop-weight", 0.5]
OOD = ["--data", TOPICS[-1], "--ood-epochs", 1]
RANKS = {
    "simcse": [*POOLED, "--mlm-weight", 0.1], "simcse ring": [*POOLED, "--ring"],
    "ease": POOLED, "vascl": [*POOLED, "--neighbours", 4],
    "dclr": [*POOLED, "--guide", "bert"],
    "selfguided": [*POOLED, "--projection-dim", 16, "--view-pooling", "mean"],
    "cline": [*WORDNET[:4], "--form", "code", "--held-out-rows", 2],
    "tacl": ["--grad-accum", 2, "--max-length", 48], "childtuning": ["--mode", "F"],
    "childtuning D": ["--mode", "D", "--fisher-samples", 24, "--fisher-batch-size", 5],
    "docs/more/consert": ["--data", DATA / "nli.csv", "--columns", "sent0", "sent1",
                          "--views", "dropout", "dropout", "--adversarial", 0.5],
    "docs/more/declutr": ["--data", "letters.txt", "--max-length", 4, "--spans", 2, 3],
    "docs/more/simcls": POOLED,
    "docs/more/cil": CIL, "docs/more/cil code": [*CIL, "--form", "code"],
    "docs/more/finetune": FINETUNE, "docs/more/finetune code": [*FINETUNE, "--form", "code"],
    "docs/more/ood": OOD, "docs/more/ood code": [*OOD, "--form", "code"]}


@pytest.mark.parametrize("case", RANKS)
def test_processes_equal_one(case, tmp_path, places):
    """Three processes with unequal shares of a batch and chunks have the losses and gradients of one
    process without chunks. The model has no dropout."""
    name = case.split()[0]
    data = RUNS[name][0][RUNS[name][0].index("--data") + 1]
    words = [name, "--model", "bert", "--data", data, "--batch-size", 8, "--steps", 3, "--lr", 1e-3]
    words = [places.get(word, word) for word in [*words, *RANKS[case]]]
    has_chunks = name not in ("cline", "tacl", "childtuning", "docs/more/finetune", "docs/more/ood")
    chunks = ["--chunk-size", 3] if has_chunks else []
    losses, norms = train_ranks(1, words, tmp_path / "one")
    several = train_ranks(3, [*words, *chunks], tmp_path / "three")
    assert len(losses) >= 3 and several[0] == pytest.approx(losses, rel=1e-5, abs=1e-5)
    assert norms and several[1] == pytest.approx(norms, rel=1e-4)
