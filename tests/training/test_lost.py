"""Nothing is lost, nothing hangs: runs that are stopped at any stage and begun again, two at once, folders
that vanish, tokens that are damaged, a terminal that closes, a disk and a memory that are full."""
import contextlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

import simcse
from kernels.benchmark import measure as benchmark
from kernels.printing import one_line
from kernels.training import output_dir
from kernels.training.cli import Fault, Flags, command, fail, handle_signals, put
from kernels.training.extras import layer_study, plot, triples
from kernels.training.progress import progress
from kernels.training.text.tokens import tokenise_table
from running import DATA, GOOD, KEPT, ROOT, SMALL, equal, metrics, refuse, run

STAGES = {"reading": "simcse.load_data", "reading the held-out data": "simcse.HeldOut",
          "loading": "simcse.build_model", "copying code": "kernels.training.output_dir.write_code",
          "tokenising": "simcse.tokenise_table", "the first evaluation": "simcse.HeldOut.before",
          "a step": "simcse.sum_gradients", "an evaluation": "kernels.training.text.evaluation.save",
          "behind the last step": "simcse.HeldOut.after"}
FIRST = "stopped  before anything was saved"
SAID = {"a step": "stopped  at step 1, saved; --resume continues",
        "an evaluation": "stopped  at step 2, saved; --resume continues",
        "behind the last step": "stopped  behind the last step; the checkpoint is whole"}
FLAGS = [*KEPT, "--steps", "3", "--eval-every", "2"]


def same_result(one, two):
    states = [torch.load(out / "state.pt", weights_only=True) for out in (one, two)]
    rows = [[row | {"seconds": 0} for row in metrics(out)] for out in (one, two)]
    models = [load_file(out / "model.safetensors") for out in (one, two)]
    return equal(*states) and rows[0] == rows[1] and equal(*models)


@pytest.fixture
def whole(here):
    """What the unbroken run left."""
    simcse.main([*FLAGS, "--out", "whole"])
    return Path("whole")


@pytest.mark.parametrize("kind", ["SIGTERM", "SIGHUP"])
def test_a_signal_at_any_stage_is_ctrl_c(kind, whole, monkeypatch, capfd):
    """One line, exit code 130, and the same command with --resume ends in the unbroken run's bits."""
    for stage, name in STAGES.items():
        out, parts = Path(stage), []
        with monkeypatch.context() as patch:
            module, _, attribute = name.rpartition(".")
            owner = sys.modules.get(module) or getattr(simcse, module.rpartition(".")[2])
            real = getattr(owner, attribute)

            def interrupted(*args, real=real, parts=parts, **more):
                parts or parts.append(signal.raise_signal(getattr(signal, kind)))
                return real(*args, **more)
            patch.setattr(owner, attribute, interrupted)
            with pytest.raises(SystemExit) as end:
                simcse.main([*FLAGS, "--out", str(out), "--resume"])
        said, errors = capfd.readouterr()
        last = said.splitlines()[-1]
        assert (end.value.code, errors) == (130, "") and re.fullmatch(SAID.get(stage, FIRST), last), stage
        assert said.count("\nstopping when this step is done") == (stage in SAID and "behind" not in stage)
        simcse.main([*FLAGS, "--out", str(out), "--resume"])
        assert same_result(whole, out), stage


