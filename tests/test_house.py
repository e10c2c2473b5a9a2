"""Check rules of CONTRIBUTING.md: no function twice, banners, flags with one meaning, imports, lengths."""
import ast
import importlib
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS, KERNELS, CORE = sorted(ROOT.glob("*.py")), ROOT / "kernels", ROOT / "kernels" / "training"
BENCHMARK, PLOT = KERNELS / "benchmark.py", ROOT / "docs" / "plot_kernels.py"
PAPERS = [*(CORE / "papers").glob("*.py"), CORE / "plot.py"]
TRAINING = [file for file in CORE.rglob("*.py") if file not in PAPERS]
MORE = sorted((ROOT / "docs" / "more").glob("*.py"))           # code of further papers
ALL_SCRIPTS = [*SCRIPTS, *(file for file in MORE if "def make_parser" in file.read_text("utf-8"))]
CODE = [*SCRIPTS, *MORE, PLOT, *sorted(KERNELS.rglob("*.py"))]
# {part: (its files, largest sum of their lines)}. A limit may only fall.
LENGTHS = {**{file.name: ([file], 440) for file in SCRIPTS}, "the ten scripts": (SCRIPTS, 3_279),
           "simcse.py": ([ROOT / "simcse.py"], 215), "README.md": ([ROOT / "README.md"], 130),
           "kernels": (set(KERNELS.rglob("*.py")) - {*CORE.rglob("*.py"), BENCHMARK}, 4_180),
           "benchmark": ([BENCHMARK], 390), "training": (TRAINING, 4_110), "papers": (PAPERS, 781),
           "further papers": (MORE, 2_052), "tests": (list((ROOT / "tests").rglob("*.py")), 8_715)}
T, TEXT, IMAGES = "kernels.training", "kernels.training.text", "kernels.training.images"
# {folder: folders from which its modules may import, beside the folder itself}; "": the folder of the scripts
MAY_IMPORT = {"kernels.gpu": {"leaf"}, "kernels": {"kernels.gpu"}, T: {"kernels"}, TEXT: {"kernels", T},
              IMAGES: {"kernels", T}, f"{T}.papers": {"kernels", T, TEXT, IMAGES}, "docs": {"kernels", T}}
MAY_IMPORT[""] = {*MAY_IMPORT[f"{T}.papers"], f"{T}.papers"}
MAY_IMPORT["docs.more"] = {*MAY_IMPORT[""], ""}                # these may import the ten main scripts
LEAVES = {"kernels.blockwise", "kernels.masks"}                # kernels.gpu may import these


def functions(file):
    """Yield (source, name, number of lines) of each function in a file."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef):
            yield ast.unparse(node), node.name, node.end_lineno - node.lineno + 1


def test_no_function_is_in_two_scripts():
    sources = Counter(text for file in ALL_SCRIPTS for text, _, lines in functions(file) if lines >= 5)
    assert [text for text, times in sources.items() if times > 1] == []


def test_banners_and_their_order():
    for file in ALL_SCRIPTS:
        banners = re.findall(r"^# ── (.{,20}?) ─+$", file.read_text("utf-8"), re.M)
        optional = ["evaluation"] if "evaluation" in banners else []
        assert banners == ["flags", "data and model", "the paper", *optional, "main"], file


def test_a_flag_means_the_same_everywhere():
    meanings = {}
    for name in (file.stem for file in ALL_SCRIPTS):
        for flag in importlib.import_module(name).make_parser()._actions:
            kind = getattr(flag.type, "__name__", None), type(flag), (flag.help or "").split("; default")[0]
            meanings.setdefault(flag.option_strings[-1], {})[name] = kind
    assert {flag: found for flag, found in meanings.items() if len(set(found.values())) > 1} == {}


def imports(file):
    """Yield the dotted name of each module and object that a file imports from this repository."""
    package, ours = file.relative_to(ROOT).parent.parts, {"kernels", *(script.stem for script in ALL_SCRIPTS)}
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        above = package[: len(package) - node.level + 1] if getattr(node, "level", 0) else ()
        for alias in node.names if isinstance(node, (ast.Import, ast.ImportFrom)) else ():
            module = ".".join(filter(None, [*above, getattr(node, "module", ""), alias.name]))
            if module.split(".")[0] in ours:
                yield module


def folder_of(module):
    """Return the dotted name of the innermost folder that contains a module."""
    parts = module.split(".")
    folders = (parts[:n] for n in range(len(parts), 0, -1) if ROOT.joinpath(*parts[:n]).is_dir())
    return ".".join(next(folders, []))


@pytest.mark.parametrize("file", CODE, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_imports_go_one_way(file):
    own = folder_of(".".join(file.relative_to(ROOT).with_suffix("").parts))
    allowed = MAY_IMPORT[own] | ({own} - {""})
    for module in imports(file):
        leaf = "leaf" in allowed and ".".join(module.split(".")[:2]) in LEAVES
        assert folder_of(module) in allowed or leaf, module


def test_lengths():
    for part, (files, limit) in LENGTHS.items():
        assert sum(file.read_text("utf-8").count("\n") for file in files) <= limit, part
    for name, count in ((name, count) for file in CODE for _, name, count in functions(file)):
        assert count <= (60 if name in ("main", "make_parser") else 50), name


def test_width():
    """No line is longer than 110 characters, except tables and commands in documents."""
    for file in [*CODE, *(ROOT / "tests").rglob("*.py"), *ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        wide = [line for line in file.read_text("utf-8").splitlines() if len(line) > 110]
        assert [line for line in wide if file.suffix == ".py" or not re.match(r"\||python", line)] == [], file
