"""Code of models, run for real: what it may not do, and that nothing of it stays."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from diloco.rl.sandbox import Limits, cuts_network, run_tests

SHORT = Limits(wall_s=1.0)
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, or namespaces for users")


def test_each_test_counts_for_itself():
    verdict = run_tests(
        "def f(x): return x + 1", ["assert f(1) == 2", "assert f(1) == 3", "f(", "assert f(0)"]
    )
    assert (verdict.num_passed, verdict.num_tests) == (2, 4)


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "x = bytearray(2 * 2**30)",
        "open('big', 'wb').write(b'x' * 2**22)",
        "import os; os._exit(0)",
        "raise SystemExit(0)",
        "import sys; print('[\"x\", true]'); sys.exit(0)",
        "import os; [os.open('/dev/null', 0) for _ in range(100)]",
    ],
)
def test_code_that_goes_too_far_passes_no_test(code):
    began = time.monotonic()
    assert run_tests(code, ["pass"], limits=SHORT).num_passed == 0
    assert time.monotonic() - began < 5


def test_code_cannot_say_that_its_tests_have_passed():
    forged = "import os\nfor fd in range(3, 20):\n try: os.write(fd, b'[\"0\", true]\\n' * 3)\n except OSError: pass\n"
    assert run_tests(forged + "os._exit(0)", ["assert 0", "assert 0"]).num_passed == 0


def test_nothing_of_our_environment_reaches_the_code(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert run_tests("import os", ["assert 'WANDB_API_KEY' not in os.environ"]).num_passed == 1


@pytest.mark.parametrize(
    "code",
    [
        "import os\nfor _ in range(3000): os.mkdir('a'); os.chdir('a')",
        "import os\nos.makedirs('a/b'); open('a/b/c', 'w').close(); os.chmod('a/b', 0); os.chmod('a', 0)",
        "import os, tempfile\nos.rmdir(tempfile.gettempdir())",
    ],
    ids=["deep", "forbidden", "removed"],
)
def test_nothing_stays_of_what_code_has_made_of_its_directory(code, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run_tests(code, ["pass"]).num_passed == 1
    assert not list(tmp_path.iterdir())


@ROOT_ONLY
def test_code_has_no_network():
    assert cuts_network()


@ROOT_ONLY
def test_a_process_that_left_its_group_dies_with_the_code(tmp_path):
    heart = tmp_path / "heart"
    script = tmp_path / "beats.py"
    script.write_text(f"import time\nwhile True:\n open({str(heart)!r}, 'a').write('x'); time.sleep(0.02)\n")
    start = f"subprocess.Popen([sys.executable, {str(script)!r}], start_new_session=True)"
    code = f"import os, subprocess, sys, time\n{start}\nwhile not os.path.exists({str(heart)!r}): time.sleep(0.01)"
    assert run_tests(code, ["pass"]).num_passed == 1
    beats = Path(heart).stat().st_size
    assert beats > 0
    time.sleep(0.2)
    assert Path(heart).stat().st_size == beats