@pytest.mark.parametrize("kind", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_while_torch_is_imported(kind, tmp_path):
    code = f"import os, signal, time\nos.kill(os.getpid(), signal.{kind})\ntime.sleep(9)"
    (tmp_path / "torch.py").write_text(code)
    done = subprocess.run([sys.executable, ROOT / "simcse.py", "--data", "x.csv"], text=True, timeout=8,
                          env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "stopped  before anything was saved\n", "")


def test_nohup_is_obeyed():
    before = signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with pytest.raises(SystemExit):
            command(lambda argv=None: (signal.raise_signal(signal.SIGHUP), fail("it went on")))()
        handle_signals(signal.SIG_DFL)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_begun_again_with_other_flags(here, monkeypatch, capfd):
    """A run without a checkpoint is another run too: --resume is needed, and its flags."""
    monkeypatch.setattr("simcse.HeldOut.before", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit, match="130"):
        simcse.main([*FLAGS, "--out", "out"])
    capfd.readouterr()
    wanted = "--out out holds a run that has no checkpoint yet: begin it again with --resume, or name .*"
    refuse("simcse", capfd, wanted, *FLAGS, "--out", "out")
    wanted = r"--resume: lr was 0\.002 in out, now it is 1\.0"
    refuse("simcse", capfd, wanted, *FLAGS, "--out", "out", "--resume", "--lr", "1")


def test_a_run_that_is_done_is_not_begun_again(here, capfd):
    for keep in ("running", "never"):
        simcse.main([*FLAGS, "--out", keep, "--keep-state", keep])
        capfd.readouterr()
        wanted = rf"--out {keep} holds a finished run: .* start a new run with --model {keep} --out NEW"
        refuse("simcse", capfd, wanted, *FLAGS, "--out", keep, "--resume")
        wanted = wanted.replace("run: ", "run: name another folder, or ")
        refuse("simcse", capfd, wanted, *FLAGS, "--out", keep)


def test_metrics_survive_a_kill_within_resume(here, finished, monkeypatch):
    shutil.copytree(finished, "out")
    with open("out/metrics.jsonl", "a") as file:
        file.write('{"step": 2}\n{"st')                        # behind the checkpoint, and a half one
    before = Path(finished, "metrics.jsonl").read_text()
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="130"):
        patch.setattr(os, "replace", Mock(side_effect=KeyboardInterrupt))
        simcse.main([*KEPT, "--out", "out", "--resume"])
    assert Path("out/metrics.jsonl").read_text().startswith(before)
    simcse.main([*KEPT, "--out", "out", "--resume"])
    assert Path("out/metrics.jsonl").read_text() == before


# ── the folder ──


HOLD = """import fcntl, sys
file = open(sys.argv[1], "r+")
fcntl.lockf(file, fcntl.LOCK_EX)
print(flush=True)
input()"""


