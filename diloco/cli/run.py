"""`diloco run`: runs a coordinator and several peers on this machine, with a live view and a final report."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from diloco.errors import UserError, print_note
from diloco.launch.history import History
from diloco.options.flags import CkptConfig, Count, Switch, Whole
from diloco.options.sources import ValueSource
from diloco.options.trainer import ConfigPath, TrainConfig, TrainFlags, notes_on_unused_flags
from diloco.output import lose_unwritable
from diloco.train.devices import check_gpus_listed, needs_two_gpus, this_machine
from diloco.train.metrics_file import Record
from diloco.train.run_dir import METRICS, locked, run_dir_of
from peers.core.weights import Aggregation
from peers.protocol.aggregation import Rule

if TYPE_CHECKING:
    from diloco.launch.local_swarm import LocalSwarm

_SOURCE = ValueSource()
# Not the name of a run directory's lock, since that directory may be the one of the checkpoints.
_SAVING_LOCK = "saving.lock"

app = App(name="run", config=[_SOURCE])

OfSwarm = Parameter(group="Swarm")


@app.default
def run(
    train: TrainFlags = TrainConfig(),  # noqa: B008
    *,
    peers: Annotated[Count, OfSwarm] = 2,
    lose_peer: Annotated[Whole | None, OfSwarm] = None,
    baseline: Annotated[Switch, OfSwarm] = False,
    config: ConfigPath = None,
) -> int:
    """Train one model with several peers on this machine.

    Without --path-model, it chooses a model and batch size that suit this machine, and prints them. Without a dataset,
    it trains on the source code of Python's standard library. It ends with a report; the exit code is 1 if the peers'
    weights differed after any epoch.

    Parameters
    ----------
    peers: int
        Number of peers.
    lose_peer: int
        World rank of a peer to kill half-way and restart.
    baseline: bool
        Afterwards train a single peer for as many steps, and compare the results.
    """
    from diloco.cli.interrupts import run_interruptible
    from diloco.cli.machine_recipes import settled
    from diloco.data.batches import check_data
    from diloco.doctor.before_start import check_choices, check_memory_and_disk
    from diloco.launch.swarm_config import state_dir

    lose_unwritable("stdout")
    if lose_peer is not None and lose_peer >= peers:
        raise UserError(
            f"--lose-peer {lose_peer}: with --peers {peers} the highest world rank is {peers - 1}."
        )
    if baseline and train.mode == "grpo":
        raise UserError("--baseline is for pretraining: leave it out with --mode grpo.")
    _check_enough_peers(train.hv.aggregation, peers)
    for note in notes_on_unused_flags(train, _SOURCE.named):
        print_note(note)
    machine = this_machine(os.environ, train.device, num_peers=peers)
    check_gpus_listed(os.environ, train.device, machine.gpus)
    _check_enough_gpus(train, machine.num_gpus, peers)
    choice = settled(train, _SOURCE.named, machine)
    train = choice.config
    check_choices(train, machine)
    check_memory_and_disk(train, machine, state_dir())
    if "dataset_name_or_path" in _SOURCE.named:
        check_data(train)
    named = _SOURCE.named | choice.fields | {"per_device_train_batch_size"}
    with run_dir_of(train) as run_dir, _own_checkpoints(train.ckpt):
        if any(run_dir.glob(f"peer-*/{METRICS}")) and train.ckpt.resume is None:
            raise UserError(f"--run-dir {run_dir} already holds a run; use another directory, or remove it.")
        return run_interruptible(
            _Run(
                train, named, run_dir, peers, machine.gpus, lose_peer, baseline, choice.in_words(train)
            ).run()
        )


@contextlib.contextmanager
def _own_checkpoints(ckpt: CkptConfig) -> Iterator[None]:
    """While the block runs, no other `diloco run` may save in the directory of --ckpt.path.

    Raises UserError if another one does, or if a new run would overwrite the checkpoints of an earlier one.
    """
    if ckpt.interval is None or "://" in ckpt.path:
        yield
        return
    path = Path(ckpt.path).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--ckpt.path {path} cannot be written to: {error.strerror}. Name another place, or leave out "
            "--ckpt.interval to save nothing."
        ) from error
    with locked(path / _SAVING_LOCK, "--ckpt.path"):
        if ckpt.resume is None and any(path.glob("model_step_*")):
            raise UserError(
                f"{path} already holds checkpoints, which this run would overwrite. Resume from them with "
                "--ckpt.resume auto, or choose another directory with --ckpt.path."
            )
        yield


def _check_enough_peers(rule: Rule, num_peers: int) -> None:
    """Raise UserError if there are fewer peers than the rule needs: they would wait forever for others."""
    needed = Aggregation(rule=rule).least_group
    if num_peers < needed:
        raise UserError(f"--hv.aggregation {rule} needs {needed} or more peers: use --peers {needed}.")


def _check_enough_gpus(train: TrainConfig, num_gpus: int, num_peers: int) -> None:
    """Raise UserError if the peers' vLLM servers would have no GPU."""
    if needs_two_gpus(train) and 0 < num_gpus < 2 * num_peers:
        raise UserError(
            f"{num_peers} peers with a vLLM server each need {2 * num_peers} GPUs, two each, but this machine has "
            f"{num_gpus}; use fewer --peers, name the servers' GPU with --grpo.vllm-gpu, or use --rollout "
            "hf, which needs no servers"
        )


