"""Which package may import which, and what the command line may load to answer `--help`."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORBIDDEN = {
    "peers": {"diloco", "provisioning", "benchmarks", "tests"},
    "provisioning": {"diloco", "peers", "benchmarks", "tests", "torch", "hivemind"},
    "diloco": {"benchmarks", "tests", "hivemind"},
    "benchmarks": {"tests"},
}
LAYERS = {
    "peers": ("protocol", "reduce", "state", "core", "net", "admission", "monitor", "daemon"),
    "diloco": (
        "options",
        "outer",
        "data",
        "train",
        "checkpoint",
        "rl",
        "sim",
        "doctor",
        "launch",
        "dashboard",
        "cli",
    ),
}
"""The folders of a package: each imports only from those before it."""
HEAVY = ("torch", "hivemind", "transformers", "numpy", "matplotlib", "datasets")
VERBS = [
    [],
    ["dht"],
    ["dht", "start"],
    ["doctor"],
    ["peer"],
    ["peers"],
    ["peers", "ban"],
    ["run"],
    ["simulate"],
    ["status"],
    ["dashboard"],
    ["ckpt"],
    ["grpo-sweep"],
    ["ckpt", "rebuild"],
    ["export"],
]
VERBS += [
    ["provision"],
    ["pods"],
    ["pods", "status"],
    ["pods", "logs"],
    ["pods", "down"],
    ["pods", "reconcile"],
    ["experiments", "run"],
    ["launch"],
]


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            # What is imported may be a module of the package that is named.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_packages(path: Path) -> set[str]:
    return {module.partition(".")[0] for module in imported_modules(path)}


@pytest.mark.parametrize("package", FORBIDDEN)
def test_a_package_imports_only_what_lies_below_it(package):
    wrong = {
        str(path.relative_to(ROOT)): bad
        for path in (ROOT / package).rglob("*.py")
        if (bad := FORBIDDEN[package].intersection(imported_packages(path)))
    }
    assert wrong == {}


def test_hivemind_is_imported_where_the_network_is_and_nowhere_else():
    users = [path for path in (ROOT / "peers").rglob("*.py") if "hivemind" in imported_packages(path)]
    assert users
    assert {path.relative_to(ROOT).parts[:2] for path in users} == {("peers", "net")}


@pytest.mark.parametrize("package", LAYERS)
def test_a_folder_imports_only_from_those_above_it(package):
    layers = LAYERS[package]
    folders = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
    assert folders == set(layers)
    wrong = []
    for folder in layers:
        below = {f"{package}.{name}" for name in layers[layers.index(folder) + 1 :]}
        for path in (ROOT / package / folder).rglob("*.py"):
            named = {".".join(module.split(".")[:2]) for module in imported_modules(path)}
            wrong += [f"{path.relative_to(ROOT)} imports {module}" for module in sorted(named & below)]
    assert wrong == []


@pytest.mark.parametrize("package", LAYERS)
def test_no_file_lies_beside_the_folder_of_its_topic(package):
    files = {path.stem for path in (ROOT / package).glob("*.py")}
    assert not files & set(LAYERS[package])


def test_the_two_names_that_users_import_are_loaded_when_asked_for():
    script = (
        "import sys\n"
        "import diloco\n"
        "loaded = 'torch' in sys.modules\n"
        "from diloco import Diloco, DilocoCallback\n"
        "print(loaded, Diloco.__name__, DilocoCallback.__name__)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert answer.stdout == "False Diloco DilocoCallback\n"


# What any command line of this library answers `--help` with: this machine's own unit of time.
EMPTY_HELP = """
import cyclopts

app = cyclopts.App(name="empty", result_action="return_value")

@app.default
def empty(*, number: int = 1) -> None:
    "Does nothing."

app(["--help"])
code = 0
"""


def _helped(script: str, *words: str) -> tuple[list[str], float]:
    """What the script, asked for help, left on standard error, and the best of three processor times in seconds.

    Processor time: what else the machine does is not ours.
    """
    script = f"{script}\nloaded = [name for name in {HEAVY!r} if name in sys.modules]"
    script = f"import resource, sys\n{script}\nusage = resource.getrusage(resource.RUSAGE_SELF)\n"
    script += "print(code, loaded, usage.ru_utime + usage.ru_stime, file=sys.stderr, sep='|')\n"
    seconds = []
    for _ in range(3):
        answer = subprocess.run(
            [sys.executable, "-c", script, *words, "--help"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        *told, used_s = answer.stderr.strip().split("|")
        assert "Usage: " in answer.stdout
        seconds.append(float(used_s))
    return told, min(seconds)


@pytest.fixture(scope="module")
def empty_help_s() -> float:
    return _helped(EMPTY_HELP)[1]


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: " ".join(verb) or "diloco")
def test_help_loads_no_torch_and_takes_little_more_than_any_help(verb, empty_help_s):
    told, used_s = _helped("from diloco.cli.app import exit_code\ncode = exit_code(sys.argv[1:])", *verb)
    assert told == ["0", "[]"]
    # A third of a second on most machines that CI has; some of the same name are three times slower.
    assert used_s < 3 * empty_help_s, f"an empty program's --help takes {empty_help_s:.2f} s here"


def test_trainers_load_neither_hivemind_nor_the_kernels_of_reductions():
    script = (
        "import sys\n"
        "import diloco.train_fsdp\n"
        "print([name for name in ('hivemind', 'numba', 'transformers') if name in sys.modules])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert answer.stdout == "[]\n"
