"""The process that runs a model's code. It gets the arguments of test calls but not the tests, and gives no verdict."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import sys
from typing import Any

from diloco.rl.sandbox import wire
from diloco.rl.sandbox.confined import confine

_MOST_ITEMS = 100_000


def main() -> None:
    confine(json.loads(sys.argv[1]))
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(0), "wb")
    # A separate module as __main__, so that pickle finds the classes that the tests' setup defines.
    program = type(sys)("__main__")
    sys.modules["__main__"] = program
    names = vars(program)
    setup, code = pickle.loads(wire.receive(requests))
    exec(compile(setup, "setup", "exec"), names)
    before = dict(names)
    exec(compile(code, "answer", "exec"), names)
    new = [name for name, value in names.items() if name not in before or before[name] is not value]
    wire.send(replies, wire.encoded(new))
    while True:
        try:
            request = wire.receive(requests)
        except EOFError:
            return
        try:
            reply = wire.encoded([True, _served(names, *pickle.loads(request))])
        except BaseException as error:  # noqa: BLE001 - SystemExit is reported to the judge, too
            reply = wire.encoded([False, type(error).__name__])
        wire.send(replies, reply)


def _served(names: dict[str, Any], kind: str, target: Any, *more: Any) -> Any:
    if kind == "name":
        return names[target]
    if kind == "attribute":
        return getattr(target, *more)
    if kind == "items":
        return list(itertools.islice(iter(target), _MOST_ITEMS))
    arguments, keywords = more
    return target(*arguments, **keywords)
