"""What `diloco provision`, `pods` and `experiments` have in common: flags, the lock, questions, and messages."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from diloco.cli.interrupts import run_interruptible
from diloco.errors import UserError
from diloco.options.checks import at_least, finite

if TYPE_CHECKING:
    from provisioning.ledger.ledger import Ledger
    from provisioning.machines.setup import Setup
    from provisioning.providers.registry import Access

StateFile = Annotated[
    Path | None,
    Parameter(
        name="--state-file",
        help="File that records which pods are yours; default: $XDG_STATE_HOME/diloco/pods.sqlite.",
    ),
]
Inventory = Annotated[
    Path | None,
    Parameter(name="--inventory", help="TOML file of the machines you own, for --provider ssh."),
]
Fetch = Annotated[
    str | None,
    Parameter(
        name="--fetch",
        help="What is copied here before a pod is given back: logs, metrics, model (the final one), paths below its "
        "directory, or none; default: logs,metrics,model.",
    ),
]
Yes = Annotated[bool, Parameter(alias="-y", negative="", help="Do not ask.")]
WithoutResults = Annotated[
    bool,
    Parameter(
        name="--yes",
        alias="-y",
        negative="",
        help="Also without their results, where those cannot be fetched.",
    ),
]
PodNames = Annotated[str, Parameter(help="Pods; default: all.")]
Hours = Annotated[float | None, Parameter(validator=(at_least(0.01), finite))]
Amount = Annotated[float | None, Parameter(validator=(at_least(0), finite))]
Words = Annotated[tuple[str, ...], Parameter(consume_multiple=1, negative="")]
_LOCK_WAIT_S = 30.0


def say(name: str, text: str) -> None:
    """Print one line of progress to stderr; stdout is for results."""
    from provisioning.terminal import printable

    print(printable(f"{time.strftime('%H:%M:%S')} {name:<10} {text}"), file=sys.stderr, flush=True)


def fetched(words: str | None) -> list[str] | None:
    """The words of --fetch. Raises UserError for an invalid one."""
    from provisioning.machines.results import patterns_of

    if words is None:
        return None
    found = [word for word in words.split(",") if word]
    if not found:
        raise UserError("--fetch is empty; to copy nothing, say --fetch none.")
    patterns_of(found)
    return found


@dataclass(frozen=True, kw_only=True)
class Given:
    """What goes to the pods besides the code, and what comes back."""

    secret: Words = ()
    """Environment variables to pass to the pods, besides WANDB_API_KEY, WANDB_PROJECT and HF_TOKEN."""
    mount: Words = ()
    """Files and directories to copy to the pods: PATH, or PATH:PLACE with a place below the pod's directory."""
    python: str | None = None
    """A Python on the pods with everything installed; default: create an environment there."""
    source: Path | None = None
    """Directory of the code to copy; default: the clone that this command runs from."""
    fetch: Fetch = None
    run_dir: str | None = None
    """Where that goes, a directory for each pod: a path, or a URL for fsspec; default: runs/<UTC time>-<name>."""

    def setup(self) -> Setup:
        """Raises UserError for a secret or a file that does not exist."""
        from provisioning.machines.setup import Setup, mount_of, secrets_of, source_directory

        fetched(self.fetch)
        return Setup(
            source=source_directory(self.source),
            python=self.python,
            secrets=secrets_of(os.environ, self.secret),
            mounts=[mount_of(word) for word in self.mount],
        )


GIVEN = Given()


@dataclass(frozen=True, kw_only=True)
class Results:
    """Which results of the pods are copied, and where to."""

    place: str
    words: Sequence[str]

    def remember(self, ledger: Ledger) -> None:
        from provisioning.ledger.keys import FETCH, RUN_DIR

        ledger.remember(RUN_DIR, self.place)
        ledger.remember(FETCH, " ".join(self.words))


