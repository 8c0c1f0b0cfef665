"""The state from which a run could begin: a checkpoint's, or a worker's own initial weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from peers.errors import UserError
from peers.protocol.certificates import verify_signature
from peers.reduce.codecs import codec_named
from peers.reduce.copies import cloned
from peers.reduce.plan import slices
from peers.reduce.residuals import Residuals
from peers.state import files as state_files
from peers.state.outer_state import OuterState
from peers.threads import in_exact_threads

_PAGE_BYTES = 4096


def offered_state(
    out: Sequence[Tensor], resume: str | None, *, codec: str
) -> tuple[OuterState, list[Residuals] | None]:
    """The state from which the run could begin, of a worker whose initial weights are in `out`.

    Also the residuals of the checkpoint `resume`, unless `codec` is lossless and so has none. Raises UserError if the
    checkpoint is not one of this model, or not proved to be one of a run.
    """
    if not resume:
        return OuterState.initial([cloned(weights) for weights in out]), None
    state = state_files.load(Path(resume))
    # `load` has checked that the values match the header; this checks that the members of a commit have signed it.
    certificate = state.header.certificate
    if certificate is None:
        raise UserError(
            f"the checkpoint {resume} has no certificate: a version of diloco from before certificates saved it, and "
            "training cannot go on from it. Take its model out with `diloco export`, and begin a run with it by "
            "--path-model"
        )
    if not certificate.is_signed(verify_signature):
        raise UserError(
            f"the certificate of the checkpoint {resume} is not signed by all of those whose work it says is in it: it "
            "has been altered, put together from parts of several, or saved by an earlier version of diloco. Resume "
            "from another one, of a place that only you can write to, or take its model out with `diloco export`"
        )
    sizes = tuple(weights.numel() for weights in out)
    if state.sizes != sizes:
        raise UserError(
            f"the checkpoint {resume} is of another model or has other fragments: it has {list(state.sizes)} "
            f"parameters in them, this one {list(sizes)}"
        )
    if codec_named(codec).lossless:
        return state, None
    return state, state_files.load_residuals(Path(resume), state)


def touch(fresh: Sequence[Tensor]) -> None:
    """Write to every page of memory that has not been written to yet."""
    for values in fresh:
        _touch(values)


def _touch(values: Tensor) -> None:
    def write(mine: list[slice]) -> None:
        for part in mine:
            values[part][:: _PAGE_BYTES // values.element_size()] = 0

    in_exact_threads("touch", write, slices(values.numel()))
