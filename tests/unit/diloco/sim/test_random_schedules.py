"""Random schedules of faults, and of members that lie. `python -m diloco.sim.replay SEED` shows one of them."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterable

import pytest

from diloco.sim import schedules

NUM_SCHEDULES = int(os.environ.get("DILOCO_SCHEDULES", "2000"))
NUM_PARTS = 20
SHOWN_LINES = 200
FAILED_ONCE = (
    2073,
    2235,
    3780,
    3972,
    4058,
    4307,
    5628,
    6597,
    6742,
    7058,
    7150,
    8686,
    9228,
    9796,
    10204,
    10732,
    15706,
    20918,
    21108,
    23148,
    23404,
    25976,
    26036,
    26671,
    40837,
    43820,
    45582,
    47414,
    53164,
    55938,
    56092,
    63420,
    63534,
    73791,
    78244,
    79684,
    90988,
    99918,
    386227,
)
"""Seeds to try beyond the default range."""


def failures_among(seeds: Iterable[int]) -> list[int]:
    return [seed for seed in seeds if schedules.run(seed).fault]


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_everything_holds_in_random_schedules(part):
    failed = failures_among(range(part, NUM_SCHEDULES, NUM_PARTS))
    if failed:
        lines = schedules.report(failed[0]).splitlines()
        shown = (
            lines if len(lines) <= SHOWN_LINES else [*lines[: SHOWN_LINES // 4], "...", *lines[-SHOWN_LINES:]]
        )
        pytest.fail("\n".join([f"seeds {failed} fail; the first:", *shown]), pytrace=False)


@pytest.mark.parametrize("seed", FAILED_ONCE)
def test_what_failed_once_holds(seed):
    assert not failures_among([seed]), schedules.report(seed)


def test_a_seed_gives_the_same_run_in_every_process():
    script = (
        "import hashlib\n"
        "from diloco.sim import schedules\n"
        "for seed in range(5): print(hashlib.sha256(schedules.report(seed).encode()).hexdigest())"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    here = [hashlib.sha256(schedules.report(seed).encode()).hexdigest() for seed in range(5)]
    assert said == {"\n".join(here) + "\n"}
