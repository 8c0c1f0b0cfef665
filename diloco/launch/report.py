"""The report at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from diloco.errors import print_note
from diloco.launch.plot import absences, plot, sessions_of
from diloco.launch.results import Losses, Rewards, decimal
from diloco.launch.reward_plot import plot_rewards
from diloco.launch.run_facts import disagreements, facts_of, waited_s
from diloco.options.flags import TrainConfig
from diloco.train.metrics_file import Record, Tail, size
from diloco.train.run_dir import METRICS
from peers.core.schedule import AS_LONG_AS_THE_ROUND
from peers.monitor.verdict import Verdict, verdict_of

_SHOWN_SHARE = 0.0005


@dataclass(frozen=True)
class Summary:
    """The figures of a run, from the records of all its peers. None means not recorded."""

    results: Losses | Rewards
    duration_s: float
    sent_bytes: int
    num_epochs: int
    num_peers: int
    num_full_epochs: int
    """Epochs to which all peers contributed."""
    blocked_share: float | None
    """Fraction of the time for which training was blocked, by rounds and by waiting for other peers."""
    waited_share: float
    """The part of `blocked_share` spent waiting for the last peer to be ready."""
    verdict: Verdict
    lost: Sequence[str]
    """Sentences on the peers that were lost, and when."""
    disagreements: Mapping[int, Mapping[str, str]]
    """Epoch -> peer -> anchor digest, for epochs after which peers had different anchors."""

    @property
    def agrees(self) -> bool:
        """Whether there was at least one epoch, and all peers had identical anchors after each."""
        return self.num_epochs > 0 and not self.disagreements


def summarise_run(config: TrainConfig, records_of: Mapping[str, Sequence[Record]]) -> Summary:
    """`records_of` holds each peer's records in the order of writing."""
    batch, hv = config.total_batch_size, config.hv
    # The records of GRPO steps contain the duration of a step, so the number of tokens is not needed.
    is_grpo = config.mode == "grpo"
    return summarise(
        records_of,
        tokens_per_step=0 if is_grpo else batch * config.seq_length,
        completions_per_step=batch if is_grpo else 0,
        compression=hv.compression,
        overlaps=hv.overlap_steps == AS_LONG_AS_THE_ROUND,
    )


def summarise(
    records_of: Mapping[str, Sequence[Record]],
    *,
    tokens_per_step: int = 0,
    completions_per_step: int = 0,
    compression: str = "fp32",
    overlaps: bool = False,
) -> Summary:
    """`overlaps`: whether training went on during every round."""
    records = [record for peer in records_of.values() for record in peer]
    epochs = [record for record in records if record.get("kind") == "epoch"]
    times = [_time(record) for record in records if "time" in record]
    duration_s = max(times) - min(times) if times else 0.0
    blocked = [float(record["blocked_s"]) for record in epochs if "blocked_s" in record]
    waited = [waited_s(record) for record in epochs if "blocked_s" in record]
    whole_s = duration_s * len(records_of)
    blocked_share = sum(blocked) / whole_s if blocked and whole_s > 0 else None
    waited_share = sum(waited) / whole_s if blocked_share is not None else 0.0
    return Summary(
        results=Rewards.of(records, completions_per_step)
        if completions_per_step
        else Losses.of(records, tokens_per_step),
        duration_s=duration_s,
        sent_bytes=sum(int(record.get("sent_bytes") or 0) for record in epochs),
        num_epochs=len({record["epoch"] for record in epochs}),
        num_peers=len(records_of),
        num_full_epochs=len(
            {record["epoch"] for record in epochs if len(record.get("contributors") or ()) >= len(records_of)}
        ),
        blocked_share=blocked_share,
        waited_share=waited_share,
        verdict=verdict_of(
            facts_of(records_of, tokens_per_step=tokens_per_step, compression=compression, overlaps=overlaps)
        ),
        lost=lost_peers(records_of),
        disagreements=disagreements(records_of),
    )


def report_text(summary: Summary, paths: Mapping[str, Path], *, in_swarm: bool = True) -> str:
    """The text of the report."""
    *results, trained = summary.results.lines()
    together = ", all peers together" if summary.num_peers > 1 else ""
    lines = [
        f"verdict                 {summary.verdict.text}",
        *(f"  and                   {one}" for one in summary.verdict.more),
        *results,
        f"{trained} in {summary.duration_s:.0f} s{together}",
        *(f"lost                    {one}" for one in summary.lost),
        *(_averaging_lines(summary) if in_swarm else []),
        *_path_lines(paths),
    ]
    return "\n".join(lines)


def text_if_already_complete(
    config: TrainConfig, records_of: Mapping[str, Sequence[Record]], paths: Mapping[str, Path]
) -> str:
    """The text that replaces the report if the run was resumed from its last step; empty if it has trained."""
    records = [record for peer in records_of.values() for record in peer]
    resumed_at = [int(record["step"]) for record in records if record.get("event") == "start"]
    has_trained = any(record.get("kind") in ("step", "epoch") for record in records)
    end = config.end_step
    if has_trained or min(resumed_at, default=0) < end:
        return ""
    flag = "--max-steps" if end < config.total_steps else "--total-steps"
    text = f"the run is complete already: step {end} of {end}. To go on, raise {flag}"
    return "\n".join([text, *_path_lines(paths)])


