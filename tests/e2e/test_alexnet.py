"""The command in examples/alexnet_ray.py, on fewer and smaller pictures. As a Ray job: tests/pods/test_ray.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT

EXAMPLE = ROOT / "examples/alexnet_ray.py"
TINY = ("--quick", "--passes", "5", "--made", "1500", "--width", "0.125")


@pytest.mark.exhaustive
def test_alexnet_learns_what_it_sees_and_knows_it_in_pictures_it_has_not_seen(tmp_path: Path) -> None:
    """There are ten classes of equal size, so chance is 10%."""
    argv = [sys.executable, str(EXAMPLE), *TINY, "--data", str(tmp_path)]
    # With so small a net several threads would mostly wait for each other.
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    said = subprocess.run(
        argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=900, check=True
    ).stdout
    passes = re.findall(r"^pass (\d): train accuracy (0\.\d+), validation accuracy (0\.\d+)$", said, re.M)
    assert [number for number, *_ in passes] == ["1", "2", "3", "4", "5"]
    (test,) = re.findall(r"^test accuracy (0\.\d+) by 1 ranks$", said, re.M)
    assert float(passes[-1][2]) > 0.6 and float(test) > 0.6, said
