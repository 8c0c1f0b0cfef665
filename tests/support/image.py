"""Reads the Dockerfile, and turns it into a shell script for machines without Docker."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from tests.support.commands import ROOT


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions with their arguments, without comments, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [
        (name, " ".join(rest.split()))
        for name, _, rest in (line.partition(" ") for line in lines if line.strip())
    ]


def values(name: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == name]


def as_shell() -> str:
    """A script that does to / what a build does to the image, in both stages; arguments come from its environment.

    Both stages have one root, so what is copied from one to the other is there already. $SOURCE is the clone.
    """
    return "\n".join(["set -ex", "umask 022", *_lines()])


def _lines() -> Iterator[str]:
    for name, rest in instructions():
        match name:
            case "ARG":
                variable, _, default = rest.partition("=")
                yield f"export {variable}=${{{variable}-{default.strip(chr(34))}}}"
            case "ENV":
                yield f"export {rest}"
            case "WORKDIR":
                yield f"mkdir -p {rest}; cd {rest}"
            case "COPY" if not rest.startswith("--from"):
                *sources, place = rest.split()
                for source in sources:
                    # COPY copies the contents of a directory, but a file as a whole.
                    content = f"{source}/." if (ROOT / source).is_dir() else source
                    yield f"mkdir -p {place}; cp -r $SOURCE/{content} {place}"
            case "RUN":
                yield f"sh -c {shlex.quote(rest)}"
