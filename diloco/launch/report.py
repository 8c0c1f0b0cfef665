"""What came out of a run: the figures at its end, and the plot of its losses."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from diloco.train.metrics_file import Record, figure, size
from peers.core.defaults import SHARE_OF_EPOCH, overlap_steps_for

UNIFORM_BITS_PER_BYTE = 8.0
_SMOOTHED_STEPS = 20
_PLOT_INCHES = (8.0, 4.5)
_PLOT_DPI = 120


@dataclass(frozen=True)
class Summary:
    """The figures of a run, from the records of all its peers. None: it was not recorded."""

    bits_before: float | None
    bits_after: float | None
    unigram_bits: float | None
    eval_bytes: int | None
    tokens: int
    duration_s: float
    sent_bytes: int
    num_epochs: int
    num_peers: int
    num_full_epochs: int
    """Epochs that hold the work of all those peers."""
    still_share: float | None
    """Share of the time that trainings stood still, for rounds and for each other."""
    waited_share: float
    """What of it was spent until the last peer had come to its round."""
    overlap_advice: int | None
    """Steps that would hide a usual round, where that is worth it and known to be harmless."""
    disagreements: Mapping[int, Mapping[str, str]]
    """Epoch -> peer -> anchor digest, of epochs after which peers held different anchors."""

    @property
    def agrees(self) -> bool:
        """Whether there was an epoch, and all peers held equal bits after each."""
        return self.num_epochs > 0 and not self.disagreements


def summarise(records_of: Mapping[str, Sequence[Record]], *, tokens_per_step: int) -> Summary:
    """`records_of` holds each peer's records in the order written."""
    records = [record for peer in records_of.values() for record in peer]
    evaluations = sorted((r for r in records if r.get("kind") == "eval"), key=_time)
    epochs = [record for record in records if record.get("kind") == "epoch"]
    times = [_time(record) for record in records if "time" in record]
    last = evaluations[-1] if evaluations else {}
    duration_s = max(times) - min(times) if times else 0.0
    still = [float(record["blocked_s"]) for record in epochs if "blocked_s" in record]
    waited = [_waited(record) for record in epochs if "blocked_s" in record]
    whole_s = duration_s * len(records_of)
    still_share = sum(still) / whole_s if still and whole_s > 0 else None
    waited_share = sum(waited) / whole_s if still_share is not None else 0.0
    rounds = [seconds - waiting for seconds, waiting in zip(still, waited, strict=True)]
    return Summary(
        bits_before=evaluations[0].get("bits_per_byte") if evaluations else None,
        bits_after=last.get("bits_per_byte") if len(evaluations) > 1 else None,
        unigram_bits=last.get("unigram_bits_per_byte"),
        eval_bytes=last.get("eval_bytes"),
        tokens=tokens_per_step * sum(record.get("kind") == "step" for record in records),
        duration_s=duration_s,
        sent_bytes=sum(int(record.get("sent_bytes") or 0) for record in epochs),
        num_epochs=len({record["epoch"] for record in epochs}),
        num_peers=len(records_of),
        num_full_epochs=len(
            {record["epoch"] for record in epochs if len(record.get("contributors") or ()) >= len(records_of)}
        ),
        still_share=still_share,
        waited_share=waited_share,
        overlap_advice=_overlap_advice(records, rounds, (still_share or 0.0) - waited_share, tokens_per_step),
        disagreements=disagreements(records_of),
    )


def disagreements(records_of: Mapping[str, Sequence[Record]]) -> dict[int, dict[str, str]]:
    """Epochs for which peers recorded different anchor digests, and who recorded which."""
    digests: dict[int, dict[str, str]] = {}
    for peer, records in records_of.items():
        for record in records:
            if record.get("kind") == "epoch":
                digests.setdefault(record["epoch"], {})[peer] = str(record.get("anchor_digest"))
    return {epoch: by for epoch, by in sorted(digests.items()) if len(set(by.values())) > 1}


def text_of(summary: Summary, paths: Mapping[str, Path]) -> str:
    """The report, as it is printed."""
    held_out = f" ({figure(summary.eval_bytes)}B held out)" if summary.eval_bytes else ""
    lines = [
        f"bits per byte on validation{held_out}",
        f"  uniform               {UNIFORM_BITS_PER_BYTE:.3f}",
        f"  byte frequencies      {_bits(summary.unigram_bits)}",
        f"  before training       {_bits(summary.bits_before)}",
        f"  after training        {_bits(summary.bits_after)}",
        f"trained                 {figure(summary.tokens)} tokens in {summary.duration_s:.0f} s, all peers together",
        f"averaged                {_epochs(summary)}, {size(summary.sent_bytes)} sent",
        *_still(summary),
        told_agreement(summary.num_epochs, summary.disagreements),
        *(f"{name:<23} {seen_from_here(path)}" for name, path in paths.items()),
    ]
    return "\n".join(lines)


