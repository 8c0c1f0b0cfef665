"""What `diloco doctor` says: one finding a line, each with the command that fixes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["pass", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `fix`: the command or flag that puts it right; only what passes needs none."""

    name: str
    verdict: Verdict
    said: str
    fix: str = ""

    def __post_init__(self) -> None:
        assert bool(self.fix) != (self.verdict == "pass"), self


def passed(name: str, said: str) -> Finding:
    return Finding(name, "pass", said)


def warned(name: str, said: str, fix: str) -> Finding:
    return Finding(name, "warn", said, fix)


def failed(name: str, said: str, fix: str) -> Finding:
    return Finding(name, "fail", said, fix)


Check = Callable[[], Iterable[Finding]]


def examined(name: str, check: Check, fix: str) -> Iterator[Finding]:
    """The findings of a check. One that breaks is a finding too: there is always a next one to make."""
    try:
        yield from check()
    except Exception as error:  # noqa: BLE001 - a doctor who faints helps nobody
        yield broken(name, error, fix)


def broken(name: str, error: Exception, fix: str) -> Finding:
    """What to say where a check itself could not be made."""
    return failed(name, f"cannot be checked: {type(error).__name__}: {error}", fix)


def as_json(findings: Iterable[Finding]) -> dict[str, Any]:
    """What `diloco doctor --json` prints."""
    found = [asdict(finding) for finding in findings]
    return {"ok": all(finding["verdict"] != "fail" for finding in found), "checks": found}
