"""Give every script bad input of every kind. Each run must end with one clear line and exit code 2, or with a
correct result.

    python tests/attack/test_attack.py [part of a name ...]    run all or the named cases, print a table
    TENCL_ATTACK=all python -m pytest tests/attack             run all cases as tests

Without TENCL_ATTACK=all, a test run tries a fixed sample of the cases.
"""
import os
import random
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import faults
import flags
import folders
import images
import kinds
import models
import pytest
import resumed
import surroundings
import texts
from cases import run_case

PARTS = texts, images, flags, folders, models, resumed, kinds, surroundings, faults
CASES = [case for part in PARTS for case in part.cases()]
CATEGORIES = list(dict.fromkeys(case.category for case in CASES))


def select_cases(category):
    """Return the cases of a category that this test run tries.

    With TENCL_ATTACK=all: all cases. Otherwise those with in_every_run, or else two sampled with a fixed
    seed; cases with `shell` are left out, because they take seconds.
    """
    cases = [case for case in CASES if case.category == category]
    if os.environ.get("TENCL_ATTACK") == "all":
        return cases
    quick = [case for case in cases if case.shell is None]
    return [case for case in quick if case.in_every_run] or random.Random(19).sample(quick, 2)


def name(case):
    return f"{case.category}: {case.script}.py: {case.name}"


def test_names_of_cases_are_unique():
    assert [case for case, times in Counter(map(name, CASES)).items() if times > 1] == []


@pytest.mark.parametrize("case", sum(map(select_cases, CATEGORIES), []), ids=lambda case: name(case)[:90])
def test_outcome_is_as_expected(case):
    verdict, description = run_case(case)
    assert verdict != "failed", description


def main():
    chosen = [case for case in CASES if all(part in name(case) for part in sys.argv[1:])]
    outcomes = []
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for case, (verdict, description) in zip(chosen, pool.map(run_case, chosen)):
            outcomes.append((verdict, description))
            if verdict == "failed" or len(chosen) < 30:
                print(f"{verdict:8}  {name(case)!a}\n          {description!a}", flush=True)
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
