"""Check the emulator: plant faults in the PTX of kernels, one at a time. Each must lead to a wrong result, a
fault or a finding; the kernels without a fault must pass."""
import re

import kernel_cases


def replace_match(text, pattern, replacement, which):
    """Replace the match of a pattern with number `which`, or the one in the middle, or all."""
    if which == "all":
        return re.sub(pattern, replacement, text)
    found = list(re.finditer(pattern, text, re.M))
    if not found:
        return text
    match = found[len(found) // 2 if which == "middle" else which % len(found)]
    return text[:match.start()] + match.expand(replacement) + text[match.end():]


def without(opcode, which=0):
    """Return (pattern, replacement, which): leave out an instruction."""
    return rf"^[ \t]*(?:@!?%p\d+ +)?{opcode}[^\n]*;[^\n]*$", "", which


def leave_one_more(match):
    return f"{match[1]}{int(match[2]) + 1}"


ON_EVERY_CHIP = {
    "no barrier at the end": without(r"bar\.sync", -1),
    "no barrier in the middle": without(r"bar\.sync", "middle"),
    "another lane in a shuffle": (r"(shfl\.sync\.bfly\.b32[^,]*,[^,]*,) 16,", r"\1 8,", 0),
    "another address": (r"(ld\.global\.b32 \{ %r\d+ \}, \[ %rd\d+ \+) 0", r"\1 2000000000", 0),
    "a store without its mask": (r"@%p\d+ (st\.global\.b32)", r"\1", -1)}
FAULTS = {
    80: ON_EVERY_CHIP | {
        "no wait for copies": without(r"cp\.async\.wait_group"),
        "a wait that leaves one copy more": (r"(cp\.async\.wait_group\s+)(\d)", leave_one_more, "all"),
        "a transposed fragment": (r"ldmatrix\.sync\.aligned\.m8n8\.x4\.shared",
                                  r"ldmatrix.sync.aligned.m8n8.x4.trans.shared", 0),
        "a product less": without(r"mma\.sync", 1)},
    90: ON_EVERY_CHIP | {
        "no wait at an mbarrier": without(r"@!complete bra\.uni"),
        "fewer bytes expected than copied": (r"(arrive\.expect_tx[^;]*,) \d+", r"\1 16", 0),
        "no wait for products": without(r"wgmma\.wait_group", -1),
        "no swizzle": (r"\b4611686293\d+\b", "0", 0),
        "another box": (r"(bytes \[%r\d+\], \[%rd\d+, \{)(%r\d+), (%r\d+)", r"\1\3, \2", 0),
        "a product less": without(r"wgmma\.mma_async", 1)}}


def find_planted_faults(report, chip):
    """Print a line per fault and case. Return whether every fault was planted and always found."""
    cases = [kernel_cases.lse_case("all", 140, 140, 64, "bf16"),
             kernel_cases.lse_case("diagonal", 140, 140, 256, "f32")]
    gpu, missed, planted = report.gpu, [], set()
    for case in cases:
        gpu.change_ptx = None
        verdict, text = report.run(case)
        print(f"sm_{chip} {case.title}, no fault: {verdict} {text}", flush=True)
        missed += [] if verdict == "ok" else [case.title]
        for name, fault in FAULTS[chip].items():
            changed = []

            def change(ptx, fault=fault, changed=changed):
                new = replace_match(ptx, *fault)
                changed.append(new != ptx)
                return new

            gpu.change_ptx = change
            gpu.findings.clear()
            verdict, text = report.run(case)
            if any(changed):
                planted.add(name)
                missed += [name] if verdict == "ok" else []
                found = "MISSED" if verdict == "ok" else "found"
                print(f"    {found}: {name}: {verdict} {text[:120]}", flush=True)
    gpu.change_ptx = None
    gpu.findings.clear()
    missed += set(FAULTS[chip]) - planted
    print(f"{len(planted)} kinds of faults planted; missed: {missed}")
    return not missed
