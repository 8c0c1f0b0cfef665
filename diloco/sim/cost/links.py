"""What links carry, and how those who use them at the same time share it; pure.

A link joins one peer to the rest of the world, with a rate each way; the core between them is never the limit. What
goes over several links at once (a reduction uses every member's, in both directions) is one activity: how far it comes
in a second is one number, its rate, and each link that it uses carries a fixed multiple of that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TCP_PAYLOAD = 1448 / 1500
"""Of each packet's bytes, with timestamps."""
TCP_FILL = 0.98
"""Of that, what a few connections which stay open fill a link with: raw TCP in the laboratory, from everybody to
everybody, took 8.51 s where this arithmetic says 8.34 (benchmarks/results/wan-cpu-2cores.json, broadband)."""
_SATURATED = 1e-9

Resource = tuple[int, str]
"""World rank, and which of its means: up, down, processors."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """How one peer is joined to the others."""

    up_bits_per_s: float
    down_bits_per_s: float
    delay_s: float
    """One way to the core: the round trip between two peers is twice the sum of theirs."""
    fill: float = TCP_PAYLOAD * TCP_FILL
    """The part of the rate that is there for data."""

    @property
    def up_bytes_per_s(self) -> float:
        return self.fill * self.up_bits_per_s / 8

    @property
    def down_bytes_per_s(self) -> float:
        return self.fill * self.down_bits_per_s / 8


def fair_rates(
    usages: Sequence[Mapping[Resource, float]],
    capacity: Mapping[Resource, float],
    most: Sequence[float],
) -> list[float]:
    """The max-min fair rate of each activity, none above its `most`.

    `usages` say how many units per second of each resource an activity takes at rate 1. All rates grow alike; where a
    resource is used up, those that use it have their rate, and the others grow on.
    """
    rates = list(most)
    left = {name: capacity[name] for usage in usages for name in usage}
    growing, level = set(range(len(usages))), 0.0
    while growing:
        load: dict[Resource, float] = {}
        for index in growing:
            for name, units in usages[index].items():
                load[name] = load.get(name, 0.0) + units
        room = min((left[name] / units for name, units in load.items() if units), default=float("inf"))
        step = min(room, *(most[index] - level for index in growing))
        level += step
        if level == float("inf"):
            break
        for name, units in load.items():
            left[name] -= step * units
        full = {name for name, units in load.items() if units and left[name] <= _SATURATED * capacity[name]}
        for index in tuple(growing):
            if most[index] <= level * (1 + _SATURATED) or not full.isdisjoint(usages[index]):
                rates[index] = min(level, most[index])
                growing.remove(index)
    return rates
