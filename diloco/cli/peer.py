"""`diloco peer`: runs one peer of a swarm: the daemon in this process, and the workers as child processes."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from diloco.cli.interrupts import run_with_hivemind
from diloco.cli.machine_recipes import Choice, own_ranks, settled
from diloco.errors import UserError, print_note
from diloco.launch.peer_workers import (
    log_and_print,
    path_with_this_python,
    worker_command,
    worker_log,
)
from diloco.options.extras import check_extras
from diloco.options.flags import Count
from diloco.options.sources import ValueSource
from diloco.options.trainer import (
    ConfigPath,
    Scalar,
    TrainConfig,
    TrainFlags,
    flag_of,
    notes_on_unused_flags,
    trainer_of,
)
from diloco.output import lose_unwritable
from diloco.train.devices import gpus_for_ranks, num_ranks, this_machine
from diloco.train.run_dir import run_dir_of

if TYPE_CHECKING:
    from peers.daemon.supervisor import WorkerCommand

_SOURCE = ValueSource()
NO_CHECKPOINTS = (
    "no checkpoints are saved: if all peers stop before the end, the progress of the run is lost; "
    "--ckpt.interval 100 saves one every 100 steps"
)

app = App(name="peer", config=[_SOURCE])

RanksFlag = Annotated[
    str,
    Parameter(
        name="--nproc-per-node",
        group="Training",
        help="Training processes of this peer: a number, or `auto` for one per GPU (one without GPUs).",
    ),
]
PeersHereFlag = Annotated[
    Count,
    Parameter(
        name="--peers-here",
        group="Swarm",
        help="Number of peers on this machine, this one included; they share its cores and memory.",
    ),
]
RoleFlag = Annotated[
    Literal["train", "rollout"],
    Parameter(
        name="--role",
        group="GRPO",
        help="`rollout`: do not train, but generate completions for the peers of the run that have --rollout peers.",
    ),
]
WorkerFlag = Annotated[
    str | None,
    Parameter(
        name="--worker",
        group="Training",
        metavar="COMMAND",
        help='Your own training program, which calls `Diloco(model)`, such as "python loop.py"; default: diloco\'s '
        "trainer.",
    ),
]


@app.default
def peer(
    train: TrainFlags = TrainConfig(),  # noqa: B008
    *,
    config: ConfigPath = None,
    nproc_per_node: RanksFlag = "auto",
    peers_here: PeersHereFlag = 1,
    role: RoleFlag = "train",
    worker: WorkerFlag = None,
) -> int:
    """Join a swarm, train in it, and leave it when the training is done.

    The weights, and all settings of the run that are not given here, come from the swarm. The first peer uses the
    model of --path-model, or chooses a model and batch size that suit its machine. Each preset except 1b brings its own
    batch size, sequence length, rates and number of steps, unless --total-batch-size is given. The same command starts
    a peer, joins a running swarm, and rejoins it after a crash.
    """
    from diloco.data.batches import check_data
    from diloco.doctor.before_start import check_choices, check_memory_and_disk, check_ports_free
    from diloco.launch.phase_file import write_phase
    from diloco.launch.swarm_config import daemon_config, state_dir
    from peers.protocol.reports import Phase

    lose_unwritable("stdout")
    if role == "rollout":
        from diloco.cli.rollout_peer import rollout_peer

        return rollout_peer(train, _SOURCE.named, num_peers=peers_here)
    machine = this_machine(os.environ, train.device, num_peers=peers_here)
    for note in notes_on_unused_flags(train, _SOURCE.named):
        print_note(note)
    program = parse_worker(worker)
    # How the user's own program divides its batch among its ranks is its own matter.
    ranks = own_ranks(train, () if program else _SOURCE.named, nproc_per_node, machine.num_gpus)
    choice = settled(train, _SOURCE.named, None if program else machine, num_ranks=1 if program else ranks)
    train = choice.config
    if program and (note := note_on_ignored_flags(_SOURCE.named)):
        print_note(note)
    is_first = not train.hv.initial_peers
    if not program:
        check_choices(train, machine, is_settled=is_first)
    # Settings that the user has not set come from the swarm, so only those that the user has set are checked.
    if not program and "dataset_name_or_path" in _SOURCE.named:
        check_data(train if is_first or "seq_length" in _SOURCE.named else replace(train, seq_length=2))
    fields = daemon_config(train, _SOURCE.named, has_own_worker=bool(program))
    # The other peers on this machine may already use their memory, so only this one is counted.
    one_peer = replace(machine, num_peers=1)
    is_settled = is_first and not program
    check_memory_and_disk(
        train, one_peer, state_dir(), named=_SOURCE.named, num_ranks=ranks, is_settled=is_settled
    )
    check_ports_free(train.hv)
    with run_dir_of(train) as run_dir:
        print(f"run directory: {run_dir}", flush=True)
        write_phase(run_dir, Phase(name="starting", detail="loading torch and hivemind"))
        # This import takes seconds. It follows the checks of the arguments, so that they fail fast, and precedes the
        # event loop, which could not handle signals meanwhile.
        import peers.daemon.main  # noqa: F401

        workers = WorkerSetup(
            choice,
            _SOURCE.named,
            run_dir,
            nproc_per_node,
            machine.num_gpus,
            program,
            num_peers=peers_here,
        )
        return run_with_hivemind(_run_peer(workers, fields))


def parse_worker(worker: str | None) -> tuple[str, ...]:
    """The words of --worker; empty without the flag. Raises UserError for a program that cannot be started."""
    if worker is None:
        return ()
    try:
        words = tuple(shlex.split(worker))
    except ValueError as error:
        raise UserError(f"--worker {worker}: {error}.") from error
    if not words or shutil.which(words[0], path=path_with_this_python()) is None:
        raise UserError(f"--worker {worker!r} names no program that can be started on this machine.")
    # Only the word after `python`: others may be arguments, parts of a shell command, or names in another directory.
    is_python = re.fullmatch(r"python[\d.]*", Path(words[0]).name) is not None
    script = words[1] if is_python and len(words) > 1 else ""
    if script.endswith(".py") and not Path(script).expanduser().exists():
        raise UserError(f"--worker {worker!r}: the file {script} does not exist.")
    return words


def note_on_ignored_flags(named: Collection[str]) -> str:
    """One sentence on the given flags that have no effect with --worker; empty if there are none."""
    # The defaults of the outer step depend on the inner optimizer, so --optimizer has an effect.
    used = ("device", "run_dir", "optimizer")
    unused = [name for name in sorted(named) if not name.startswith("hv.") and name not in used]
    flags = ", ".join(map(flag_of, unused))
    return f"{flags}: no effect with --worker; only diloco's own trainer reads such flags." if flags else ""


@dataclass
class WorkerSetup:
    """The settings with which this peer's workers are started."""

    choice: Choice
    named: frozenset[str]
    run_dir: Path
    nproc_per_node: str
    """As in the flag."""
    num_gpus: int
    """Of this machine."""
    program: tuple[str, ...] = ()
    """The command of --worker; empty for diloco's trainer."""
    num_peers: int = 1
    """Peers on this machine."""
    adopted: TrainConfig | None = None
    """The configuration of diloco's trainer; None until the swarm's manifest is known, and with --worker."""

    def num_ranks(self, config: TrainConfig, *, divide_batch: bool = True) -> int:
        """The ranks that train by these settings of the run: a vLLM server takes a GPU, and they divide the batch."""
        num_gpus = gpus_for_ranks(config, self.num_gpus)
        batch_size = config.total_batch_size if divide_batch and not self.program else None
        return num_ranks(self.nproc_per_node, config.device, num_gpus, batch_size=batch_size)

    def command(
        self, manifest: Mapping[str, Scalar], is_own: bool, world_rank: int, link_path: Path
    ) -> WorkerCommand:
        """The workers' command line, after writing the configuration file that it names.

        `is_own`: the manifest is this peer's own proposal.
        """
        from diloco.launch.swarm_config import adopt_manifest

        config = adopt_manifest(
            self.choice.config,
            manifest,
            self.named,
            run_dir=self.run_dir,
            num_ranks=lambda agreed: 1 if self.program else self.num_ranks(agreed),
        )
        ranks = self.num_ranks(config)
        if not self.program:
            most = self.num_ranks(config, divide_batch=False)
            if ranks < most:
                print_note(
                    f"trains on {ranks} of the {most} GPUs that are there for it: the run's --total-batch-size is "
                    f"{config.total_batch_size}, which is not a multiple of {most}."
                )
            check_extras(config)
            self.adopted = config
            print(self.choice.in_words(config, has_joined=not is_own), flush=True)
            if is_own and config.ckpt.interval is None:
                print(NO_CHECKPOINTS, flush=True)
        config = replace(config, run_dir=str(self.run_dir), hv=replace(config.hv, world_rank=world_rank))
        return worker_command(
            config,
            self.run_dir,
            link_path,
            module=trainer_of(config),
            program=self.program,
            num_ranks=ranks,
            num_peers=self.num_peers,
        )


async def _run_peer(workers: WorkerSetup, fields: Mapping[str, Any]) -> int:
    from diloco.launch.live import PeerRow, running_view, show, show_log
    from diloco.launch.phase_file import write_phase
    from peers.daemon.config import DaemonConfig
    from peers.daemon.main import run_daemon

    log_and_print(workers.run_dir / "logs" / "daemon.log")
    row = PeerRow("this peer", workers.run_dir, since=time.time())
    # Only diloco's trainers write metrics. The output of the user's own program is printed as it is, so a table that
    # is redrawn in place would be disturbed.
    views = [show([row], terminal=False if workers.program else None)]
    if workers.program:
        views.append(show_log(worker_log(workers.run_dir)))
    async with contextlib.AsyncExitStack() as stack:
        for view in views:
            await stack.enter_async_context(running_view(view))
        await run_daemon(
            DaemonConfig(**fields),
            worker=workers.command,
            on_phase=lambda phase: write_phase(workers.run_dir, phase),
        )
    if workers.adopted is None:
        print(f"training is done; its logs are in {workers.run_dir}", flush=True)
        return 0
    from diloco.launch.report import report

    print("training is done", flush=True)
    report(workers.adopted, workers.run_dir, in_swarm=True)
    return 0
