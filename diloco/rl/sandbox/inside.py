"""What runs inside the sandbox: `judge` runs the tests, `answer` the model's code, each in a process of its own.

Imports only the standard library, since there is nothing else. Requests to `answer` are pickles. Its replies come from
untrusted code, so they are JSON, from which only plain values are built: a reply cannot bring an object with its own
`__eq__` into `judge`.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import itertools
import json
import os
import pickle
import resource
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, BinaryIO

_MOST_ITEMS = 100_000
MAX_BYTES = 2**20
_SCALARS = (bool, int, float, str)
_CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
    "dict": dict,
}
_AS_STRING: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "complex": (complex, str, complex),
}

held: list[Any] = []
"""In the process of `answer`: objects that are not plain data, to which `judge` refers by their index."""


def check() -> None:
    """Only restrict the process, to check whether that works on this machine."""
    confine(json.loads(sys.argv[1]))


def judge() -> None:
    """The process that runs the tests. It never runs the model's code.

    A test calls the answer's functions with copies of its arguments and gets copies of their results, so a function
    that changes its argument in place does not change the test's object.
    """
    verdicts, sys.stdout = sys.stdout, sys.stderr
    order = json.loads(sys.stdin.read())
    confine(json.loads(sys.argv[1]))
    program = type(sys)("__main__")
    sys.modules["__main__"] = program
    exec(compile(order["setup"], "setup", "exec"), vars(program))
    other = Answer(int(sys.argv[2]), order["setup"], order["code"])
    for test in order["tests"]:
        print(json.dumps(_passes(test, dict(vars(program)), other)), file=verdicts, flush=True)


def _passes(test: str, names: dict[str, Any], other: Answer) -> bool:
    try:
        _bind_names(test, names, other)
        exec(compile(test, "test", "exec"), names)
    except BaseException:  # noqa: BLE001 - whatever a test raises, it has not passed
        return False
    return True


def _bind_names(test: str, names: dict[str, Any], other: Answer) -> None:
    """Bind the names that a test uses: to the answer's definitions only where Python does not define the name.

    An answer that defines `set` or `math` must not affect the test `set(f(x)) == {1}`. But if the test uses no other
    name of the answer, as when the task is to write `sum`, the answer's definition is meant.
    """
    used = {node.id for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Name)} - set(names)
    provided = {name for name in used if hasattr(builtins, name) or name in sys.stdlib_module_names}
    meant = (used - provided) & other.names
    for name in provided & sys.stdlib_module_names if meant else ():
        names[name] = importlib.import_module(name)
    for name in meant or used & other.names:
        names[name] = other.asked("name", name)


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
        return value_of, (self._number,)


class Answer:
    """The judge's connection to the process of `answer`. Methods raise if it is gone or the model's code has failed."""

    def __init__(self, descriptor: int, setup: str, code: str) -> None:
        self._requests = os.fdopen(os.dup(descriptor), "wb")
        self._replies = os.fdopen(descriptor, "rb")
        send(self._requests, pickle.dumps((setup, code)))
        self.names = frozenset(self._received())

    def asked(self, *request: Any) -> Any:
        send(self._requests, pickle.dumps(request))
        succeeded, value = self._received()
        if succeeded is not True:
            raise RuntimeError(f"the answer raised {value}")
        return value

    def _received(self) -> Any:
        return decoded(receive(self._replies), lambda number: Reference(self, number))


def answer() -> None:
    """The process that runs the model's code. It gets the arguments of test calls, but not the tests."""
    confine(json.loads(sys.argv[1]))
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(0), "wb")
    # A separate module as __main__, so that pickle finds the classes that the tests' setup defines.
    program = type(sys)("__main__")
    sys.modules["__main__"] = program
    names = vars(program)
    setup, code = pickle.loads(receive(requests))
    exec(compile(setup, "setup", "exec"), names)
    before = dict(names)
    exec(compile(code, "answer", "exec"), names)
    new = [name for name, value in names.items() if name not in before or before[name] is not value]
    send(replies, encoded(new))
    while True:
        try:
            request = receive(requests)
        except EOFError:
            return
        try:
            reply = encoded([True, _served(names, *pickle.loads(request))])
        except BaseException as error:  # noqa: BLE001 - SystemExit is reported to the judge, too
            reply = encoded([False, type(error).__name__])
        send(replies, reply)


def _served(names: dict[str, Any], kind: str, target: Any, *more: Any) -> Any:
    if kind == "name":
        return names[target]
    if kind == "attribute":
        return getattr(target, *more)
    if kind == "items":
        return list(itertools.islice(iter(target), _MOST_ITEMS))
    arguments, keywords = more
    return target(*arguments, **keywords)


def confine(order: dict[str, Any]) -> None:
    """Set rlimits and, as root, switch to another user, before anything runs."""
    for name, most in order["limits"].items():
        resource.setrlimit(getattr(resource, name), (most, most))
    user: int | None = order["user"]
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def value_of(number: int) -> Any:
    """Resolves a reference when a request is unpickled in the answer."""
    return held[number]


def send(stream: BinaryIO, content: bytes) -> None:
    stream.write(len(content).to_bytes(4, "big") + content)
    stream.flush()


def receive(stream: BinaryIO) -> bytes:
    """Raises EOFError if the other side is gone or sends more than MAX_BYTES."""
    length = int.from_bytes(stream.read(4), "big")
    content = stream.read(length) if 0 < length <= MAX_BYTES else b""
    if not content or len(content) < length:
        raise EOFError("the other side is gone")
    return content


def encoded(value: Any) -> bytes:
    return json.dumps(_plain(value)).encode()


def decoded(content: bytes, reference: Callable[[int], Any]) -> Any:
    """The value of a reply; `reference` makes the proxy of an object that stays in the answer."""
    return _value(json.loads(content), reference)


def _plain(value: Any) -> Any:
    if value is None:
        return None
    for scalar in _SCALARS:
        if isinstance(value, scalar):
            return scalar(value)
    # A subclass, such as Counter, is sent as its base class.
    for name, kind in _CONTAINERS.items():
        if isinstance(value, kind):  # type: ignore[arg-type]
            items = value.items() if name == "dict" else value
            return [name, [_plain(tuple(item) if name == "dict" else item) for item in items]]
    for name, (kind, write, _) in _AS_STRING.items():
        if isinstance(value, kind):
            return [name, write(value)]
    held.append(value)
    return ["reference", len(held) - 1]


def _value(plain: Any, reference: Callable[[int], Any]) -> Any:
    if not isinstance(plain, list):
        if plain is None or isinstance(plain, _SCALARS):
            return plain
        raise ValueError("a reply of another form")
    name, content = plain
    if name == "reference":
        return reference(int(content))
    if name in _AS_STRING:
        return _AS_STRING[name][2](content)
    return _CONTAINERS[name](_value(item, reference) for item in content)
