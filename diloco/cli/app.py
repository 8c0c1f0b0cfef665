"""`diloco`: the verbs, each loaded when it is called, and the one place that prints errors."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from diloco.cli.interrupts import exit_at_once_on_signals
from diloco.errors import DilocoError, UserError, print_box
from diloco.options.help import asked_for, known_verb

if TYPE_CHECKING:
    from cyclopts import App

USER_ERROR = 2
FAILED = 1


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("diloco")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"


class Verb(NamedTuple):
    """One command: the words that call it, the module that has it, and what it does."""

    words: str
    module: str
    help: str


VERBS = {
    "Train": (
        Verb("run", "run:app", "Train with several peers on this machine."),
        Verb("peer", "peer:app", "Run one peer of a swarm: join, train, average, leave."),
        Verb("dht start", "dht:start_app", "Start a DHT node and coordinate a run."),
        Verb("launch", "launch:app", "Start one training over several nodes."),
        Verb("grpo-sweep", "grpo_sweep:app", "Run GRPO with several seeds side by side."),
    ),
    "Watch and check": (
        Verb("status", "status:app", "Show the peers of a swarm."),
        Verb("dashboard", "dashboard:app", "Show a swarm on a web page."),
        Verb("doctor", "doctor:app", "Check this machine and its connection to a swarm."),
    ),
    "Use what was trained": (
        Verb("export", "export:app", "Convert a checkpoint to a model for transformers."),
        Verb("ckpt rebuild", "ckpt:rebuild_app", "Rebuild a model from delta checkpoints."),
    ),
    "Plan and rent": (
        Verb("simulate", "simulate:app", "Estimate the time, traffic and cost of a run."),
        Verb("provision", "provision:app", "Rent pods and start a swarm on them."),
        Verb("pods", "pods:app", "Manage rented pods."),
        Verb("experiments", "experiments:app", "Run many trainings on rented pods."),
    ),
    "Control access": (Verb("peers", "peers:app", "Ban peers from a swarm, or let them back in."),),
}
"""Sections of `diloco --help`, by purpose."""
_GROUPS = {"dht": "The DHT's bootstrap node and the run's coordinator.", "ckpt": "What trainings have saved."}


def make_app() -> App:
    """The whole command line."""
    from cyclopts import App, Parameter

    app = App(
        name="diloco",
        help="Train one model on machines scattered over the world.",
        version=_version,
        help_flags=(),
        # Of a flag that is given twice, the last one counts.
        default_parameter=Parameter(allow_repeating=True),
    )
    groups = {name: App(name=name, help=text) for name, text in _GROUPS.items()}
    for group in groups.values():
        app.command(group)
    for verb in (verb for verbs in VERBS.values() for verb in verbs):
        first, _, second = verb.words.partition(" ")
        place = groups[first] if second else app
        place.command(f"diloco.cli.{verb.module}", name=second or first, help=verb.help)
    return app


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the `diloco` command. Ends with SystemExit."""
    exit_at_once_on_signals()
    sys.exit(exit_code(list(sys.argv[1:] if argv is None else argv)))


def exit_code(argv: list[str]) -> int:
    """Run a command line: 0 done, 2 the user can mend it, 1 it failed; errors are shown."""
    try:
        page = asked_for(argv or ["--help"])
        if page is None:
            return _ran(argv)
        print(page, end="", flush=True)
        return 0
    except BrokenPipeError:
        # The reader, `head` for instance, has closed the pipe; keep Python from writing its buffer there at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _ran(argv: list[str]) -> int:
    # Not at the top: while this loads, Python's own signal handlers would print a traceback.
    from cyclopts import CycloptsError

    from diloco.options.trainer import explained

    try:
        result = make_app()(
            argv, exit_on_error=False, print_error=False, verbose=False, result_action="return_value"
        )
        # Flush while errors are still handled here, not by the interpreter at exit.
        sys.stdout.flush()
    except CycloptsError as error:
        verb = " ".join(known_verb(argv)[0])
        said = explained(error, lambda flag: _other_verb_with(flag, verb))
        print_box("diloco", f"{said}\nSee `{f'diloco {verb}'.rstrip()} --help`.")
        return USER_ERROR
    except UserError as error:
        print_box("diloco", str(error))
        return USER_ERROR
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001
        return _failed(error)
    return result if isinstance(result, int) else 0


def _other_verb_with(flag: str, verb: str) -> str:
    """Of the two verbs that are most easily confused the other one, if it has this flag; else nothing."""
    other = {"run": "peer", "peer": "run"}.get(verb)
    if other is None:
        return ""
    flags = make_app()[other].assemble_argument_collection()
    return other if any(flag in argument.names for argument in flags) else ""


def _failed(error: Exception) -> int:
    # Not at the top: `--help` needs none of it.
    import traceback

    from peers import errors as peers_errors
    from provisioning import errors as pods_errors

    if isinstance(error, peers_errors.UserError | pods_errors.UserError):
        print_box("diloco", str(error))
        return USER_ERROR
    if isinstance(error, DilocoError | peers_errors.PeersError | pods_errors.ProvisioningError):
        print_box("diloco failed", str(error))
    else:
        traceback.print_exception(error)
        print_box("diloco failed", f"{type(error).__name__}: {error}")
    return FAILED
