"""The protocol between judge and answer. Runs inside the sandbox, so it imports only the standard library.

Requests to the answer are pickles. Replies come from untrusted code, so they are JSON, from which only plain values are
built: a reply cannot bring an object with its own `__eq__` into the judge.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from typing import Any, BinaryIO

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
"""In the answer: objects that are not plain data, which the judge refers to by their index."""


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
