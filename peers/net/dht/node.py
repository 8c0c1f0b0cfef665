"""The swarm's DHT: small expiring records that every peer can read, and the transport that comes with it.

A Hivemind DHT node in this process's own event loop, on a p2pd of its own. Only `load_hivemind`, which `Dht.join`
calls, imports Hivemind (and with it torch): a command line can import this module without that cost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import statistics
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from peers.errors import PeersError, PeerUnreachable, ProtocolError
from peers.net.dht.bootstrap import connect_any, not_taken
from peers.net.dht.contacts import Contacts
from peers.net.dht.descriptors import raise_limit
from peers.net.dht.look_ups import bound_look_ups, look_up
from peers.net.identity import Identity
from peers.net.libp2p.p2pd import P2pd
from peers.protocol.maddrs import by_reach, check_listenable, is_maddr, parse_maddr, validate_maddr
from peers.protocol.records import MAX_RECORD_BYTES, Record
from peers.protocol.wire import encode
from peers.tasks import cancelled
from peers.timing import CONNECT_S, GRACE_S, LOOK_S, OFTEN_S, PROBE_S, RECORD_TTL_S

if TYPE_CHECKING:
    from hivemind.dht.node import DHTNode
    from hivemind.p2p import P2P

    from peers.net.dht.records import Check, Found, InitialRecords, KeptRecords
    from peers.net.libp2p.transport import Transport

__all__ = ["Dht", "announced", "load_hivemind", "validate_maddr"]

R = TypeVar("R", bound=Record)
T = TypeVar("T")

_MAX_VALUES = 4096
BUCKET_SIZE = 8
"""Kademlia's k, as in BitTorrent's DHT. Every look-up and every store asks at least this many nodes: with Hivemind's
20, all nodes of a small swarm."""
_LONELY_LOOK_S = OFTEN_S
"""How often lost contacts are dialled while the node knows no other node."""
_DEADLINE_S = 3 / 8 * RECORD_TTL_S
"""Of one store or look-up: the two and the longest pause between announcements, RECORD_TTL_S / 4, take no longer than a
record lives."""
_ASKING_S = _DEADLINE_S - PROBE_S - GRACE_S
"""How long a look-up asks further nodes. Those asked last answer within PROBE_S, so that what was found is returned."""

logger = logging.getLogger(__name__)


class Dht:
    """This process's membership in a DHT. Used from the event loop that joined."""

    def __init__(
        self,
        p2pd: P2pd,
        p2p: P2P,
        node: DHTNode,
        kept: KeptRecords,
        transport: Transport,
        initial: InitialRecords,
        initial_peers: Sequence[str],
    ) -> None:
        self.peer_id = str(p2p.peer_id)
        self.transport = transport
        self._p2pd = p2pd
        self._p2p = p2p
        self._node, self._kept = node, kept
        self.initial_peers = frozenset(_by_peer(initial_peers))
        """The ids of the peers that this peer's user has named."""
        self._contacts = Contacts(_by_peer(initial_peers))
        self._initial = initial
        self._keeper = asyncio.create_task(self._keep_contacts())

    @classmethod
    async def join(
        cls,
        *,
        identity: Identity,
        initial_peers: Sequence[str] = (),
        host_maddrs: Sequence[str] = ("/ip4/0.0.0.0/tcp/0",),
        announce_maddrs: Sequence[str] = (),
        client_mode: bool = False,
        timeout_s: float = 2 * CONNECT_S,
    ) -> Dht:
        """Join the DHT that any of `initial_peers` belongs to, or begin one when there are none.

        `client_mode`: listen nowhere and store nothing for others, only ask. Raises UserError for addresses that are
        wrong or in use, and if this process may open too few files; PeerUnreachable if no initial peer answers.
        """
        for maddr in initial_peers:
            validate_maddr(maddr, peer_id=True)
        for maddr in (*host_maddrs, *announce_maddrs):
            validate_maddr(maddr, peer_id=False)
        if not client_mode:
            check_listenable(host_maddrs)
        others = [maddr for maddr in initial_peers if parse_maddr(maddr).peer_id != identity.peer_id]
        # Before p2pd starts, which inherits the limit.
        raise_limit()
        load_hivemind()
        from peers.net.dht.records import InitialRecords
        from peers.net.libp2p.transport import Transport

        async with contextlib.AsyncExitStack() as undo:
            p2pd = await P2pd.start(
                identity_path=identity.path,
                host_maddrs=host_maddrs,
                announce_maddrs=announce_maddrs,
                client_mode=client_mode,
            )
            undo.push_async_callback(p2pd.stop)
            transport = Transport(p2pd.control, p2pd.directory)
            undo.push_async_callback(transport.close)
            deadline = time.monotonic() + timeout_s
            answering = await connect_any(transport, others, timeout_s=timeout_s)
            p2p = await _attach(p2pd)
            undo.push_async_callback(p2p.shutdown)
            left_s = max(deadline - time.monotonic(), PROBE_S)
            node, kept = await _create_node(p2p, answering, client_mode, left_s)
            undo.pop_all()
            initial = InitialRecords(transport, node.protocol, kept, _by_peer(others))
            return cls(p2pd, p2p, node, kept, transport, initial, others)

    async def maddrs(self) -> list[str]:
        """The addresses others can dial now, each with /p2p/<id>, farthest reach first; none in client mode, or if p2pd
        does not answer."""
        visible = await _answer(self._p2p.get_visible_maddrs(latest=True))
        return by_reach(text for maddr in visible or () if is_maddr(text := str(maddr)))

    async def store(self, key: str, subkey: str, value: bytes, ttl_s: float) -> bool:
        """Put `value` (MAX_RECORD_BYTES at most) under `key`, beside the values of other subkeys.

        Returns whether any node took the value in time. Nodes refuse one that expires no later than the one they have,
        so give all values of a key the same `ttl_s`.
        """
        if len(value) > MAX_RECORD_BYTES:
            raise ValueError(f"a DHT value of {len(value)} bytes; at most {MAX_RECORD_BYTES} are kept")
        expiry = time.time() + ttl_s
        stored = await asyncio.gather(
            _answer(self._node.store(key, value, expiry, subkey=subkey)),
            _answer(self._initial.store(key, subkey, encode(value), expiry)),
        )
        return any(stored)

    def keep(self, key: str, check: Check) -> None:
        """From now on this node stores for others under `key` only what `check` lets through."""
        self._kept.keep(key, check)

    async def get(self, key: str) -> dict[str, bytes]:
        """The live values under `key` by subkey, as far as they are found in time. Anybody may have written them: the
        caller checks them."""
        found, of_initial = await asyncio.gather(
            _answer(self._node.get(key, latest=True)), _answer(self._initial.find(key))
        )
        return _checked_values(found.value if found is not None else None, of_initial or {})

    @property
    def silent_initial_peers(self) -> frozenset[str]:
        """Initial peers that are connected and did not answer the last look-up: their records are unknown here."""
        return self._initial.silent

    @property
    def is_answered(self) -> bool:
        """Whether any initial peer has answered a look-up; True if there are none."""
        return self._initial.is_answered

    async def clock_ahead_s(self) -> float | None:
        """How far this machine's clock is ahead of the initial peers', by the median of those that are connected and
        answer; None: there are none."""
        from hivemind.p2p import PeerID
        from hivemind.proto.dht_pb2 import PingRequest

        protocol = self._node.protocol

        async def ahead_of(peer_id: str) -> float:
            stub, sent_at, began = (
                protocol.get_stub(PeerID.from_base58(peer_id)),
                time.time(),
                time.monotonic(),
            )
            answer = await stub.rpc_ping(PingRequest(peer=protocol.node_info), timeout=PROBE_S)
            return float(sent_at + (time.monotonic() - began) / 2 - answer.dht_time)

        try:
            asked = self.initial_peers & await self.transport.connected_peers()
        except PeerUnreachable:
            return None
        answers = await asyncio.gather(*(_answer(ahead_of(peer_id)) for peer_id in asked))
        told = [ahead_s for ahead_s in answers if ahead_s is not None]
        return statistics.median_low(told) if told else None

    def remember(self, peer_id: str, maddrs: Sequence[str]) -> None:
        """Remember this peer as a node of the DHT, to be dialled again when it is lost."""
        if maddrs and peer_id != self.peer_id:
            self._contacts.remember(peer_id, maddrs)

    @property
    def p2pd_pid(self) -> int:
        return self._p2pd.pid

    async def ping(self, peer_id: str, *, timeout_s: float, maddrs: Sequence[str] = ()) -> bool:
        """Whether the process with this identity answers a DHT ping. All members do except those in client mode."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                return await self._meet(peer_id, maddrs)
        return False

    async def fail_with_p2pd(self) -> None:
        """Wait until p2pd has ended or Hivemind has lost its connection to it, then raise PeersError."""
        dead, control = asyncio.create_task(self._p2pd.wait_dead()), _control_tasks(self._p2p)
        try:
            await asyncio.wait({dead, *control}, return_when=asyncio.FIRST_COMPLETED)
            # The connection may end a little before the process does.
            await asyncio.wait({dead}, timeout=PROBE_S)
            words = dead.result() if dead.done() else "or lost its connection to this process"
        finally:
            await cancelled([dead])
        raise PeersError(
            f"p2pd, the process that carries this peer's connections, has died ({words}); start the same command again"
        )

    async def close(self) -> None:
        """Leave the swarm, and end every process and socket of this node. May be repeated."""
        await cancelled([self._keeper])
        await self.transport.close()
        if self._p2pd.is_alive:
            try:
                async with asyncio.timeout(PROBE_S):
                    await self._node.shutdown()
            except Exception as error:  # noqa: BLE001 - whatever ails hivemind, p2pd has to go
                logger.info("the DHT node did not close cleanly: %r", error)
        await self._p2p.shutdown()
        await self._p2pd.stop()

    async def _keep_contacts(self) -> None:
        """Dial peers again that were down when this node joined, have restarted since, or missed an answer."""
        while True:
            known = self._peers_in_table()
            await asyncio.sleep(LOOK_S if known else _LONELY_LOOK_S)
            with contextlib.suppress(PeerUnreachable):
                connected = await self.transport.connected_peers()
                lost = self._contacts.lost(connected & self._peers_in_table(), time.monotonic())
                answered = await asyncio.gather(*(self._meet(peer_id, maddrs) for peer_id, maddrs in lost))
                tried = zip((peer_id for peer_id, _ in lost), answered, strict=True)
                self._contacts.tried(tried, time.monotonic())

    async def _meet(self, peer_id: str, maddrs: Sequence[str]) -> bool:
        """Whether this peer's DHT node answers. If so, our node takes it back into its routing table despite earlier
        failures."""
        from hivemind.p2p import PeerID

        if maddrs:
            try:
                await self.transport.connect(peer_id, maddrs, timeout_s=PROBE_S)
            except PeerUnreachable:
                return False
        peer = PeerID.from_base58(peer_id)
        if await _answer(self._node.protocol.call_ping(peer)) is None:
            return False
        self._node.blacklist.register_success(peer)
        return True

    def _peers_in_table(self) -> set[str]:
        """The nodes in the routing table, which drops those that did not answer in time."""
        return {str(peer) for peer in self._node.protocol.routing_table.peer_id_to_uid}


async def _answer(call: Coroutine[Any, Any, T]) -> T | None:
    """What this call of Hivemind returns; None if it fails or takes too long."""
    try:
        with look_up(_ASKING_S):
            async with asyncio.timeout(_DEADLINE_S):
                return await call
    except Exception as error:  # noqa: BLE001 - whatever strangers' nodes answer, this process goes on
        logger.info("no answer from the DHT: %r", error)
        return None


async def announced(
    dht: Dht, key: str, kind: type[R], run_id: str, check: Callable[[R], object]
) -> dict[str, R]:
    """By peer id: the records under this key that are signed, fresh, of this run, and accepted by `check`, which raises
    ProtocolError for others (Gate.check_record, for instance, for a peer that is not admitted)."""
    found = {}
    for peer_id, blob in (await dht.get(key)).items():
        try:
            record = kind.decode(peer_id, blob, time.time(), run_id=run_id)
            check(record)
        except ProtocolError as error:
            logger.debug("ignored a record: %s", error)
            continue
        found[peer_id] = record
    return found


def _by_peer(maddrs: Sequence[str]) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for maddr in maddrs:
        grouped.setdefault(str(parse_maddr(maddr).peer_id), []).append(maddr)
    return grouped


def load_hivemind() -> None:
    """Import what joining needs. Takes seconds, so call it before an event loop runs, which has to hear signals."""
    import hivemind.dht.node  # noqa: F401 - sets up its logging as it loads

    import peers.net.libp2p.transport  # noqa: F401

    # Hivemind logs a warning with a traceback for every peer that comes or goes, which is normal in a swarm.
    logging.getLogger("hivemind").setLevel(logging.CRITICAL)


async def _attach(p2pd: P2pd) -> P2P:
    from hivemind.p2p import P2P
    from hivemind.utils.multiaddr import Multiaddr

    p2p = await P2P.replicate(Multiaddr(f"/unix{p2pd.control}"))
    for task in _control_tasks(p2p):
        # `fail_with_p2pd` tells when p2pd dies; asyncio would log it once more, with a traceback inside hivemind.
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
    return p2p


def _control_tasks(p2p: P2P) -> tuple[asyncio.Task[None], asyncio.Task[None]]:
    """Hivemind's tasks that read from p2pd and write to it. Hivemind itself does not notice when one of them fails."""
    control = p2p._client.control
    return control._read_task, control._write_task


