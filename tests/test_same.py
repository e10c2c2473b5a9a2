"""The scripts repeat each other on purpose; this test keeps the copies equal, by name. To opt out, rename.

python tests/test_same.py --copy spearman --from simcse.py      writes simcse.py's text over every other copy
"""
import argparse
import ast
import difflib
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FAMILY = dict.fromkeys("simclr moco".split(), "images")
FAMILY |= {"cline": "triples", "tacl": "tokens", "childtuning": "classifiers"}  # all others, and a new one, embed sentences
IN_FAMILY = "load_encoder embed evaluate save_model model_card load_line load_best".split()  # pictures and text differ here
OWNED = "make_parser load_data make_batch augment build_model compute_loss linear_probe main".split()  # the paper's: only signatures agree
SKELETON = {  # every banner, and every name that two scripts share, in the order of the file
    "flags": "make_parser",
    "data": "load_data make_batch augment uniform coin crop_and_flip cubic jitter grey shift_hue blur",
    "model": "SmallPictureResNet build_model load_encoder embed pool",
    "the paper": "compute_loss mlm_loss",
    "evaluation": "load_sts spearman knn_accuracy features evaluate linear_probe",
    "plumbing": "read_table Table read_cells read_rows tokenise tokenise_rows write_tokens Rows length_groups read_pictures check_pictures Arrays read_cifar read_folder decode "
                "start fingerprint begin_out average_gradients average_statistics lr_at warmup_linear epoch_steps batches warmup_cosine full_batches SIGNALS command asked_to_stop refuse_bad_loss named report save_model model_card load_line load_best save_state load_state peak_gb empty_cell at_least say fail",
    "main": "main",
}
ORDER = [entry for title, names in SKELETON.items() for entry in (f"── {title}", *names.split())]
BANNER = re.compile(r"# (── .+?) ─+$")
# Half of a script is furniture: bad input, resume, torchrun and the layouts of two libraries take 350 lines; pictures need their
# augmentations and readers besides.
SCRIPT_LINES = {"images": 920, "ease": 1095, "cline": 1160, "childtuning": 1040, "dclr": 1055}  # an entity table, WordNet, masks, a guide
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


class Script:
    def __init__(self, path):
        self.path, self.name = path, path.name
        self.lines = path.read_text(encoding="utf-8").split("\n")
        self.tree = ast.parse("\n".join(self.lines), filename=str(path))
        self.nodes = {node.name: node for node in self.tree.body if isinstance(node, (*FUNCTION, ast.ClassDef))}

    def scope(self, name):
        """Copies of one scope are compared with each other."""
        return f"{name} ({FAMILY.get(self.path.stem, 'sentences')})" if name in IN_FAMILY else name

    def span(self, name):
        """The lines of a definition, with its decorators and the comments that touch it."""
        node = self.nodes[name]
        first, last = min(part.lineno for part in (node, *node.decorator_list)) - 1, node.end_lineno
        while first and self.lines[first - 1].startswith("#") and not BANNER.match(self.lines[first - 1]):
            first -= 1
        while re.match(r"\s+#", "".join(self.lines[last:last + 1])):  # ast ends a body before its closing comment
            last += 1
        return slice(first, last)

    def shared(self):
        """(what, lines, name to --copy or None): `what` has the same lines in every script that has it."""
        for name, node in self.nodes.items():
            if name in OWNED:
                yield f"the signature of {name}", [ast.unparse(getattr(node, "args", node))], None
            else:
                yield self.scope(name), self.lines[self.span(name)], name
        for call in (node for node in ast.walk(self.tree) if isinstance(node, ast.Call) and node.keywords):
            given = {"type": "str"} | {word.arg: ast.unparse(word.value) for word in call.keywords}
            for flag in (arg.value for arg in call.args if isinstance(arg, ast.Constant)):
                if re.fullmatch(r"--[\w-]+", str(flag)):  # any call: `add = parser.add_argument` is a common shorthand
                    given["help"] = re.split(r"(; |')default ", given.get("help", ""))[0]         # defaults may differ
                    kind = {"images": "pictures", "tokens": "documents", "classifiers": "labels"}.get(FAMILY.get(self.path.stem), "sentences")
                    kind = {"--form": self.path.stem, "--dev": kind, "--max-length": kind, "--steps": kind}.get(flag)
                    title = f"{flag} ({kind})" if kind else flag
                    yield f"the flag {title}", [f"{w}={given.get(w)}" for w in ("type", "action", "nargs", "help")], None
        for banner in filter(None, map(BANNER.match, self.lines)):
            yield f"the banner {banner[1]}", [banner[0]], None


