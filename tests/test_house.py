"""Check the rules of CONTRIBUTING.md: no duplicated functions, the order of banners, one meaning per flag,
the direction of imports, and lengths."""
import ast
import importlib
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(ROOT.glob("*.py"))
MORE = [file for file in sorted((ROOT / "docs" / "more").glob("*.py"))         # further papers
        if "def make_parser" in file.read_text("utf-8")]
CODE = [*SCRIPTS, *sorted((ROOT / "docs" / "more").glob("*.py")), *sorted((ROOT / "kernels").rglob("*.py"))]
BANNERS = ["flags", "data and model", "the paper", "evaluation", "main"]       # "evaluation" is optional
# {part of the house: (limit: its lines today, rounded up; goal)}. A limit may only fall.
# On 2026-11-27 code of several papers (text classification, saving, AdamW of BERT) moved to training.
LINES = {"simcse.py": (215, 215), "the longest script": (440, 440), "the ten scripts": (3_400, 3_400),
         "kernels": (4_490, 3_600), "benchmark and figures": (539, 350),
         "training without papers": (4_340, 3_900), "papers and tools": (1_780, 1_300),
         "further papers": (1_844, 1_550), "tests": (15_119, 9_000)}
FUNCTION, MAIN = 50, 60                                        # MAIN also limits make_parser


def lines_in(*files):
    """Return the total number of lines of the files."""
    return sum(file.read_text("utf-8").count("\n") for file in files)


def functions(file):
    """Return [(source, name, number of lines)] of the functions in a file."""
    nodes = ast.walk(ast.parse(file.read_text("utf-8")))
    return [(ast.unparse(node), node.name, node.end_lineno - node.lineno + 1) for node in nodes
            if isinstance(node, ast.FunctionDef)]


def test_no_function_is_in_two_scripts():
    texts = Counter(text for file in (*SCRIPTS, *MORE) for text, _, lines in functions(file) if lines >= 5)
    assert [text for text, times in texts.items() if times > 1] == []


def test_banners_and_their_order():
    for file in (*SCRIPTS, *MORE):
        found = re.findall(r"^# ── (.{,20}?) ─+$", file.read_text("utf-8"), re.M)
        assert [name for name in BANNERS if name in found or name != "evaluation"] == found, file


def test_a_flag_means_the_same_everywhere():
    meanings = {}
    for name in (file.stem for file in (*SCRIPTS, *MORE)):
        for flag in importlib.import_module(name).make_parser()._actions:
            text = re.split("; default", flag.help or "")[0]
            kind = getattr(flag.type, "__name__", None), type(flag).__name__, text
            meanings.setdefault(flag.option_strings[-1], {})[name] = kind
    assert {flag: found for flag, found in meanings.items() if len(set(found.values())) > 1} == {}


T = "kernels.training"
# {folder: folders that its modules may import}; "": the scripts. LATER: {folder: more folders, but only in
# imports inside functions, which run when a flag needs them}.
MAY_IMPORT = {"kernels.gpu": {"kernels.gpu"}, "kernels": {"kernels"}, T: {"kernels"},
              f"{T}.text": {"kernels", T}, f"{T}.images": {"kernels", T},
              f"{T}.papers": {"kernels", T, f"{T}.text", f"{T}.images"},
              "": {"kernels", T, f"{T}.text", f"{T}.images", f"{T}.papers"}}
MAY_IMPORT["docs.more"] = MAY_IMPORT[""]
LATER = {"kernels": {"kernels.gpu"}}
LEAVES = {"kernels.heuristics", "kernels.masks", "kernels.replay"}     # plain Python: kernels.gpu may
TOOLS = [ROOT / "kernels" / "training" / f"{name}.py" for name in ("mine", "probes", "plot", "equal_texts")]


def imports(file):
    """Yield (module of this repository, whether a function imports it) for each import of a file."""
    tree, package = ast.parse(file.read_text("utf-8")), file.relative_to(ROOT).parent.parts
    inside = {node for function in ast.walk(tree) if isinstance(function, ast.FunctionDef)
              for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            modules = [f"{base}.{name.name}" for name in node.names]
        else:
            modules = [name.name for name in node.names] if isinstance(node, ast.Import) else []
        for module in modules:
            if module.split(".")[0] in ("kernels", *(script.stem for script in SCRIPTS)):
                yield module, node in inside


def folder_of(module):
    """Return the dotted name of the innermost folder that contains this module, or module.name."""
    parts = module.split(".")
    folders = (parts[:n] for n in range(len(parts), 0, -1) if ROOT.joinpath(*parts[:n]).is_dir())
    return ".".join(next(folders, []))


@pytest.mark.parametrize("file", CODE, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_imports_go_one_way(file):
    own = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for module, inside in imports(file):
        here = folder_of(own)
        allowed = MAY_IMPORT[here] | ({here} - {""}) | (LATER.get(here, set()) if inside else set())
        allowed |= {f"{T}.text"} if file in TOOLS else set()
        leaf = here == "kernels.gpu" and ".".join(module.split(".")[:2]) in LEAVES
        assert folder_of(module) in allowed or leaf, module


def test_the_core_has_an_order_of_imports():
    """Its __init__.py lists the modules; each one imports only from modules above it."""
    core = ROOT / "kernels" / "training"
    order = [line.split()[0] for line in (core / "__init__.py").read_text("utf-8").splitlines()
             if re.match(r"[a-z]+  ", line)]
    tools = {file.stem for file in TOOLS}
    assert sorted(order) == sorted({file.stem for file in core.glob("*.py")} - {"__init__", *tools})
    for i, name in enumerate(order):
        used = {module.removeprefix(f"{T}.").split(".")[0] for module, _ in imports(core / f"{name}.py")
                if module.startswith(f"{T}.")}
        assert used <= {*order[:i]}, name


def test_lengths():
    papers = [file for file in CODE if "papers" in file.parts or file in TOOLS]
    training = [file for file in CODE if "training" in file.parts and file not in papers]
    benchmark = [ROOT / "kernels" / name for name in ("benchmark.py", "figures.py")]
    others = (*SCRIPTS, *(ROOT / "docs").rglob("*.py"), *papers, *training, *benchmark)
    kernels = [file for file in CODE if file not in others]
    folders = {"the ten scripts": SCRIPTS, "kernels": kernels, "training without papers": training,
               "papers and tools": papers, "further papers": (ROOT / "docs").rglob("*.py"),
               "tests": (ROOT / "tests").rglob("*.py"), "simcse.py": [ROOT / "simcse.py"],
               "benchmark and figures": benchmark}
    found = {name: lines_in(*files) for name, files in folders.items()}
    found["the longest script"] = max(map(lines_in, SCRIPTS))
    assert {name: lines for name, lines in found.items() if lines > LINES[name][0]} == {}
    long = [(file.name, name, lines) for file in CODE for _, name, lines in functions(file)]
    limits = {"main": MAIN, "make_parser": MAIN}
    assert [found for found in long if found[2] > limits.get(found[1], FUNCTION)] == []


def test_width():
    """No line is longer than 110 characters, except tables and commands in documents."""
    documents = [file for pattern in ("*.md", "docs/*.md") for file in ROOT.glob(pattern)]
    for file in [*CODE, *(ROOT / "tests").rglob("*.py"), *documents]:
        if file.name == "make.py":                             # test data: tables of sentences
            continue
        wide = [line for line in file.read_text("utf-8").splitlines() if len(line) > 110]
        assert [line for line in wide if file.suffix == ".py" or not re.match(r"\||python", line)] == [], file
