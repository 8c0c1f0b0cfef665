"""Advice on flags for a run whose rounds take too much of its time, given once after a few epochs."""

from __future__ import annotations

import re
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from peers.core.defaults import SHARE_OF_EPOCH, compression_for, fragments_for, is_lossier, overlap_steps_for
from peers.core.schedule import Schedule
from peers.timing import START_S

_ENOUGH_EPOCHS = 4
_ENOUGH_S = 2 * START_S
"""A run that is over sooner is a trial, in which it matters little how often it averages."""
_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, kw_only=True)
class Usual:
    """What an epoch is like on one peer."""

    epoch_s: float
    round_s: float
    """The part of the epoch from the group to the commit."""
    bytes_per_s: float
    """Bandwidth of the peer's link; 0: not known."""
    num_peers: int


class Advice:
    def __init__(self) -> None:
        self._epochs: deque[Usual] = deque(maxlen=_ENOUGH_EPOCHS)
        self._ended_at: float | None = None
        self._is_given = False
        self._trained_s = 0.0

    def epoch_ended(self, now: float, *, round_s: float, bytes_per_s: float, num_peers: int) -> Usual | None:
        """The medians over the last epochs, once only, as soon as there are enough of them."""
        began_at, self._ended_at = self._ended_at, now
        if began_at is None or self._is_given or num_peers < 2:
            # The first epoch includes waiting for others to join; an epoch alone says nothing about rounds.
            return None
        self._epochs.append(
            Usual(epoch_s=now - began_at, round_s=round_s, bytes_per_s=bytes_per_s, num_peers=num_peers)
        )
        self._trained_s += now - began_at
        if len(self._epochs) < _ENOUGH_EPOCHS or self._trained_s < _ENOUGH_S:
            return None
        self._is_given = True
        return Usual(
            epoch_s=statistics.median(each.epoch_s for each in self._epochs),
            round_s=statistics.median(each.round_s for each in self._epochs),
            bytes_per_s=statistics.median(each.bytes_per_s for each in self._epochs),
            num_peers=num_peers,
        )


def advice_on(usual: Usual, schedule: Schedule, *, codec: str, sizes: Iterable[int], num_layers: int) -> str:
    """A log line of flags that published experiments found harmless; empty if rounds are short or overlapped.

    `sizes`: the number of values in each fragment.
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
    """The number of layers of a model with these parameter names, like `model.layers.3.mlp.weight`; 0: none found."""
    return len({match[1] for name in names if (match := _LAYER.search(name))})