def plot(records_of: Mapping[str, Sequence[Record]], path: Path, *, tokens_per_step: int, title: str) -> None:
    """Write a PNG: each peer's training loss and the validation loss over the tokens a peer has trained."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    picture = Figure(figsize=_PLOT_INCHES, dpi=_PLOT_DPI, layout="constrained")
    FigureCanvasAgg(picture)
    axes = picture.add_subplot()
    for peer, records in records_of.items():
        steps = _measured(records, "step")
        if steps:
            window = max(1, min(len(steps) // 20, _SMOOTHED_STEPS))
            losses = smoothed([r["loss"] for r in steps], window)
            tokens = [r["step"] * tokens_per_step for r in steps]
            axes.plot(*with_gaps(tokens, losses, longest=tokens_per_step), label=peer, linewidth=1.2)
    evaluations = _measured([r for records in records_of.values() for r in records], "eval")
    if evaluations:
        axes.plot(
            [r["step"] * tokens_per_step for r in evaluations],
            [r["loss"] for r in evaluations],
            "ko",
            label="validation",
            markersize=5,
            zorder=3,
        )
    axes.set(title=title, xlabel="tokens trained by a peer", ylabel="loss (nats per token)")
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    partial = path.with_suffix(".partial")
    picture.savefig(partial, format="png")
    partial.replace(path)


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Each value's mean with those up to `window` - 1 before it."""
    means: list[float] = []
    total = 0.0
    for index, value in enumerate(values):
        total += value - (values[index - window] if index >= window else 0.0)
        means.append(total / min(index + 1, window))
    return means


def with_gaps(xs: Sequence[float], ys: Sequence[float], *, longest: float) -> tuple[list[float], list[float]]:
    """The points of a line that breaks off where x advances by more than `longest`: nothing is known of between."""
    points: list[tuple[float, float]] = []
    for x, y in zip(xs, ys, strict=True):
        if points and x - points[-1][0] > longest:
            points.append((x, math.nan))
        points.append((x, y))
    return [x for x, _ in points], [y for _, y in points]


def _measured(records: Sequence[Record], kind: str) -> list[Record]:
    """Those of a kind that have a loss (a loss that was not finite is null), by step."""
    found = (r for r in records if r.get("kind") == kind and r.get("loss") is not None)
    return sorted(found, key=lambda record: record["step"])


def seen_from_here(path: Path) -> Path:
    """Shorter where it lies below the current directory."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _epochs(summary: Summary) -> str:
    if summary.num_full_epochs == summary.num_epochs:
        return f"{summary.num_epochs} epochs by all {summary.num_peers} peers"
    return f"{summary.num_epochs} epochs, {summary.num_full_epochs} of them by all {summary.num_peers} peers"


def _waited(record: Record) -> float:
    """Seconds of an epoch's record in which the training stood still for the slowest peer, not for the round."""
    beyond_s = float(record["blocked_s"]) - float(record.get("round_s") or 0.0)
    return max(0.0, min(beyond_s, float(record.get("wait_s") or 0.0)))


def _overlap_advice(
    records: Sequence[Record], rounds: Sequence[float], share: float, tokens_per_step: int
) -> int | None:
    rates = [float(r["tokens_per_s"]) for r in records if r.get("kind") == "step" and r.get("tokens_per_s")]
    if share < SHARE_OF_EPOCH or not rates:
        return None
    return overlap_steps_for(statistics.median(rounds), tokens_per_step / statistics.median(rates))


def _still(summary: Summary) -> list[str]:
    if summary.still_share is None:
        return []
    line = f"stood still             {summary.still_share:.1%} of the time, for averaging"
    if summary.waited_share >= SHARE_OF_EPOCH:
        line += f", {summary.waited_share:.1%} waiting for the slowest peer"
    if summary.overlap_advice:
        line += f"; --hv.overlap-steps {summary.overlap_advice} would hide the rounds"
    elif summary.still_share - summary.waited_share >= SHARE_OF_EPOCH:
        line += "; more --hv.local-steps or --hv.compression int8 or int4 make it less"
    return [line]


def told_agreement(num_epochs: int, disagreements: Mapping[int, Mapping[str, str]]) -> str:
    """Whether all peers held the same bits, as a line of a report."""
    if not num_epochs:
        return "PROBLEM: no epoch was completed, so nothing was averaged"
    if not disagreements:
        return "agreement               all peers held bit-identical anchors after every epoch"
    epoch, digests = next(iter(disagreements.items()))
    held = ", ".join(f"{peer} {digest[:12]}" for peer, digest in digests.items())
    return (
        f"PROBLEM: anchors differed after {len(disagreements)} of {num_epochs} epochs; "
        f"first after epoch {epoch}: {held}"
    )


def _bits(value: float | None) -> str:
    return f"{value:.3f}" if value is not None else "not recorded"


def _time(record: Record) -> float:
    return float(record.get("time") or 0.0)
