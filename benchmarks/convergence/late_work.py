"""The direction-aware correction of late work of HeLoCo (arXiv 2606.00271), block by block, a parameter being a block.

A pseudo-gradient that points against the outer momentum loses part of that component, one that is nearly orthogonal to
it is turned towards it, and one that points along it stays. The paper's constants were not at hand: these are ours.
"""

from __future__ import annotations

from torch import Tensor

_ALIGNED = 0.2
"""From this cosine on a block stays as it is."""
_SHRINKAGE = 1.0
_MAX_SHRINKAGE = 1.0
_TURN = 1.0
_KAPPA = 1.0
_EPSILON = 1e-12


def corrected(work: Tensor, momentum: Tensor) -> Tensor:
    """The corrected pseudo-gradient of one block; `momentum` has its shape and direction."""
    work_norm, momentum_norm = work.norm(), momentum.norm()
    if work_norm < _EPSILON or momentum_norm < _EPSILON:
        return work
    towards = momentum / momentum_norm
    cosine = (work / work_norm * towards).sum()
    confidence = work_norm / (work_norm + _KAPPA * momentum_norm)
    if cosine >= _ALIGNED:
        return work
    if cosine < 0:
        shrinkage = (_SHRINKAGE * -cosine * confidence).clamp(max=_MAX_SHRINKAGE)
        return work - shrinkage * cosine * work_norm * towards
    turn = _TURN * (_ALIGNED - cosine) * confidence
    turned = (1 - turn) * work / work_norm + turn * towards
    return work_norm * turned / turned.norm().clamp(min=_EPSILON)
