"""The report at the end of a run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from diloco.launch.daemon_process import wants_swarm
from diloco.launch.plot import absences, lives_of, plot
from diloco.launch.run_facts import disagreements, facts_of, waited_s
from diloco.options.flags import TrainConfig
from diloco.train.metrics_file import Record, Tail, figure, size
from diloco.train.run_dir import METRICS
from peers.core.defaults import SHARE_OF_EPOCH, overlap_steps_for
from peers.monitor.verdict import Verdict, verdict_of

UNIFORM_BITS_PER_BYTE = 8.0
_SHOWN_SHARE = 0.0005


@dataclass(frozen=True)
class Summary:
    """The figures of a run, from the records of all its peers. None means not recorded."""

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
    """Epochs to which all peers contributed."""
    still_share: float | None
    """Fraction of the time for which training was blocked, by rounds and by waiting for other peers."""
    waited_share: float
    """The part of `still_share` spent waiting for the last peer to be ready."""
    overlap_advice: int | None
    """Overlap steps that would hide a typical round, if that is worthwhile and known to be harmless."""
    verdict: Verdict
    lost: Sequence[str]
    """Sentences on the peers that were lost, and when."""
    disagreements: Mapping[int, Mapping[str, str]]
    """Epoch -> peer -> anchor digest, for epochs after which peers had different anchors."""

    @property
    def agrees(self) -> bool:
        """Whether there was at least one epoch, and all peers had identical anchors after each."""
        return self.num_epochs > 0 and not self.disagreements


def summarise(
    records_of: Mapping[str, Sequence[Record]], *, tokens_per_step: int, compression: str = "fp32"
) -> Summary:
    """`records_of` holds each peer's records in the order of writing."""
    records = [record for peer in records_of.values() for record in peer]
    evaluations = sorted((r for r in records if r.get("kind") == "eval"), key=_time)
    epochs = [record for record in records if record.get("kind") == "epoch"]
    times = [_time(record) for record in records if "time" in record]
    last = evaluations[-1] if evaluations else {}
    duration_s = max(times) - min(times) if times else 0.0
    still = [float(record["blocked_s"]) for record in epochs if "blocked_s" in record]
    waited = [waited_s(record) for record in epochs if "blocked_s" in record]
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
        verdict=verdict_of(facts_of(records_of, tokens_per_step=tokens_per_step, compression=compression)),
        lost=lost_peers(records_of),
        disagreements=disagreements(records_of),
    )


def text_of(summary: Summary, paths: Mapping[str, Path], *, in_swarm: bool = True) -> str:
    """The text of the report."""
    held_out = f" ({figure(summary.eval_bytes)}B held out)" if summary.eval_bytes else ""
    lines = [
        *verdict_lines(summary.verdict),
        f"bits per byte on validation{held_out}",
        f"  uniform               {UNIFORM_BITS_PER_BYTE:.3f}",
        f"  byte frequencies      {_bits(summary.unigram_bits)}",
        f"  before training       {_bits(summary.bits_before)}{_above_uniform(summary.bits_before)}",
        f"  after training        {_bits(summary.bits_after)}",
        f"trained                 {figure(summary.tokens)} tokens in {summary.duration_s:.0f} s"
        + (", all peers together" if summary.num_peers > 1 else ""),
        *lost_lines(summary.lost),
        *(_averaged(summary) if in_swarm else []),
        *(f"{name:<23} {seen_from_here(path)}" for name, path in paths.items()),
    ]
    return "\n".join(lines)


def _above_uniform(bits: float | None) -> str:
    return (
        " (above uniform: random weights are sure of some bytes)"
        if (bits or 0.0) > UNIFORM_BITS_PER_BYTE
        else ""
    )


def baseline_line(alone: Summary, swarm: Summary) -> str:
    """The line of the report that compares the swarm with the same training without a swarm."""
    return (
        f"alone                   {_bits(alone.bits_after)} bits per byte after as many steps as each peer's, in "
        f"{alone.duration_s:.0f} s; the swarm {_bits(swarm.bits_after)}, in {swarm.duration_s:.0f} s"
    )


def report(config: TrainConfig, run_dir: Path) -> None:
    """Print the report of a trainer that was started by hand, from its metrics, and write its plot."""
    tokens_per_step = config.total_batch_size * config.seq_length
    records_of = {"this peer": Tail(run_dir / METRICS).read()}
    summary = summarise(records_of, tokens_per_step=tokens_per_step, compression=config.hv.compression)
    picture = run_dir / "loss.png"
    plot(records_of, picture, title=config.project)
    paths = {"model": run_dir / "model", "plot of the losses": picture, "everything": run_dir}
    print(text_of(summary, paths, in_swarm=wants_swarm(config)), flush=True)


def verdict_lines(verdict: Verdict) -> list[str]:
    return [
        f"verdict                 {verdict.text}",
        *(f"  and                   {one}" for one in verdict.more),
    ]


def lost_peers(records_of: Mapping[str, Sequence[Record]]) -> list[str]:
    """Sentences on which peers were lost, how long after the start of the run, and when they returned."""
    times = [_time(record) for records in records_of.values() for record in records if "time" in record]
    began_at, ended_at = min(times, default=0.0), max(times, default=0.0)
    return [
        f"{peer}, {gone - began_at:.0f} s into training, "
        + (f"back {back - gone:.0f} s later" if back < ended_at else "and not back")
        for peer, records in records_of.items()
        for gone, back in absences(lives_of(records), ended_at)
    ]


def lost_lines(lost: Sequence[str]) -> list[str]:
    return [f"lost                    {one}" for one in lost]


def seen_from_here(path: Path) -> Path:
    """The path relative to the current directory, if it is below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _averaged(summary: Summary) -> list[str]:
    return [
        f"averaged                {_epochs(summary)}, {size(summary.sent_bytes)} sent",
        *_blocked_lines(summary),
        agreement_line(summary.num_epochs, summary.disagreements),
    ]


def _epochs(summary: Summary) -> str:
    if summary.num_full_epochs == summary.num_epochs:
        return f"{summary.num_epochs} epochs by all {summary.num_peers} peers"
    return f"{summary.num_epochs} epochs, {summary.num_full_epochs} of them by all {summary.num_peers} peers"


def _overlap_advice(
    records: Sequence[Record], rounds: Sequence[float], share: float, tokens_per_step: int
) -> int | None:
    rates = [float(r["tokens_per_s"]) for r in records if r.get("kind") == "step" and r.get("tokens_per_s")]
    if share < SHARE_OF_EPOCH or not rates:
        return None
    return overlap_steps_for(statistics.median(rounds), tokens_per_step / statistics.median(rates))


def _blocked_lines(summary: Summary) -> list[str]:
    if summary.still_share is None:
        return []
    line = f"stood still             {summary.still_share:.1%} of the time"
    if summary.waited_share >= _SHOWN_SHARE:
        rounds_share = summary.still_share - summary.waited_share
        line += f": {rounds_share:.1%} for averaging, {summary.waited_share:.1%} waiting for the slowest peer"
    else:
        line += ", for averaging"
    if summary.overlap_advice:
        line += f"; --hv.overlap-steps {summary.overlap_advice} would hide the rounds"
    return [line]


def agreement_line(num_epochs: int, disagreements: Mapping[int, Mapping[str, str]]) -> str:
    """The line of the report on whether all peers had bit-identical anchors."""
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
