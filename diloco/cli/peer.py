"""`diloco peer`: one peer of a swarm: its daemon in this process, its workers below it."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from diloco.cli.discovery import discovered
from diloco.cli.machine_recipes import Choice, chosen
from diloco.errors import UserError
from diloco.launch.workplace import (
    check_not_refused,
    path_with_this_python,
    tell_in,
    worker_command,
    worker_log,
)
from diloco.options.checks import at_least, whole
from diloco.options.extras import check_extras
from diloco.options.sources import ValueSource
from diloco.options.trainer import (
    ConfigPath,
    Scalar,
    TrainConfig,
    TrainFlags,
    for_mode,
    remarks,
    settled,
    trainer_of,
)
from diloco.rl.gpus import gpus_for_ranks
from diloco.train.devices import num_ranks, this_machine
from diloco.train.run_dir import run_dir_of

if TYPE_CHECKING:
    from peers.daemon.supervisor import WorkerCommand

_SOURCE = ValueSource()
NOT_KEPT = (
    "no checkpoints are saved: if all peers stop before the end, the progress of the run is lost; "
    "--ckpt.interval 100 saves one every 100 steps"
)

app = App(name="peer", config=[_SOURCE])

RanksFlag = Annotated[str, Parameter(name="--nproc-per-node", group="Training")]
PeersHereFlag = Annotated[
    int, Parameter(name="--peers-here", group="Swarm", converter=whole, validator=at_least(1))
]
DiscoverFlag = Annotated[bool, Parameter(name="--discover", group="Swarm")]
RoleFlag = Annotated[Literal["train", "rollout"], Parameter(name="--role", group="GRPO")]
WorkerFlag = Annotated[str | None, Parameter(name="--worker", group="Training", metavar="COMMAND")]


@app.default
def peer(
    train: TrainFlags = TrainConfig(),  # noqa: B008
    *,
    config: ConfigPath = None,
    nproc_per_node: RanksFlag = "auto",
    peers_here: PeersHereFlag = 1,
    discover: DiscoverFlag = False,
    role: RoleFlag = "train",
    worker: WorkerFlag = None,
) -> int:
    """Join a swarm, train in it, and leave it when the training is done.

    The weights, and all settings of the run that are not given here, come from the swarm. The first peer chooses a
    model and batch size that suit its machine, or takes the model of --path-model; a preset includes batch size and
    sequence length. The same command starts a peer, joins a running swarm, and rejoins it after a crash.

    Parameters
    ----------
    config: Path
        A TOML file of these flags, with sections [hv] and [ckpt]; flags beat it.
    nproc_per_node: str
        Training processes of this peer: a number, or `auto` for one per GPU (one without GPUs).
    peers_here: int
        Number of peers on this machine, this one included; they share its cores and memory.
    discover: bool
        Find the run on this network, in place of --initial-peers, by asking over UDP multicast; and answer who asks.
    role: str
        `rollout`: generate completions for the peers of the run that train with --rollout peers, and do not train.
    worker: str
        Your own program with `Diloco(model)` in it, such as "python loop.py"; default: the trainer of diloco.
    """
    from diloco.cli.interrupts import run_interruptible
    from diloco.data.batches import check_data
    from diloco.doctor.before_start import check_choices, check_ports_free, check_room
    from diloco.launch.phase_file import write_phase
    from diloco.launch.swarm_config import daemon_config, state_dir
    from peers.protocol.reports import Phase

    if role == "rollout":
        from diloco.cli.rollout_peer import rollout_peer

        if discover and not train.hv.initial_peers:
            train = replace(train, hv=replace(train.hv, initial_peers=discovered(train.hv)))
        return rollout_peer(train, _SOURCE.named, num_peers=peers_here)
    machine = this_machine(os.environ, train.device, num_peers=peers_here)
    ranks = num_ranks(nproc_per_node, train.device, gpus_for_ranks(train, machine.num_gpus))
    for remark in remarks(train, _SOURCE.named):
        print(f"note: {remark}", file=sys.stderr, flush=True)
    program, train = program_of(worker), for_mode(train, _SOURCE.named)
    # A program of the user's own brings its own model.
    choice = Choice(config=train) if program else chosen(train, _SOURCE.named, machine, num_ranks=ranks)
    train = settled(choice.config, _SOURCE.named, num_ranks=ranks)
    if program and (unread := unread_by_a_program(_SOURCE.named)):
        print(f"note: {unread}", file=sys.stderr, flush=True)
    if discover and not train.hv.initial_peers:
        train = replace(train, hv=replace(train.hv, initial_peers=discovered(train.hv)))
    is_first = not train.hv.initial_peers
    if not program:
        check_choices(train, machine, is_settled=is_first)
    # Fields that are not named come from the swarm.
    if not program and "dataset_name_or_path" in _SOURCE.named:
        check_data(train if is_first or "seq_length" in _SOURCE.named else replace(train, seq_length=2))
    fields = {
        **daemon_config(train, _SOURCE.named, has_own_worker=bool(program)),
        "discover": discover,
    }
    # Ports and memory taken by other peers here are not free any more.
    alone = replace(machine, num_peers=1)
    check_room(train, alone, state_dir(), num_ranks=ranks, is_settled=is_first and not program)
    check_ports_free(train.hv)
    with run_dir_of(train) as run_dir:
        print(f"run directory: {run_dir}", flush=True)
        write_phase(run_dir, Phase(name="starting", detail="loading torch and hivemind"))
        # Takes seconds: only after the arguments have been checked, and before the event loop, which would not notice
        # a signal.
        import peers.daemon.main  # noqa: F401
        from peers.net.dht.node import load_hivemind

        load_hivemind()
        if not program and "path_model" in _SOURCE.named:
            from diloco.doctor.speed import tell_if_slow

            tell_if_slow(train, ranks, num_peers=peers_here)
        choice = replace(choice, config=train)
        workplace = Workplace(choice, _SOURCE.named, run_dir, ranks, program, num_peers=peers_here)
        return run_interruptible(_live(workplace, fields))


def program_of(worker: str | None) -> tuple[str, ...]:
    """The words of --worker; nothing means the trainer. Raises UserError where it cannot be started."""
    if worker is None:
        return ()
    try:
        words = tuple(shlex.split(worker))
    except ValueError as error:
        raise UserError(f"--worker {worker}: {error}.") from error
    if not words or shutil.which(words[0], path=path_with_this_python()) is None:
        raise UserError(f"--worker {worker!r} names no program that is here to be started.")
    script = next((word for word in words if word.endswith(".py")), None)
    if script is not None and not Path(script).expanduser().exists():
        raise UserError(f"--worker {worker!r}: there is no {script} here.")
    return words


def unread_by_a_program(named: Collection[str]) -> str:
    """One sentence on the flags that only diloco's own trainer follows, if any were given."""
    # The outer step follows the inner optimizer.
    flags = [f"--{name.replace('_', '-')}" for name in sorted(named) if not name.startswith("hv.")]
    unread = [flag for flag in flags if flag not in ("--device", "--run-dir", "--optimizer")]
    return (
        f"{', '.join(unread)}: the program of --worker is not told, only diloco's own trainer."
        if unread
        else ""
    )


