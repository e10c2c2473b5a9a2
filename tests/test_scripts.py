"""Every script from its first flag to its last line: tiny models and the data beside this file, on the CPU, without a hub.

A new script is a line in SCRIPTS, and in TEXT if its data files, embed and save_model are simcse.py's. With one thread
equal runs are equal to the bit, and a busy machine does not slow them down.
"""
import contextlib, copy, csv, importlib.util, io, itertools, json, os, shutil, socket, subprocess, sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, BertTokenizer

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data"
SCRIPTS = {"simcse": ["--model", "scratch", "--data", DATA / "nli.csv", "--dev", DATA / "sts.tsv"],  # the README's command
           "vascl": ["--model", "scratch", "--data", DATA / "sentences.txt", "--dev", DATA / "sts.tsv", "--neighbours", 4, "--radius", 0.5],
           "ease": ["--model", "scratch", "--data", DATA / "entities.tsv", "--dev", DATA / "sts.tsv"],
           "dclr": ["--model", "scratch", "--data", DATA / "sentences.txt", "--dev", DATA / "sts.tsv"],  # and --guide, below
           "selfguided": ["--model", "scratch", "--data", DATA / "sentences.txt", "--dev", DATA / "sts.tsv", "--width", 128, "--lr", 1e-3,
                          "--pooling", "avg", "--view-pooling", "mean"]}  # [CLS] of a random encoder is slow to leave chance
RISE = {"vascl": 4, "dclr": 8}  # of the dev score in 30 steps, where it is not 12: single sentences teach less than triples
TEXT = ["simcse"]
every_script, every_text_script = (pytest.mark.parametrize("name", names) for names in (SCRIPTS, TEXT))
NLI = list(csv.reader(open(DATA / "nli.csv", newline="", encoding="utf-8")))[1:]
SENTENCES = [[line] for line in (DATA / "sentences.txt").read_text(encoding="utf-8").splitlines()]
POOLINGS = [(p, NLI) for p in ("cls", "cls_before_pooler", "avg", "avg_top2", "avg_first_last")] + [("cls", SENTENCES)]
every_pooling = pytest.mark.parametrize("pooling, data", POOLINGS)  # cls of one column: no head in evaluation


@pytest.fixture(autouse=True)
def one_cpu_thread(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # a GPU would need other tolerances
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def bert(tmp_path_factory):
    """A folder with a BERT of three layers, one token a letter, large random weights and no dropout."""
    letters = sorted(set("".join(cell for row in NLI + SENTENCES for cell in row).lower()) - {" "})
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *("##" + letter for letter in letters)]
    shape = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64, vocab_size=len(pieces))
    off, folder = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0), tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    BertModel(BertConfig(**shape, **off, initializer_range=0.2)).save_pretrained(folder)
    BertTokenizer({piece: i for i, piece in enumerate(pieces)}, model_max_length=512).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def guide(bert):
    SCRIPTS["dclr"] += ["--guide", str(bert), "--phi", "0.994"]  # which leaves out a tenth of the pairs


def small(name, folder, rows=36):
    """The script's command with the first rows of its files: 36 are four batches of 8 and one of 4."""
    for file in (flag for flag in SCRIPTS[name] if isinstance(flag, Path)):
        (folder / file.name).write_bytes(b"".join(file.read_bytes().splitlines(True)[: rows + (file.suffix != ".txt")]))
    return [folder / flag.name if isinstance(flag, Path) else flag for flag in SCRIPTS[name]] + ["--batch-size", 8]


def run(name, out, *flags):
    """main(flags) in this process: what it writes, what it says by label, and its flags, model and gradient norms."""
    script, made, norms = importlib.import_module(name), [], []
    build, average = script.build_model, script.average_gradients

    def measured(model, args):
        average(model, args)
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item())

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as lines:
        patch.setattr(script, "build_model", lambda args: made.extend([args, build(args)]) or made[1])
        patch.setattr(script, "average_gradients", measured)
        script.main([*map(str, flags), "--out", str(out)])
    said = dict(line.split(None, 1) for line in lines.getvalue().splitlines())
    steps, state = metrics(out), torch.load(out / "state.pt", weights_only=True)
    return SimpleNamespace(script=script, args=made[0], model=made[1], norms=norms, said=said, state=state, steps=steps,
                           losses=[step["loss"] for step in steps])


