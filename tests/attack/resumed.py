"""--resume in run folders that were tampered with, or whose inputs changed: links to other files, a forged
state.pt, forged tokens, changed data and models."""

import itertools
import json
import os
import shutil
from functools import partial

import numpy as np
import torch
from cases import DATA, SCRIPTS, Case, all_of, change_file, end, read_output, start, write_file
from folders import RESUME_HALF, change_settings, change_state, change_weights, extend_command, to_nan
from images import image_bytes, write_photos
from safetensors.torch import load_file, save_file

case = partial(Case, "resumed", may_leave_out=True)
RESUME_TWIN, RESUME_RUN = [*RESUME_HALF[:-1], "twin"], ["--steps", "2", "--resume", "--out", "run"]

# ── links ──


def replace_by_link(name, target="../target"):
    """Return a `make` that replaces a file or folder of the run by a symbolic link."""

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


def add_hard_link(name):
    """Return a `make` that adds a hard link, `target`, to a file of the run. The file does not look like a
    link, but writing into it in place also changes `target`."""

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


def link_cases():
    for name in FILES + LINKS:
        yield case(
            f"{name} is a link", "simcse", RESUME_HALF, replace_by_link(name), "one line", may_leave_out=False
        )
        yield case(f"{name} leads nowhere", "simcse", RESUME_HALF, replace_by_link(name, "../none"),
                   "one line", may_leave_out=False)
    for name in ("training", "1_Pooling", ".saving", "x"):
        yield case(f"{name} leads to /tmp", "simcse", RESUME_HALF, replace_by_link(name, "/tmp"), "one line",
                   may_leave_out=False)
    for name in (*FILES, "tokens.tmp/ids"):
        yield case(f"{name} is a second name", "simcse", RESUME_HALF, add_hard_link(name),
                   unchanged=("target",), same_as=RESUME_TWIN)
    make = all_of(lambda here: (here / "half/state.pt").unlink(), replace_by_link(".running"))
    yield case(
        "no checkpoint, and .running is a link", "simcse", RESUME_HALF, make, "one line", may_leave_out=False)
    make = all_of(lambda here: (here / "half/state.pt").unlink(), write_file("half/.running", ""),
                  add_hard_link("simcse.py"), replace_by_link("training", "/tmp"))
    yield case("no checkpoint, and links", "simcse", RESUME_HALF, make, "one line", may_leave_out=False,
               unchanged=("target",))
    make = all_of(replace_by_link("x"), lambda here: os.symlink("half", here / "out"))
    yield case("--out is a link, with links", "simcse", [*RESUME_HALF[:-1], "out"], make, "one line",
               may_leave_out=False)
    yield case("--out is a link", "simcse", [*RESUME_HALF[:-1], "way"],
               lambda here: os.symlink("half", here / "way"), "accepted")
    for words in (["--save-triples", "pwned.csv"], ["--save-triples", "../pwned.csv"]):
        make = all_of(run_one_step("cline"), extend_command(*words, folder="run"))
        yield case(f"the command has {' '.join(words)}", "cline", RESUME_RUN, make)


# ── state.pt ──


def run_one_step(script, *argv, steps=2, out="run"):
    """Return a `make` that runs one step and leaves a run that --resume can continue to `steps`."""

    def make(here):
        log_path, flags = here.with_name(out), [*argv, "--out", out, "--keep-state", "always"]
        assert end(start(script, flags, here, log_path)) == 0, read_output(log_path)
        path = here / out / "args.json"
        settings = json.loads(path.read_text())
        more = {"steps": steps, "command": [*settings["command"], "--steps", str(steps)]}
        path.write_text(json.dumps(settings | more))

    return make


def change_optimizer(edit, folder="half"):
    """Return a `make` that calls edit(optimizer state) and saves state.pt again."""

    def make(here):
        path = here / folder / "state.pt"
        found = torch.load(path, weights_only=True)
        edit(found["optimizer"])
        torch.save(found, path)

    return make