def results_of(ledger: Ledger, given: Given, name: str) -> Results:
    """As the flags say, else as the previous command for these pods did; `name` is part of a new directory's name.

    Raises UserError if nothing can be written there, so that the command fails before it rents anything.
    """
    from diloco.train.run_dir import default_run_dir
    from provisioning.ledger.keys import FETCH, RUN_DIR
    from provisioning.machines.results import DEFAULT, check_place, is_url, patterns_of

    goes_on = bool(ledger.rows())
    words = fetched(given.fetch) or (ledger.recall(FETCH).split() if goes_on else []) or DEFAULT
    place = ledger.recall(RUN_DIR) if goes_on else ""
    if given.run_dir is not None or not place:
        place = given.run_dir or str(default_run_dir(name))
        place = place if is_url(place) else str(Path(place).absolute())
    if patterns_of(words):
        check_place(place)
    return Results(place=place, words=words)


def access(inventory: Path | None) -> Access:
    from diloco.launch.swarm_config import state_dir
    from provisioning.providers.registry import Access

    return Access(
        state_dir=state_dir(), environment=os.environ, inventory=inventory.absolute() if inventory else None
    )


def locked(ledger: Ledger, work: Callable[[], Coroutine[Any, Any, int]], *, for_jobs: bool = False) -> int:
    """Run `work` as the only command that changes these pods or, with `for_jobs`, that runs jobs on them."""
    from provisioning.swarm import watcher

    # A watcher takes the lock from time to time, so wait for it.
    is_watched = not for_jobs and watcher.running_pid(ledger.path) is not None
    with ledger.locked(wait_s=_LOCK_WAIT_S if is_watched else 0.0, for_jobs=for_jobs):
        return run_interruptible(work())


def ensure_watcher(ledger: Ledger) -> None:
    """Start a watcher, a process in the background, if the ledger needs one and none runs: see `needs_watcher`."""
    from provisioning.swarm import watcher

    if not watcher.needs_watcher(ledger):
        return
    if watcher.lacks(ledger, access(None)):
        watcher.stop(ledger.path)
    argv = [sys.executable, "-m", "diloco", "pods", "reconcile", "--watch", "--state-file", str(ledger.path)]
    # With this path the watcher finds diloco even if it runs from its source without being installed.
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    if watcher.start(ledger.path, argv, {**os.environ, "PYTHONPATH": path}):
        say(
            "–",
            "a background process gives back pods whose time is over, whose order had an unknown outcome or "
            "whose deletion failed, and keeps the swarm as requested",
        )


async def confirmed(question: str, *, yes: bool) -> None:
    """Ask the user. Raises UserError unless the answer is yes."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise UserError(
            "Nothing was changed: there is no terminal to ask for confirmation. Give --yes to go on."
        )
    if not await says_yes(question):
        raise UserError("Nothing was changed.")


async def says_yes(question: str) -> bool:
    """Ask the user at the terminal. Returns whether the answer is yes."""
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return (await _typed_line()).strip().lower() in ("y", "yes")


async def _typed_line() -> str:
    """Read a line from the terminal. Waiting in `readline` itself would keep Ctrl-C from being handled."""
    loop, typed = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), typed.set)
    try:
        await typed.wait()
    finally:
        loop.remove_reader(sys.stdin.fileno())
    return sys.stdin.readline()


@contextlib.contextmanager
def interruption_told(ledger: Ledger, give_back: str, also: str = "") -> Iterator[None]:
    """If the block is cancelled, print how many pods stay and how to give them back, and `also`."""
    try:
        yield
    except asyncio.CancelledError:
        rows = [row for row in ledger.rows() if row.state != "planned"]
        rate = sum(row.offer.price_per_hour for row in rows)
        if rows:
            print(
                f"Interrupted: {len(rows)} pods stay, {rate:.2f} $/h. Repeat the command to continue; "
                f"`{give_back}` gives them back.{also}",
                file=sys.stderr,
                flush=True,
            )
        raise


def shouted(failures: Mapping[str, Exception]) -> int:
    """Print the errors by pod to stderr. Returns the exit code."""
    for name, error in failures.items():
        shout(f"{name}: {error}")
    return 1 if failures else 0


def shout(text: str) -> None:
    """Print a failure to stderr."""
    from provisioning.terminal import printable

    print(printable(f"!!! {text}"), file=sys.stderr, flush=True)
