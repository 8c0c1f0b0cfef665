"""Figures for Prometheus: of one daemon on loopback, or of a whole swarm as an observer sees it.

Labels are bounded: a run's id, world ranks below MAX_RANK of at most MAX_PEERS peers at once, and fixed words. No peer
id and no text that a peer has sent becomes a label.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, generate_latest, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from peers.errors import UserError
from peers.monitor.observations import LOST, SILENT
from peers.protocol.records import STATES
from peers.protocol.reports import PARTS
from peers.timing import ANSWER_S

HOST = "127.0.0.1"
MAX_RANK = 4096
MAX_PEERS = 256
MAX_CONNECTIONS = 16
ALL_STATES = (*sorted(STATES), LOST, SILENT)
_RUN = ("run_id",)
_RANK = ("run_id", "world_rank")
# Of one connection: for reading the request, and for the daemon's figures.
_CONNECTION_S = 2 * ANSWER_S

Summary = Mapping[str, Any]
"""A swarm's, as `summary_of` (peers/monitor/summary.py) gives it."""

log = logging.getLogger(__name__)


class Family(NamedTuple):
    """One metric, with its name and description, on which the docs and the Grafana dashboard rely."""

    name: str
    says: str
    figure: str = ""
    """The figure that it shows, in a peer's entry of peers/monitor/summary.py; empty: it is computed."""
    labels: tuple[str, ...] = _RANK

    @property
    def kind(self) -> str:
        return "counter" if self.name.endswith("_total") else "gauge"

    def empty(self) -> GaugeMetricFamily | CounterMetricFamily:
        family = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        return family(self.name, self.says, labels=self.labels)


FAMILIES = (
    Family("diloco_peers", "Peers of the run that are there.", labels=_RUN),
    Family("diloco_stragglers", "Peers that the leader of a round waits for.", labels=_RUN),
    Family(
        "diloco_state", "1 for the state that the peer is in, 0 for the others.", labels=(*_RANK, "state")
    ),
    Family("diloco_epoch", "Outer steps that the peer's anchor has.", "epoch"),
    Family("diloco_step", "Nominal inner step.", "step"),
    Family("diloco_loss", "Loss of the last reported step, in nats per token.", "loss"),
    Family("diloco_tokens_per_second", "Tokens trained per second, lately.", "tokens_per_s"),
    Family(
        "diloco_committed_tokens",
        "Tokens averaged into the anchor, over all epochs and peers.",
        "committed_tokens",
    ),
    Family("diloco_last_seen_seconds", "Since the peer's newest report.", "last_seen_s"),
    Family("diloco_rounds_total", "Epochs that ended on the peer since it was started.", "num_rounds"),
    Family(
        "diloco_round_failures_total",
        "Attempts at rounds that were reported as failed.",
        "num_failures",
    ),
    Family(
        "diloco_worker_losses_total",
        "Times that the peer's worker ended before the training did.",
        "num_worker_losses",
    ),
    Family("diloco_sent_bytes_total", "Sent for reductions.", "sent_bytes"),
    Family("diloco_received_bytes_total", "Received for reductions.", "received_bytes"),
    Family("diloco_forwarded_bytes_total", "Carried for other peers, each way.", "forwarded_bytes"),
    Family(
        "diloco_upload_bytes_per_second", "Sent in the last reduction, over its time.", "upload_bytes_per_s"
    ),
    Family(
        "diloco_download_bytes_per_second",
        "Received in the last reduction, over its time.",
        "download_bytes_per_s",
    ),
    Family(
        "diloco_link_bytes_per_second",
        "What the peer's link carries each way at the most.",
        "link_bytes_per_s",
    ),
    Family("diloco_round_seconds", "Of the last round, from its group to the commit."),
    Family(
        "diloco_round_part_seconds",
        "Of the last epoch's parts: gathering, reducing, voting and so on.",
        labels=(*_RANK, "part"),
    ),
)


