"""Benchmarks that start whole swarms run to their end with `--quick`. Their figures are not judged."""

from __future__ import annotations

import json
import sys
import tempfile

import pytest

from benchmarks.lab import unavailable

IN_A_LABORATORY = {"overlap", "rollouts --push", "unlike", "unlike --losses"}
"""These need network namespaces with emulated links between them."""
NAMES = ["membership", "rollouts", "saving", *sorted(IN_A_LABORATORY)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_runs_to_its_end_and_writes_its_figures(start, tmp_path, name):
    if name in IN_A_LABORATORY and (reason := unavailable()) is not None:
        pytest.skip(reason)
    module, *flags = name.split()
    figures = tmp_path / "figures.json"
    # The path of a test's own directory is too long for multiprocessing's sockets.
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        argv = (sys.executable, "-m", f"benchmarks.{module}", *flags, "--quick", "--json", figures)
        command = start("env", f"TMPDIR={short}", *argv)
        # A benchmark takes minutes, and longer with other tests running beside it.
        assert command.wait(1800) == 0, command.stdout + command.stderr
    rows = json.loads(figures.read_text())["results"]
    assert rows and all(row["runs"] >= 1 for row in rows)
