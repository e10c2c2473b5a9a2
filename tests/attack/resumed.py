"""Folders of runs that came from elsewhere or changed meanwhile: --resume through links, with a forged
state.pt or forged tokens, and after an input of the run was changed."""

import itertools
import json
import os
import shutil
from functools import partial

import numpy as np
import torch
from cases import DATA, SCRIPTS, Case, both, change, end, put, start, texts
from folders import HALF, command, settings, spoilt, state, weights
from pictures import encoded, photos
from safetensors.torch import load_file, save_file

case = partial(Case, "resumed", late=True)
TWIN, RUN = [*HALF[:-1], "twin"], ["--steps", "2", "--resume", "--out", "run"]

# ── links ──


def linked(name, target="../target"):
    """A `make` that puts a link in the place of a file or folder of the run."""

    def make(here):
        path = here / "half" / name
        if target == "../target":
            (here / "target").write_text("dear\n")
            (here / "target-folder").mkdir()
        path.parent.mkdir(parents=True, exist_ok=True)
        to = target
        if path.is_dir():
            shutil.rmtree(path)
            to = target + "-folder"
        path.unlink(missing_ok=True)
        path.symlink_to(to if os.path.isabs(to) else os.path.relpath(here / to[3:], path.parent))

    return make


def hard(name):
    """A `make` that makes a file of the run one with another: no link is seen, but what is written in place
    changes both."""

    def make(here):
        path = here / "half" / name
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            path.write_text("dear\n")
        os.link(path, here / "target")

    return make


FILES = """.running metrics.jsonl metrics.jsonl.tmp state.tmp state.pt args.json simcse.py
    1_Pooling/config.json model.safetensors""".split()
LINKS = """args.json.tmp training training/run.py 1_Pooling .saving tokens tokens/ids tokens.tmp modules.json
    tensorboard README.md x/y/z""".split()


def of_links():
    for name in FILES + LINKS:
        yield case(f"{name} is a link", "simcse", HALF, linked(name), "one line", late=False)
        yield case(f"{name} leads nowhere", "simcse", HALF, linked(name, "../none"), "one line", late=False)
    for name in ("training", "1_Pooling", ".saving", "x"):
        yield case(f"{name} leads to /tmp", "simcse", HALF, linked(name, "/tmp"), "one line", late=False)
    for name in (*FILES, "tokens.tmp/ids"):
        yield case(f"{name} is a second name", "simcse", HALF, hard(name), kept=("target",), like=TWIN)
    make = both(lambda here: (here / "half/state.pt").unlink(), linked(".running"))
    yield case("no checkpoint, and .running is a link", "simcse", HALF, make, "one line", late=False)
    make = both(
        lambda here: (here / "half/state.pt").unlink(), put("half/.running", ""), hard("simcse.py"),
        linked("training", "/tmp"),
    )
    yield case("no checkpoint, and links", "simcse", HALF, make, "one line", late=False, kept=("target",))
    make = both(linked("x"), lambda here: os.symlink("half", here / "out"))
    yield case("--out is a link, with links", "simcse", [*HALF[:-1], "out"], make, "one line", late=False)
    yield case(
        "--out is a link", "simcse", [*HALF[:-1], "way"], lambda here: os.symlink("half", here / "way"),
        "accepted",
    )
    for words in (["--save-triples", "pwned.csv"], ["--save-triples", "../pwned.csv"]):
        make = both(ran("cline"), command(*words, folder="run"))
        yield case(f"the command has {' '.join(words)}", "cline", RUN, make)


# ── state.pt ──


def ran(script, *argv, steps=2, out="run"):
    """A `make` of a run of one step, which is to go on to `steps`."""

    def make(here):
        said, flags = here.with_name(out), [*argv, "--out", out, "--keep-state", "always"]
        assert end(start(script, flags, here, said)) == 0, texts(said)
        path = here / out / "args.json"
        about = json.loads(path.read_text())
        more = {"steps": steps, "command": [*about["command"], "--steps", str(steps)]}
        path.write_text(json.dumps(about | more))

    return make


def optimizer(how, folder="half"):
    """A `make` that changes the optimizer of state.pt in place."""

    def make(here):
        path = here / folder / "state.pt"
        found = torch.load(path, weights_only=True)
        how(found["optimizer"])
        torch.save(found, path)

    return make


def of_states(how):
    return lambda found: [how(part) for part in found["state"].values()]


def replaced(name, how):
    return of_states(lambda part: part.update({name: how(part[name])}))


def group(**more):
    return lambda found: [part.update(more) for part in found["param_groups"]]


