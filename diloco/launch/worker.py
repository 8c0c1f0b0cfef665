"""Runs a training process: its configuration and run directory, the peer's daemon, and the exit code for errors."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from diloco.errors import FAILED, USER_ERROR, DilocoError, UserError, print_box, print_note
from diloco.launch.daemon_process import DaemonProcess, wants_swarm
from diloco.launch.report import report
from diloco.launch.swarm_config import adopt_manifest
from diloco.options.extras import check_extras
from diloco.options.trainer import TrainConfig, notes_on_unused_flags, trainer_of, with_fitting_batch_size
from diloco.outer.world import World, joined, on_rank_zero
from diloco.output import lose_unwritable
from diloco.train.progress import Progress
from diloco.train.run_dir import created_run_dir, run_dir_of, written_config
from diloco.train.signals import CleanUps, cleaned_up_on_failure
from peers.daemon.link import LINK_ENV
from peers.errors import PeersError
from peers.errors import UserError as SwarmRefusal

# torchrun kills all ranks when the first one exits, so the others wait until rank 0 has printed its message.
_MESSAGE_GRACE_S = 3.0


def exit_code(action: Callable[[], None]) -> int:
    """Run a rank. Returns 0 on success, 2 for a user's error, 1 for others; prints the reason."""
    lose_unwritable("stdout", "stderr")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    # `diloco peer` gives each rank a log of its own; under torchrun they share one.
    prints_at_once = LINK_ENV in os.environ or World.from_environment(os.environ).local_rank == 0
    try:
        action()
        return 0
    except Exception as error:  # noqa: BLE001 - the edge of the process
        if prints_at_once:
            return _told(error)
        if isinstance(error, DilocoError | PeersError):
            # If the first rank has the same error, this rank is killed meanwhile, and the message is printed once.
            time.sleep(_MESSAGE_GRACE_S)
            return _told(error)
        code = _told(error)
        time.sleep(_MESSAGE_GRACE_S)
        return code


def _told(error: Exception) -> int:
    """Print why this rank ends; returns its exit code."""
    if isinstance(error, UserError | SwarmRefusal):
        print_box("diloco", str(error))
        return USER_ERROR
    if isinstance(error, DilocoError | PeersError):
        print_box("diloco failed", str(error))
    else:
        traceback.print_exception(error)
    return FAILED


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The configuration of this rank's peer; the same on all its ranks."""

    config: TrainConfig
    run_dir: Path
    link_path: Path | None = None
    """The socket of this peer's daemon."""
    is_shown_here: bool = True
    """Whether this process prints for the user. If not, `diloco peer` shows the training and prints the report."""

    def progress(self, world: World) -> Progress:
        """The Progress of this rank; also prints the run directory."""
        if world.is_main and self.is_shown_here:
            print(f"run directory: {self.run_dir}", flush=True)
        return Progress(self.link_path, tells=world.is_main)


@contextlib.contextmanager
def assigned(
    config: TrainConfig, named: frozenset[str], world: World, device: torch.device, clean_ups: CleanUps
) -> Iterator[tuple[Assignment, Progress]]:
    """What this rank trains while the block runs. If a swarm is asked for and no daemon is running, one is started.

    Appends to `clean_ups` what has to run if a signal or an error ends the process. At the end the daemon leaves the
    swarm, and the report is printed. A collective. Raises UserError.
    """
    with joined(world, device), contextlib.ExitStack() as stack, cleaned_up_on_failure(clean_ups):
        assignment, daemon = make_assignment(config, named, world, clean_ups, stack)
        explained = daemon.explains() if daemon is not None else contextlib.nullcontext()
        with explained, contextlib.closing(assignment.progress(world)) as progress:
            yield assignment, progress
        if daemon is not None:
            daemon.stop()
    if world.is_main and assignment.is_shown_here:
        report(assignment.config, assignment.run_dir, in_swarm=wants_swarm(assignment.config))


def make_assignment(
    config: TrainConfig,
    named: frozenset[str],
    world: World,
    clean_ups: CleanUps,
    stack: contextlib.ExitStack,
) -> tuple[Assignment, DaemonProcess | None]:
    """The assignment of this rank. If a swarm is asked for and no daemon runs yet, start one and adopt the manifest.

    The daemon is returned on rank 0 only; `clean_ups` gets the function that kills it. `stack` keeps the run directory
    from other runs, unless `diloco peer` started this process and does so. A collective. Raises UserError.
    """
    daemons: list[DaemonProcess] = []

    def prepare() -> Assignment:
        for note in notes_on_unused_flags(config, named):
            print_note(note)
        check_extras(config)
        link = os.environ.get(LINK_ENV)
        run_dir = created_run_dir(config) if link else stack.enter_context(run_dir_of(config))
        if link or not wants_swarm(config):
            own = with_fitting_batch_size(config, named, num_ranks=world.num_ranks)
            # `diloco peer` has written the file already, and a full disk must not end its later workers.
            with contextlib.suppress(OSError) if link else contextlib.nullcontext():
                written_config(own, run_dir)
            path = Path(link) if link else None
            return Assignment(config=own, run_dir=run_dir, link_path=path, is_shown_here=not link)
        daemon = DaemonProcess(config, named, log_path=run_dir / "logs" / "daemon.log")
        daemons.append(daemon)
        clean_ups.append(daemon.kill)
        os.environ[LINK_ENV] = str(daemon.link_path)
        agreed = adopt_manifest(
            config, daemon.manifest(), named, run_dir=run_dir, num_ranks=lambda _: world.num_ranks
        )
        if agreed.mode != config.mode:
            raise UserError(f"the swarm's mode is {agreed.mode}; start {trainer_of(agreed)} to join it")
        written_config(agreed, run_dir)
        agreed = replace(agreed, run_dir=str(run_dir))
        return Assignment(config=agreed, run_dir=run_dir, link_path=daemon.link_path)

    return on_rank_zero(prepare), (daemons[0] if daemons else None)