def edit_states(edit):
    """Return a function that calls edit(state) for each parameter in an optimizer's state."""
    return lambda found: [edit(part) for part in found["state"].values()]


def replace_in_states(name, edit):
    """Return a function that replaces state[name] by edit(state[name]) for each parameter."""
    return edit_states(lambda part: part.update({name: edit(part[name])}))


def change_groups(**more):
    """Return a function that sets these values in all parameter groups."""
    return lambda found: [part.update(more) for part in found["param_groups"]]


def change_model(edit):
    """Return a `make` that calls edit(model's state dict) and saves state.pt again."""
    def make(here):
        path = here / "half/state.pt"
        found = torch.load(path, weights_only=True)
        edit(found["model"])
        torch.save(found, path)

    return make


def first_state(found):
    return next(iter(found["state"].values()))


def share_memory(found):
    """Let moments of equal name and shape share one memory."""
    seen = {}
    for part in found["state"].values():
        for name in ("exp_avg", "exp_avg_sq"):
            part[name] = seen.setdefault((name, part[name].shape), part[name])


STATES = {
    "one element": replace_in_states("exp_avg", lambda x: x.flatten()[:1]),
    "no element": replace_in_states("exp_avg", lambda x: x[:0]),
    "strides of 0": replace_in_states("exp_avg", lambda x: x.flatten()[:1].expand(x.shape[::-1]).T),
    "another order": replace_in_states("exp_avg_sq", lambda x: x.T.contiguous().T if x.dim() == 2 else x),
    "turned": replace_in_states("exp_avg_sq", lambda x: x.T.contiguous() if x.dim() == 2 else x),
    "a view of more": replace_in_states("exp_avg", lambda x: torch.cat([x, x])[::2]),
    "one memory": share_memory,
    "flat": replace_in_states("exp_avg", lambda x: x.flatten()),
    "int8": replace_in_states("exp_avg", lambda x: x.to(torch.int8)),
    "float16": replace_in_states("exp_avg_sq", lambda x: x.half()),
    "float64": replace_in_states("exp_avg", lambda x: x.double()),
    "complex": replace_in_states("exp_avg", lambda x: x.to(torch.complex64)),
    "sparse": replace_in_states("exp_avg", lambda x: x.to_sparse()),
    "quantised": replace_in_states("exp_avg", lambda x: torch.quantize_per_tensor(x, 1.0, 0, torch.qint8)),
    "nan": replace_in_states("exp_avg", lambda x: x * torch.nan),
    "inf": replace_in_states("exp_avg_sq", lambda x: x + torch.inf),
    "one nan": lambda found: first_state(found)["exp_avg"].view(-1)[:1].fill_(torch.nan),
    "negative squares": replace_in_states("exp_avg_sq", lambda x: -x - 1),
    "texts": replace_in_states("exp_avg", lambda x: "x"),
    "lists": replace_in_states("exp_avg", lambda x: x.tolist()),
    "none": replace_in_states("exp_avg", lambda x: None),
    "meta": replace_in_states("exp_avg", lambda x: x.to("meta")),
    "no moments": edit_states(lambda part: part.pop("exp_avg")),
    "no squares": edit_states(lambda part: part.pop("exp_avg_sq")),
    "no steps": edit_states(lambda part: part.pop("step")),
    "more moments": edit_states(lambda part: part.update(max_exp_avg_sq=part["exp_avg"])),
    "nothing": lambda found: found["state"].clear(),
    "one less": lambda found: found["state"].pop(3),
    "one more": lambda found: found["state"].update({999: dict(first_state(found))}),
    "names": lambda found: found.update(state={str(number): part for number, part in found["state"].items()}),
    "a list": lambda found: found.update(state=[]),
    "empty parts": edit_states(lambda part: part.clear()),
    **{
        f"step {value}": replace_in_states("step", lambda x, value=value: torch.tensor(value))
        for value in (-1.0, 0.0, 1.5, 1e30, float("nan"), float("inf"), 2)
    },
    "steps of numbers": replace_in_states("step", lambda x: 1.0),
    "steps of rows": replace_in_states("step", lambda x: x.expand(3)),
    **{
        f"{name} {value!a}": change_groups(**{name: value})
        for name, value in [("betas", "x"), ("betas", (2.0, 2.0)), ("betas", (0.9,)), ("maximize", True),
                            ("eps", -1.0), ("eps", "x"), ("weight_decay", 1e30), ("amsgrad", True),
                            ("capturable", True), ("differentiable", True), ("fused", False),
                            ("foreach", True), ("lr", "x"), ("lr", -1.0), ("lr", float("nan")), ("lr", None),
                            ("params", []), ("params", [0] * 99), ("decoupled_weight_decay", False)]
    },
    "no groups": lambda found: found.update(param_groups=[]),
    "groups twice": lambda found: found.update(param_groups=found["param_groups"] * 2),
    "no state": lambda found: found.pop("state"),
    "more parts": lambda found: found.update(x=1),
}
MODELS = {
    "nan": lambda found: found.update({name: to_nan(x) for name, x in found.items()}),
    "one inf": lambda found: next(iter(found.values())).view(-1)[:1].fill_(torch.inf),
    "int8": lambda found: found.update({name: x.to(torch.int8) for name, x in found.items()}),
    "sparse": lambda found: found.update({name: x.to_sparse() for name, x in found.items()}),
    "one name": lambda found: found.popitem(),
    "one more": lambda found: found.update(x=torch.zeros(3)),
    "other shapes": lambda found: found.update({name: x[:1] for name, x in found.items()}),
    "broadcast": lambda found: found.update(
        {name: x.flatten()[0].expand(x.shape) for name, x in found.items()}),
    "texts": lambda found: found.update({name: "x" for name in found}),
    "half": lambda found: found.update({name: x.half() for name, x in found.items()}),
}
PROGRESS = {
    "a list": [],
    "nothing": {},
    "step of text": {"step": "1"},
    "step -1": {"step": -1},
    "step 0": {"step": 0},
    "step 1.5": {"step": 1.5},
    "step true": {"step": True},
    "step 3": {"step": 3},
    "step 2**70": {"step": 2**70},
    "saved is text": {"saved": "x"},
    "saved is a list": {"saved": [1]},
    "saved holds a tensor": {"saved": {"step": torch.zeros(3)}},
    "before is 7": {"before": 7},
    "before is empty": {"before": {}},
    "saved is empty": {"saved": {}},
    "saved of other scores": {"saved": {"step": 1, "x": 1.0}},
    "more of it": {"x": 1},
}


