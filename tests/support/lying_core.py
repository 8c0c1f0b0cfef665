"""A light peer whose core is one of the liars of the random schedules: a member in good order, but for its lie."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

from diloco.sim.liars import Liar
from diloco.sim.schedules import ALL_LIARS

LIES = "this peer has lied"
"""In the log of one that has."""

log = logging.getLogger(__name__)


def lie(name: str) -> None:
    """From now on the daemon of this process decides with the liar of this name (`ALL_LIARS`)."""
    from peers.daemon import assembly

    honest = assembly.Peer

    def make(*, keys: Any, now: float, **rest: Any) -> Liar:
        inner = honest(keys=keys, now=now, **rest)
        liar = ALL_LIARS[name](inner=inner, keys=keys, rng=random.Random(1), now=now, lies_at=now)
        liar.hear = noted(liar.hear, lambda event: event)  # type: ignore[method-assign]
        liar.say = noted(liar.say, lambda effect: (effect,))  # type: ignore[method-assign]
        liar.invent = noted(liar.invent, lambda: ())  # type: ignore[method-assign]
        liar.answer = noted(liar.answer, lambda event: ())  # type: ignore[method-assign]
        return liar

    assembly.Peer = make  # type: ignore[misc, assignment]


def noted(said: Callable[..., Any], honest: Callable[..., Any]) -> Callable[..., Any]:
    """The same, and a line in the log where it is not what an honest peer would say."""

    def say(*arguments: Any) -> Any:
        truth, lie = honest(*arguments), said(*arguments)
        if isinstance(truth, tuple):
            lie = tuple(lie)
        if lie != truth:
            log.info(LIES)
        return lie

    return say
