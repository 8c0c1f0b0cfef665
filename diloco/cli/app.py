"""The command `diloco`: its subcommands, each loaded when it is called, and the place where errors are printed."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from diloco.cli.interrupts import exit_at_once_on_signals
from diloco.errors import FAILED, USER_ERROR, DilocoError, UserError, print_box
from diloco.options.help import requested_page, split_command
from diloco.output import lose_unwritable
from diloco.process_end import exit_process

if TYPE_CHECKING:
    from cyclopts import App


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("diloco")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"


class Command(NamedTuple):
    """A subcommand: the words that call it, the module that defines it, and its description."""

    words: str
    module: str
    help: str


COMMANDS = {
    "Train": (
        Command("run", "run:app", "Train with several peers on this machine."),
        Command("peer", "peer:app", "Run one peer of a swarm: join, train, average, leave."),
        Command("dht start", "dht:start_app", "Start a DHT node and coordinate a run."),
        Command("launch", "launch:app", "Start one training on several nodes."),
        Command("grpo-sweep", "grpo_sweep:app", "Run GRPO with several seeds at the same time."),
    ),
    "Watch and check": (
        Command("status", "status:app", "Show the peers of a swarm."),
        Command("dashboard", "dashboard:app", "Show a swarm on a web page."),
        Command("doctor", "doctor:app", "Check this machine and its connection to a swarm."),
    ),
    "Use what was trained": (
        Command("export", "export:app", "Convert a checkpoint to a model for transformers."),
        Command("ckpt rebuild", "ckpt:rebuild_app", "Rebuild a model from delta checkpoints."),
    ),
    "Plan and rent": (
        Command("simulate", "simulate:app", "Estimate the time, traffic and cost of a run."),
        Command("provision", "provision:app", "Rent pods and start a swarm on them."),
        Command("pods", "pods:app", "Manage rented pods."),
        Command("experiments", "experiments:app", "Run many trainings on rented pods."),
    ),
    "Control access": (Command("peers", "peers:app", "Ban peers from a swarm, or let them back in."),),
}
"""The commands by section of `diloco --help`."""
_GROUPS = {
    "dht": "The DHT's bootstrap node and the run's coordinator.",
    "ckpt": "Work with saved checkpoints.",
}


def make_app() -> App:
    """The cyclopts app with all commands."""
    from cyclopts import App, Parameter

    app = App(
        name="diloco",
        help="Train one model on machines scattered over the world.",
        version=_version,
        help_flags=(),
        # If a flag is given twice, the last value counts.
        default_parameter=Parameter(allow_repeating=True),
    )
    groups = {name: App(name=name, help=text) for name, text in _GROUPS.items()}
    for group in groups.values():
        app.command(group)
    for command in (command for section in COMMANDS.values() for command in section):
        first, _, second = command.words.partition(" ")
        parent = groups[first] if second else app
        parent.command(f"diloco.cli.{command.module}", name=second or first, help=command.help)
    return app


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the `diloco` command. Ends the process."""
    exit_at_once_on_signals()
    # Stdout is for people only in commands that train, which do the same with it.
    lose_unwritable("stderr")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Help pages and tables have characters that some locales lack.
        sys.stdout.reconfigure(errors="replace")
    code = exit_code(list(sys.argv[1:] if argv is None else argv))
    # As the interpreter does at its end: wait for threads that are not daemons.
    threading._shutdown()  # type: ignore[attr-defined]
    exit_process(code)


def exit_code(argv: list[str]) -> int:
    """Run a command line. Returns 0 if it succeeded, 2 for a user's error, 1 for others; prints the error."""
    try:
        page = requested_page(argv or ["--help"])
        if page is None:
            return _run_command(argv)
        print(page, end="", flush=True)
        return 0
    except BrokenPipeError:
        # The reader, for instance `head`, has closed the pipe. Without the next line, Python would write its buffer to
        # the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _run_command(argv: list[str]) -> int:
    # Not at the top: while this loads, Python's own signal handlers would print a traceback.
    from cyclopts import CycloptsError

    from diloco.options.parse_errors import parse_error_text

    try:
        result = _called(argv)
        # Flush while errors are still handled here, not by the interpreter at exit.
        sys.stdout.flush()
    except CycloptsError as error:
        command = " ".join(split_command(argv)[0])
        text = parse_error_text(error, lambda flag: _similar_command_with(flag, command))
        print_box("diloco", f"{text}\nSee `{f'diloco {command}'.rstrip()} --help`.")
        return USER_ERROR
    except UserError as error:
        print_box("diloco", str(error))
        return USER_ERROR
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001
        return _report_failure(error)
    return result if isinstance(result, int) else 0


def _called(argv: list[str]) -> Any:
    """Call the command. Words after `--` go to its `*` parameter, whether or not all parameters before it are given."""
    from cyclopts import UnusedCliTokensError

    end = argv.index("--") if "--" in argv else len(argv)
    words = argv[end + 1 :]
    command, bound, _ = make_app().parse_args(
        argv[:end], exit_on_error=False, print_error=False, verbose=False
    )
    if words:
        bound.apply_defaults()
        name = next((p.name for p in bound.signature.parameters.values() if p.kind is p.VAR_POSITIONAL), None)
        if name is None:
            raise UnusedCliTokensError(unused_tokens=words)
        bound.arguments[name] += tuple(words)
    return command(*bound.args, **bound.kwargs)


def _similar_command_with(flag: str, command: str) -> str:
    """`run` for `peer`, and `peer` for `run`, if that command has the flag; else an empty text."""
    other = {"run": "peer", "peer": "run"}.get(command)
    if other is None:
        return ""
    flags = make_app()[other].assemble_argument_collection()
    return other if any(flag in argument.names for argument in flags) else ""


def _report_failure(error: Exception) -> int:
    # Not at the top: these imports would slow down `--help`.
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
