"""How long an epoch may last where peers train at different speeds (--hv.local-time auto), so that none waits for the
slowest: each trains for this time, and is weighted by its tokens.

Every peer computes it from the speeds that all announce. The results may differ a little: the grace covers that.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections.abc import Collection

FASTEST = 8.0
"""A peer counts as at most this many times as fast as the median step time (of two, the shorter): otherwise one false
claim could make epochs as short as it likes."""


def best_epoch_s(
    own_step_s: float,
    others_step_s: Collection[float],
    local_steps: int,
    round_s: float,
    *,
    hides_rounds: bool = False,
) -> float:
    """The epoch length in seconds at which peers with these step times train the most steps per second.

    Nobody trains more than `local_steps`, and a round of `round_s` follows, or takes place during the next epoch if
    `hides_rounds`. In a shorter epoch fast peers wait less, and rounds take a larger share of the time. Whatever others
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
    """Seconds in which a peer's nominal local step advances by one. `step_s`: how long its steps take; `epoch_s`: how
    long its epoch may last, 0: as long as its steps take."""
    return min(step_s, epoch_s / local_steps) if epoch_s else step_s
