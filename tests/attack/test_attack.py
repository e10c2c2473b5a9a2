"""Bad input of every kind, to every script: one clear line and exit code 2, or a right result; nothing else.

    python tests/attack/test_attack.py [part of a name ...]    all cases, or those, and a table
    TENCL_ATTACK=all python -m pytest tests/attack             the same without it, and all kills

Without TENCL_ATTACK a test run draws 18 cases, always the same.
"""
import os
import random
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import faults
import flags
import folders
import kinds
import models
import pictures
import pytest
import resumed
import surroundings
import texts
from cases import outcome

PARTS = texts, pictures, flags, folders, models, resumed, kinds, surroundings, faults
CASES = [case for part in PARTS for case in part.cases()]
CATEGORIES = list(dict.fromkeys(case.category for case in CASES))


def usual(category):
    """The cases of every test run: those that say so, or two that are drawn, none that takes seconds."""
    cases = [case for case in CASES if case.category == category]
    if os.environ.get("TENCL_ATTACK") == "all":
        return cases
    quick = [case for case in cases if case.shell is None]
    return [case for case in quick if case.usual] or random.Random(19).sample(quick, 2)


def name(case):
    return f"{case.category}: {case.script}.py: {case.name}"


def test_every_name_is_one_case():
    assert [case for case, times in Counter(map(name, CASES)).items() if times > 1] == []


@pytest.mark.parametrize("case", sum(map(usual, CATEGORIES), []), ids=lambda case: name(case)[:90])
def test_one_line_or_a_right_result(case):
    verdict, said = outcome(case)
    assert verdict != "failed", said


def main():
    chosen = [case for case in CASES if all(part in name(case) for part in sys.argv[1:])]
    outcomes = []
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for case, (verdict, said) in zip(chosen, pool.map(outcome, chosen)):
            outcomes.append((verdict, said))
            if verdict == "failed" or len(chosen) < 30:
                print(f"{verdict:8}  {name(case)!a}\n          {said!a}", flush=True)
            if len(outcomes) % 100 == 0:
                print(f"{len(outcomes):,} of {len(chosen):,} cases", file=sys.stderr, flush=True)
    print("\n| category | tried | one line | accepted | failed |\n|---|---:|---:|---:|---:|")
    for category in [*CATEGORIES, "all"]:
        found = Counter(verdict for case, (verdict, _) in zip(chosen, outcomes)
                        if category in (case.category, "all"))
        numbers = [found.total(), *(found[verdict] for verdict in ("one line", "accepted", "failed"))]
        print(f"| {category} | {' | '.join(map(str, numbers))} |")


if __name__ == "__main__":
    main()
