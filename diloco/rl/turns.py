"""Triggers evaluations whenever a multiple of the interval has been passed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class EvaluateWhenDue(TrainerCallback):
    """Must come after DilocoCallback, so that the weights evaluated include the outer step."""

    def __init__(
        self, *, interval: int | None, should_evaluate: Callable[[], bool], at_start: Callable[[], None]
    ) -> None:
        self._interval, self._should_evaluate, self._at_start = interval, should_evaluate, at_start
        self._checked_step = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._checked_step = state.global_step
        self._at_start()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        before, self._checked_step = self._checked_step, state.global_step
        # Not `% interval == 0`: an outer step may advance the nominal step by several.
        if self._interval and state.global_step // self._interval > before // self._interval:
            control.should_evaluate = self._should_evaluate()