def change_progress(folder="half", **more):
    """Return a `make` that sets these values in the progress of state.pt."""
    def make(here):
        path = here / folder / "state.pt"
        found = torch.load(path, weights_only=True)
        found["progress"] = found["progress"] | more
        torch.save(found, path)

    return make


def change_tokens(edit):
    """Return a `make` that replaces the arrays ids and ends of tokens/ by edit(ids, ends)."""

    def make(here):
        folder = here / "half/tokens"
        ids, ends = np.fromfile(folder / "ids", np.int32), np.fromfile(folder / "ends", np.int64)
        ids, ends = edit(ids, ends)
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
    "fewer ids": lambda ids, ends: (ids[:9], ends),
    "no ends": lambda ids, ends: (ids, ends[:0]),
    "ends from 5": lambda ids, ends: (ids, ends + 5),
}


def change_saved_weights(edit):
    """Return a `make` that replaces each saved weight x of the run by edit(x)."""

    def make(here):
        path = here / "half/model.safetensors"
        save_file({name: edit(x) for name, x in load_file(path).items()}, path)

    return make


def forged_cases():
    for name, edit in STATES.items():
        yield case(f"optimizer: {name}", "simcse", RESUME_HALF, change_optimizer(edit), same_as=RESUME_TWIN)
    for name, edit in MODELS.items():
        yield case(f"model: {name}", "simcse", RESUME_HALF, change_model(edit))
    for name, more in PROGRESS.items():
        make = change_state(progress=more) if isinstance(more, list) or not more else change_progress(**more)
        yield case(f"progress: {name}", "simcse", RESUME_HALF, make, same_as=RESUME_TWIN)
    for name, edit in TOKENS.items():
        yield case(f"tokens: {name}", "simcse", RESUME_HALF, change_tokens(edit), same_as=RESUME_TWIN)
    for name, edit in {"nan": to_nan, "other shapes": lambda x: x[:1].contiguous(),
                       "int8": lambda x: x.to(torch.int8)}.items():
        yield case(f"saved weights: {name}", "simcse", RESUME_HALF, change_saved_weights(edit))
    for name, text in {"auto_map": '{"auto_map": {"AutoModel": "code.Own"}}', "a list": "[]"}.items():
        yield case(f"saved config: {name}", "simcse", RESUME_HALF, write_file("half/config.json", text))
    names = {"moco": "momentum_buffer", "childtuning": "exp_avg"}
    for script, name in names.items():
        for what, edit in {"one element": replace_in_states(name, lambda x: x.flatten()[:1]),
                           "nan": replace_in_states(name, lambda x: x * torch.nan),
                           "nothing": lambda found: found["state"].clear()}.items():
            make = all_of(run_one_step(script), change_optimizer(edit, "run"))
            yield case(f"optimizer of {script}: {what}", script, RESUME_RUN, make, "one line")
    for what, more in {"pointer -1": -1, "pointer 10**9": 10**9, "pointer x": "x"}.items():
        make = all_of(run_one_step("moco"), change_progress("run", pointer=more))
        yield case(f"progress of moco: {what}", "moco", RESUME_RUN, make)
    for what, more in {"place -1": [-1, 0, 0], "place 10**9": [10**9, 0, 0], "a short place": [0],
                       "a place of 10**9 sentences": [0, 10**9, 10**9]}.items():
        make = all_of(run_one_step("tacl"), change_progress("run", place=more))
        yield case(f"progress of tacl: {what}", "tacl", RESUME_RUN, make)
    for what, edit in {"modes": change_groups(mode="x"), "no modes": change_groups(mode=None),
                       "masks": lambda found: found.update(masks=[torch.ones(3)] * 99),
                       "no generator": lambda found: found.pop("generator"),
                       "a generator of text": lambda found: found.update(generator="x")}.items():
        make = all_of(run_one_step("childtuning"), change_optimizer(edit, "run"))
        yield case(f"optimizer of childtuning: {what}", "childtuning", RESUME_RUN, make)
    for what, more in {"a text": "x", "a list": [{}], "below 0": -1}.items():
        make = all_of(
            run_one_step("childtuning", "--dev", "topics.tsv"), change_progress("run", skipped=more))
        yield case(f"progress of childtuning: {what}", "childtuning", RESUME_RUN, make)


