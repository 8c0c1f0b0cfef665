"""Plots a run of reinforcement learning: each peer's mean reward, and the evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from diloco.launch.plot import smoothed
from diloco.launch.results import rewards_by_step
from diloco.options.plot_file import save_figure
from diloco.train.metrics_file import Record

_SMOOTHED_STEPS = 10
_INCHES = (8.0, 4.5)
_DPI = 120


def plot_rewards(records_of: Mapping[str, Sequence[Record]], path: Path, *, title: str) -> None:
    """Write a PNG with each peer's mean reward and the evaluations over the inner steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")
    axes = figure.add_subplot()
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
    save_figure(figure, path)