def model(how):
    def make(here):
        path = here / "half/state.pt"
        found = torch.load(path, weights_only=True)
        how(found["model"])
        torch.save(found, path)

    return make


def first(found):
    return next(iter(found["state"].values()))


def shared(found):
    """All moments of a shape lie in one memory."""
    seen = {}
    for part in found["state"].values():
        for name in ("exp_avg", "exp_avg_sq"):
            part[name] = seen.setdefault((name, part[name].shape), part[name])


STATES = {
    "one element": replaced("exp_avg", lambda x: x.flatten()[:1]),
    "no element": replaced("exp_avg", lambda x: x[:0]),
    "strides of 0": replaced("exp_avg", lambda x: x.flatten()[:1].expand(x.shape[::-1]).T),
    "another order": replaced("exp_avg_sq", lambda x: x.T.contiguous().T if x.dim() == 2 else x),
    "turned": replaced("exp_avg_sq", lambda x: x.T.contiguous() if x.dim() == 2 else x),
    "a view of more": replaced("exp_avg", lambda x: torch.cat([x, x])[::2]),
    "one memory": shared,
    "flat": replaced("exp_avg", lambda x: x.flatten()),
    "int8": replaced("exp_avg", lambda x: x.to(torch.int8)),
    "float16": replaced("exp_avg_sq", lambda x: x.half()),
    "float64": replaced("exp_avg", lambda x: x.double()),
    "complex": replaced("exp_avg", lambda x: x.to(torch.complex64)),
    "sparse": replaced("exp_avg", lambda x: x.to_sparse()),
    "quantised": replaced("exp_avg", lambda x: torch.quantize_per_tensor(x, 1.0, 0, torch.qint8)),
    "nan": replaced("exp_avg", lambda x: x * torch.nan),
    "inf": replaced("exp_avg_sq", lambda x: x + torch.inf),
    "one nan": lambda found: first(found)["exp_avg"].view(-1)[:1].fill_(torch.nan),
    "negative squares": replaced("exp_avg_sq", lambda x: -x - 1),
    "texts": replaced("exp_avg", lambda x: "x"), "lists": replaced("exp_avg", lambda x: x.tolist()),
    "none": replaced("exp_avg", lambda x: None), "meta": replaced("exp_avg", lambda x: x.to("meta")),
    "no moments": of_states(lambda part: part.pop("exp_avg")),
    "no squares": of_states(lambda part: part.pop("exp_avg_sq")),
    "no steps": of_states(lambda part: part.pop("step")),
    "more moments": of_states(lambda part: part.update(max_exp_avg_sq=part["exp_avg"])),
    "nothing": lambda found: found["state"].clear(),
    "one less": lambda found: found["state"].pop(3),
    "one more": lambda found: found["state"].update({999: dict(first(found))}),
    "names": lambda found: found.update(state={str(number): part for number, part in found["state"].items()}),
    "a list": lambda found: found.update(state=[]),
    "empty parts": of_states(lambda part: part.clear()),
    **{
        f"step {value}": replaced("step", lambda x, value=value: torch.tensor(value))
        for value in (-1.0, 0.0, 1.5, 1e30, float("nan"), float("inf"), 2)
    },
    "steps of numbers": replaced("step", lambda x: 1.0),
    "steps of rows": replaced("step", lambda x: x.expand(3)),
    **{
        f"{name} {value!a}": group(**{name: value})
        for name, value in [
            ("betas", "x"), ("betas", (2.0, 2.0)), ("betas", (0.9,)), ("maximize", True), ("eps", -1.0),
            ("eps", "x"), ("weight_decay", 1e30), ("amsgrad", True), ("capturable", True),
            ("differentiable", True), ("fused", False), ("foreach", True), ("lr", "x"), ("lr", -1.0),
            ("lr", float("nan")), ("lr", None), ("params", []), ("params", [0] * 99),
            ("decoupled_weight_decay", False),
        ]
    },
    "no groups": lambda found: found.update(param_groups=[]),
    "groups twice": lambda found: found.update(param_groups=found["param_groups"] * 2),
    "no state": lambda found: found.pop("state"),
    "more parts": lambda found: found.update(x=1),
}
MODELS = {
    "nan": lambda found: found.update({name: spoilt(x) for name, x in found.items()}),
    "one inf": lambda found: next(iter(found.values())).view(-1)[:1].fill_(torch.inf),
    "int8": lambda found: found.update({name: x.to(torch.int8) for name, x in found.items()}),
    "sparse": lambda found: found.update({name: x.to_sparse() for name, x in found.items()}),
    "one name": lambda found: found.popitem(),
    "one more": lambda found: found.update(x=torch.zeros(3)),
    "other shapes": lambda found: found.update({name: x[:1] for name, x in found.items()}),
    "broadcast": lambda found: found.update(
        {name: x.flatten()[0].expand(x.shape) for name, x in found.items()}
    ),
    "texts": lambda found: found.update({name: "x" for name in found}),
    "half": lambda found: found.update({name: x.half() for name, x in found.items()}),
}
PROGRESS = {
    "a list": [], "nothing": {}, "step of text": {"step": "1"}, "step -1": {"step": -1},
    "step 0": {"step": 0}, "step 1.5": {"step": 1.5}, "step true": {"step": True}, "step 3": {"step": 3},
    "step 2**70": {"step": 2**70}, "saved is text": {"saved": "x"}, "saved is a list": {"saved": [1]},
    "saved holds a tensor": {"saved": {"step": torch.zeros(3)}},
    "before is 7": {"before": 7}, "before is empty": {"before": {}}, "saved is empty": {"saved": {}},
    "saved of other scores": {"saved": {"step": 1, "x": 1.0}},
    "more of it": {"x": 1},
}


