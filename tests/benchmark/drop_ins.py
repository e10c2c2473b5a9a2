"""Compare the blocks of docs/drop-ins.md with the losses that they replace: peak memory and time per step.

    python tests/benchmark/drop_ins.py
    python tests/benchmark/drop_ins.py --only cached --repeats 1

A step is forward and backward of the loss on random embeddings; for `cached` and `sorted` also of an
encoder, a BERT with 2 layers of width 128, on texts of 10 to 30 tokens. Each measurement runs in a process of
its own, in the order library, block, library, ... The time is the median of the steps after the first; the
memory is the peak of the process minus its memory before the first step. The table has medians over
processes. Labels have four rows per class. Losses of missing packages are skipped:
pip install sentence-transformers accelerate open_clip_torch lightly pytorch-metric-learning
"""
import argparse
import importlib
import json
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ST = "sentence_transformers.sentence_transformer.losses"
METRIC = "pytorch_metric_learning.losses"
# {name: (module and class of the library, rows, width)}, in the order of the page's blocks
LOSSES = {"ranking": (f"{ST}.MultipleNegativesRankingLoss", 4096, 768),
          "cached": (f"{ST}.CachedMultipleNegativesRankingLoss", 4096, 128),
          "sorted": (f"{ST}.CachedMultipleNegativesRankingLoss", 4096, 128),
          "clip": ("open_clip.loss.ClipLoss", 4096, 512), "siglip": ("open_clip.loss.SigLipLoss", 4096, 512),
          "lightly": ("lightly.loss.NTXentLoss", 4096, 128), "bank": ("lightly.loss.NTXentLoss", 4096, 128),
          "sup con": (f"{METRIC}.SupConLoss", 4096, 128), "metric": (f"{METRIC}.NTXentLoss", 256, 128)}
BEFORE = {"cached": ["ranking"], "sorted": ["ranking", "cached"]}              # blocks that a block needs
TOO_LARGE = {"metric": 4096}                                   # rows that only the block can handle
BANK, MINI_BATCH = 16384, 64


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--only", nargs="+", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("--repeats", type=int, default=2, help="processes per loss and side")
    parser.add_argument("--steps", type=int, default=3, help="steps per process; the first is not timed")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)          # name, side, rows
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(*args.measure, args.steps)))
        return
    print("| block | rows | library: memory, time | block: memory, time | memory | time |")
    print("|---" * 6 + "|")
    for name in args.only:
        sizes = [(LOSSES[name][1], ("library", "block"))]
        if name in TOO_LARGE:
            sizes.append((TOO_LARGE[name], ("block",)))
        for rows, sides in sizes:
            print(compare(name, rows, sides, args), flush=True)


def compare(name, rows, sides, args):
    """Return a row of the table, or why there is none."""
    found = {"library": [], "block": []}
    for _ in range(args.repeats):
        for side in sides:
            command = [sys.executable, __file__, "--steps", args.steps, "--measure", name, side, rows]
            run = subprocess.run([*map(str, command)], capture_output=True, text=True)
            if run.returncode:
                return f"{name}, {side}: {(run.stderr.strip().splitlines() or ['killed'])[-1]}"
            found[side].append(json.loads(run.stdout.splitlines()[-1]))
    middle = {side: [statistics.median(column) for column in zip(*values)] for side, values in found.items()}
    cells = [f"{m[0]:,.0f} MB, {m[1]:.2f} s" if m else "–" for m in middle.values()]
    ratios = ["–", "–"]
    if middle["library"]:
        ratios = [f"{a / max(b, 1e-3):.2f} ×" for a, b in zip(middle["block"], middle["library"])]
    return f"| {name} | {rows:,} | {' | '.join(cells + ratios)} |"


def measure(name, side, rows, steps):
    """Return (peak memory in MB above the memory before the first step, median seconds per step)."""
    import torch

    module, _, name_in_library = LOSSES[name][0].rpartition(".")
    try:
        library = getattr(importlib.import_module(module), name_in_library)
    except ImportError as error:
        sys.exit(f"skipped: {error}")
    page = (ROOT / "docs/drop-ins.md").read_text("utf-8")
    blocks = dict(zip(LOSSES, re.findall(r"^```python\n(.*?)^```", page, re.M | re.S), strict=True))
    code = "".join(blocks[x] for x in BEFORE.get(name, ())) + blocks[name]
    sys.path.insert(0, str(ROOT))
    names = {}
    exec(code, names)
    block = names[re.findall(r"^class (\w+)", code, re.M)[-1]]
    torch.manual_seed(0)
    loss, inputs = prepare(name, library if side == "library" else block, int(rows), LOSSES[name][2])
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        loss(*inputs()).backward()
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6     # Linux: in KB
    return peak - before, statistics.median(seconds[1:])


def prepare(name, make, rows, width):
    """Return (loss, function without arguments that returns its inputs)."""
    import torch

    if name in ("cached", "sorted"):
        model = small_encoder(width)
        loss = make(model, mini_batch_size=MINI_BATCH)
        words = random.Random(0)
        texts = [[" ".join(f"w{words.randrange(2000)}" for _ in range(words.randint(8, 28)))
                  for _ in range(rows)] for _ in range(3)]
        columns = [dict(model.preprocess(column)) for column in texts]
        return loss, lambda: ([dict(column) for column in columns], None)
    vectors = [torch.randn(rows, width).requires_grad_() for _ in range(3)]
    if name == "ranking":
        return make(torch.nn.Identity()), lambda: ([dict(sentence_embedding=x) for x in vectors], None)
    if name in ("clip", "siglip"):
        scalars = torch.tensor(14.3).requires_grad_(), torch.tensor(-10.0).requires_grad_()
        unit = [torch.nn.functional.normalize(x.detach(), dim=1).requires_grad_() for x in vectors[:2]]
        return make(), lambda: (*unit, *scalars[: 1 if name == "clip" else 2])
    if name in ("lightly", "bank"):
        settings = dict(memory_bank_size=(BANK, width)) if name == "bank" else {}
        return make(**settings), lambda: vectors[:2]
    return make(), lambda: (vectors[0], torch.arange(rows) // 4)


def small_encoder(width):
    """Return a SentenceTransformer: a random BERT with two layers; its tokens are w0, w1, ..."""
    import sentence_transformers
    from transformers import BertConfig, BertModel, BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(2000))]
    config = BertConfig(vocab_size=len(words), hidden_size=width, num_hidden_layers=2, num_attention_heads=2,
                        intermediate_size=4 * width)
    with tempfile.TemporaryDirectory() as folder:
        BertModel(config).save_pretrained(folder)
        BertTokenizer({word: i for i, word in enumerate(words)}).save_pretrained(folder)
        return sentence_transformers.SentenceTransformer(folder, device="cpu")


if __name__ == "__main__":
    main()
