"""A light peer whose daemon means ill in rounds: it follows the protocol, and lies in what it sends."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

Lie = Literal["not finite", "longer than announced", "false sums"]


def poison(lie: Lie) -> None:
    """From now on, what this process contributes to rounds, or makes of others' contributions, is this."""
    from peers.reduction import arithmetic as reduce_arithmetic

    if lie == "false sums":
        _reduce_falsely()
        return
    from peers.codecs import PseudoGradient

    honest = reduce_arithmetic.contribution

    def hostile(*arguments: Any) -> PseudoGradient:
        chunk = honest(*arguments)
        if lie == "not finite":
            return chunk._replace(local=np.full_like(chunk.local, np.nan))
        return chunk._replace(local=chunk.anchor - np.float32(1000) * (chunk.anchor - chunk.local))

    reduce_arithmetic.contribution = hostile  # type: ignore[assignment]


def _reduce_falsely() -> None:
    """To everybody alike, and to take part in audits that never find anything."""
    from peers.reduction.arithmetic import Arithmetic
    from peers.round import attempts

    honest, look = Arithmetic.finish, attempts.audit_shares

    def finish(self: Arithmetic, index: int, *arguments: Any) -> None:
        part = self._plan.chunk(self._plan.me, index)
        np.negative(self._result[part], out=self._result[part])
        honest(self, index, *arguments)

    def blind(*arguments: Any, **named: Any) -> frozenset[int]:
        look(*arguments, **named)
        return frozenset()

    Arithmetic.finish = finish  # type: ignore[method-assign]
    attempts.audit_shares = blind  # type: ignore[assignment]
