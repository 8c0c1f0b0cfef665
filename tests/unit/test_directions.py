"""Which package may import which, and what the command line may load to answer `--help`."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco.options.help import PAGES_DIR

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
    "provisioning": (
        *("pods", "machines", "providers", "ledger", "renting", "swarm", "experiments", "launchers"),
    ),
}
"""The folders of each package; a folder imports only from folders that precede it."""


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            # `from package import name` may import a module of the package.
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


HELPED = """
import resource, sys
from diloco.cli.app import exit_code

code = exit_code(sys.argv[1:])
loaded = [name for name in ("cyclopts", "torch", "hivemind", "numpy", "rich") if name in sys.modules]
usage = resource.getrusage(resource.RUSAGE_SELF)
print(code, loaded, len(sys.modules), usage.ru_utime + usage.ru_stime, file=sys.stderr, sep="|")
"""
MOST_MODULES = 150
"""Python's own modules and ours are about 90."""


def asked_for_help(page: Path) -> tuple[int, float]:
    """The number of loaded modules and the seconds of processor time that showing this page takes."""
    verb = page.name.removesuffix(".txt")
    words = verb.removesuffix(".all").split("_") if verb.removesuffix(".all") != "diloco" else []
    asked = "--help-all" if verb.endswith(".all") else "--help"
    answer = subprocess.run(
        [sys.executable, "-c", HELPED, *words, asked],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    code, loaded, num_modules, used_s = answer.stderr.strip().split("|")
    assert answer.stdout == page.read_text()
    assert (code, loaded) == ("0", "[]")
    return int(num_modules), float(used_s)


@pytest.mark.parametrize("page", sorted(PAGES_DIR.glob("*.txt")), ids=lambda page: page.stem)
def test_a_help_loads_hardly_more_than_python_itself(page):
    num_modules, _ = asked_for_help(page)
    assert num_modules < MOST_MODULES


def test_a_help_is_there_at_once():
    """It takes a thirtieth of a second on an idle machine; the limit allows for load."""
    assert min(asked_for_help(PAGES_DIR / "peer.txt")[1] for _ in range(3)) <= 0.5


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