def run_text(name, folder, rows, *flags):
    """The same on these rows; one column is a .txt."""
    file = folder / ("data.txt" if len(rows[0]) == 1 else "data.json")
    file.write_text(json.dumps(rows) if file.suffix == ".json" else "\n".join(row[0] for row in rows))
    return run(name, folder / "out", "--data", file, *flags)


def metrics(out):
    return [json.loads(line) for line in open(out / "metrics.jsonl")]


def equal(a, b):
    """To the bit, dicts and lists through."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return torch.equal(a, b) if torch.is_tensor(a) else a == b


@every_script
def test_copied_with_kernels_alone(name, tmp_path):
    home = tmp_path / "home"
    shutil.copytree(ROOT / "kernels", home / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / f"{name}.py", home)
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "TRITON_INTERPRET")}
    env.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    command = [sys.executable, f"{name}.py", *map(str, small(name, tmp_path)), "--out", "out/first", "--steps", "3"]
    done = subprocess.run(command, cwd=home, env=env, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[-2:]] == ["done", "load"]
    out = home / "out" / "first"
    wanted = ["README.md", "args.json", "config.json", "metrics.jsonl", "model.safetensors", "state.pt", f"{name}.py"]
    wanted += ["modules.json", "1_Pooling/config.json", "tokenizer.json"] * (name in TEXT)
    assert [file for file in wanted if not (out / file).is_file()] == []
    assert (out / f"{name}.py").read_bytes() == (ROOT / f"{name}.py").read_bytes()
    assert [step["step"] for step in metrics(out)] == [1, 2, 3]


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "selfguided"])  # a random encoder cannot guide itself: test_selfguided.py
def test_learns(name, tmp_path):
    result = run(name, tmp_path / "out", *SCRIPTS[name], "--steps", 30)
    before, best = (float(result.said["done"].split()[i]) for i in (2, 4))  # dev Spearman 41.57 → 78.94 at step 30, ...
    assert best == round(result.steps[-1]["dev_spearman"], 2) and best > before + RISE.get(name, 12)


@every_script
def test_loss_falls_when_one_batch_repeats(name, tmp_path):
    losses = run(name, tmp_path / "out", *small(name, tmp_path, 8), "--steps", 20).losses
    assert max(losses[-5:]) < 0.5 * losses[0]


@pytest.mark.parametrize("name, flags", [(name, []) for name in SCRIPTS] + [("simcse", ["--mlm-weight", 0.1])])
def test_resume_is_exact(name, flags, tmp_path, monkeypatch):
    """Step 6 begins the second epoch; step 4, which the interrupted run did after its evaluation, is done again."""
    flags = [*small(name, tmp_path), "--steps", 6, "--eval-every", 3, *flags]
    whole = run(name, tmp_path / "whole", *flags)
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="130"):
        patch.setattr(whole.script, "average_gradients", Mock(side_effect=[None] * 4 + [KeyboardInterrupt]))
        run(name, tmp_path / "parts", *flags)
    assert len(metrics(tmp_path / "parts")) == 4
    parts = run(name, tmp_path / "parts", *flags, "--resume")
    assert [step | {"seconds": 0} for step in parts.steps] == [step | {"seconds": 0} for step in whole.steps]
    assert equal(parts.state, whole.state)
    assert equal(load_file(tmp_path / "parts" / "model.safetensors"), load_file(tmp_path / "whole" / "model.safetensors"))


@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in ("cline", "tacl", "childtuning")])
def test_chunks_are_the_whole_step(name, size, tmp_path, monkeypatch):
    """With dropout: the same groups, embedded once and all kept, are the step without chunks."""
    flags = [*small(name, tmp_path), "--steps", 1, "--chunk-size", size]
    chunked = run(name, tmp_path / "chunked", *flags)
    monkeypatch.setattr(chunked.script, "embed_in_chunks", lambda embed, chunks, module: torch.cat([embed(chunk) for chunk in chunks]))
    whole = run(name, tmp_path / "whole", *flags)
    assert chunked.losses == pytest.approx(whole.losses, rel=1e-6) and chunked.norms == pytest.approx(whole.norms, rel=1e-5)
    assert whole.args.chunk_size == size and len(whole.norms) == 1
    for key, weight in whole.state["optimizer"]["state"].items():  # a tenth of the gradient
        if "exp_avg" in weight:
            torch.testing.assert_close(chunked.state["optimizer"]["state"][key]["exp_avg"], weight["exp_avg"], rtol=1e-5, atol=1e-6)


WORLD = int(os.environ.get("TENCL_WORLD", 3))                  # three processes have unequal shares of a batch


def one_of_several(rank, world, port, name, out, flags):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.is_available = lambda: False
    torch.set_num_threads(1)
    if rank:  # what rank 0 writes may not be there yet
        importlib.import_module(name).main([*map(str, flags), "--out", str(out)])
    else:
        torch.save(run(name, out, *flags).norms, out / "norms")


@every_script
def test_several_processes_equal_one(name, tmp_path, bert):
    """Clipping and Adam hide a gradient that is k times too large, so its norm is compared as well."""
    flags = [*small(name, tmp_path), "--model", bert, "--pooling", "avg", "--steps", 6, "--lr", 1e-3]
    one = run(name, tmp_path / "one", *flags)
    assert max(one.norms) > 1  # clipping is active
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    chunks = ["--chunk-size", 3]                               # which without dropout are the whole step
    torch.multiprocessing.start_processes(one_of_several, (WORLD, port, name, tmp_path / "two", [*flags, *chunks]), nprocs=WORLD, start_method="forkserver")
    assert [step["loss"] for step in metrics(tmp_path / "two")] == pytest.approx(one.losses, rel=1e-6, abs=1e-5)
    assert torch.load(tmp_path / "two" / "norms") == pytest.approx(one.norms, rel=1e-4)
    for key, weight in torch.load(tmp_path / "two" / "state.pt", weights_only=True)["model"].items():
        if not key.endswith("key.bias"):  # softmax ignores it: its gradient is rounding, which Adam makes large
            torch.testing.assert_close(weight, one.state["model"][key], atol=1e-4, rtol=0, msg=key)


@every_script
@pytest.mark.parametrize("impl", ["blockwise", "triton"])
def test_impl_follows_eager(name, impl, tmp_path, monkeypatch):
    if impl == "triton" and not (importlib.util.find_spec("triton") and os.environ.get("TRITON_INTERPRET") == "1"):
        pytest.skip("no Triton, or a GPU's, and this file stays on the CPU")
    flags = [*small(name, tmp_path), "--steps", 3, "--eval-every", 1]
    eager = run(name, tmp_path / "eager", *flags, "--impl", "eager")
    asked = Mock(wraps=eager.script.choose_impl)
    monkeypatch.setattr("kernels.similarity.choose_impl", asked)
    monkeypatch.setattr("kernels.losses.choose_impl", asked)
    other = run(name, tmp_path / "other", *flags, "--impl", impl)
    assert {call.args[0] for call in asked.call_args_list} == {impl}
    for value, tolerance in (("loss", 1e-4), ("dev_uniformity", 1e-3)):
        assert [step[value] for step in other.steps] == pytest.approx([step[value] for step in eager.steps], abs=tolerance)


@every_script
def test_evaluation_leaves_no_trace(name, tmp_path):
    """The same losses, weights and random numbers with five evaluations, with one and with none."""
    flags = [*small(name, tmp_path), "--steps", 5]
    often = run(name, tmp_path / "often", *flags, "--eval-every", 1)
    seldom = run(name, tmp_path / "seldom", *flags, "--eval-every", 100)
    dev = flags.index("--dev")
    never = run(name, tmp_path / "never", *flags[:dev], *flags[dev + 2 :])
    assert [sum("dev_spearman" in step for step in x.steps) for x in (often, seldom, never)] == [5, 1, 0]
    for other in (seldom, never):
        assert other.losses == often.losses
        assert [part for part in ("model", "optimizer", "random") if not equal(other.state[part], often.state[part])] == []


@every_script
def test_best_checkpoint_is_kept(name, tmp_path, monkeypatch):
    """A better score replaces it, an equal one does not, and none before training counts; --test reads it."""
    scores, seen = iter([9.0, 1.0, 3.0, 3.0, 2.0, 7.0]), []

    def evaluate(model, *_):
        seen.append(copy.deepcopy(model.encoder.state_dict()))
        return {"spearman": next(scores)}

    monkeypatch.setattr(importlib.import_module(name), "evaluate", evaluate)
    flags = [*small(name, tmp_path), "--test", SCRIPTS[name][SCRIPTS[name].index("--dev") + 1]]
    result = run(name, tmp_path / "out", *flags, "--steps", 4, "--eval-every", 1)
    assert [step["best"] for step in result.steps] == [True, True, False, False]
    assert [equal(dict(seen[2]), dict(weights)) for weights in seen] == [False, False, True, False, False, True]
    assert equal(dict(seen[2]), load_file(tmp_path / "out" / "model.safetensors"))
    assert "9.00 → 3.00 at step 2," in result.said["done"]


def pooled(encoder, tokenizer, sentences, pooling):
    """(n, H) by the definitions, one sentence after the other: no padding."""
    layers, rows = {"avg": [-1], "avg_top2": [-2, -1], "avg_first_last": [1, -1]}.get(pooling), []  # 0: word embeddings
    for tokens in (tokenizer(sentence, return_tensors="pt") for sentence in sentences):
        with torch.no_grad():
            states = encoder.eval()(**tokens, output_hidden_states=True).hidden_states
        rows.append(torch.stack([states[i][0].mean(0) for i in layers]).mean(0) if layers else states[-1][0, 0])
    return torch.stack(rows)


@pytest.mark.parametrize("width, flag, value", [
    (1, "--mlm-weight", 0), (2, "--mlm-weight", 0), (3, "--hard-negative-weight", 1.5), (3, "--mlm-weight", 0.1)])
def test_simcse_first_loss_is_the_papers(width, flag, value, tmp_path, bert):
    """Without dropout and with all rows in one batch it is the paper's objective on the folder's own embeddings."""
    rows = SENTENCES[:12] if width == 1 else [row[:width] for row in NLI[:12]]
    flags = ["--model", bert, "--pooling", "avg", "--max-length", 512, "--batch-size", 12, "--lr", 1e-3]
    losses = run_text("simcse", tmp_path, rows, *flags, "--steps", 3, flag, value).losses
    folder = AutoModel.from_pretrained(bert), AutoTokenizer.from_pretrained(bert)
    z1, *others = [F.normalize(pooled(*folder, view, "avg").double(), dim=1) for view in zip(*rows)]
    logits = [z1 @ z.T / 0.05 for z in others or [z1]]
    logits[-1] += (flag == "--hard-negative-weight") * value * torch.eye(12)
    assert losses[0] == pytest.approx(F.cross_entropy(torch.cat(logits, 1), torch.arange(12)).item(), abs=1e-4)
    assert len(losses) == 3 and losses[2] < losses[0]


@every_text_script
def test_file_formats_give_the_same_losses(name, tmp_path):
    rows = [*NLI[:9], ['"No, thanks," he said.', "He went,\nwithout\r\na word.", ", He"]]
    texts, losses = {}, {}
    for kind, header in {"bare": [], "header": [["sent0", "sent1", "hard_neg"]]}.items():
        quoted = [",".join('"' + cell.replace('"', '""') + '"' for cell in row) for row in header + rows]
        flat = ["\t".join(" ".join(cell.split()) for cell in row) for row in header + rows]  # no newline in a cell of .tsv
        items = [dict(zip(header[0], row)) for row in rows] if header else rows
        texts[f"{kind}.csv"], texts[f"{kind}.tsv"] = "\ufeff" + "\r\n".join(quoted), "\n".join(flat) + "\n"
        texts[f"{kind}.json"], texts[f"{kind}.jsonl"] = json.dumps(items), "\n".join(map(json.dumps, items))
    for file, text in texts.items():
        (tmp_path / file).write_bytes(text.encode())
        flags = ["--model", "scratch", "--data", tmp_path / file, "--batch-size", 5]
        losses[file] = run(name, tmp_path / "out" / file, *flags, "--steps", 3).losses
    assert [file for file in losses if losses[file] != losses["bare.json"]] == [] and len(losses) == 8


@every_text_script
@every_pooling
def test_embed_is_the_pooling_of_every_row(name, pooling, data, tmp_path, bert, monkeypatch):
    """However rows are ordered and grouped. The head is used in training, and in evaluation where it is kept."""
    sentences = ["Yes.", "no, " * 20, *(row[0] for row in data[:10])]
    result = run_text(name, tmp_path, data[:12], "--model", bert, "--batch-size", 4, "--pooling", pooling, "--steps", 1)
    script, model, groups = result.script, result.model, set()
    rows = [(ids,) for ids in script.tokenise(sentences, model, 512)[0]]
    bare = pooled(model.encoder, model.tokenizer, sentences, pooling)
    headed = torch.tanh(model.head(bare)) if pooling == "cls" else bare
    for training, cost in itertools.product((True, False), (0, 60, 10**6)):
        model.train(training)
        monkeypatch.setitem(script.GROUP_COST, "cpu", cost)
        wanted = headed if training or data is NLI else bare
        for order in (range(12), range(11, -1, -1), [7, 1, 3, 0, 3]):
            batch = script.make_batch([rows[i] for i in order], model, result.args)
            groups.add(len(batch))
            torch.testing.assert_close(script.embed(model, batch), wanted[list(order)], atol=1e-5, rtol=0)
        views = script.make_batch([a + b for a, b in zip(rows, rows[::-1])], model, result.args)
        torch.testing.assert_close(script.embed(model, views), torch.cat([wanted, wanted.flip(0)]), atol=1e-5, rtol=0)
    assert min(groups) == 1 and max(groups) > 4


@every_text_script
@every_pooling
@pytest.mark.parametrize("library", ["transformers", "sentence_transformers"])
def test_others_load_the_folder(name, library, pooling, data, tmp_path, bert):
    """By the line that was printed: the embeddings are those of the weights in state.pt."""
    module = pytest.importorskip(library)
    flags = ["--model", bert, "--pooling", pooling, "--batch-size", 8, "--steps", 3, "--lr", 1e-2, "--max-length", 16]
    result = run_text(name, tmp_path, data[:24], *flags)
    sentences = ["no, " * 20, *(row[0] for row in data[:12])]  # longer than 16 tokens
    script, model = result.script, result.model.eval()
    model.load_state_dict(result.state["model"])
    rows = [(ids,) for ids in script.tokenise(sentences, model, 512)[0]]
    ours = script.embed(model, script.make_batch(rows, model, result.args)).detach()
    assert json.loads((tmp_path / "out" / "tokenizer.json").read_text())["truncation"] is None
    sentence_transformer, auto_model = result.said["load"].split("  or  ")
    if library == "sentence_transformers":
        theirs = torch.from_numpy(eval(sentence_transformer, vars(module)).encode(sentences))
    else:
        model, tokenizer = eval(auto_model, {"AutoModel": AutoModel}), AutoTokenizer.from_pretrained(tmp_path / "out")
        tokens = tokenizer(sentences, padding=True, return_tensors="pt")
        assert (model.pooler is not None) == (pooling == "cls" and data is NLI)  # the head, never a random one
        theirs = model(**tokens).pooler_output.detach() if model.pooler else pooled(model, tokenizer, sentences, pooling)
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=0)
