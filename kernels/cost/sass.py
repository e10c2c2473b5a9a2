"""Count what a compiled kernel does, from its SASS (the GPU's machine code).

SASS does not tell which branches are taken, so one code path through the kernel is counted: the shortest of
the paths with the most tensor core instructions, or, in kernels without these, with the most loops. A block
that can be skipped therefore counts as skipped, such as the mask, which only few tiles need, or a wait that
is over. A predicated instruction takes an issue slot whether it executes or not. The number of iterations of
a loop is not in the SASS; kernel_costs.py gets it from the arguments of the launch. A loop of a few
instructions is a spin wait, and counts once.
"""
import re
import subprocess
import tempfile
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

# (address, predicate, instruction, operands)
LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ )?\s*([A-Z][\w.]*) ?([^;]*);")
MAX_SPIN_LENGTH = 8      # instructions of a loop that only waits, at most
WIDTHS = {"64": 8, "128": 16, "U16": 2, "S16": 2, "U8": 1, "S8": 1}     # bytes per thread; 4 without suffix
SHARED = "LDS", "STS", "LDSM", "STSM", "ATOMS", "SHFL"     # a shuffle uses the data path of shared memory too


class CodePath(NamedTuple):
    """The counted code path through a kernel."""
    registers: int       # per thread
    spills: int          # bytes of stack per thread
    blocks: list         # [(count_block of a basic block, number of loops around it)]
    loops: int           # loops around the tensor core instructions; without these, the deepest nesting


def analyse_sass(cubin, prefer="mma"):
    """Return the CodePath through a compiled kernel that has the most tensor core instructions ("mma") or
    the most loops ("loops"), or simply the shortest ("")."""
    import triton
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-sass", "--dump-resource-usage", file.name], capture_output=True,
                              text=True, check=True).stdout
    registers, spills = (int(re.search(rf"{name}:(\d+)", text)[1]) for name in ("REG", "STACK"))
    blocks, successors = control_flow(LINE.findall(text))
    loops = find_loops(blocks, successors)
    counts = {start: count_block(block) for start, block in blocks.items()}
    path = [(counts[start], sum(start in body for body in loops.values()))
            for start in best_path(blocks, successors, loops, counts, prefer)]
    depths = [depth for count, depth in path if count["mma"]] or [depth for _, depth in path]
    return CodePath(registers, spills, path, max(depths))


def control_flow(lines):
    """Return the basic blocks {start address: [(instruction, operands)]} and the control flow between them,
    {start address: start addresses of the blocks that may follow}, of lines as LINE matches them."""
    code = [(int(at, 16), guard, op, rest) for at, guard, op, rest in lines]
    after = {at: following for (at, *_), (following, *_) in zip(code, code[1:])}
    targets = {at: [int(target, 16) for target in re.findall("0x([0-9a-f]+)", rest)[:1]]
               for at, _, op, rest in code if re.match(r"(BRA|CALL|EXIT|RET)\b", op)}
    starts = {code[0][0]}.union(*targets.values(), (after[at] for at in targets if at in after))
    blocks, successors = {}, {}
    for at, guard, op, rest in code:
        if at in starts:
            blocks[at], successors[at], start = [], [], at
        blocks[start].append((op, rest))
        if at in targets or after.get(at) in starts:
            may_jump = op.startswith("BRA") or op.startswith("CALL") and guard   # an unguarded CALL returns
            if may_jump:
                successors[start] += targets.get(at, [])
            may_continue = at not in targets or op.startswith("CALL") or guard or re.match("!?U?P", rest)
            if may_continue:
                successors[start].append(after.get(at))
    return blocks, {at: [to for to in following if to is not None] for at, following in successors.items()}


def reachable(successors, start, avoid):
    """Return the blocks that can be reached from `start` without passing the block `avoid`."""
    found, left = {start}, [start]
    while left:
        new = {to for to in successors[left.pop()] if to != avoid} - found
        found |= new
        left += new
    return found