def progress(folder="half", **more):
    def make(here):
        path = here / folder / "state.pt"
        found = torch.load(path, weights_only=True)
        found["progress"] = found["progress"] | more
        torch.save(found, path)

    return make


def forged_tokens(how):
    """A `make` that changes the arrays of tokens/."""

    def make(here):
        folder = here / "half/tokens"
        ids, ends = np.fromfile(folder / "ids", np.int32), np.fromfile(folder / "ends", np.int64)
        ids, ends = how(ids, ends)
        ids.tofile(folder / "ids")
        ends.tofile(folder / "ends")

    return make


TOKENS = {
    "ids of 10**6": lambda ids, ends: (ids + 10**6, ends),
    "negative ids": lambda ids, ends: (-ids - 1, ends),
    "one id of 2**31 - 1": lambda ids, ends: (np.concatenate([ids[:-1], [2**31 - 1]]).astype(np.int32), ends),
    "ends that go back": lambda ids, ends: (ids, np.concatenate([ends[:1], ends[:0:-1]])),
    "ends of 2**62": lambda ids, ends: (ids, ends + 2**62),
    "negative ends": lambda ids, ends: (ids, -ends),
    "rows of nothing": lambda ids, ends: (ids, ends * 0),
    "one row of all": lambda ids, ends: (ids, np.where(np.arange(len(ends)) > 0, ends[-1], 0)),
    "fewer ids": lambda ids, ends: (ids[:9], ends), "no ends": lambda ids, ends: (ids, ends[:0]),
    "ends from 5": lambda ids, ends: (ids, ends + 5),
}


def other_weights(how):
    """A `make` that changes the weights that the run has saved."""

    def make(here):
        path = here / "half/model.safetensors"
        save_file({name: how(x) for name, x in load_file(path).items()}, path)

    return make


def of_forged():
    for name, how in STATES.items():
        yield case(f"optimizer: {name}", "simcse", HALF, optimizer(how), like=TWIN)
    for name, how in MODELS.items():
        yield case(f"model: {name}", "simcse", HALF, model(how))
    for name, more in PROGRESS.items():
        make = state(progress=more) if isinstance(more, list) or not more else progress(**more)
        yield case(f"progress: {name}", "simcse", HALF, make, like=TWIN)
    for name, how in TOKENS.items():
        yield case(f"tokens: {name}", "simcse", HALF, forged_tokens(how), like=TWIN)
    for name, how in {
        "nan": spoilt, "other shapes": lambda x: x[:1].contiguous(), "int8": lambda x: x.to(torch.int8),
    }.items():
        yield case(f"saved weights: {name}", "simcse", HALF, other_weights(how))
    for name, text in {"auto_map": '{"auto_map": {"AutoModel": "code.Own"}}', "a list": "[]"}.items():
        yield case(f"saved config: {name}", "simcse", HALF, put("half/config.json", text))
    names = {"moco": "momentum_buffer", "childtuning": "exp_avg"}
    for script, name in names.items():
        for what, how in {
            "one element": replaced(name, lambda x: x.flatten()[:1]),
            "nan": replaced(name, lambda x: x * torch.nan),
            "nothing": lambda found: found["state"].clear(),
        }.items():
            make = both(ran(script), optimizer(how, "run"))
            yield case(f"optimizer of {script}: {what}", script, RUN, make, "one line")
    for what, more in {"pointer -1": -1, "pointer 10**9": 10**9, "pointer x": "x"}.items():
        make = both(ran("moco"), progress("run", pointer=more))
        yield case(f"progress of moco: {what}", "moco", RUN, make)
    for what, more in {
        "place -1": [-1, 0, 0], "place 10**9": [10**9, 0, 0], "a short place": [0],
        "a place of 10**9 sentences": [0, 10**9, 10**9],
    }.items():
        make = both(ran("tacl"), progress("run", place=more))
        yield case(f"progress of tacl: {what}", "tacl", RUN, make)
    for what, how in {
        "modes": group(mode="x"),
        "no modes": group(mode=None),
        "masks": lambda found: found.update(masks=[torch.ones(3)] * 99),
        "no generator": lambda found: found.pop("generator"),
        "a generator of text": lambda found: found.update(generator="x"),
    }.items():
        make = both(ran("childtuning"), optimizer(how, "run"))
        yield case(f"optimizer of childtuning: {what}", "childtuning", RUN, make)
    for what, more in {"a text": "x", "a list": [{}], "below 0": -1}.items():
        make = both(ran("childtuning", "--dev", "topics.tsv"), progress("run", skipped=more))
        yield case(f"progress of childtuning: {what}", "childtuning", RUN, make)


