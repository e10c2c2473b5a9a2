"""What a compiled kernel does, counted from the assembler's listing of it.

Counted are the instructions of a warp on one way through the kernel, the shortest of those that pass the most
tensor core instructions, or the most loops where a kernel has none. So a block that can be branched over
counts as not run: the mask of the few tiles that a rule touches, logits past the bound, a wait that is over.
A predicated instruction is an issue slot whether it runs or not. How often a loop runs is not in the listing
(kernels/cost.py has it from the launch); a loop of a few instructions waits, and counts once.
"""
import re
import subprocess
import tempfile
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ )?\s*([A-Z][\w.]*) ?([^;]*);")
WAIT = 8                 # instructions of a loop that waits, at most
WIDTHS = {"64": 8, "128": 16, "U16": 2, "S16": 2, "U8": 1, "S8": 1}      # bytes of a lane; else 4
SHARED = "LDS", "STS", "LDSM", "STSM", "ATOMS", "SHFL"                   # a shuffle takes the same path


class Way(NamedTuple):
    """The counted way through a kernel."""
    registers: int       # of a thread
    spills: int          # bytes of a thread's stack
    blocks: list         # [(what a warp does, loops around it)]; see work
    loops: int           # around the tensor core instructions, else the most


def read_listing(cubin, wanted="mma"):
    """The Way through a compiled kernel that passes the most of what is wanted: "mma" | "loops" | ""."""
    import triton
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-sass", "--dump-resource-usage", file.name], capture_output=True,
                              text=True, check=True).stdout
    registers, spills = (int(re.search(rf"{name}:(\d+)", text)[1]) for name in ("REG", "STACK"))
    blocks, follow = flow(LINE.findall(text))
    loops = loops_of(blocks, follow)
    does = {at: work(block) for at, block in blocks.items()}
    way = [(does[at], sum(at in body for body in loops.values()))
           for at in best_way(blocks, follow, loops, does, wanted)]
    depths = [depth for done, depth in way if done["mma"]] or [depth for _, depth in way]
    return Way(registers, spills, way, max(depths))


def flow(lines):
    """({start: instructions}, {start: starts of what may come next}) of the blocks without jumps inside."""
    code = [(int(at, 16), guard, op, rest) for at, guard, op, rest in lines]
    after = {at: following for (at, *_), (following, *_) in zip(code, code[1:])}
    goals = {at: [int(goal, 16) for goal in re.findall("0x([0-9a-f]+)", rest)[:1]]
             for at, _, op, rest in code if re.match(r"(BRA|CALL|EXIT|RET)\b", op)}
    starts = {code[0][0]}.union(*goals.values(), (after[at] for at in goals if at in after))
    blocks, follow = {}, {}
    for at, guard, op, rest in code:
        if at in starts:
            blocks[at], follow[at], start = [], [], at
        blocks[start].append((op, rest))
        if at in goals or after.get(at) in starts:
            goes_on = at not in goals or op.startswith("CALL") or guard or re.match("!?U?P", rest)
            jumps = op.startswith("BRA") or op.startswith("CALL") and guard      # an unguarded CALL returns
            follow[start] += goals.get(at, []) * bool(jumps) + [after.get(at)] * bool(goes_on)
    return blocks, {at: [to for to in ways if to is not None] for at, ways in follow.items()}


def reach(follow, start, without):
    """What can be reached from a start on ways that pass by one block."""
    found, left = {start}, [start]
    while left:
        new = {to for to in follow[left.pop()] if to != without} - found
        found |= new
        left += new
    return found


def loops_of(blocks, follow):
    """{head: all blocks of the loop}; loops that only wait are cut out of follow."""
    first, loops = next(iter(blocks)), {}
    before = {at: [other for other in blocks if at in follow[other]] for at in blocks}
    for tail in blocks:
        for head in [to for to in follow[tail] if to <= tail]:  # a loop if no way to its tail avoids its head
            if tail == head or head == first or tail not in reach(follow, first, head):
                body = {head} if tail == head else {head} | reach(before, tail, head)
                loops[head] = loops.get(head, set()) | body
    for head, body in list(loops.items()):
        if sum(len(blocks[at]) for at in body) <= WAIT:
            follow[head] = [to for to in follow[head] if to != head]
            del loops[head]
    return loops


def best_way(blocks, follow, loops, does, wanted):
    """Starts of the blocks on the counted way."""
    leaves = {head: {to for at in body for to in follow[at]} - body for head, body in loops.items()}

    def onward(at, to):
        """{to}, or where its loop is left if that is the way back."""
        return set().union(*(onward(at, out) for out in leaves[to])) if at in loops.get(to, ()) else {to}

    ahead = {at: set().union(*(onward(at, to) for to in follow[at])) for at in blocks}
    best = {}
    for at in TopologicalSorter(ahead).static_order():          # what comes next comes first
        ways = [best[to] for to in ahead[at] if to in best]
        if blocks[at][-1][0] == "EXIT":
            ways.append(((0, not follow[at], 0), []))           # a guarded EXIT may end with stores behind it
        if ways:
            (passed, whole, length), way = max(ways)
            passed += {"mma": does[at]["mma"], "loops": at in loops}.get(wanted, 0)
            best[at] = (passed, whole, length - len(blocks[at])), [at, *way]
    return best[next(iter(blocks))][1]


def work(block):
    """Of a warp in a block: instructions, results of the multifunction unit, bytes to and from shared memory,
    bytes read from and written to global memory; of the tensor cores instructions and bf16 FLOP, one of tf32
    as two. Copies of operand tiles are left out: a prefetch has them twice."""
    done = Counter(instructions=len(block))
    for op, rest in block:
        kind, *parts = op.split(".")
        size = 32 * ([WIDTHS[part] for part in parts if part in WIDTHS] or [4])[0]
        matrices = re.search(r"MT?88\.?(\d?)", op)              # of 8 × 8 entries, 128 bytes
        if kind == "HGMMA":                                     # of four warps: (64, 32 bytes)·(32 bytes, n)
            n, from_registers = int(parts[0].split("x")[1]), re.match(r"R\w+, R\w+, gdesc", rest)
            size = 32 * (n if from_registers else n + 64) // 4
            done.update(mma=1, tensor=2 * 64 * n * 16 // 4, shared=size)
        elif kind == "HMMA":                                    # (16, 32 bytes)·(32 bytes, 8)
            done.update(mma=1, tensor=2 * 16 * 8 * 16)
        elif re.fullmatch("UTC.*MMA", kind):                    # its shape is in a register
            done.update(mma=1)
        elif kind == "MUFU":
            done.update(mufu=32)
        elif kind in SHARED:
            done.update(shared=128 * int(matrices[1] or 1) if matrices else size)
        elif kind in ("LDG", "STG"):
            done.update({"read" if kind == "LDG" else "written": size})
    return done
