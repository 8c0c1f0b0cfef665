"""What the daemon does for its worker: admits it, starts it, saves the outer state, and notices its end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from peers.core import events
from peers.daemon.agreement import Agreement
from peers.daemon.beginning import offered_state
from peers.daemon.rollout_service import RolloutService
from peers.daemon.runtime import Runtime
from peers.daemon.worker_monitor import WorkerMonitor
from peers.errors import UserError
from peers.protocol.mesh import Scalar
from peers.state.files import Saving
from peers.state.handover import Memories, Start
from peers.state.layout import Layout
from peers.tasks import is_set_within
from peers.timing import START_S

_FLOAT_BYTES = 4
_REFUSAL_TIMEOUT_S = START_S
"""How long a worker may take to connect that has to be told why this peer cannot join."""


class WorkerHost:
    """Outlives the worker's lives, each of which is a WorkerSession. Used from one event loop."""

    def __init__(
        self, run_id: str, agreement: Agreement, monitor: WorkerMonitor, rollouts: RolloutService
    ) -> None:
        self.run_id, self.monitor, self.rollouts = run_id, monitor, rollouts
        self.finished = asyncio.Event()
        """Set when the worker says that its training is over."""
        self.refused = asyncio.Event()
        """Set when a worker has been told what its user must correct."""
        self.saving = Saving()
        self._agreement = agreement
        self._ready: asyncio.Future[Runtime] = asyncio.get_running_loop().create_future()
        self._layout: Layout | None = None

    @property
    def runtime(self) -> Runtime:
        """Once this peer may train; every worker that has been admitted finds it."""
        return self._ready.result()

    def may_train(self, runtime: Runtime) -> None:
        """Serve the workers that wait for this peer to join."""
        self.monitor.runtime = runtime
        self._ready.set_result(runtime)

    async def refuse(self, error: UserError, *, wait: bool) -> None:
        """Tell the workers that wait why this peer cannot join; `wait` until one has been told."""
        self._ready.set_exception(error)
        # Marks the exception as retrieved: there may be no worker.
        self._ready.exception()
        if wait:
            await is_set_within(self.refused, _REFUSAL_TIMEOUT_S)

    async def manifest(self) -> Mapping[str, Scalar]:
        """What the swarm has agreed on, as soon as it has. Raises UserError where this peer cannot join."""
        await asyncio.shield(self._ready)
        return self._agreement.manifest

    async def admit(self, layout: Layout) -> None:
        """Raises UserError where this is another model than that of the worker's earlier lives."""
        runtime = await asyncio.shield(self._ready)
        if self._layout is not None and self._layout.digest != layout.digest:
            raise UserError("the worker came back with another model than before; start the peer anew")
        self._layout = layout
        runtime.core.timing.set_sizes(
            fragment_bytes=_FLOAT_BYTES * max(layout.sizes), state_bytes=2 * _FLOAT_BYTES * sum(layout.sizes)
        )

    async def start(self, memories: Memories, offer: Mapping[str, Any]) -> Start:
        """The state to begin from: the swarm's, a checkpoint's, or the worker's own initial weights."""
        runtime, resume = self.runtime, offer.get("resume")
        self.monitor.has_worker = True
        offered, residuals = await asyncio.to_thread(offered_state, memories.out, resume)
        if runtime.state is None:
            self.monitor.show("waiting")
        start = await runtime.begin_worker(memories.inn, offered, residuals)
        if resume and offer.get("is_own", True) and runtime.state is offered:
            # The run began from this very checkpoint, so the worker's weights are on top of the right anchor.
            start = replace(start, keep_local=True, local_step=int(offer["local_step"]))
        self.monitor.started(start)
        return start

    async def snapshot(self, directory: Path) -> None:
        """Begin to write the outer state as it is now. Raises OSError."""
        runtime = self.runtime
        if runtime.state is None:
            raise OSError("there is no outer state yet")
        await self.saving.begin(runtime.state, runtime.averaging.residuals, directory)

    def progressed(self, progress: Mapping[str, Any]) -> None:
        """Tell the core how far the worker is."""
        since_commit = self.monitor.progressed(progress)
        # A worker that continues during its round is still in the epoch before.
        if since_commit >= 0:
            self.runtime.post(events.WorkerTrains(since_commit, self.monitor.step_s))

    def worker_lost(self) -> None:
        """The worker has hung up. Nobody is to wait for it; what it has handed over is still averaged."""
        self.monitor.has_worker = False
        if self._ready.done() and not self._ready.exception():
            self.runtime.post(events.WorkerGone())
        if self.finished.is_set():
            self.monitor.show("leaving")
            return
        self.monitor.lost()
        if self.monitor.state in ("training", "waiting"):
            self.monitor.show("joining")
