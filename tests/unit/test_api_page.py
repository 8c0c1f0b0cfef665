"""docs/api.md has the signatures, attributes, fields and records that the code has, and its snippets run."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import io
import json
import re
from collections.abc import Callable
from dataclasses import fields

import pytest
from torch import nn

import diloco
from diloco.outer.diloco import Diloco
from diloco.train.evaluation import Evaluation
from diloco.train.inner import StepResult
from tests.support.commands import ROOT
from tests.support.documents import PAGES, blocks_of, names_in_table

PAGE = PAGES["docs/api.md"]
SNIPPETS = [block.text for block in blocks_of(PAGE) if block.mark == "run"]
STUBS = [
    (module, block)
    for mark, block in re.findall(r"<!-- test: signatures (\S+) -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    for module in [importlib.import_module(mark)]
]


@pytest.mark.parametrize(("module", "stub"), STUBS, ids=[module.__name__ for module, _ in STUBS])
def test_signatures_are_those_of_the_code(module, stub):
    (said,) = ast.parse(stub).body
    assert isinstance(said, ast.ClassDef)
    assert getattr(diloco, said.name) is getattr(module, said.name)
    (real,) = ast.parse(inspect.getsource(getattr(module, said.name))).body
    assert isinstance(real, ast.ClassDef)
    assert _signatures(said) == _signatures(real)


def _signatures(found: ast.ClassDef) -> dict[str, str]:
    """Signatures of the constructor and the public methods, without a callback's hooks, which the trainer calls."""
    return {
        item.name: f"{ast.unparse(item.args)} -> {ast.unparse(item.returns or ast.Constant(None))}"
        for item in found.body
        if isinstance(item, ast.FunctionDef)
        and (item.name == "__init__" or not item.name.startswith(("_", "on_")))
        and not item.decorator_list
    }


def test_each_attribute_of_diloco_is_told():
    properties = {name for name, value in vars(Diloco).items() if isinstance(value, property)}
    set_by_init = set(vars(Diloco(nn.Linear(2, 1))))
    public = {name for name in properties | set_by_init if not name.startswith("_")}
    assert names_in_table(PAGE, "| attribute | |") == public


def test_each_field_of_a_commit_is_told():
    (path,) = re.findall(r"<!-- test: fields (\S+) -->", PAGE)
    module, _, name = path.rpartition(".")
    commit = getattr(importlib.import_module(module), name)
    assert names_in_table(PAGE, f"<!-- test: fields {path} -->") == {field.name for field in fields(commit)}


def test_what_is_measured_in_a_step_and_an_evaluation_is_told():
    """tests/e2e/test_readme.py compares all keys in the tables with the records of real trainings."""
    for kind, measured in (("step", StepResult), ("eval", Evaluation)):
        assert {field.name for field in fields(measured)} <= names_in_table(
            PAGE, f"<!-- test: record {kind} -->"
        )


def test_events_are_those_that_the_code_writes():
    said = names_in_table(PAGE, "<!-- test: events -->")
    texts = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "diloco").rglob("*.py"))
    written = set(re.findall(r'event="(\w+)"|"event": "(\w+)"', texts))
    watched = re.findall(
        r'found\["(\w+)"\]', (ROOT / "diloco/rl/signal_watch.py").read_text(encoding="utf-8")
    )
    assert said == {"".join(names) for names in written} | set(watched)


def test_each_file_of_a_run_is_one_that_the_code_names():
    (tree,) = re.findall(r"<!-- test: tree -->\n```\n(.*?)```", PAGE, re.DOTALL)
    texts = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "diloco").rglob("*.py"))
    for line in tree.splitlines():
        for path in re.split(r"\s{2,}", line)[0].split():
            assert f'"{path.strip("/").rpartition("/")[2]}"' in texts, path


@pytest.fixture
def snippet_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DILOCO_LINK", raising=False)
    lines = [
        {"kind": "step", "step": 1, "loss": 5.5},
        {"kind": "eval", "step": 1},
        {"kind": "step", "step": 2, "loss": 5.25},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


CHECKS: list[Callable[[dict, str], bool]] = [
    lambda namespace, said: namespace["trainer"].state.global_step == 4,
    lambda namespace, said: said == "2 steps, loss 5.250\n",
]


@pytest.mark.parametrize(
    ("snippet", "holds"), list(zip(SNIPPETS, CHECKS, strict=True)), ids=["callback", "records"]
)
def test_each_snippet_runs_alone(snippet, holds, snippet_directory):
    namespace: dict = {"__name__": "__main__"}
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(snippet, "docs/api.md", "exec"), namespace)
    assert holds(namespace, said.getvalue())
