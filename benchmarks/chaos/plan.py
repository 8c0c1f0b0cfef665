"""Draws the faults of a run and their times from a seed, so that a run can be repeated."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of fault."""

    num_cards: int
    """Number of its cards in the deck, which is its relative frequency."""
    num_ranks: int = 1
    """Number of peers that it affects: two for a link, none for the coordinator."""
    lasts_s: tuple[float, float] = (0.0, 0.0)
    """Minimum and maximum duration; for a process that ends, the time until it is restarted."""
    is_death: bool = False
    """Whether a peer's process ends."""


_AWAY_S = (1.0, 5.0)
KINDS: dict[str, Kind] = {
    "kill daemon": Kind(num_cards=3, lasts_s=_AWAY_S, is_death=True),
    "kill worker": Kind(num_cards=2),
    "kill p2pd": Kind(num_cards=1, lasts_s=_AWAY_S, is_death=True),
    "leave": Kind(num_cards=1, lasts_s=_AWAY_S, is_death=True),
    "freeze": Kind(num_cards=2, lasts_s=(1.0, 12.0)),
    "cut link": Kind(num_cards=2, num_ranks=2, lasts_s=(2.0, 12.0)),
    "silent link": Kind(num_cards=1, num_ranks=2, lasts_s=(2.0, 12.0)),
    "slow link": Kind(num_cards=1, num_ranks=2, lasts_s=(5.0, 20.0)),
    "partition": Kind(num_cards=1, num_ranks=2, lasts_s=(3.0, 12.0)),
    "corrupt byte": Kind(num_cards=2, num_ranks=2),
    "disorder": Kind(num_cards=1, lasts_s=(5.0, 20.0)),
    "clock": Kind(num_cards=1, lasts_s=(10.0, 30.0)),
    "disk full": Kind(num_cards=1, lasts_s=(5.0, 20.0)),
    "kill coordinator": Kind(num_cards=1, num_ranks=0, lasts_s=(3.0, 10.0)),
}
DISORDER = 0.3
"""Fraction of a peer's messages that are sent twice, and fraction that are sent late."""
CLOCK_SKEW_S = 2.0


@dataclass(frozen=True)
class Fault:
    at_s: float
    kind: str
    ranks: tuple[int, ...]
    until_s: float
    """When the fault is over, or the process that it ended is restarted."""
    sign: int = 1
    """Direction of a clock jump."""

    def __str__(self) -> str:
        who = " and ".join(map(str, self.ranks))
        lasts = f" for {self.until_s - self.at_s:.1f} s" if self.until_s > self.at_s else ""
        return f"{self.kind} {who}{lasts}"


def draw(
    seed: int, *, seconds: float, num_peers: int, mean_s: float, kinds: Sequence[str] = tuple(KINDS)
) -> list[Fault]:
    """Faults of a Poisson process with a mean interval of `mean_s`, in order of time.

    Kinds are drawn from a shuffled deck without replacement, so that a short run has most of them. Deaths and freezes
    of one peer do not overlap, and at least one peer is free of them at any time.
    """
    chance, faults, at_s, deck = random.Random(seed), list[Fault](), 0.0, list[str]()
    busy = dict.fromkeys(range(num_peers), 0.0)
    while (at_s := at_s + chance.expovariate(1 / mean_s)) < seconds:
        if not deck:
            deck = [name for name in kinds for _ in range(KINDS[name].num_cards)]
            chance.shuffle(deck)
        name = deck.pop()
        kind = KINDS[name]
        ranks = tuple(sorted(chance.sample(range(num_peers), min(kind.num_ranks, num_peers))))
        until_s = at_s + chance.uniform(*kind.lasts_s)
        sign = chance.choice((-1, 1))
        if kind.is_death or name in ("freeze", "kill worker"):
            free = [rank for rank in busy if busy[rank] <= at_s]
            if len(free) < 2:
                continue
            ranks = (chance.choice(free),)
            busy[ranks[0]] = until_s + 1.0
        faults.append(Fault(at_s, name, ranks, until_s, sign))
    return faults
