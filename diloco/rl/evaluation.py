"""pass@k on held-out prompts, by the unbiased estimator (arXiv 2107.03374, equation 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from statistics import fmean

from transformers import PreTrainedTokenizerBase

from diloco.rl.dialogues import Complete, judged, said_in
from diloco.rl.server_client import Sampling
from diloco.rl.tasks import Example, Task, weighted

TEMPERATURE, TOP_P, TOP_K = 0.6, 0.95, 20


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """The probability that one of k completions solves a prompt that `num_solved` of `num_samples` have solved."""
    if not 0 <= num_solved <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} of {num_solved} solved among {num_samples}")
    if num_samples - num_solved < k:
        return 1.0
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def measured(
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    complete: Complete,
    *,
    samples: int,
    max_tokens: int,
    seed: int,
) -> list[dict[str, float]]:
    """For each example: the mean `reward` of its completions, `pass_at_1` and `pass_at_<samples>`."""
    sampling = Sampling(max_tokens=max_tokens, temperature=TEMPERATURE, top_p=TOP_P, top_k=TOP_K)
    groups = judged(task, tokenizer, examples, samples, complete, sampling, seed)
    said = [
        (example, said_in(tokenizer, one))
        for example, group in zip(examples, groups, strict=True)
        for one in group
    ]
    verdicts = iter(task.pool.each("is_solved", task.is_solved, said))
    found = []
    for group in groups:
        solved = sum(islice(verdicts, len(group)))
        passes = {f"pass_at_{k}": pass_at_k(samples, solved, k) for k in sorted({1, samples})}
        found.append({"reward": fmean(weighted(task, one["scores"]) for one in group), **passes})
    return found


def means(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each figure over the examples."""
    return {name: fmean(one[name] for one in figures) for name in figures[0]}