def find_loops(blocks, successors):
    """Return the loops as {head: set of all blocks of the loop}. Spin waits are not returned; their edges
    back are removed from `successors`."""
    first, loops = next(iter(blocks)), {}
    before = {at: [other for other in blocks if at in successors[other]] for at in blocks}
    for tail in blocks:
        # an edge back from tail to head is a loop if every path from the first block to tail passes head
        for head in [to for to in successors[tail] if to <= tail]:
            if tail == head or head == first or tail not in reachable(successors, first, head):
                body = {head} if tail == head else {head} | reachable(before, tail, head)
                loops[head] = loops.get(head, set()) | body
    for head, body in list(loops.items()):
        if sum(len(blocks[at]) for at in body) <= MAX_SPIN_LENGTH:
            successors[head] = [to for to in successors[head] if to != head]
            del loops[head]
    return loops


def best_path(blocks, successors, loops, counts, prefer):
    """Return the start addresses of the blocks on the counted code path; see analyse_sass. Each loop is
    entered at most once: from its end, the path continues at its exits."""
    exits = {head: {to for at in body for to in successors[at]} - body for head, body in loops.items()}

    def forward(at, to):
        """Return {to}, or the exits of the loop if `to` is the head of a loop around `at`."""
        return set().union(*(forward(at, out) for out in exits[to])) if at in loops.get(to, ()) else {to}

    ahead = {at: set().union(*(forward(at, to) for to in successors[at])) for at in blocks}
    best = {}                                                   # best path from each block to an exit
    for at in TopologicalSorter(ahead).static_order():          # blocks come after all blocks ahead of them
        paths = [best[to] for to in ahead[at] if to in best]
        if blocks[at][-1][0] == "EXIT":
            paths.append(((0, not successors[at], 0), []))      # after a guarded EXIT there may be stores
        if paths:
            (passed, is_complete, length), path = max(paths)
            passed += {"mma": counts[at]["mma"], "loops": at in loops}.get(prefer, 0)
            best[at] = (passed, is_complete, length - len(blocks[at])), [at, *path]
    return best[next(iter(blocks))][1]


def count_block(block):
    """Count what a warp does in a basic block. Returns a Counter:

    instructions     all instructions
    mma, tensor      tensor core instructions, and their FLOP in bf16 (a tf32 FLOP counts as two)
    mufu             results of the special function unit (exp2, log2, reciprocal)
    shared           bytes to and from shared memory
    read, written    bytes from and to global memory, without asynchronous copies of operand tiles: a prefetch
                     contains them twice, and kernel_costs.py computes them from the tile sizes
    """
    done = Counter(instructions=len(block))
    for op, rest in block:
        kind, *parts = op.split(".")
        size = 32 * ([WIDTHS[part] for part in parts if part in WIDTHS] or [4])[0]
        matrices = re.search(r"MT?88\.?(\d?)", op)              # number of 8 × 8 matrices, 128 bytes each
        if kind == "HGMMA":                                     # four warps: (64, 32 bytes)·(32 bytes, n)
            n, from_registers = int(parts[0].split("x")[1]), re.match(r"R\w+, R\w+, gdesc", rest)
            size = 32 * (n if from_registers else n + 64) // 4
            done.update(mma=1, tensor=2 * 64 * n * 16 // 4, shared=size)
        elif kind == "HMMA":                                    # (16, 32 bytes)·(32 bytes, 8)
            done.update(mma=1, tensor=2 * 16 * 8 * 16)
        elif re.fullmatch("UTC.*MMA", kind):                    # sm_100: the shape is in a register
            done.update(mma=1)
        elif kind == "MUFU":
            done.update(mufu=32)
        elif kind in SHARED:
            done.update(shared=128 * int(matrices[1] or 1) if matrices else size)
        elif kind in ("LDG", "STG"):
            done.update({"read" if kind == "LDG" else "written": size})
    return done
