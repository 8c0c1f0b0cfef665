"""The report at the end of a GRPO run, and the plot of its rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from diloco.launch.daemon_process import wants_swarm
from diloco.launch.plot import smoothed
from diloco.launch.report import agreement_line, lost_lines, lost_peers, seen_from_here, verdict_lines
from diloco.launch.run_facts import disagreements, facts_of
from diloco.options.flags import TrainConfig
from diloco.train.metrics_file import Record, Tail, figure, size
from diloco.train.run_dir import METRICS
from peers.monitor.verdict import Verdict, verdict_of

_SMOOTHED_STEPS = 10
# Fraction of the steps that count as the beginning of a run, and as its end.
_EDGE = 0.1
_PLOT_INCHES = (8.0, 4.5)
_PLOT_DPI = 120


@dataclass(frozen=True)
class RewardSummary:
    """The figures of a run, from the records of all its peers. None means not recorded."""

    reward_before: float | None
    """Mean over all peers and the first tenth of the steps."""
    reward_after: float | None
    evaluations: tuple[Record, ...]
    completions: int
    duration_s: float
    sent_bytes: int
    num_epochs: int
    num_peers: int
    logp_difference: float | None
    """The largest difference between a server's and a trainer's log-probabilities."""
    verdict: Verdict
    lost: Sequence[str]
    """Sentences on the peers that were lost, and when."""
    disagreements: Mapping[int, Mapping[str, str]]

    @property
    def agrees(self) -> bool:
        """Whether there was at least one epoch, and all peers had identical anchors after each."""
        return self.num_epochs > 0 and not self.disagreements


def summarise(
    records_of: Mapping[str, Sequence[Record]], *, completions_per_step: int, compression: str = "fp32"
) -> RewardSummary:
    """`records_of` holds each peer's records in the order of writing."""
    records = [record for peer in records_of.values() for record in peer]
    epochs = [record for record in records if record.get("kind") == "epoch"]
    evaluations = [record for record in records if record.get("kind") == "eval" and "reward" in record]
    times = [float(record["time"]) for record in records if "time" in record]
    differences = [
        float(r["logp_difference_max"]) for r in records if r.get("logp_difference_max") is not None
    ]
    rewards = rewards_by_step(records)
    edge = max(1, int(len(rewards) * _EDGE))
    return RewardSummary(
        reward_before=_mean([reward for _, reward in rewards[:edge]]),
        reward_after=_mean([reward for _, reward in rewards[-edge:]]),
        evaluations=tuple(sorted(evaluations, key=lambda record: int(record.get("step") or 0))),
        completions=completions_per_step * sum(record.get("kind") == "step" for record in records),
        duration_s=max(times) - min(times) if times else 0.0,
        sent_bytes=sum(int(record.get("sent_bytes") or 0) for record in epochs),
        num_epochs=len({record["epoch"] for record in epochs}),
        num_peers=len(records_of),
        logp_difference=max(differences, default=None),
        # 0: the records of GRPO steps have their duration.
        verdict=verdict_of(facts_of(records_of, tokens_per_step=0, compression=compression)),
        lost=lost_peers(records_of),
        disagreements=disagreements(records_of),
    )


def rewards_by_step(records: Sequence[Record]) -> list[tuple[int, float]]:
    """(step, mean reward over all peers), in the order of steps."""
    found: dict[int, list[float]] = {}
    for record in records:
        if record.get("kind") == "step" and record.get("reward") is not None:
            found.setdefault(int(record["step"]), []).append(float(record["reward"]))
    return [(step, sum(values) / len(values)) for step, values in sorted(found.items())]


def text_of(summary: RewardSummary, paths: Mapping[str, Path], *, in_swarm: bool = True) -> str:
    """The text of the report."""
    lines = [
        *verdict_lines(summary.verdict),
        "mean reward of completions",
        f"  first tenth of steps  {_decimal(summary.reward_before)}",
        f"  last tenth of steps   {_decimal(summary.reward_after)}",
        *_evaluation_lines(summary.evaluations),
        f"trained on              {figure(summary.completions)} completions in {summary.duration_s:.0f} s"
        + (", all peers together" if summary.num_peers > 1 else ""),
        *lost_lines(summary.lost),
    ]
    if summary.logp_difference is not None:
        lines.append(
            f"servers and trainers    log-probabilities differ by {summary.logp_difference:.1e} at most"
        )
    if in_swarm:
        peers = f"{summary.num_peers} peer{'' if summary.num_peers == 1 else 's'}"
        sent = f"{size(summary.sent_bytes)} sent"
        lines.append(f"averaged                {summary.num_epochs} epochs by {peers}, {sent}")
        lines.append(agreement_line(summary.num_epochs, summary.disagreements))
    lines += [f"{name:<23} {seen_from_here(path)}" for name, path in paths.items()]
    return "\n".join(lines)


def report(config: TrainConfig, run_dir: Path) -> None:
    """Print the report of a trainer that was started by hand, from its metrics, and write its plot."""
    records_of = {"this peer": Tail(run_dir / METRICS).read()}
    summary = summarise(
        records_of, completions_per_step=config.total_batch_size, compression=config.hv.compression
    )
    picture = run_dir / "reward.png"
    plot(records_of, picture, title=config.project)
    paths = {"model": run_dir / "model", "plot of the rewards": picture, "everything": run_dir}
    print(text_of(summary, paths, in_swarm=wants_swarm(config)), flush=True)


def plot(records_of: Mapping[str, Sequence[Record]], path: Path, *, title: str) -> None:
    """Write a PNG with each peer's mean reward and the evaluations over the inner steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    picture = Figure(figsize=_PLOT_INCHES, dpi=_PLOT_DPI, layout="constrained")
    FigureCanvasAgg(picture)
    axes = picture.add_subplot()
    for peer, records in records_of.items():
        rewards = rewards_by_step(records)
        if rewards:
            window = max(1, min(len(rewards) // 10, _SMOOTHED_STEPS))
            values = smoothed([reward for _, reward in rewards], window)
            axes.plot([step for step, _ in rewards], values, label=peer, linewidth=1.2)
    evaluations = [
        r for records in records_of.values() for r in records if r.get("kind") == "eval" and "reward" in r
    ]
    if evaluations:
        steps = [record["step"] for record in evaluations]
        axes.plot(steps, [record["reward"] for record in evaluations], "ko", label="held out", markersize=5)
    axes.set(title=title, xlabel="inner steps", ylabel="mean reward", ylim=(0.0, 1.0))
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    partial = path.with_suffix(".partial")
    picture.savefig(partial, format="png")
    partial.replace(path)


def _evaluation_lines(evaluations: Sequence[Record]) -> list[str]:
    lines = []
    for name, record in zip(("before", "after"), (*evaluations[:1], *evaluations[1:][-1:]), strict=False):
        passes = ", ".join(
            f"pass@{key.removeprefix('pass_at_')} {_decimal(value)}"
            for key, value in record.items()
            if key.startswith("pass_at_")
        )
        lines.append(f"held out, {name:<13} reward {_decimal(record['reward'])}, {passes}")
    return lines


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _decimal(value: float | None) -> str:
    return f"{value:.3f}" if value is not None else "not recorded"