@dataclass
class _Run:
    config: TrainConfig
    named: frozenset[str]
    run_dir: Path
    num_peers: int
    gpus: tuple[str, ...]
    lose_peer: int | None
    has_baseline: bool
    description: str
    """The model and its training, in one line."""
    histories: dict[str, History] = field(default_factory=dict)
    """By peer."""
    run_dirs: list[Path] = field(default_factory=list)

    async def run(self) -> int:
        import asyncio

        from diloco.launch.equal_models import link_equal_weights
        from diloco.launch.live import running_view, show
        from diloco.launch.local_swarm import LocalSwarm

        print(f"run directory: {self.run_dir}", flush=True)
        _say(f"each peer {self.description}")
        peers = f"{self.num_peers} peer{'' if self.num_peers == 1 else 's'}"
        _say(f"starting a coordinator and {peers}: some seconds, and half a minute the first time")
        swarm = LocalSwarm(self.config, self.named, self.run_dir, self.num_peers, _say, self.gpus)
        self.histories = {peer.name: History() for peer in swarm.rows}
        self.run_dirs = [peer.run_dir for peer in swarm.rows]
        try:
            async with running_view(
                show(swarm.rows, on_records=lambda i, new: self._received(swarm, i, new))
            ):
                await swarm.run()
        except asyncio.CancelledError:
            step = max(_last_step(records) for records in self.records.values())
            _say(f"stopped at step {step} of {self.config.end_step}; everything is in {self.run_dir}")
            raise
        code = self._report()
        await asyncio.to_thread(link_equal_weights, self.run_dirs)
        if self.has_baseline and code is not None:
            await self._compare()
        return code or 0

    async def _compare(self) -> None:
        """Train the baseline and print its results. Called after the report, which must not depend on the baseline."""
        from diloco.launch.baseline import train_alone
        from diloco.launch.report import baseline_line, plot_run

        _say("training a single peer for as many steps, to compare; Ctrl-C skips this")
        alone = await train_alone(self.config, self.named, self.run_dir, self.num_peers, self.gpus)
        plot_run(self.config, self.records, self.run_dir, self._title, alone)
        print(baseline_line(alone, self.records), flush=True)

    def _received(self, swarm: LocalSwarm, index: int, new: Sequence[Record]) -> None:
        """Record a peer's progress, and kill the peer of --lose-peer when it is half-way."""
        peer = swarm.peers[index]
        self.histories[peer.row.name].add(new)
        peer.supervisor.restarts.progressed()
        step = _last_step(new)
        if self.lose_peer == peer.world_rank and 2 * step >= self.config.end_step:
            self.lose_peer = None
            num_killed = peer.lose()
            _say(
                f"killed {peer.row.name} (SIGKILL to its {num_killed} processes) "
                f"at step {step} of {self.config.end_step}"
            )

    def _report(self) -> int | None:
        """Print the report. Returns the exit code; None if the run was complete already."""
        from diloco.launch.report import plot_run, print_report, report_of, text_if_already_complete

        models = [path for own in self.run_dirs if (path := own / "model").is_dir()]
        paths = {"model": models[0]} if models else {}
        if self.config.ckpt.interval is not None and "://" not in self.config.ckpt.path:
            paths["checkpoints"] = Path(self.config.ckpt.path).expanduser().absolute()
        if text := text_if_already_complete(self.config, self.records):
            print_report(text, {**paths, "everything": self.run_dir})
            return None
        text, agrees = report_of(self.config, self.records)
        paths |= plot_run(self.config, self.records, self.run_dir, self._title)
        print_report(text, {**paths, "everything": self.run_dir})
        return 0 if agrees else 1

    @property
    def records(self) -> dict[str, list[Record]]:
        """By peer, what its history has kept."""
        return {peer: history.records for peer, history in self.histories.items()}

    @property
    def _title(self) -> str:
        return f"{self.config.project}: {self.num_peers} peers"


def _last_step(records: Sequence[Record]) -> int:
    return max((int(record["step"]) for record in records if record.get("kind") == "step"), default=0)


def _say(text: str) -> None:
    print(f"--- {text}", flush=True)
