"""A trainer's figures as the records of metrics.jsonl."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from diloco.outer.diloco import Commit
from diloco.rl.signal_watch import SignalWatch
from diloco.train.metrics import Metrics

log = logging.getLogger(__name__)

# TRL's names, and ours. What is not here is in neither.
_NAMES = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "lr",
    "num_tokens": "tokens",
    "reward": "reward",
    "reward_std": "reward_std",
    "frac_reward_zero_std": "same_reward",
    "completions/mean_length": "completion_tokens",
    "completions/clipped_ratio": "cut_off",
    "kl": "kl",
    "entropy": "entropy",
    "step_time": "step_s",
    "sampling/sampling_logp_difference/max": "logp_difference_max",
    "sampling/sampling_logp_difference/mean": "logp_difference_mean",
}


class Recorder(TrainerCallback):
    """Give it to the trainer before DilocoCallback: a step belongs to the epoch in which it was trained."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        epoch_of: Callable[[], int],
        extra: Callable[[], dict[str, Any]] = dict,
        logp_alarm: float = math.inf,
    ) -> None:
        """`extra` gives more figures for each step's record.

        A mean difference of more than `logp_alarm` (nats) between a server's log-probabilities and the trainer's is an
        event of its own: completions are then not by the weights that are trained.
        """
        self._metrics = metrics
        self._epoch_of = epoch_of
        self._extra = extra
        self._logp_alarm = logp_alarm
        self._watch = SignalWatch()
        self._commits: list[tuple[int, Commit]] = []
        self._step = self._epoch = self._tokens = 0
        self._stepped_at = time.monotonic()
        self._rate = 0.0
        self.at_end: Callable[[], None] = lambda: None
        """Called when training has ended, before DilocoCallback leaves the swarm."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._tokens = state.num_input_tokens_seen

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._stepped_at = time.monotonic()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._step, self._epoch = state.global_step, self._epoch_of()
        elapsed_s = time.monotonic() - self._stepped_at
        new, self._tokens = state.num_input_tokens_seen - self._tokens, state.num_input_tokens_seen
        self._rate = new / elapsed_s if elapsed_s > 0 else 0.0

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not logs or "loss" not in logs:
            return
        figures = {ours: _finite(logs[theirs]) for theirs, ours in _NAMES.items() if theirs in logs}
        parts = {
            f"reward_{name.split('/')[1]}": _finite(value)
            for name, value in logs.items()
            if name.startswith("rewards/") and name.endswith("/mean")
        }
        self._metrics.write(
            "step",
            step=self._step,
            epoch=self._epoch,
            tokens_per_s=self._rate,
            **figures,
            **parts,
            **self._extra(),
        )
        for name, text in self._watch.step(figures).items():
            log.warning("step %d: %s", self._step, text)
            self._metrics.write("event", event=name, step=self._step, reason=text)
        difference = figures.get("logp_difference_mean")
        if difference is not None and difference > self._logp_alarm:
            log.warning("log-probabilities of server and trainer differ by %g on average", difference)
            self._metrics.write(
                "event",
                event="logp_alarm",
                step=self._step,
                difference=difference,
                limit=self._logp_alarm,
            )
        self.tell_commits()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.at_end()

    def committed(self, commit: Commit, step: int) -> None:
        """An outer step has been made; its record follows the one of the step that led to it."""
        self._commits.append((step, commit))

    def tell_commits(self) -> None:
        for step, commit in self._commits:
            self._metrics.write("epoch", step=step, **asdict(commit))
        self._commits = []


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
