"""The results of `diloco doctor`: one finding per line, each with the command that fixes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["pass", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """The result of one check. `fix` is the command or flag that solves the problem; empty exactly if it passed."""

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


def run_check(name: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yield the findings of a check. An exception becomes a failed finding, so that the remaining checks still run."""
    try:
        yield from check()
    except Exception as error:  # noqa: BLE001 - a bug in one check must not prevent the others
        yield crashed(name, error)


def crashed(name: str, error: Exception) -> Finding:
    """The finding for a check that raised an exception."""
    return failed(
        name,
        f"cannot be checked: {type(error).__name__}: {error}",
        "report this error  # the check itself has failed; the others hold",
    )


def as_json(findings: Iterable[Finding]) -> dict[str, Any]:
    """The output of `diloco doctor --json`."""
    found = [asdict(finding) for finding in findings]
    return {"ok": all(finding["verdict"] != "fail" for finding in found), "checks": found}