# ── inputs ──


def scale_weights(folder):
    """Return a `make` that multiplies the floating-point weights of a model by 1.5."""
    return change_weights(
        lambda old: {name: x * 1.5 if x.is_floating_point() else x for name, x in old.items()}, folder)


def change_letter(name):
    """Return a `make` that changes a letter in the first text after the header, or in a WordNet gloss."""

    def edit(old):
        start = old.rindex(b"| ") if b"wordnet" in name.encode() else old.index(b"\n")
        at = old.index(b"e", start)
        return old[:at] + b"o" + old[at + 1 :]

    return change_file(name, edit)


def write_labelled_photos(here):
    for i in range(8):
        write_file(f"sorted/{'ab'[i % 2]}/{i}.png", image_bytes("PNG"))(here)


def write_linked_photos(here):
    """Write a folder of images for each label; the folders are links."""
    write_labelled_photos(here)
    os.rename(here / "sorted", here / "elsewhere")
    os.mkdir(here / "sorted")
    for label in "ab":
        (here / "sorted" / label).symlink_to(here / "elsewhere" / label)


def write_listed_photos(here):
    write_photos()(here)
    (here / "photos.tsv").write_text("".join(f"photos/{i}.png\t{'ab'[i % 2]}\n" for i in range(8)))


def copy_wordnet(here):
    shutil.copytree(DATA / "wordnet", here / "wordnet")


