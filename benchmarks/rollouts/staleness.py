"""What is learned from policies of a fixed age in steps: `python -m benchmarks.rollouts --staleness`.

Each case and seed runs in one process, since asynchronous rollout peers have policies of varying age. The trainer is
the product's own, with `--rollout peers` and its loss (a clipped ratio to the policy that sampled). A stand-in for the
daemon generates with the weights of exactly `staleness` optimizer steps ago, or with the first ones until then. Gain is
the rise of the mean reward on held-out prompts, per million tokens trained on, prompts included.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

from benchmarks.format_model import TASK
from benchmarks.record import Result

CASES, SEEDS = (0, 2, 4, 8), (1, 2, 3)
NUM_STEPS, LR = 20, 1e-3
_ROOT = Path(__file__).parent.parent.parent


def measured(path_model: str, *, is_quick: bool) -> list[Result]:
    """All cases, as many at once as there are cores."""
    cases, seeds, steps = ((0, 2), (1,), 4) if is_quick else (CASES, SEEDS, NUM_STEPS)
    runs = [(staleness, seed) for seed in seeds for staleness in cases]
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        found = dict(zip(runs, pool.map(lambda run: _in_process(path_model, *run, steps), runs), strict=True))
    return [
        Result.of(f"staleness {staleness}", metric, unit, [found[staleness, seed][metric] for seed in seeds])
        for staleness in cases
        for metric, unit in (
            ("gain per million tokens", "reward"),
            ("reward before", "reward"),
            ("reward after", "reward"),
            ("pass@1 after", "share"),
            ("tokens", "tokens"),
            ("log-probabilities apart", "nats"),
        )
    ]


def _in_process(path_model: str, *numbers: int) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.rollouts.staleness", path_model, *map(str, numbers)],
        cwd=_ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def trained(path_model: str, staleness: int, seed: int, num_steps: int) -> dict[str, float]:
    """One training with policies of one age."""
    import torch

    from diloco.launch.worker import Assignment
    from diloco.options.flags import GrpoConfig, TrainConfig
    from diloco.options.trainer import with_mode_defaults
    from diloco.outer.world import World

    config = TrainConfig(
        mode="grpo",
        path_model=path_model,
        lr=LR,
        warmup_steps=0,
        total_steps=100_000,
        max_steps=num_steps,
        total_batch_size=64,
        per_device_train_batch_size=64,
        seed=seed,
        device="cpu",
        grpo=GrpoConfig(dataset=TASK, rollout="peers", max_completion_length=32),
    )
    config = with_mode_defaults(config, {"lr", "warmup_steps", "total_steps", "total_batch_size"})
    with tempfile.TemporaryDirectory() as name:
        assignment = Assignment(config=config, run_dir=Path(name))
        training = _training_by_old_policies(staleness)(assignment, World(), torch.device("cpu"), [])
        with training.metrics:
            training.train()
        lines = (Path(name) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    steps = [record for record in records if record["kind"] == "step"]
    before, *_, after = (record for record in records if record["kind"] == "eval")
    ages = [record["staleness_max"] for record in steps]
    assert ages == [min(index, staleness) for index in range(num_steps)], ages
    tokens = steps[-1]["tokens"]
    differences = [record["logp_difference_mean"] for record in steps]
    # The newest policy's log-probabilities are the trainer's own. Those of older ones differ once there are rewards.
    assert all(difference < 1e-4 for difference, age in zip(differences, ages, strict=True) if age == 0)
    return {
        "gain per million tokens": 1e6 * (after["reward"] - before["reward"]) / tokens,
        "reward before": before["reward"],
        "reward after": after["reward"],
        "pass@1 after": after["pass_at_1"],
        "tokens": tokens,
        "log-probabilities apart": sum(differences) / len(differences),
    }


def _training_by_old_policies(staleness: int) -> Any:
    from diloco import train_grpo

    class Training(train_grpo.Training):
        def open_peer_rollouts(self, *_: object) -> None:
            self.peer_rollouts = self.rollouts_by(cast(Any, OldPolicies(self, staleness)))

    return Training


class OldPolicies:
    """Replaces the link to a daemon. Its rollouts are sampled from the policy of exactly `staleness` steps ago."""

    def __init__(self, training: Any, staleness: int) -> None:
        from diloco.train.model import load_model

        self._training = training
        # Not a copy of the trainer's model: TRL has replaced its forward, which would still use the trainer's weights.
        self._model = load_model(training.config.path_model, seed=0)
        self._policies: deque[dict[str, Any]] = deque(maxlen=staleness + 1)
        self._steps: deque[int] = deque(maxlen=staleness + 1)
        self._taken: deque[dict[str, Any]] = deque()

    def send(self, kind: str, **fields: Any) -> None:
        if kind == "policy":
            state = self._training.model.state_dict()
            self._policies.append({name: tensor.clone() for name, tensor in state.items()})
            self._steps.append(fields["step"])

    def receive(self, kind: str) -> dict[str, Any]:
        if kind == "rollout":
            return self._taken.popleft()
        self._model.load_state_dict(self._policies[0])
        age = self._steps[-1] - self._steps[0]
        self._taken += [self._rollout(number, age) for number in self._generated()]
        return {"num_rollouts": len(self._taken), "num_uniform": 0, "senders": {}}

    def close(self) -> None: ...

    def _generated(self) -> Sequence[tuple[int, list[dict[str, Any]]]]:
        from diloco.rl.generator import generated
        from diloco.rl.sampling import sampled

        training = self._training
        tokenizer, numbers = training.tokenizer, training.example_numbers()

        def complete(prompts: Any, count: int, sampling: Any, seed: int) -> Any:
            return sampled(self._model, tokenizer, prompts, count, sampling, seed=seed)

        seed = training.rollout_seed()
        groups = generated(training.task, tokenizer, numbers, training.config.grpo, complete, seed)
        return list(zip(numbers, groups, strict=True))

    def _rollout(self, generated: tuple[int, list[dict[str, Any]]], age: int) -> dict[str, Any]:
        number, completions = generated
        return {"peer_id": "", "example": number, "staleness": age, "completions": completions}


if __name__ == "__main__":
    print(json.dumps(trained(sys.argv[1], *map(int, sys.argv[2:5]))))