@dataclass
class Workplace:
    """How this peer's workers are started."""

    choice: Choice
    named: frozenset[str]
    run_dir: Path
    num_ranks: int
    program: tuple[str, ...] = ()
    """What the user trains with instead of the trainer."""
    num_peers: int = 1
    """Peers on this machine."""
    agreed: TrainConfig | None = None
    """What diloco's trainer trains, once the swarm has agreed on it."""

    def command(
        self, manifest: Mapping[str, Scalar], is_own: bool, world_rank: int, link_path: Path
    ) -> WorkerCommand:
        """The workers' command line, after writing the configuration that it names. `is_own`: this peer, and no other,
        has chosen the manifest.
        """
        from diloco.launch.swarm_config import adopted

        config = adopted(
            self.choice.config, manifest, self.named, run_dir=self.run_dir, num_ranks=self.num_ranks
        )
        if not self.program:
            check_extras(config)
            self.agreed = config
            print(self.choice.in_words(config, has_joined=not is_own), flush=True)
            if is_own and config.ckpt.interval is None:
                print(NOT_KEPT, flush=True)
        config = replace(config, run_dir=str(self.run_dir), hv=replace(config.hv, world_rank=world_rank))
        return worker_command(
            config,
            self.run_dir,
            link_path,
            module=trainer_of(config),
            program=self.program,
            num_ranks=self.num_ranks,
            num_peers=self.num_peers,
        )


async def _live(workplace: Workplace, fields: Mapping[str, Any]) -> int:
    from diloco.launch.live import Shown, show, show_log, viewed
    from diloco.launch.phase_file import write_phase
    from peers.daemon.config import DaemonConfig
    from peers.daemon.main import run_daemon

    tell_in(workplace.run_dir / "logs" / "daemon.log")
    shown = Shown("this peer", workplace.run_dir, since=time.time())
    # Only our trainers write metrics; a program of the user's own prints what it likes, we what this peer does.
    views = [show([shown], terminal=False if workplace.program else None)]
    if workplace.program:
        views.append(show_log(worker_log(workplace.run_dir)))
    async with contextlib.AsyncExitStack() as shown_meanwhile:
        for view in views:
            await shown_meanwhile.enter_async_context(viewed(view))
        code = await run_daemon(
            DaemonConfig(**fields),
            worker=workplace.command,
            on_phase=lambda phase: write_phase(workplace.run_dir, phase),
        )
    check_not_refused(code, workplace.run_dir)
    if workplace.agreed is None:
        print(f"training is done; its logs are in {workplace.run_dir}", flush=True)
        return 0
    from diloco.launch.report import report

    print("training is done", flush=True)
    report(workplace.agreed, workplace.run_dir, in_swarm=True)
    return 0
