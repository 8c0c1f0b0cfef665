"""A light peer whose daemon means ill in rounds: it follows the protocol, and lies in what it sends."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

Lie = Literal["not finite", "longer than announced"]


def poison(lie: Lie) -> None:
    """From now on, what this process contributes to rounds, or makes of others' contributions, is this."""
    from peers.reduce import arithmetic as reduce_arithmetic
    from peers.reduce.codecs import PseudoGradient

    honest = reduce_arithmetic.contribution

    def hostile(*arguments: Any) -> PseudoGradient:
        chunk = honest(*arguments)
        if lie == "not finite":
            return chunk._replace(local=np.full_like(chunk.local, np.nan))
        return chunk._replace(local=chunk.anchor - np.float32(1000) * (chunk.anchor - chunk.local))

    reduce_arithmetic.contribution = hostile  # type: ignore[assignment]