def baseline_line(alone: Summary, swarm: Summary) -> str:
    """The line of the report that compares the swarm with the same pretraining without a swarm."""
    assert isinstance(alone.results, Losses) and isinstance(swarm.results, Losses)
    return (
        f"alone                   {decimal(alone.results.bits_after)} bits per byte after as many steps as each "
        f"peer's, in {alone.duration_s:.0f} s; the swarm {decimal(swarm.results.bits_after)}, in "
        f"{swarm.duration_s:.0f} s for {swarm.num_peers} times the tokens"
    )


def plot_run(
    config: TrainConfig,
    records_of: Mapping[str, Sequence[Record]],
    run_dir: Path,
    title: str,
    alone: Sequence[Record] = (),
) -> dict[str, Path]:
    """Write the run's plot. Returns its path, with its name in the report as the key.

    A plot that cannot be written, for instance to a full disk, is a note, so that the report is printed without it.
    """
    is_grpo = config.mode == "grpo"
    path = run_dir / ("reward.png" if is_grpo else "loss.png")
    try:
        if is_grpo:
            plot_rewards(records_of, path, title=title)
        else:
            plot(records_of, path, title=title, alone=alone)
    except OSError as error:
        print_note(f"the plot {path} cannot be written: {error.strerror}")
        return {}
    return {"plot of the rewards" if is_grpo else "plot of the losses": path}


def report(config: TrainConfig, run_dir: Path, *, in_swarm: bool) -> None:
    """Print the report of one trainer, from its metrics, and write its plot."""
    records_of = {"this peer": Tail(run_dir / METRICS).read()}
    model = {"model": run_dir / "model"} if (run_dir / "model").is_dir() else {}
    if text := text_if_already_complete(config, records_of, {**model, "everything": run_dir}):
        print(text, flush=True)
        return
    paths = {**model, **plot_run(config, records_of, run_dir, config.project), "everything": run_dir}
    print(report_text(summarise_run(config, records_of), paths, in_swarm=in_swarm), flush=True)


def lost_peers(records_of: Mapping[str, Sequence[Record]]) -> list[str]:
    """Sentences on which peers were lost, how long after the start of the run, and when they returned."""
    times = [_time(record) for records in records_of.values() for record in records if "time" in record]
    began_at, ended_at = min(times, default=0.0), max(times, default=0.0)
    return [
        f"{peer}, {lost_at - began_at:.0f} s into training, "
        + (f"back {returned_at - lost_at:.0f} s later" if returned_at < ended_at else "and not back")
        for peer, records in records_of.items()
        for lost_at, returned_at in absences(sessions_of(records), ended_at)
    ]


def shown_path(path: Path) -> Path:
    """The path relative to the current directory, if it is below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _path_lines(paths: Mapping[str, Path]) -> list[str]:
    return [f"{name:<23} {shown_path(path)}" for name, path in paths.items()]


def _averaging_lines(summary: Summary) -> list[str]:
    return [
        f"averaged                {_epochs_text(summary)}, {size(summary.sent_bytes)} sent",
        *_blocked_lines(summary),
        agreement_line(summary.num_epochs, summary.disagreements, num_peers=summary.num_peers),
    ]


def _epochs_text(summary: Summary) -> str:
    if summary.num_peers == 1:
        return f"{summary.num_epochs} epoch{'' if summary.num_epochs == 1 else 's'}"
    if summary.num_full_epochs == summary.num_epochs:
        return f"{summary.num_epochs} epochs by all {summary.num_peers} peers"
    return f"{summary.num_epochs} epochs, {summary.num_full_epochs} of them by all {summary.num_peers} peers"


def _blocked_lines(summary: Summary) -> list[str]:
    if summary.blocked_share is None:
        return []
    line = f"stood still             {summary.blocked_share:.1%} of the time"
    if summary.waited_share >= _SHOWN_SHARE:
        rounds_share = summary.blocked_share - summary.waited_share
        line += f": {rounds_share:.1%} for averaging, {summary.waited_share:.1%} waiting for the slowest peer"
    else:
        line += ", for averaging"
    return [line]


def agreement_line(num_epochs: int, disagreements: Mapping[int, Mapping[str, str]], *, num_peers: int) -> str:
    """The line of the report on whether the `num_peers` peers whose records are known had bit-identical anchors."""
    if not num_epochs:
        return "PROBLEM: no epoch was completed, so nothing was averaged"
    if num_peers == 1:
        # The records of the other peers are not here, but a commit has the signatures of all its contributors.
        return "agreement               the contributors of every epoch have signed the same bits"
    if not disagreements:
        return "agreement               all peers held bit-identical anchors after every epoch"
    epoch, digests = next(iter(disagreements.items()))
    held = ", ".join(f"{peer} {digest[:12]}" for peer, digest in digests.items())
    return (
        f"PROBLEM: anchors differed after {len(disagreements)} of {num_epochs} epochs; "
        f"first after epoch {epoch}: {held}"
    )


def _time(record: Record) -> float:
    return float(record.get("time") or 0.0)
