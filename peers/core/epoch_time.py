"""How long an epoch may last where peers train at different speeds (--hv.local-time auto), so that none waits for the
slowest: each trains for this time, and is weighted by its tokens.

Every peer works it out from the speeds that all announce. They need not agree exactly: the grace covers the rest.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections.abc import Collection

FASTEST = 8.0
"""A peer counts as at most this many times as fast as the median, the lower one of two: one that claims more would make
epochs as short as it likes."""


def best_epoch_s(
    own_step_s: float,
    others_step_s: Collection[float],
    local_steps: int,
    round_s: float,
    *,
    hides_rounds: bool = False,
) -> float:
    """The length of an epoch in which peers that need so many seconds for a step train most steps per second.

    Nobody trains more than `local_steps`, and a round of `round_s` follows, or takes place during the next epoch if
    `hides_rounds`. A shorter epoch lets fast peers wait less, and spends more of the time on rounds. Whatever others
    claim, there is time for one step of this peer.
    """
    claimed = [own_step_s, *others_step_s]
    least = max(statistics.median_low(claimed) / FASTEST, own_step_s / local_steps)
    paces = sorted(max(pace, least) for pace in claimed)
    # Steps per second of the slowest, the two slowest, and so on; the last is the sum of all.
    rates = [0.0, *itertools.accumulate(1 / pace for pace in reversed(paces))]
    # The rate is highest where some peer has just done all its steps, or a hidden round ends with the epoch.
    ends = {epoch_s for pace in paces if math.isfinite(epoch_s := local_steps * pace)}
    if hides_rounds and local_steps * paces[0] < round_s < local_steps * paces[-1]:
        ends.add(round_s)

    def rate(epoch_s: float) -> float:
        num_done = bisect.bisect_right(paces, epoch_s / local_steps)
        trained = local_steps * num_done + epoch_s * rates[len(paces) - num_done]
        return trained / (max(epoch_s, round_s) if hides_rounds else epoch_s + round_s)

    return max(sorted(ends), key=rate, default=0.0)


def nominal_step_s(step_s: float, local_steps: int, epoch_s: float) -> float:
    """The time in which the nominal local step of a peer advances by one that needs `step_s` for a step; `epoch_s`: how
    long its epoch may last, 0 if as long as its steps take."""
    return min(step_s, epoch_s / local_steps) if epoch_s else step_s
