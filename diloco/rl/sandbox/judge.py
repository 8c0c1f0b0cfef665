"""The process that runs the tests. It never runs the model's code, which stays in the process of answer.py.

A test calls the answer's functions with copies of its arguments and gets copies of their results, so a function that
changes its argument in place does not change the test's object.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import os
import pickle
import sys
from typing import Any

from diloco.rl.sandbox import wire
from diloco.rl.sandbox.confined import confine


class Reference:
    """A proxy for an object of the answer that is not plain data: it can be called and iterated, and has attributes."""

    def __init__(self, answer: Answer, number: int) -> None:
        self._answer, self._number = answer, number

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._answer.asked("call", self, arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._answer.asked("attribute", self, name)

    def __iter__(self) -> Any:
        return iter(self._answer.asked("items", self))

    def __reduce__(self) -> Any:
        return wire.value_of, (self._number,)


class Answer:
    """The process that runs the model's code. Methods raise if it is gone or its code has failed."""

    def __init__(self, descriptor: int, setup: str, code: str) -> None:
        self._requests = os.fdopen(os.dup(descriptor), "wb")
        self._replies = os.fdopen(descriptor, "rb")
        wire.send(self._requests, pickle.dumps((setup, code)))
        self.names = frozenset(self._received())

    def asked(self, *request: Any) -> Any:
        wire.send(self._requests, pickle.dumps(request))
        succeeded, value = self._received()
        if succeeded is not True:
            raise RuntimeError(f"the answer raised {value}")
        return value

    def _received(self) -> Any:
        return wire.decoded(wire.receive(self._replies), lambda number: Reference(self, number))


def main() -> None:
    verdicts, sys.stdout = sys.stdout, sys.stderr
    order = json.loads(sys.stdin.read())
    confine(json.loads(sys.argv[1]))
    program = type(sys)("__main__")
    sys.modules["__main__"] = program
    exec(compile(order["setup"], "setup", "exec"), vars(program))
    answer = Answer(int(sys.argv[2]), order["setup"], order["code"])
    for test in order["tests"]:
        print(json.dumps(_passes(test, dict(vars(program)), answer)), file=verdicts, flush=True)


def _passes(test: str, names: dict[str, Any], answer: Answer) -> bool:
    try:
        _bind_names(test, names, answer)
        exec(compile(test, "test", "exec"), names)
    except BaseException:  # noqa: BLE001 - whatever a test raises, it has not passed
        return False
    return True


def _bind_names(test: str, names: dict[str, Any], answer: Answer) -> None:
    """Bind the names that a test uses: to the answer's definitions only where Python does not define the name.

    An answer that defines `set` or `math` must not affect the test `set(f(x)) == {1}`. But if the test uses no other
    name of the answer, as when the task is to write `sum`, the answer's definition is meant.
    """
    used = {node.id for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Name)} - set(names)
    provided = {name for name in used if hasattr(builtins, name) or name in sys.stdlib_module_names}
    meant = (used - provided) & answer.names
    for name in provided & sys.stdlib_module_names if meant else ():
        names[name] = importlib.import_module(name)
    for name in meant or used & answer.names:
        names[name] = answer.asked("name", name)