def change_pixels(path):
    """Return a `make` that replaces an image by another one with as many pixels and bytes."""

    def make(here):
        old = (here / path).read_bytes()
        new = image_bytes("PNG", "L").ljust(len(old), b"\0")[: len(old)]
        assert new != old
        (here / path).write_bytes(new)

    return make


def copy_sts(here):
    shutil.copy(here / "sts.tsv", here / "held.tsv")


DEV = ["--dev", "held.tsv"]
# {name: (script, argv, make, change_input)}
INPUTS = {
    "--guide": ("dclr", ["--guide", "bert"], None, scale_weights("bert")),
    "--teacher": ("tacl", ["--model", "bert", "--teacher", "bert"], None, scale_weights("bert")),
    "--model of selfguided": ("selfguided", ["--model", "bert"], None, scale_weights("bert")),
    "--model's tokenizer": ("simcse", ["--model", "bert"], None,
                            change_settings("tokenizer_config.json", do_lower_case=False)),
    "--model's prompts": (
        "vascl", ["--model", "bert"], None,
        write_file("bert/config_sentence_transformers.json", '{"prompts": {"query": "q "}}')),
    "--wordnet": ("cline", ["--wordnet", "wordnet"], copy_wordnet, change_letter("wordnet/data.noun")),
    "--wordnet of views": ("simcse",
                           ["--columns", "1", "--views", "synonym", "dropout", "--wordnet", "wordnet"],
                           copy_wordnet, change_letter("wordnet/data.verb")),
    "--dev": ("simcse", DEV, copy_sts, change_letter("held.tsv")),
    "--dev of ease": ("ease", DEV, copy_sts, change_letter("held.tsv")),
    "--test": ("simcse", ["--test", "held.tsv"], copy_sts, change_letter("held.tsv")),
    "--test of two": ("vascl", ["--test", "sts.tsv", "held.tsv"], copy_sts, change_letter("held.tsv")),
    "--transfer": ("dclr", ["--transfer", "topics.tsv"], None, change_letter("topics.tsv")),
    "--transfer of two": ("dclr", ["--transfer", "topics.tsv,held.tsv"],
                          lambda here: shutil.copy(here / "topics.tsv", here / "held.tsv"),
                          change_letter("held.tsv")),
    "--cluster": ("simcse", ["--cluster", "topics.tsv"], None, change_letter("topics.tsv")),
    "--dev of childtuning": ("childtuning", DEV,
                             lambda here: shutil.copy(here / "topics.tsv", here / "held.tsv"),
                             change_letter("held.tsv")),
    "--contrast-set": ("childtuning", ["--contrast-set", "topics.tsv", "held.tsv"],
                       lambda here: shutil.copy(here / "topics.tsv", here / "held.tsv"),
                       change_letter("held.tsv")),
    "--ood": ("childtuning", ["--dev", "topics.tsv", "--ood", "few.txt"], None, change_letter("few.txt")),
    "--entity-vectors": ("ease", ["--entity-vectors", "v.txt", "--entity-map", "linear"], None,
                         change_letter("v.txt")),
    "--dev of tacl": ("tacl", ["--dev", "held.txt"],
                      lambda here: shutil.copy(here / "documents.txt", here / "held.txt"),
                      change_letter("held.txt")),
    "images of equal size": ("simclr", ["--data", "photos"], write_photos(), change_pixels("photos/3.png")),
    "listed images": ("moco", ["--data", "photos.tsv"], write_listed_photos, change_pixels("photos/3.png")),
    "labels that are links": ("simclr", ["--data", "sorted"], write_linked_photos,
                              change_pixels("elsewhere/a/2.png")),
    "a label that leads elsewhere": (
        "simclr", ["--data", "sorted"], write_linked_photos,
        lambda here: os.rename(here / "elsewhere/a/2.png", here / "elsewhere/b/2.png")),
    "a deleted image": ("simclr", ["--data", "sorted"], write_linked_photos,
                        lambda here: os.unlink(here / "elsewhere/a/2.png")),
    "a resized image": ("moco", ["--data", "photos.tsv"], write_listed_photos,
                        write_file("photos/3.png", image_bytes("PNG", size=(20, 20)))),
    "an image more": ("moco", ["--data", "photos"], write_photos(),
                      write_file("photos/9.png", image_bytes("PNG"))),
    "a renamed image": ("moco", ["--data", "photos"], write_photos(),
                        lambda here: os.rename(here / "photos/3.png", here / "photos/93.png")),
    "--dev of images": ("simclr", ["--data", "sorted", "--dev", "photos.tsv"],
                        all_of(write_labelled_photos, write_listed_photos), change_pixels("photos/3.png")),
    "an array of equal size": ("moco", [], None, change_file("few.npz", lambda old: invert_pixels(old))),
    "--finetune": ("simclr", ["--finetune", "few.npz", "--model", "net"], None,
                   change_file("few.npz", lambda old: invert_pixels(old))),
    "--distill": (
        "simclr", ["--distill", "tuned"],
        lambda here: run_one_step("simclr", "--finetune", "few.npz", "--model", "net", out="tuned")(here),
        scale_weights("tuned")),
    "--data of text": ("vascl", ["--data", "few.csv", "--columns", "1"], None, change_letter("few.csv")),
    "documents": ("tacl", [], None, change_letter("documents.txt")),
}