async def _create_node(
    p2p: P2P, initial_peers: Sequence[str], client_mode: bool, timeout_s: float
) -> tuple[DHTNode, KeptRecords]:
    from hivemind.dht.node import DHTNode
    from hivemind.dht.protocol import ValidationError

    from peers.net.dht.records import KeptRecords

    kept = KeptRecords()
    try:
        # The look-up of this node's own neighbours may go on for a while in the background.
        with look_up(timeout_s):
            # No caches: they would answer with outdated announcements.
            node = await DHTNode.create(
                p2p=p2p,
                initial_peers=list(initial_peers),
                client_mode=client_mode,
                # Long: a node may be busy, as when fifty peers join at once.
                wait_timeout=timeout_s,
                bootstrap_timeout=PROBE_S,
                cache_locally=False,
                cache_on_store=False,
                cache_nearest=0,
                bucket_size=BUCKET_SIZE,
                record_validator=kept,
            )
        node.protocol.wait_timeout = PROBE_S
        kept.guard(node.protocol)
        bound_look_ups(node)
        return node, kept
    except ValidationError as error:
        raise not_taken(str(error)) from error
    except (RuntimeError, AssertionError) as error:  # AssertionError: its DHT id is no such id
        raise PeerUnreachable(
            f"{', '.join(initial_peers)} can be reached, but no Hivemind DHT answers there; is it the "
            "address that `diloco dht start` or `hivemind-dht` printed?"
        ) from error


def _checked_values(found: Any, of_initial: Found) -> dict[str, bytes]:
    """The newest value of each subkey, if it has the form of our records; the rest is dropped."""
    from peers.net.dht.records import value_in

    newest = {subkey: (value_in(packed), expiry) for subkey, (packed, expiry) in of_initial.items()}
    for subkey, item in list(found.items())[:_MAX_VALUES] if hasattr(found, "items") else ():
        value, expiry = getattr(item, "value", None), getattr(item, "expiration_time", 0.0)
        if isinstance(subkey, str) and expiry >= newest.get(subkey, (None, 0.0))[1]:
            newest[subkey] = value, expiry
    return {
        subkey: value
        for subkey, (value, _) in newest.items()
        if isinstance(value, bytes) and len(value) <= MAX_RECORD_BYTES
    }