# ── inputs ──


def scaled(folder):
    return weights(
        lambda old: {name: x * 1.5 if x.is_floating_point() else x for name, x in old.items()}, folder
    )


def letters(name):
    """A letter is another, in the first text behind a header, or in the explanation of a word."""

    def how(old):
        start = old.rindex(b"| ") if b"wordnet" in name.encode() else old.index(b"\n")
        at = old.index(b"e", start)
        return old[:at] + b"o" + old[at + 1 :]

    return change(name, how)


def labelled_photos(here):
    for i in range(8):
        put(f"sorted/{'ab'[i % 2]}/{i}.png", encoded("PNG"))(here)


def linked_photos(here):
    """A folder for each label, which is a link."""
    labelled_photos(here)
    os.rename(here / "sorted", here / "elsewhere")
    os.mkdir(here / "sorted")
    for label in "ab":
        (here / "sorted" / label).symlink_to(here / "elsewhere" / label)


def listed_photos(here):
    photos()(here)
    (here / "photos.tsv").write_text("".join(f"photos/{i}.png\t{'ab'[i % 2]}\n" for i in range(8)))


def wordnet(here):
    shutil.copytree(DATA / "wordnet", here / "wordnet")


def other_pixels(path):
    """Another picture of the same size, in bytes too."""

    def make(here):
        old = (here / path).read_bytes()
        new = encoded("PNG", "L").ljust(len(old), b"\0")[: len(old)]
        assert new != old
        (here / path).write_bytes(new)

    return make


def sts(here):
    shutil.copy(here / "sts.tsv", here / "held.tsv")


