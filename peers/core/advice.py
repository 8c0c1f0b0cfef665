"""What to change where rounds take too much of the time: told once, when a few epochs have shown it."""

from __future__ import annotations

import re
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from peers.core.defaults import SHARE_OF_EPOCH, compression_for, fragments_for, is_lossier, overlap_steps_for
from peers.core.schedule import Schedule

_ENOUGH_EPOCHS = 4
_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, kw_only=True)
class Usual:
    """What an epoch is like on one peer."""

    epoch_s: float
    round_s: float
    """Of it, from the group to the commit."""
    bytes_per_s: float
    """That the peer's link carries; 0: not known."""
    num_peers: int


class Advice:
    """Of one peer."""

    def __init__(self) -> None:
        self._epochs: deque[Usual] = deque(maxlen=_ENOUGH_EPOCHS)
        self._ended_at: float | None = None
        self._is_given = False

    def epoch_ended(self, now: float, *, round_s: float, bytes_per_s: float, num_peers: int) -> Usual | None:
        """What is usual, once enough epochs have shown it and if that was not told before."""
        began_at, self._ended_at = self._ended_at, now
        if began_at is None or self._is_given or num_peers < 2:
            # The first epoch began with waiting for others; and of one that it came too late for, or was alone in, this
            # peer knows nothing.
            return None
        self._epochs.append(
            Usual(epoch_s=now - began_at, round_s=round_s, bytes_per_s=bytes_per_s, num_peers=num_peers)
        )
        if len(self._epochs) < _ENOUGH_EPOCHS:
            return None
        self._is_given = True
        return Usual(
            epoch_s=statistics.median(each.epoch_s for each in self._epochs),
            round_s=statistics.median(each.round_s for each in self._epochs),
            bytes_per_s=statistics.median(each.bytes_per_s for each in self._epochs),
            num_peers=num_peers,
        )


def advice_on(usual: Usual, schedule: Schedule, *, codec: str, sizes: Iterable[int], num_layers: int) -> str:
    """Flags that published experiments found harmless, for a log; empty where rounds take little or are hidden.

    `sizes` are the values of each fragment.
    """
    share = usual.round_s / usual.epoch_s if usual.epoch_s > 0 else 0.0
    if schedule.overlap_steps or share <= SHARE_OF_EPOCH:
        return ""
    found = []
    step_s = max(usual.epoch_s - usual.round_s, 0.0) / schedule.steps_per_epoch
    overlap = overlap_steps_for(usual.round_s, step_s) if step_s > 0 else None
    if overlap is not None and overlap < schedule.steps_per_epoch:
        found.append(f"--hv.overlap-steps {overlap} hides them (arXiv 2501.18512)")
    if usual.bytes_per_s > 0:
        better = compression_for(max(sizes), 8 * usual.bytes_per_s, usual.epoch_s, num_peers=usual.num_peers)
        if is_lossier(better, codec):
            found.append(f"--hv.compression {better} sends fewer bytes")
    if schedule.num_fragments == 1 and num_layers > 1:
        most = fragments_for(num_layers)
        fragments = max(n for n in range(1, most + 1) if schedule.local_steps % n == 0)
        if fragments > 1:
            found.append(f"--hv.num-fragments {fragments} averages less at a time (arXiv 2501.18512)")
    found.append("more --hv.local-steps make them rarer")
    return f"rounds take {share:.0%} of the time: {'; '.join(found)}"


def num_layers_of(names: Iterable[str]) -> int:
    """Of a model with parameters of these names, as `model.layers.3.mlp.weight`; 0: it has none."""
    return len({match[1] for name in names if (match := _LAYER.search(name))})
