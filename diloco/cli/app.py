"""`diloco`: the verbs, each loaded when it is called, and the one place that prints errors."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

from diloco.cli.interrupts import exit_at_once_on_signals
from diloco.errors import DilocoError, UserError, print_box

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


def make_app() -> App:
    """The whole command line."""
    from cyclopts import App

    app = App(
        name="diloco",
        help="Train one model on machines scattered over the world.",
        version=_version,
        help_format="plaintext",
    )
    ckpt = App(name="ckpt", help="What trainings have saved.")
    ckpt.command("diloco.cli.ckpt:rebuild_app", name="rebuild", help="Make a model of delta checkpoints.")
    app.command(ckpt)
    app.command("diloco.cli.dashboard:app", name="dashboard", help="Show a swarm on a web page.")
    dht = App(name="dht", help="The DHT's bootstrap node and the run's coordinator.")
    dht.command("diloco.cli.dht:start_app", name="start", help="Start a DHT node and coordinate a run.")
    app.command(dht)
    app.command(
        "diloco.cli.export:app", name="export", help="Write a checkpoint's model as transformers loads it."
    )
    app.command("diloco.cli.doctor:app", name="doctor", help="Examine this machine and its way to a swarm.")
    app.command("diloco.cli.experiments:app", name="experiments", help="Run many trainings on rented pods.")
    app.command("diloco.cli.launch:app", name="launch", help="Start a training that spans nodes.")
    app.command(
        "diloco.cli.grpo_sweep:app", name="grpo-sweep", help="Run GRPO with several seeds side by side."
    )
    app.command(
        "diloco.cli.peer:app", name="peer", help="Be one peer of a swarm: join, train, average, leave."
    )
    app.command("diloco.cli.peers:app", name="peers", help="Ban peers from a swarm, or let them back in.")
    app.command("diloco.cli.pods:app", name="pods", help="Look after rented pods.")
    app.command("diloco.cli.provision:app", name="provision", help="Rent pods and start a swarm on them.")
    app.command("diloco.cli.run:app", name="run", help="Train with several peers on this machine.")
    app.command(
        "diloco.cli.simulate:app", name="simulate", help="Say what a run would take, without running it."
    )
    app.command("diloco.cli.status:app", name="status", help="Show who is in a swarm.")
    return app


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the `diloco` command. Ends with SystemExit."""
    exit_at_once_on_signals()
    sys.exit(exit_code(list(sys.argv[1:] if argv is None else argv)))


def exit_code(argv: list[str]) -> int:
    """Run a command line: 0 done, 2 the user can mend it, 1 it failed; errors are shown."""
    # Not at the top: a signal while this loads would meet Python's own handlers, and show a traceback.
    from cyclopts import CycloptsError

    from diloco.options.trainer import explained

    try:
        result = make_app()(
            argv, exit_on_error=False, print_error=False, verbose=False, result_action="return_value"
        )
        # What is still buffered is part of the command: at its end the interpreter would complain of a lost reader.
        sys.stdout.flush()
    except CycloptsError as error:
        print_box("diloco", f"{explained(error)}\n`diloco {_verb_of(argv)}--help` lists what can be given.")
        return USER_ERROR
    except UserError as error:
        print_box("diloco", str(error))
        return USER_ERROR
    except BrokenPipeError:
        # Whoever read it, as `head` does, has seen enough; Python must not write what is left there at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:  # noqa: BLE001
        return _failed(error)
    return result if isinstance(result, int) else 0


def _failed(error: Exception) -> int:
    # Not imported above: only these errors of the swarm's are known here, and `--help` needs none of it.
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


def _verb_of(argv: Sequence[str]) -> str:
    words = []
    for word in argv:
        if word.startswith("-"):
            break
        words.append(word)
    known = {
        "ckpt",
        "dashboard",
        "rebuild",
        "export",
        "dht",
        "start",
        "doctor",
        "peer",
        "peers",
        "ban",
        "unban",
        "list",
        "new-secret",
        "run",
        "simulate",
        "status",
    }
    known |= {"pods", "logs", "ssh", "ssh-key", "add", "cost", "extend", "down", "forget", "reconcile"}
    known |= {"provision", "experiments", "destroy", "launch", "grpo-sweep"}
    return "".join(f"{word} " for word in words if word in known)