DEV = ["--dev", "held.tsv"]
INPUTS = {
    "--guide": ("dclr", ["--guide", "bert"], None, scaled("bert")),
    "--teacher": ("tacl", ["--model", "bert", "--teacher", "bert"], None, scaled("bert")),
    "--model of selfguided": ("selfguided", ["--model", "bert"], None, scaled("bert")),
    "--model's tokenizer": (
        "simcse", ["--model", "bert"], None,
        settings("tokenizer_config.json", do_lower_case=False),
    ),
    "--model's prompts": (
        "vascl", ["--model", "bert"], None,
        put("bert/config_sentence_transformers.json", '{"prompts": {"query": "q "}}'),
    ),
    "--wordnet": ("cline", ["--wordnet", "wordnet"], wordnet, letters("wordnet/data.noun")),
    "--wordnet of views": (
        "simcse",
        ["--columns", "1", "--views", "synonym", "dropout", "--wordnet", "wordnet"],
        wordnet,
        letters("wordnet/data.verb"),
    ),
    "--dev": ("simcse", DEV, sts, letters("held.tsv")),
    "--dev of ease": ("ease", DEV, sts, letters("held.tsv")),
    "--test": ("simcse", ["--test", "held.tsv"], sts, letters("held.tsv")),
    "--test of two": ("vascl", ["--test", "sts.tsv", "held.tsv"], sts, letters("held.tsv")),
    "--transfer": ("dclr", ["--transfer", "topics.tsv"], None, letters("topics.tsv")),
    "--transfer of two": (
        "dclr",
        ["--transfer", "topics.tsv,held.tsv"],
        lambda here: shutil.copy(here / "topics.tsv", here / "held.tsv"),
        letters("held.tsv"),
    ),
    "--cluster": ("simcse", ["--cluster", "topics.tsv"], None, letters("topics.tsv")),
    "--dev of childtuning": (
        "childtuning",
        DEV,
        lambda here: shutil.copy(here / "topics.tsv", here / "held.tsv"),
        letters("held.tsv"),
    ),
    "--contrast-set": (
        "childtuning",
        ["--contrast-set", "topics.tsv", "held.tsv"],
        lambda here: shutil.copy(here / "topics.tsv", here / "held.tsv"),
        letters("held.tsv"),
    ),
    "--ood": ("childtuning", ["--dev", "topics.tsv", "--ood", "few.txt"], None, letters("few.txt")),
    "--entity-vectors": (
        "ease",
        ["--entity-vectors", "v.txt", "--entity-map", "linear"],
        None,
        letters("v.txt"),
    ),
    "--dev of tacl": (
        "tacl",
        ["--dev", "held.txt"],
        lambda here: shutil.copy(here / "documents.txt", here / "held.txt"),
        letters("held.txt"),
    ),
    "pictures of equal size": ("simclr", ["--data", "photos"], photos(), other_pixels("photos/3.png")),
    "listed pictures": ("moco", ["--data", "photos.tsv"], listed_photos, other_pixels("photos/3.png")),
    "labels that are links": (
        "simclr", ["--data", "sorted"], linked_photos, other_pixels("elsewhere/a/2.png"),
    ),
    "a label that leads elsewhere": (
        "simclr", ["--data", "sorted"], linked_photos,
        lambda here: os.rename(here / "elsewhere/a/2.png", here / "elsewhere/b/2.png"),
    ),
    "a deleted picture": (
        "simclr", ["--data", "sorted"], linked_photos, lambda here: os.unlink(here / "elsewhere/a/2.png"),
    ),
    "a resized picture": (
        "moco", ["--data", "photos.tsv"], listed_photos, put("photos/3.png", encoded("PNG", size=(20, 20))),
    ),
    "a picture more": ("moco", ["--data", "photos"], photos(), put("photos/9.png", encoded("PNG"))),
    "a renamed picture": (
        "moco", ["--data", "photos"], photos(),
        lambda here: os.rename(here / "photos/3.png", here / "photos/93.png"),
    ),
    "--dev of pictures": (
        "simclr", ["--data", "sorted", "--dev", "photos.tsv"], both(labelled_photos, listed_photos),
        other_pixels("photos/3.png"),
    ),
    "an array of equal size": ("moco", [], None, change("few.npz", lambda old: recoloured(old))),
    "--finetune": (
        "simclr", ["--finetune", "few.npz", "--model", "net"], None,
        change("few.npz", lambda old: recoloured(old)),
    ),
    "--distill": (
        "simclr",
        ["--distill", "tuned"],
        lambda here: ran("simclr", "--finetune", "few.npz", "--model", "net", out="tuned")(here),
        scaled("tuned"),
    ),
    "--data of text": ("vascl", ["--data", "few.csv", "--columns", "1"], None, letters("few.csv")),
    "documents": ("tacl", [], None, letters("documents.txt")),
}


def recoloured(data):
    """An .npz with other pixels."""
    import io

    with np.load(io.BytesIO(data)) as file:
        arrays = {name: file[name] for name in file}
    arrays["images"] = 255 - arrays["images"]
    np.savez(out := io.BytesIO(), **arrays)
    return out.getvalue()


def vectors(here):
    titles = sorted(
        {line.split("\t")[1].strip() for line in (here / "entities.tsv").read_text().splitlines()[1:]}
    )
    rows = [f"ENTITY/{title.replace(' ', '_')} {i % 7 + 1} {i % 5 + 1}" for i, title in enumerate(titles)]
    (here / "v.txt").write_text(f"{len(rows)} 2\n" + "\n".join(rows) + "\n")


def of_inputs():
    for name, (script, argv, make, changed) in INPUTS.items():
        make = make or (vectors if name == "--entity-vectors" else lambda here: None)
        makes = both(make, ran(script, *argv), changed)
        yield case(
            f"another {name}", script, [*argv, *RUN], makes, "one line", late=False,
            says="the content of --.* is not what it was|pictures, wanted",
        )
    for script in SCRIPTS:
        yield case(f"unchanged: {script}", script, RUN, ran(script), "accepted")
    for name in ("labels that are links", "listed pictures", "--transfer of two"):
        script, argv, make, _ = INPUTS[name]
        yield case(f"unchanged: {name}", script, [*argv, *RUN], both(make, ran(script, *argv)), "accepted")


def cases():
    yield from itertools.chain(of_links(), of_forged(), of_inputs())