def invert_pixels(data):
    """Return the bytes of an .npz file with inverted pixels."""
    import io

    with np.load(io.BytesIO(data)) as file:
        arrays = {name: file[name] for name in file}
    arrays["images"] = 255 - arrays["images"]
    np.savez(out := io.BytesIO(), **arrays)
    return out.getvalue()


def write_vectors(here):
    """Write v.txt, Wikipedia2Vec vectors of the titles in entities.tsv."""
    titles = sorted(
        {line.split("\t")[1].strip() for line in (here / "entities.tsv").read_text().splitlines()[1:]})
    rows = [f"ENTITY/{title.replace(' ', '_')} {i % 7 + 1} {i % 5 + 1}" for i, title in enumerate(titles)]
    (here / "v.txt").write_text(f"{len(rows)} 2\n" + "\n".join(rows) + "\n")


def input_cases():
    for name, (script, argv, make, change_input) in INPUTS.items():
        make = make or (write_vectors if name == "--entity-vectors" else lambda here: None)
        makes = all_of(make, run_one_step(script, *argv), change_input)
        yield case(f"another {name}", script, [*argv, *RESUME_RUN], makes, "one line", may_leave_out=False,
                   message="the content of --.* has changed since|images, expected")
    for script in SCRIPTS:
        yield case(f"unchanged: {script}", script, RESUME_RUN, run_one_step(script), "accepted")
    for name in ("labels that are links", "listed images", "--transfer of two"):
        script, argv, make, _ = INPUTS[name]
        yield case(f"unchanged: {name}", script, [*argv, *RESUME_RUN],
                   all_of(make, run_one_step(script, *argv)), "accepted")


def cases():
    yield from itertools.chain(link_cases(), forged_cases(), input_cases())
