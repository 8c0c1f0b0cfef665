"""Time until a mean reward is reached, by the same peers in lock-step and as one learner with rollout peers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.format_model import TASK
from benchmarks.record import Result
from benchmarks.rollouts.peers import Peer, Run

_TIMEOUT_S = 900.0
_GENERATIONS = 8
"""Completions of a prompt."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The settings of both arms."""

    path_model: str
    target: float
    """Mean reward that ends an arm."""
    num_peers: int = 4
    num_cores: float = 0.45
    """CPU time of each peer; the coordinator and the machine have the rest."""
    batch: int = 32
    """Completions per inner step of one learner."""
    window: int = 640
    """Completions over which rewards are averaged."""
    max_completions: int = 200_000
    """Completions judged by all peers together after which an arm has failed."""
    lr: float = 1e-3
    """Faster than 5e-4 in both arms, by one run of each."""

    def rollout_peer(self) -> tuple[object, ...]:
        """Generates as many completions at once as a peer in lock-step does."""
        return (
            *("--role", "rollout", "--rollout", "hf", "--path-model", self.path_model),
            *("--per-device-train-batch-size", self.batch),
        )

    def learner(self) -> tuple[object, ...]:
        return (
            *("--mode", "grpo", "--path-model", self.path_model, "--dataset", TASK),
            *("--lr", self.lr, "--warmup-steps", 0, "--total-steps", 100_000, "--hv.local-steps", 5),
            *("--hv.outer-lr", 0.9, "--hv.outer-momentum", 0.3, "--total-batch-size", self.batch),
            *("--per-device-train-batch-size", self.batch, "--grpo.max-completion-length", 32),
            *("--grpo.eval-prompts", 0, "--grpo.num-generations", _GENERATIONS),
        )


@dataclass(frozen=True)
class Judged:
    """Rewards that one learner has recorded with a step."""

    time: float
    began: float
    num_completions: int
    reward: float


@dataclass(frozen=True)
class Curve:
    """The reward of one arm over time."""

    first_s: float
    """Duration of the first step, which waits for other peers to start."""
    points: Sequence[tuple[float, float]]
    """Seconds since the end of the first step, and the mean reward of the last completions."""
    num_completions: int

    def seconds_to(self, target: float) -> float | None:
        return next((seconds for seconds, reward in self.points if reward >= target), None)


def lock_step(setting: Setting) -> list[Result]:
    """Every peer generates and trains, and all average."""
    with tempfile.TemporaryDirectory() as name, Run(Path(name), num_cores=setting.num_cores) as run:
        for rank in range(setting.num_peers):
            run.start(
                *setting.learner(),
                "--rollout",
                "hf",
                "--world-rank",
                rank,
                "--galaxy-size",
                setting.num_peers,
            )
        curve = _until_target(run, lambda: run.peers, setting, "lock-step")
        return _results(f"{setting.num_peers} peers in lock-step", curve, run.peers, setting)


def rollout_peers(setting: Setting, *, is_disturbed: bool = False) -> list[Result]:
    """One peer trains on what all others generate. `is_disturbed`: one of them is killed and another one added."""
    with tempfile.TemporaryDirectory() as name, Run(Path(name), num_cores=setting.num_cores) as run:
        learner = run.start(*setting.learner(), "--rollout", "peers")
        first, *_ = [run.start(*setting.rollout_peer()) for _ in range(setting.num_peers - 1)]

        def disturbed(reward: float) -> None:
            if is_disturbed and reward >= setting.target / 2 and first.process.poll() is None:
                first.kill()
                run.start(*setting.rollout_peer())

        curve = _until_target(run, lambda: [learner], setting, "rollout peers", disturbed)
        case = f"1 learner, {setting.num_peers - 1} rollout peers" + (
            ", one killed, one added" * is_disturbed
        )
        return _results(case, curve, [learner], setting)


def _until_target(
    run: Run,
    learners: Callable[[], Sequence[Peer]],
    setting: Setting,
    what: str,
    on_reward: Callable[[float], None] = lambda _: None,
) -> Curve:
    curve = Curve(0.0, (), 0)

    def is_over() -> bool:
        nonlocal curve
        curve = curve_of([_judged(peer, setting) for peer in learners()], window=setting.window)
        if curve.points:
            on_reward(curve.points[-1][1])
        return curve.seconds_to(setting.target) is not None or curve.num_completions > setting.max_completions

    run.wait(is_over, f"the reward of {what}", _TIMEOUT_S)
    return curve


def _judged(peer: Peer, setting: Setting) -> list[Judged]:
    return [judged_of(record, batch=setting.batch) for record in peer.records("step")]


def judged_of(record: dict[str, Any], *, batch: int) -> Judged:
    """The rewards in a step's record, including those of groups of uniform reward that a learner left out."""
    left_out = record.get("uniform_groups", 0) * _GENERATIONS
    return Judged(
        time=record["time"],
        began=record["time"] - record["step_s"],
        num_completions=batch + left_out,
        reward=record.get("reward_of_all", record["reward"]),
    )


def curve_of(learners: Iterable[Sequence[Judged]], *, window: int) -> Curve:
    """The trailing mean over at least `window` completions of all learners, once there are so many."""
    every = sorted((one for judged in learners for one in judged), key=lambda one: one.time)
    first = every[0] if every else Judged(0.0, 0.0, 0, 0.0)
    points = []
    for end in range(len(every)):
        count, total = 0, 0.0
        for one in reversed(every[: end + 1]):
            count += one.num_completions
            total += one.num_completions * one.reward
            if count >= window:
                points.append((every[end].time - first.time, total / count))
                break
    return Curve(first.time - first.began, points, sum(one.num_completions for one in every))


def _results(case: str, curve: Curve, learners: Sequence[Peer], setting: Setting) -> list[Result]:
    steps = [peer.records("step") for peer in learners]
    starts = sum(record["event"] == "start" for peer in learners for record in peer.records("event"))
    found = {
        ("first step", "s"): curve.first_s,
        ("reward at the end", ""): curve.points[-1][1] if curve.points else 0.0,
        ("completions judged", ""): float(curve.num_completions),
        ("steps of a learner", ""): float(max(map(len, steps))),
        ("starts per learner", ""): starts / len(learners),
    }
    if (seconds := curve.seconds_to(setting.target)) is not None:
        found = {(f"until reward {setting.target:g}", "s"): seconds, **found}
    ages = [record["staleness_mean"] for records in steps for record in records if "staleness_mean" in record]
    if ages:
        found["staleness", "steps"] = sum(ages) / len(ages)
        left_out = sum(record["uniform_groups"] for record in steps[0])
        found["uniform groups left out", "%"] = 100 * _GENERATIONS * left_out / max(curve.num_completions, 1)
    return [Result.of(case, metric, unit, [value]) for (metric, unit), value in found.items()]
