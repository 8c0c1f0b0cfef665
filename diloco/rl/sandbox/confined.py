"""What a process of the sandbox does to itself before it runs anything: rlimits, and as root another user."""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Any


def main() -> None:
    """Nothing but that, to see whether it can be done here."""
    confine(json.loads(sys.argv[1]))


def confine(order: dict[str, Any]) -> None:
    for name, most in order["limits"].items():
        resource.setrlimit(getattr(resource, name), (most, most))
    user: int | None = order["user"]
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
