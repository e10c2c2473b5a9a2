"""The house: one place for each thing, one order of banners, one meaning of a flag, lengths for a reader."""
import ast
import importlib
import itertools
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(ROOT.glob("*.py"))
CODE = [*SCRIPTS, *sorted(ROOT.glob("kernels/**/*.py"))]
BANNERS = ["flags", "data and model", "the paper", "evaluation", "main"]       # the fourth is the paper's own


def functions(file):
    """[(text, name, lines)] of a file."""
    nodes = [node for node in ast.walk(ast.parse(file.read_text("utf-8"))) if type(node) is ast.FunctionDef]
    return [(ast.unparse(node), node.name, node.end_lineno - node.lineno + 1) for node in nodes]


def test_no_function_stands_in_two_scripts():
    texts = Counter(text for file in SCRIPTS for text, _, lines in functions(file) if lines >= 5)
    assert [text for text, times in texts.items() if times > 1] == []


def test_banners_and_their_order():
    for file in SCRIPTS:
        found = re.findall(r"^# ── (.{,20}?) ─+$", file.read_text("utf-8"), re.M)
        assert [name for name in BANNERS if name in found or name != "evaluation"] == found, file


def test_a_flag_means_the_same_everywhere():
    meanings = {}
    for name in (file.stem for file in SCRIPTS):
        for flag in importlib.import_module(name).make_parser()._actions:
            text = re.split("; default", flag.help or "")[0]
            kind = getattr(flag.type, "__name__", None), type(flag).__name__, text
            meanings.setdefault(flag.option_strings[-1], {})[name] = kind
    assert {flag: found for flag, found in meanings.items() if len(set(found.values())) > 1} == {}


def test_lengths():
    sizes = {file.name: file.read_text("utf-8").count("\n") for file in SCRIPTS}
    assert max(sizes.values()) <= 682 and sum(sizes.values()) <= 4_200 and sizes["simcse.py"] <= 284
    assert (ROOT / "kernels/training/run.py").read_text("utf-8").count("\n") < 300
    long = [(file.name, name, lines) for file in CODE for _, name, lines in functions(file)]
    assert [found for found in long if found[2] > (75 if found[1] == "main" else 60)] == []


def test_width():
    """Of a document, tables and commands may be longer."""
    more = (ROOT.glob(which) for which in ("tests/*.py", "tests/attack/*.py", "*.md", "docs/*.md"))
    for file in itertools.chain(CODE, *more):
        wide = [line for line in file.read_text("utf-8").splitlines() if len(line) > 110]
        assert [line for line in wide if file.suffix == ".py" or not re.match(r"\||python", line)] == [], file


def test_arrows_point_one_way():
    """Script → kernels/training → operations: a script knows no other, the operations no furniture."""
    scripts = "|".join(file.stem for file in SCRIPTS)
    for file in CODE:
        below = scripts if file.parent in (ROOT, ROOT / "kernels/training") else f"{scripts}|.*\\btraining"
        assert not re.search(rf"^\s*(from|import) ({below})\b", file.read_text("utf-8"), re.M), file
