"""The results of a training, from the records of all its peers, as lines of the report. None means not recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diloco.train.metrics_file import Record, figure

UNIFORM_BITS_PER_BYTE = 8.0
# Fraction of the steps that count as the beginning of a run, and as its end.
_EDGE = 0.1


@dataclass(frozen=True)
class Losses:
    """The results of pretraining, evaluated on held-out text."""

    bits_before: float | None
    bits_after: float | None
    unigram_bits: float | None
    eval_bytes: int | None
    tokens: int

    @classmethod
    def of(cls, records: Sequence[Record], tokens_per_step: int) -> Losses:
        evaluations = sorted(
            (r for r in records if r.get("kind") == "eval"),
            key=lambda record: float(record.get("time") or 0.0),
        )
        first, last = (evaluations[0], evaluations[-1]) if evaluations else ({}, {})
        return cls(
            # A resumed run has no evaluation before training, and neither has a run on a slow machine.
            bits_before=None if first.get("step") else first.get("bits_per_byte"),
            bits_after=last.get("bits_per_byte") if last.get("step") else None,
            unigram_bits=last.get("unigram_bits_per_byte"),
            eval_bytes=last.get("eval_bytes"),
            tokens=tokens_per_step * _num_steps(records),
        )

    def lines(self) -> list[str]:
        """The last line is the amount of training."""
        held_out = f" ({figure(self.eval_bytes)}B held out)" if self.eval_bytes else ""
        is_above = (self.bits_before or 0.0) > UNIFORM_BITS_PER_BYTE
        above = " (above uniform: random weights prefer some bytes)" if is_above else ""
        if self.bits_before is None and self.bits_after is None:
            return [
                "validation              not on this peer",
                f"trained                 {figure(self.tokens)} tokens",
            ]
        return [
            f"bits per byte on validation{held_out}",
            f"  uniform               {UNIFORM_BITS_PER_BYTE:.3f}",
            f"  byte frequencies      {decimal(self.unigram_bits)}",
            f"  before training       {decimal(self.bits_before)}{above}",
            f"  after training        {decimal(self.bits_after)}",
            f"trained                 {figure(self.tokens)} tokens",
        ]


@dataclass(frozen=True)
class Rewards:
    """The results of reinforcement learning."""

    reward_before: float | None
    """Mean over all peers and the first tenth of the steps."""
    reward_after: float | None
    evaluations: tuple[Record, ...]
    completions: int
    logp_difference: float | None
    """The largest difference between a server's and a trainer's log-probabilities."""

    @classmethod
    def of(cls, records: Sequence[Record], completions_per_step: int) -> Rewards:
        evaluations = [record for record in records if record.get("kind") == "eval" and "reward" in record]
        differences = [
            float(r["logp_difference_max"]) for r in records if r.get("logp_difference_max") is not None
        ]
        rewards = [reward for _, reward in rewards_by_step(records)]
        edge = max(1, int(len(rewards) * _EDGE))
        return cls(
            reward_before=_mean(rewards[:edge]),
            reward_after=_mean(rewards[-edge:]),
            evaluations=tuple(sorted(evaluations, key=lambda record: int(record.get("step") or 0))),
            completions=completions_per_step * _num_steps(records),
            logp_difference=max(differences, default=None),
        )

    def lines(self) -> list[str]:
        """The last line is the amount of training."""
        lines = [
            "mean reward of completions",
            f"  first tenth of steps  {decimal(self.reward_before)}",
            f"  last tenth of steps   {decimal(self.reward_after)}",
        ]
        ends = (*self.evaluations[:1], *self.evaluations[1:][-1:])
        for name, record in zip(("before", "after"), ends, strict=False):
            passes = ", ".join(
                f"pass@{key.removeprefix('pass_at_')} {decimal(value)}"
                for key, value in record.items()
                if key.startswith("pass_at_")
            )
            lines.append(f"held out, {name:<13} reward {decimal(record['reward'])}, {passes}")
        if self.logp_difference is not None:
            lines.append(
                f"servers and trainers    log-probabilities differ by {self.logp_difference:.1e} at most"
            )
        return [*lines, f"trained on              {figure(self.completions)} completions"]


def rewards_by_step(records: Sequence[Record]) -> list[tuple[int, float]]:
    """(step, mean reward over all peers), in the order of steps."""
    found: dict[int, list[float]] = {}
    for record in records:
        if record.get("kind") == "step" and record.get("reward") is not None:
            found.setdefault(int(record["step"]), []).append(float(record["reward"]))
    return [(step, sum(values) / len(values)) for step, values in sorted(found.items())]


def decimal(value: float | None) -> str:
    return f"{value:.3f}" if value is not None else "not recorded"


def _num_steps(records: Sequence[Record]) -> int:
    return sum(record.get("kind") == "step" for record in records)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