def unified(a, b, a_name, b_name):
    return "\n".join(difflib.unified_diff(a, b, a_name, b_name, lineterm=""))


def different_copies(scripts):
    copies = {}
    for script in scripts:
        for what, lines, name in script.shared():
            copies.setdefault((what, name), {})[script.name] = tuple(lines)
    for (what, name), found in copies.items():
        usual = Counter(found.values()).most_common(1)[0][0]  # the odd one out is the one accused
        source = next(script for script in found if found[script] == usual)
        repair = f"python tests/test_same.py --copy {name} --from {source}" if name else "by hand"
        for other in (script for script in found if found[script] != usual):
            diff = unified(usual, found[other], source, other)
            yield f"{other}: {what} differs from {source}\n{diff}\nrepair: {repair}"


def wrong_order(scripts):
    for script in scripts:
        places = [(node.lineno, name) for name, node in script.nodes.items() if name in ORDER]
        places += [(i, match[1]) for i, match in enumerate(map(BANNER.match, script.lines), 1) if match]
        outline = [entry for _, entry in sorted(places)]
        wanted = [entry for entry in ORDER if entry in outline or entry.startswith("──")]
        if outline != wanted:
            diff = unified(wanted, outline, "SKELETON", script.name)
            yield f"{script.name}: banners or functions out of order\n{diff}\nrepair: by hand"
    times = Counter(name for script in scripts for name in script.nodes)
    for name in (name for name in times if times[name] > 1 and name not in ORDER):
        yield f"{name} is in {times[name]} scripts: give it a place in SKELETON, in tests/test_same.py"


def over_budget(scripts):
    for script in scripts:
        sizes = [(node.name, node.end_lineno - node.lineno + 1, 84 if node is script.nodes.get("main") else 50)
                 for node in ast.walk(script.tree) if isinstance(node, FUNCTION)]
        for name, lines, budget in [("the script", len(script.lines) - 1, SCRIPT_LINES.get(script.path.stem, SCRIPT_LINES.get(FAMILY.get(script.path.stem), 955))), *sizes]:
            if lines > budget:
                yield f"{script.name}: {name} has {lines} lines, the budget is {budget}"


def complaints(paths):
    scripts = [Script(path) for path in paths]
    return [text for check in (different_copies, wrong_order, over_budget) for text in check(scripts)]


def main(argv=None, root=ROOT):
    """Copy one definition from one script into every other script of its scope that defines it."""
    parser = argparse.ArgumentParser(description="copy one top-level definition between the scripts")
    parser.add_argument("--copy", required=True, metavar="NAME", help="function or class")
    parser.add_argument("--from", required=True, metavar="SCRIPT", dest="source", help="the script with the right text")
    args = parser.parse_args(argv)
    scripts = {path.name: Script(path) for path in sorted(root.glob("*.py"))}
    source, name = scripts.get(args.source), args.copy
    if source is None or name not in source.nodes or name in OWNED:
        parser.error(f"{name} " + ("belongs to each paper" if name in OWNED else f"is not defined in {args.source}"))
    text = source.lines[source.span(name)]
    for script in (script for script in scripts.values() if name in script.nodes):
        if script.scope(name) == source.scope(name) and script.lines[script.span(name)] != text:
            script.lines[script.span(name)] = text
            script.path.write_text("\n".join(script.lines), encoding="utf-8")
            print(f"{name}: {source.name} -> {script.name}")


def test_scripts_agree():
    if found := complaints(sorted(ROOT.glob("*.py"))):
        pytest.fail("\n\n".join(found), pytrace=False)  # an assert would bury the diffs in a repr


