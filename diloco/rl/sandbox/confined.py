"""Restricts a process of the sandbox before it runs anything: sets rlimits and, as root, switches to another user."""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Any


def main() -> None:
    """Only restrict the process, to check whether that works on this machine."""
    confine(json.loads(sys.argv[1]))


def confine(order: dict[str, Any]) -> None:
    for name, most in order["limits"].items():
        resource.setrlimit(getattr(resource, name), (most, most))
    user: int | None = order["user"]
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