@contextlib.asynccontextmanager
async def metrics_served(
    port: int, summary: Callable[[], Summary], rank: Callable[[], int]
) -> AsyncIterator[int]:
    """Serve the figures of the peer with this world rank on loopback while the context lasts.

    Gives the port; `port` 0 takes any free one. Raises UserError if it is taken.
    """
    loop = asyncio.get_running_loop()

    async def current() -> tuple[Summary, int]:
        return summary(), rank()

    def collect() -> Iterator[Metric]:
        # Each request has a thread of its own, but the figures belong to the event loop's.
        try:
            swarm, only_rank = asyncio.run_coroutine_threadsafe(current(), loop).result(ANSWER_S)
        except TimeoutError:
            log.warning("no figures for Prometheus: the daemon was busy for %g s", ANSWER_S)
            return iter(())
        return metrics_of(swarm, only_rank=only_rank)

    try:
        server = make_server(HOST, port, make_wsgi_app(_registry(collect)), _Server, _Handler)
    except OSError as error:
        raise UserError(
            f"--hv.metrics-port {port}: {error.strerror}; choose another one, or 0 for any"
        ) from error
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        log.info("metrics at http://%s:%d/metrics", HOST, server.server_port)
        yield server.server_port
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        thread.join()


class _Server(ThreadingWSGIServer):
    """Limits how many connections there are, since each has a thread and any local user may connect, and their time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._opened_at: dict[Any, float] = {}
        super().__init__(*args, **kwargs)

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._opened_at) >= MAX_CONNECTIONS:
            self.shutdown_request(request)
            return
        self._opened_at[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._opened_at.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called twice a second. A thread whose connection is shut down ends by itself."""
        oldest = time.monotonic() - _CONNECTION_S
        for request in [request for request, at in list(self._opened_at.items()) if at < oldest]:
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)


class _Handler(WSGIRequestHandler):
    """Limits how long a client may take, and logs nothing."""

    timeout = ANSWER_S

    def log_message(self, format: str, *args: object) -> None:
        pass


def swarm_metrics(swarm: Summary) -> bytes:
    """The figures of all peers, in Prometheus' text format."""
    return generate_latest(_registry(lambda: metrics_of(swarm)))


def metrics_of(swarm: Summary, *, only_rank: int | None = None) -> Iterator[Metric]:
    """The metrics of all peers, or of one. Unknown figures are omitted."""
    run_id = str(swarm["run_id"])
    metrics = {family.name: family.empty() for family in FAMILIES}

    def add(name: str, value: float | None, *labels: str) -> None:
        if value is not None:
            metrics[name].add_metric([run_id, *labels], value)

    add("diloco_peers", sum(peer["state"] not in (LOST, SILENT) for peer in swarm["peers"]))
    add("diloco_stragglers", len(swarm["stragglers"]))
    shown: dict[int, Mapping[str, Any]] = {}
    for peer in swarm["peers"]:
        is_wanted = only_rank in (None, peer["world_rank"])
        if is_wanted and 0 <= peer["world_rank"] < MAX_RANK and len(shown) < MAX_PEERS:
            shown.setdefault(peer["world_rank"], peer)
    last_round = {entry["world_rank"]: entry for round_ in swarm["rounds"] for entry in round_["peers"]}
    for world_rank, peer in shown.items():
        rank = str(world_rank)
        for state in ALL_STATES:
            add("diloco_state", float(peer["state"] == state), rank, state)
        for family in FAMILIES:
            if family.figure:
                add(family.name, peer[family.figure], rank)
        if (round_ := last_round.get(world_rank)) is not None:
            add("diloco_round_seconds", round_["round_s"], rank)
            for part in PARTS:
                add("diloco_round_part_seconds", round_[part], rank, part.removesuffix("_s"))
    return (metric for metric in metrics.values() if metric.samples)


def _registry(collect: Callable[[], Iterator[Metric]]) -> CollectorRegistry:
    class Figures(Collector):
        def collect(self) -> Iterator[Metric]:
            return collect()

    # Must not collect while it is registered: the event loop that has to answer is busy registering it.
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Figures())
    return registry
