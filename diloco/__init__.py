"""The training process and the command line. `Diloco` makes any torch loop a peer's worker.

Each folder imports only from those above it:

    options     what the user sets: flags and their limits, a trainer's configuration, named models and datasets
    outer       the worker's end of the swarm: start at outer/diloco.py
    data        from documents to batches, and which peer trains on which samples
    train       the parts of a trainer: model, optimizer, sharding, metrics, run directory
    checkpoint  saving and restoring, exporting
    rl          GRPO: tasks, rewards, rollouts
    sim         the virtual runtime of peers.core, and `diloco simulate`
    doctor      checks whether a machine can be a peer
    launch      peers and trainers as processes on this machine
    dashboard   the web page
    cli         the commands

The trainers are train_fsdp.py and train_grpo.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco.callback import DilocoCallback
    from diloco.outer.diloco import Diloco

__all__ = ["Diloco", "DilocoCallback"]


def __getattr__(name: str) -> Any:
    # Imported on first use: both load torch, which would slow down `--help`.
    if name == "Diloco":
        from diloco.outer.diloco import Diloco

        return Diloco
    if name == "DilocoCallback":
        from diloco.callback import DilocoCallback

        return DilocoCallback
    raise AttributeError(f"module 'diloco' has no attribute {name!r}")
