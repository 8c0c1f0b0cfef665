"""pass@k on held-out prompts, by the unbiased estimator (arXiv 2107.03374, equation 1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from diloco.rl.answers import parsed
from diloco.rl.tasks import Example, Message, Task, reward_of

TEMPERATURE, TOP_P, TOP_K = 0.6, 0.95, 20

Complete = Callable[[Sequence[list[Message]], int], list[list[str]]]
"""(prompts, n) -> n completions of each prompt by the current weights."""


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """The probability that one of k completions solves a prompt that `num_solved` of `num_samples` have solved."""
    if not 0 <= num_solved <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} of {num_solved} solved among {num_samples}")
    if num_samples - num_solved < k:
        return 1.0
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def evaluated(
    task: Task, examples: Sequence[Example], complete: Complete, *, samples: int
) -> dict[str, float]:
    """Means over the examples of `reward`, `pass_at_1` and `pass_at_<samples>`."""
    completions = complete([example.prompt for example in examples], samples)
    rewards = [
        [reward_of(task, text, example) for text in texts]
        for example, texts in zip(examples, completions, strict=True)
    ]
    solved = [
        sum(bool(text.strip()) and task.is_solved(parsed(text), example) for text in texts)
        for example, texts in zip(examples, completions, strict=True)
    ]
    return figures_of(rewards, solved, samples=samples)


def figures_of(
    rewards: Sequence[Sequence[float]], solved: Sequence[int], *, samples: int
) -> dict[str, float]:
    """`rewards` of each completion of each prompt, and how many of a prompt's completions solved it."""
    every = [reward for group in rewards for reward in group]
    figures = {"reward": sum(every) / len(every)}
    for k in sorted({1, samples}):
        figures[f"pass_at_{k}"] = sum(pass_at_k(samples, count, k) for count in solved) / len(solved)
    return figures
