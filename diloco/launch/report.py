"""The report at the end of a run, from the records of all its peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from diloco.errors import print_note
from diloco.launch.history import History
from diloco.launch.plot import plot_losses, plot_rewards
from diloco.launch.run_facts import (
    RecordsOf,
    absences,
    disagreements,
    facts_of,
    num_steps,
    rewards_by_step,
    sessions_of,
    span_of,
    waited_s,
)
from diloco.options.flags import TrainConfig
from diloco.train.metrics_file import Record, Tail, figure, size
from diloco.train.run_dir import METRICS
from peers.monitor.verdict import verdict_of

UNIFORM_BITS_PER_BYTE = 8.0
_EDGE = 0.1
"""Fraction of the steps of GRPO that count as the beginning of a run, and as its end."""
_SHOWN_SHARE = 0.0005


def report_of(config: TrainConfig, records_of: RecordsOf, *, in_swarm: bool = True) -> tuple[str, bool]:
    """The text, and whether there was an epoch and all peers had identical anchors after every epoch.

    `records_of` holds each peer's records in the order of writing.
    """
    records = [record for own in records_of.values() for record in own]
    began_at, ended_at = span_of(records)
    verdict = verdict_of(facts_of(config, records_of))
    together = ", all peers together" if len(records_of) > 1 else ""
    *results, trained = (
        _reward_lines(config, records) if config.mode == "grpo" else _loss_lines(config, records)
    )
    epochs = [record for record in records if record.get("kind") == "epoch"]
    num_epochs, differing = len({record["epoch"] for record in epochs}), disagreements(records_of)
    lines = [
        f"verdict                 {verdict.text}",
        *(f"  and                   {one}" for one in verdict.more),
        *results,
        f"{trained} in {ended_at - began_at:.0f} s{together}",
        *(f"lost                    {one}" for one in _lost_peers(records_of)),
    ]
    if in_swarm:
        lines += [
            f"averaged                {_epochs_text(epochs, num_epochs, len(records_of))}, "
            f"{size(sum(int(record.get('sent_bytes') or 0) for record in epochs))} sent",
            *_blocked_lines(epochs, (ended_at - began_at) * len(records_of)),
            _agreement_line(num_epochs, differing, num_peers=len(records_of)),
        ]
    return "\n".join(lines), num_epochs > 0 and not differing


def text_if_already_complete(config: TrainConfig, records_of: RecordsOf) -> str:
    """The text that replaces the report if the run was resumed from its last step; empty if it has trained."""
    records = [record for own in records_of.values() for record in own]
    resumed_at = [int(record["step"]) for record in records if record.get("event") == "start"]
    has_trained = any(record.get("kind") in ("step", "epoch") for record in records)
    end = config.end_step
    if has_trained or min(resumed_at, default=0) < end:
        return ""
    flag = "--max-steps" if end < config.total_steps else "--total-steps"
    return f"the run is complete already: step {end} of {end}. To go on, raise {flag}"


def baseline_line(alone: Sequence[Record], swarm: RecordsOf) -> str:
    """The line of the report that compares the swarm with the same pretraining without a swarm."""
    together = [record for own in swarm.values() for record in own]
    bits, seconds = [], []
    for records in (alone, together):
        began_at, ended_at = span_of(records)
        bits.append(decimal(_bits(records)[1]))
        seconds.append(f"{ended_at - began_at:.0f} s")
    return (
        f"alone                   {bits[0]} bits per byte after as many steps as each peer's, in {seconds[0]}; "
        f"the swarm {bits[1]}, in {seconds[1]} for {len(swarm)} times the tokens"
    )


def plot_run(
    config: TrainConfig, records_of: RecordsOf, run_dir: Path, title: str, alone: Sequence[Record] = ()
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
            plot_losses(records_of, path, title=title, alone=alone)
    except OSError as error:
        print_note(f"the plot {path} cannot be written: {error.strerror}")
        return {}
    return {"plot of the rewards" if is_grpo else "plot of the losses": path}


def report(config: TrainConfig, run_dir: Path, *, in_swarm: bool) -> None:
    """Print the report of one trainer, from its metrics, and write its plot."""
    records_of = {"this peer": History(Tail(run_dir / METRICS).records()).records}
    paths = {"model": run_dir / "model"} if (run_dir / "model").is_dir() else {}
    text = text_if_already_complete(config, records_of)
    if not text:
        paths |= plot_run(config, records_of, run_dir, config.project)
        text, _ = report_of(config, records_of, in_swarm=in_swarm)
    print_report(text, {**paths, "everything": run_dir})


def print_report(text: str, paths: Mapping[str, Path]) -> None:
    """Print the report, and below it the paths of files; those below the current directory are relative to it."""
    here = Path.cwd()
    shown = {
        name: path.relative_to(here) if path.is_relative_to(here) else path for name, path in paths.items()
    }
    print(text, *(f"{name:<23} {path}" for name, path in shown.items()), sep="\n", flush=True)


def decimal(value: float | None) -> str:
    return f"{value:.3f}" if value is not None else "not recorded"


def _bits(records: Sequence[Record]) -> tuple[float | None, float | None, Record]:
    """Bits per byte on validation before and after training, and the last evaluation."""
    evaluations = [record for record in records if record.get("kind") == "eval"]
    evaluations.sort(key=lambda record: float(record.get("time") or 0.0))
    first, last = (evaluations[0], evaluations[-1]) if evaluations else ({}, {})
    # A resumed run has no evaluation before training, and neither has a run on a slow machine.
    before = None if first.get("step") else first.get("bits_per_byte")
    return before, last.get("bits_per_byte") if last.get("step") else None, last


def _loss_lines(config: TrainConfig, records: Sequence[Record]) -> list[str]:
    """The results of pretraining, evaluated on held-out text. The last line is the amount of training."""
    before, after, last = _bits(records)
    tokens = config.total_batch_size * config.seq_length * num_steps(records)
    trained = f"trained                 {figure(tokens)} tokens"
    if before is None and after is None:
        return ["validation              not on this peer", trained]
    held_out = f" ({figure(last['eval_bytes'])}B held out)" if last.get("eval_bytes") else ""
    is_above = (before or 0.0) > UNIFORM_BITS_PER_BYTE
    return [
        f"bits per byte on validation{held_out}",
        f"  uniform               {UNIFORM_BITS_PER_BYTE:.3f}",
        f"  byte frequencies      {decimal(last.get('unigram_bits_per_byte'))}",
        f"  before training       {decimal(before)}"
        + (" (above uniform: random weights prefer some bytes)" if is_above else ""),
        f"  after training        {decimal(after)}",
        trained,
    ]


def _reward_lines(config: TrainConfig, records: Sequence[Record]) -> list[str]:
    """The results of reinforcement learning. The last line is the amount of training."""
    rewards = [reward for _, reward in rewards_by_step(records)]
    edge = max(1, int(len(rewards) * _EDGE))
    means = [sum(part) / len(part) if part else None for part in (rewards[:edge], rewards[-edge:])]
    lines = [
        "mean reward of completions",
        f"  first tenth of steps  {decimal(means[0])}",
        f"  last tenth of steps   {decimal(means[1])}",
    ]
    evaluations = [record for record in records if record.get("kind") == "eval" and "reward" in record]
    evaluations.sort(key=lambda record: int(record.get("step") or 0))
    for name, record in zip(("before", "after"), (*evaluations[:1], *evaluations[1:][-1:]), strict=False):
        passes = ", ".join(
            f"pass@{key.removeprefix('pass_at_')} {decimal(value)}"
            for key, value in record.items()
            if key.startswith("pass_at_")
        )
        lines.append(f"held out, {name:<13} reward {decimal(record['reward'])}, {passes}")
    differences = [record.get("logp_difference_max") for record in records]
    if known := [float(one) for one in differences if one is not None]:
        lines.append(f"servers and trainers    log-probabilities differ by {max(known):.1e} at most")
    completions = config.total_batch_size * num_steps(records)
    return [*lines, f"trained on              {figure(completions)} completions"]


def _lost_peers(records_of: RecordsOf) -> list[str]:
    """Sentences on which peers were lost, how long after the start of the run, and when they returned."""
    began_at, ended_at = span_of([record for own in records_of.values() for record in own])
    return [
        f"{peer}, {lost_at - began_at:.0f} s into training, "
        + (f"back {returned_at - lost_at:.0f} s later" if returned_at < ended_at else "and not back")
        for peer, records in records_of.items()
        for lost_at, returned_at in absences(sessions_of(records), ended_at)
    ]


def _epochs_text(epochs: Sequence[Record], num_epochs: int, num_peers: int) -> str:
    if num_peers == 1:
        return f"{num_epochs} epoch{'' if num_epochs == 1 else 's'}"
    full = {record["epoch"] for record in epochs if len(record.get("contributors") or ()) >= num_peers}
    if len(full) == num_epochs:
        return f"{num_epochs} epochs by all {num_peers} peers"
    return f"{num_epochs} epochs, {len(full)} of them by all {num_peers} peers"


def _blocked_lines(epochs: Sequence[Record], whole_s: float) -> list[str]:
    """The fraction of the time for which training was blocked, by rounds and by waiting for other peers."""
    known = [record for record in epochs if "blocked_s" in record]
    if not known or whole_s <= 0:
        return []
    blocked = sum(float(record["blocked_s"]) for record in known) / whole_s
    waited = sum(map(waited_s, known)) / whole_s
    line = f"stood still             {blocked:.1%} of the time"
    if waited < _SHOWN_SHARE:
        return [f"{line}, for averaging"]
    return [f"{line}: {blocked - waited:.1%} for averaging, {waited:.1%} waiting for the slowest peer"]


def _agreement_line(num_epochs: int, differing: Mapping[int, Mapping[str, str]], *, num_peers: int) -> str:
    """Whether the `num_peers` peers whose records are known had bit-identical anchors."""
    if not num_epochs:
        return "PROBLEM: no epoch was completed, so nothing was averaged"
    if num_peers == 1:
        # The records of the other peers are not here, but a commit has the signatures of all its contributors.
        return "agreement               the contributors of every epoch have signed the same bits"
    if not differing:
        return "agreement               all peers held bit-identical anchors after every epoch"
    epoch, digests = next(iter(differing.items()))
    held = ", ".join(f"{peer} {digest[:12]}" for peer, digest in digests.items())
    return f"PROBLEM: anchors differed after {len(differing)} of {num_epochs} epochs; first after epoch {epoch}: {held}"
