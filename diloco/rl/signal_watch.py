"""Detects that a training has no learning signal: completions that are cut off, or rewards that are all equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_CUT_OFF_SHARE = 0.5
_IN_A_ROW = 3


class SignalWatch:
    """Reports a problem once it has lasted for _IN_A_ROW steps, and again only after it has been absent."""

    def __init__(self) -> None:
        self._lasted: dict[str, int] = {}

    def step(self, figures: Mapping[str, float | None]) -> dict[str, str]:
        """Messages to log after this step, by the problem's name."""
        wrong = problems(figures)
        self._lasted = {name: self._lasted.get(name, 0) + 1 for name in wrong}
        return {name: text for name, text in wrong.items() if self._lasted[name] == _IN_A_ROW}


def lasting_problems(steps: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Problems that all of the last _IN_A_ROW steps had."""
    last = [problems(figures) for figures in steps[-_IN_A_ROW:]]
    if len(last) < _IN_A_ROW:
        return {}
    return {name: text for name, text in last[-1].items() if all(name in found for found in last)}


def problems(figures: Mapping[str, float | None]) -> dict[str, str]:
    """The problems of one step, by name, with what to do about them."""
    found: dict[str, str] = {}
    cut_off, reward, same = (figures.get(name) for name in ("cut_off", "reward", "same_reward"))
    if cut_off is not None and cut_off >= _CUT_OFF_SHARE:
        found["cut_off"] = (
            f"{cut_off:.0%} of the completions were cut off before they gave an answer: raise "
            "--grpo.max-completion-length"
        )
    if same == 1.0 and reward == 0.0:
        found["no_reward"] = (
            "all rewards are zero, so nothing is learned: take an easier --dataset, a model that solves some of it, or "
            "a --grpo.reward that gives partial credit"
        )
    elif same == 1.0:
        found["same_reward"] = (
            "all completions of each prompt earn the same, so nothing is learned: raise --grpo.num-generations or "
            "--grpo.temperature, or take a --dataset that is neither solved nor too hard"
        )
    return found