def test_two_runs_in_one_folder(here, monkeypatch, capfd):
    """The second one is refused while the first one's process lives, by whatever it was begun."""
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="130"):
        patch.setattr("simcse.HeldOut.before", Mock(side_effect=KeyboardInterrupt))
        simcse.main([*FLAGS, "--out", "out"])
    first = subprocess.Popen([sys.executable, "-c", HOLD, Path("out", output_dir.RUNNING).absolute()],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        first.stdout.readline()
        capfd.readouterr()
        refuse("simcse", capfd, "--out out: another process is at work in it; .*", *FLAGS, "--out", "out",
               "--resume")
    finally:
        first.kill()
        first.wait()
    simcse.main([*FLAGS, "--out", "out", "--resume"])
    assert len(metrics(Path("out"))) == 3 and not Path("out", output_dir.RUNNING).exists()


@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_a_run_that_locks_the_folder_meanwhile(resume, here, monkeypatch, capfd):
    """Its damaged state is none of the second one's business."""
    real, first = simcse.build_model, []

    def meanwhile(*args):
        Path("out").mkdir()
        Path("out", output_dir.RUNNING).touch()
        Path("out", "args.json").write_text('{"seed": 1}')
        first.append(subprocess.Popen([sys.executable, "-c", HOLD, Path("out", output_dir.RUNNING)],
                                      stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        first[0].stdout.readline()
        return real(*args)
    monkeypatch.setattr("simcse.build_model", meanwhile)
    try:
        with pytest.raises(SystemExit, match="2"):
            simcse.main([*FLAGS, "--out", "out", *resume])
    finally:
        first[0].kill()
        first[0].wait()
    wanted = r"simcse\.py: --out out: another process is at work in it; .*\n"
    assert re.fullmatch(wanted, capfd.readouterr().err)
    assert {path.name for path in Path("out").iterdir()} == {output_dir.RUNNING, "args.json"}


@pytest.mark.parametrize("there", [["args.json"], ["args.json", output_dir.RUNNING], ["state.pt"]])
def test_a_run_that_is_begun_in_the_folder_meanwhile(there, here, monkeypatch, capfd):
    """It is over, or was killed, when the second one comes to lock the folder."""
    real = simcse.build_model

    def meanwhile(*args):
        Path("out").mkdir()
        for name in there:
            Path("out", name).write_text('{"seed": 1}')
        return real(*args)
    monkeypatch.setattr("simcse.build_model", meanwhile)
    with pytest.raises(SystemExit, match="2"):
        simcse.main([*FLAGS, "--out", "out"])
    wanted = r"simcse\.py: --out out: another run was begun in it while this one was starting; name .*\n"
    assert re.fullmatch(wanted, capfd.readouterr().err)
    assert sorted(path.name for path in Path("out").iterdir()) == sorted(there)


@pytest.mark.parametrize("anew", [False, True])
def test_a_folder_that_is_removed_meanwhile(anew, here, monkeypatch, capfd):
    """Nothing is saved elsewhere, nor into a folder that has come in its place."""
    def removed(model):
        shutil.rmtree("out", ignore_errors=True)
        if anew:
            Path("out").mkdir()
    monkeypatch.setattr("simcse.sum_gradients", removed)
    with pytest.raises(SystemExit, match="2"):
        simcse.main([*FLAGS, "--out", "out"])
    wanted = r"simcse\.py: --out out was removed while this run was writing it; .*\n"
    assert re.fullmatch(wanted, capfd.readouterr().err)
    assert Path("out").exists() == anew and not any(Path("out").rglob("*"))


def test_out_within_the_pictures(here):
    Path("pictures").mkdir()
    for out in ("pictures", "pictures/a/out"):
        with pytest.raises(Fault, match="lies in --data pictures, where it would be taken for data"):
            output_dir.check_out(Path(out), False, "pictures")
    output_dir.check_out(Path("pictures-out"), False, "pictures")


def test_data_that_change_before_the_first_step(here, monkeypatch, capfd):
    """Which a script that holds them in memory, or makes its words of them, would not see again."""
    real = simcse.build_model

    def change(*args):
        Path("good.csv").write_text(GOOD.upper())              # as long as before
        return real(*args)
    monkeypatch.setattr("simcse.build_model", change)
    with pytest.raises(SystemExit, match="2"):
        simcse.main([*FLAGS, "--out", "out"])
    wanted = "simcse.py: good.csv: changed while it was read; leave it as it is, and start again\n"
    assert capfd.readouterr().err == wanted and not Path("out").exists()


def test_a_file_spelt_otherwise_is_the_same(here, finished):
    shutil.copytree(finished, "out")
    shutil.copytree(finished, "model")
    Path("link.csv").symlink_to("good.csv")
    flags = [flag.replace("good.csv", "link.csv") for flag in map(str, SMALL)]
    simcse.main([*flags, "--out", "../" + Path().absolute().name + "/out", "--resume"])
    assert len(metrics(Path("out"))) == 1


# ── tokens ──


def made(tmp_path, bert, texts):
    model = SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(bert), longest=512, prompted=list,
                            encoder=SimpleNamespace(get_input_embeddings=lambda: None))
    run = SimpleNamespace(out=tmp_path, rank=0, world=1, args=SimpleNamespace(max_length=8))
    return tokenise_table([(None, (text,)) for text in texts], model, run)


DAMAGES = {"zeroed": lambda path: (path / "ids").write_bytes(bytes((path / "ids").stat().st_size)),
           "a bit": lambda path: (path / "ends").write_bytes(b"\1" + (path / "ends").read_bytes()[1:]),
           "cut": lambda path: os.truncate(path / "ends", (path / "ends").stat().st_size - 8),
           "longer": lambda path: (path / "ids").open("ab").write(b"more"),
           "empty": lambda path: os.truncate(path / "ids", 0),
           "ids gone": lambda path: (path / "ids").unlink(),
           "all gone": lambda path: [file.unlink() for file in path.iterdir()],
           "of other data": lambda path: made(path.parent, path.parents[1] / "bert", ["Two.", "Rows."])}


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_tokens_are_made_anew(how, tmp_path, bert):
    shutil.copytree(bert, tmp_path / "bert")
    texts, out = ["A man eats.", "No.", "The sun is up.", "Yes."], tmp_path / "out"
    out.mkdir()
    wanted = [ids.tolist() for row in made(out, bert, texts) for ids in row]
    DAMAGES[how](out / "tokens")
    found = [ids.tolist() for row in made(out, bert, texts) for ids in row]
    assert found == wanted


def test_tokens_that_are_cut_while_they_are_read(tmp_path, bert):
    """Of a map a bus error would kill the process."""
    rows = made(tmp_path, bert, ["A man eats."] * 5000)
    os.truncate(tmp_path / "tokens" / "ids", 5)
    with pytest.raises(Fault, match="tokens: was cut while it was read; --resume makes it anew"):
        rows[4999]


# ── the machine ──


def test_a_closed_pipe_stops_as_a_signal_does(monkeypatch, capfd):
    heard, before = [], signal.getsignal(signal.SIGTERM)
    end, start = os.pipe()
    os.close(end)
    with open(start, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
        try:
            put("one")
            put("two")                                         # into nothing
        finally:
            signal.signal(signal.SIGTERM, before)
    assert heard == [1] and capfd.readouterr().err.endswith(": standard output is closed; stopping\n")


def test_closed_streams_get_no_data(tmp_path):
    """The next file to be opened would have their numbers, and be printed into."""
    code = "import kernels.training.cli; f = open('f', 'w'); print(f.fileno(), file=f)"
    done = subprocess.run(f'{sys.executable} -c "{code}" <&- >&- 2>&-', shell=True, cwd=tmp_path,
                          env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0 and int((tmp_path / "f").read_text()) > 2


def faults(main, capfd):
    with pytest.raises(SystemExit, match="2"):
        command(main)()
    said, errors = capfd.readouterr()
    assert said == "" and errors.count("\n") == 1
    return errors


def make_parser():
    return simcse.make_parser()


def test_a_full_memory(capfd):
    flags = "--chunk-size or --batch-size or --max-length"
    wanted = f"test_lost.py: the machine's memory is full; lower {flags}\n"
    assert faults(lambda argv=None: torch.empty(2**45), capfd) == wanted
    assert faults(lambda argv=None: bytearray(2**62), capfd) == wanted


def no_flags(argv=None):
    torch.empty(2**45)


def test_a_full_memory_without_a_flag_that_helps(monkeypatch, capfd):
    monkeypatch.setitem(globals(), "make_parser", lambda: Flags("none"))
    wanted = "test_lost.py: the machine's memory is full; end other programs, or take a machine with more\n"
    assert faults(no_flags, capfd) == wanted


@contextlib.contextmanager
def full_disk(size):
    """No file may be larger: this fails as a full disk does, without a name."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


FULL = {"args.json": ("kernels.training.output_dir.write_whole", 20, "args.json"),
        "code": ("kernels.training.output_dir.write_code", 500, "simcse.py"),
        "tokens": ("simcse.tokenise_table", 20, "tokens"),
        "metrics": ("simcse.Run.write_metrics", 20, "metrics.jsonl"),
        "state": ("simcse.Run.save_state", 5_000, "state.pt"),
        "config": ("kernels.training.text.evaluation.save", 20, ""),
        "weights": ("kernels.training.text.evaluation.save", 10_000, "")}


@pytest.mark.parametrize("stage", FULL)
def test_a_full_disk_is_named(stage, here, monkeypatch, capsys):
    """By a file of --out, or by --out: where a person sees which disk it is. capsys writes no file."""
    name, size, path = FULL[stage]
    module, _, attribute = name.rpartition(".")
    owner = sys.modules.get(module) or simcse.Run
    real, limit = getattr(owner, attribute), contextlib.ExitStack()

    def full(*args, **more):
        if stage != "args.json" or args[0].name == stage:
            limit.enter_context(full_disk(size))
        return real(*args, **more)
    monkeypatch.setattr(owner, attribute, full)
    with limit, pytest.raises(SystemExit, match="2"):
        simcse.main([*FLAGS, "--out", "out"])
    found = re.fullmatch(r"simcse\.py: (.*?): .*File too large.*\n", capsys.readouterr().err)
    assert Path(found[1]) == Path("out", path)


def study_of_nothing():
    layer_study.study({}, SimpleNamespace(pooling="avg"), [], "full.json")


@pytest.mark.parametrize("write, path", [
    (lambda: triples.write_triples([("a", "b", "c")] * 9, Path("full.csv")), "full.csv"),
    (study_of_nothing, "full.json"), (lambda: put("A line of a log. " * 9), "standard output")])
def test_a_full_disk_elsewhere(write, path, here, monkeypatch, capsys):
    with open("log", "w") as log, full_disk(20), pytest.raises(SystemExit, match="2"):
        if path == "standard output":
            monkeypatch.setattr(sys, "stdout", log)
        command(lambda argv=None: write())()
    monkeypatch.undo()
    assert capsys.readouterr().err == f"test_lost.py: {path}: File too large\n"


def test_a_full_disk_under_the_benchmark(here, capsys):
    with full_disk(20), pytest.raises(SystemExit, match="2"):
        benchmark.write(dict(rows=["a row" * 9]), "full.json")
    assert capsys.readouterr().err.endswith(": --json full.json: File too large\n")


def test_a_full_disk_under_a_tokenizer(bert, tmp_path, capfd):
    tokenizer = AutoTokenizer.from_pretrained(bert)
    with pytest.raises(Exception) as end:
        tokenizer.backend_tokenizer.save("/dev/full")
    assert "os error" in str(end.value)

    def full(argv=None):
        tokenizer.backend_tokenizer.save("/dev/full")
    assert re.fullmatch(r"test_lost\.py: No space left on device \(os error 28\)\n", faults(full, capfd))


def test_warnings_of_libraries_do_not_precede_the_line(monkeypatch, capfd):
    def warn(argv=None):
        warnings.warn("Corrupt EXIF data", stacklevel=1)
        fail("what matters")
    monkeypatch.setattr(warnings, "showwarning", lambda text, *_: print(text, file=sys.stderr))
    with warnings.catch_warnings():
        warnings.simplefilter("always")                        # pytest would keep them
        assert faults(warn, capfd) == "test_lost.py: what matters\n"


def test_a_name_that_is_no_utf_8(here, capfd):
    """Of data: printed, trained on, and in the folder's README."""
    name = os.fsdecode(b"caf\xe9.csv")
    Path(name).write_text(GOOD)
    result = run("simcse", Path("out"), "--data", name, *SMALL[2:])
    assert "caf\\udce9.csv" in Path("out/README.md").read_text() and len(result.losses) == 1
    refuse("simcse", capfd, r"--out caf.*csv: not UTF-8.*", *SMALL, "--out", name)


LETTERS = "\u202e\u2066\u061c\u200f\ufeff\xad\U000e0041\x1b\x9b\u2028\udcff"    # turn, hide, steer, break


def test_letters_that_turn_or_hide_others(here, capfd):
    """Joiners stay, which Persian and emoji need."""
    for letter in LETTERS:
        assert one_line(f"a{letter}b") == f"a{letter!r}b".replace("'", "")
    assert one_line("می\u200cخواهم 👩\u200d💻 é é　中") == "می\u200cخواهم 👩\u200d💻 é é　中"
    refuse("simcse", capfd, r"a\\u202eb\.csv: .*", *SMALL, "--data", "a\u202eb.csv")
    with pytest.raises(SystemExit, match="2"):
        plot.main(["a\u202e\n", "--save", "a.png"])
    assert capfd.readouterr().err.count("a\\u202e\\n/metrics.jsonl: No such file") == 1


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_steers_no_terminal(terminal, monkeypatch, capsys):
    monkeypatch.setattr("kernels.training.progress.QUIET", 0)
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: terminal)
    list(progress(range(3), "reading a\u202eb.csv", mininterval=0))
    said = "".join(capsys.readouterr())
    assert "\u202e" not in said and r"reading a\u202eb.csv" in said


def test_names_do_not_break_the_line(here, capfd):
    refuse("simcse", capfd, r"a\\nb\.csv: .*", *SMALL, "--data", "a\nb.csv")
    refuse("simcse", capfd, r"a\\x00b: holds a NUL character.*", *SMALL, "--data", "a\0b")
    refuse("simcse", capfd, r"--transfer: an empty name.*", *SMALL, "--transfer", "")


@pytest.mark.parametrize("name, flag, more", [
    ("simclr", "--width", []), ("moco", "--queue", []), ("moco", "--width", ["--queue", 96])])
def test_what_no_memory_holds(name, flag, more, here, capfd):
    flags = ["--data", DATA / "shapes.npz", "--model", "resnet-small", "--batch-size", 96]
    wanted = f"--.*{12 * 10**12}.* would need .* GB of memory, this machine has .* GB"
    refuse(name, capfd, wanted, *flags, *more, flag, 12 * 10**12)


@pytest.mark.parametrize("change, wanted", [
    (dict(num_hidden_layers=10**9), "config.json has num_hidden_layers 1000000000; wanted at most 1,000,000"),
    (dict(hidden_size=10**9, num_attention_heads=1), ".* describes a model of more than .* weights .*"),
    (dict(vocab_size=10**12), ".* describes a model of more than .*, its weight files have .* bytes; .*")])
def test_a_config_that_no_memory_holds(change, wanted, here, bert, capfd):
    shutil.copytree(bert, "model")
    config = json.loads(Path("model/config.json").read_text()) | change
    Path("model/config.json").write_text(json.dumps(config))
    refuse("simcse", capfd, f"--model model: {wanted}", *SMALL, "--model", "model")


def test_a_module_outside_the_folder(here, bert, capfd):
    shutil.copytree(bert, "model")
    modules = [dict(type="sentence_transformers.models.Pooling", path="../1_Pooling")]
    Path("model/modules.json").write_text(json.dumps(modules))
    refuse("simcse", capfd, r"--model model: modules\.json: \.\./1_Pooling lies outside", *SMALL, "--model",
           "model")