# The tester, tested on invented scripts.
GOOD = '''# ── flags ───
def make_parser():
    parser.add_argument("--lr", type=float, default=1e-3, help="peak rate")
# ── data ───
# ── model ───
# ── the paper ───
def compute_loss(model, batch, args):
    return 1
# ── evaluation ───
# Ties share a rank.
@no_grad
def spearman(a, b):
    return sum(a)
    # closing
def evaluate(model):
    return spearman(model)
# ── plumbing ───
# ── main ───
def main(argv=None):
    return 0
'''
FLAGS, DATA, MODEL = re.split(r"(?=^# ── )", GOOD, flags=re.M)[1:4]


def write(folder, **texts):
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return [folder / f"{name}.py" for name in texts]


def test_agreement_passes(tmp_path):
    paper = GOOD.replace("return 1\n", "return 2\n" + "    x = 1\n" * 48).replace("1e-3", "1e-5")  # exactly 50 lines
    images = GOOD.replace("return spearman(model)", "return 0")
    assert complaints([]) == complaints(write(tmp_path, simcse=GOOD, dclr=paper, moco=images)) == []


@pytest.mark.parametrize("old, new, said", [
    ("sum(a)", "max(a)", "--copy spearman --from simcse.py"),
    ("(model)\n", "(0)\n", "--copy evaluate --from simcse.py"),
    ("Ties share", "Ties get", "-# Ties share a rank.\n+# Ties get a rank."),
    ("@no_grad", "@grad", "-@no_grad\n+@grad"),
    ("# closing", "# shut", "spearman differs"),
    ("batch, args", "args", "the signature of compute_loss differs"),
    ("=float", "=int", "the flag --lr differs"),
    ("peak rate", "rate", "the flag --lr differs"),
    (DATA, "", "out of order"),
    (DATA + MODEL, MODEL + DATA, "out of order"),
    (FLAGS + DATA, DATA + FLAGS, "out of order"),
    ("evaluation ───", "evaluation ────", "the banner ── evaluation differs"),
    ("return 1\n", "return 1\n" + "    x = 1\n" * 49, "compute_loss has 51 lines, the budget is 50"),
    ("return 0\n", "return 0\n" + "    x = 1\n" * 83, "main has 85 lines, the budget is 84"),
    (DATA, DATA + "\n" * (956 - GOOD.count("\n")), "the script has 956 lines, the budget is 955"),
])
def test_each_fault_is_reported(tmp_path, old, new, said):
    assert old in GOOD
    [complaint] = complaints(write(tmp_path, simcse=GOOD, dclr=GOOD, vascl=GOOD.replace(old, new)))
    assert complaint.startswith("vascl.py") and said in complaint


def test_shared_name_needs_a_place(tmp_path):
    helped = GOOD + "def helper():\n    return 0\n"
    assert complaints(write(tmp_path, simcse=helped, dclr=GOOD)) == []
    [complaint] = complaints(write(tmp_path, simcse=helped, moco=helped))
    assert complaint.startswith("helper is in 2 scripts")


@pytest.mark.parametrize("name, old, new", [("spearman", "rank.\n@no_grad", "place."),
                                            ("evaluate", "(model)\n", "(0)\n")])
def test_copy_repairs_its_scope_only(tmp_path, name, old, new):
    images = GOOD.replace("return spearman(model)", "return 'images'").replace("return 0", "return 3")
    paths = write(tmp_path, simcse=GOOD, dclr=GOOD.replace(old, new), moco=images)
    assert len(complaints(paths)) == 1
    main(["--copy", name, "--from", "simcse.py"], root=tmp_path)
    assert [path.read_text(encoding="utf-8") for path in paths] == [GOOD, GOOD, images]


@pytest.mark.parametrize("name, source", [("main", "simcse.py"), ("absent", "simcse.py"), ("spearman", "absent.py")])
def test_copy_refuses(tmp_path, name, source):
    paper = GOOD.replace("return 0", "return 1")
    paths = write(tmp_path, simcse=GOOD, dclr=paper)
    with pytest.raises(SystemExit):
        main(["--copy", name, "--from", source], root=tmp_path)
    assert [path.read_text(encoding="utf-8") for path in paths] == [GOOD, paper]


if __name__ == "__main__":
    main()
