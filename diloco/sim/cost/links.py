"""Links, and max-min fair sharing between the transfers that use them; pure.

A link connects one peer to the core of the network, with a rate in each direction; the core itself is never the
bottleneck. A transfer over several links at once is one *activity*: a reduction, for example, uses every member's link
in both directions. An activity has a single rate, and each link that it uses carries a fixed multiple of that rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TCP_PAYLOAD = 1448 / 1500
"""Share of payload in each packet, with TCP timestamps."""
TCP_FILL = 0.98
"""Share of a link that a few open connections use: raw TCP in the laboratory, all to all, took 8.51 s where 8.34 s are
computed from TCP_PAYLOAD alone (benchmarks/results/wan-cpu-2cores.json, broadband)."""
_SATURATED = 1e-9

Resource = tuple[int, str]
"""World rank, and one of "up", "down", "processors"."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """The link between one peer and the core of the network."""

    up_bits_per_s: float
    down_bits_per_s: float
    delay_s: float
    """One-way delay to the core: the round trip between two peers takes twice the sum of their delays."""
    fill: float = TCP_PAYLOAD * TCP_FILL
    """Fraction of the rate that is available for data."""

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
    """The max-min fair rate of each activity, at most its `most`.

    `usages` are units per second of each resource that an activity uses at rate 1. Progressive filling: all rates grow
    equally; when a resource is saturated, the activities that use it keep their rate and the others grow further.
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
