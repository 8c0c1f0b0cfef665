"""Whether training improves, by its losses or its rewards; if not, what is wrong and what to do. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

Points = Sequence[tuple[int, float]]
"""Of all peers: (step, value)."""

_ENOUGH_POINTS = 40
_MANY_POINTS = 100
"""A loss that does not fall says little before: it goes up and down for a while."""
_NO_FALL = 0.002
_RISE = 1.2


def judged_losses(found: Points) -> Iterator[str]:
    """By their steps."""
    window, means = _window_means(found)
    # Not every loss falls: GRPO's is around zero.
    if not means or min(means) <= 0:
        return
    best = min(range(len(means)), key=means.__getitem__)
    # End of the window: nothing after it was better.
    step, last = found[best + window - 1][0], found[-1][0]
    # With few steps between averagings, a loss goes up and down with them.
    lately = min(means[-window:])
    if lately > _RISE * means[best]:
        yield (
            f"the loss rises: {means[-1]:.3g}, from {means[best]:.3g} at step {step}; a lower --lr or a longer "
            "--warmup-steps may help"
        )
    elif (
        len(found) >= _MANY_POINTS
        and last - step > (last - found[0][0]) / 3
        and lately > (1 + _NO_FALL) * means[best]
    ):
        yield f"the loss has not fallen since step {step}: the learning rate may be too high, or training has converged"


def judged_rewards(found: Points) -> Iterator[str]:
    """By their steps."""
    window, means = _window_means(found)
    if not means:
        return
    best = max(range(len(means)), key=means.__getitem__)
    if max(means[-window:]) < means[best] / _RISE:
        yield (
            f"the reward falls: {means[-1]:.3g}, from {means[best]:.3g} at step {found[best + window - 1][0]}; a lower "
            "--lr may help"
        )
    elif means[-1] <= means[0]:
        yield (
            f"the reward has not risen: {means[-1]:.3g}, and {means[0]:.3g} at the beginning; more steps, a higher "
            "--lr or an easier --dataset may help"
        )


def _window_means(points: Points) -> tuple[int, list[float]]:
    """Means over windows of a tenth of all points, and how many points that is; none of too few."""
    window = len(points) // 10
    if len(points) < _ENOUGH_POINTS:
        return window, []
    values = [value for _, value in points]
    return window, [statistics.fmean(values[i : i + window]) for i in range(len(values) - window + 1)]
