"""Real daemons, watched from outside: a peer's death is seen at once."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import msgpack
import pytest
from msgspec.msgpack import Decoder

from benchmarks.chaos.links import free_port
from peers.admission.secrets import AdmissionKey, SwarmSecret
from peers.errors import PeerUnreachable, ProtocolError
from peers.monitor.observer import Observer, observing
from peers.monitor.report_service import ReportService, proof_of
from peers.net.channel import Channel
from peers.net.dht.node import Dht
from peers.net.identity import load_or_create
from peers.protocol.admission import Nonce, Proof
from peers.protocol.refusal import Refusal, Why
from peers.protocol.reports import Busy, Hello, Report, report_protocol
from peers.timing import RECORD_TTL_S
from tests.support.in_process import Network
from tests.support.members import eventually
from tests.support.observing import read_swarm
from tests.support.sighted import full_report
from tests.support.swarm import LightSwarm, wait_until
from tests.unit.peers.monitor.test_prometheus import get, values

_HELLO, _NONCE = Decoder(Hello), Decoder(Nonce)
_ANSWER = Decoder(Report | Busy | Refusal)


async def until(
    observer: Observer, condition: Callable[[dict[str, Any]], bool], timeout_s: float = 30.0
) -> float:
    """Wait until the observed swarm meets the condition. Returns the time by the wall clock."""
    deadline = time.monotonic() + timeout_s
    while not condition(swarm := observer.swarm()):
        assert time.monotonic() < deadline, swarm
        await observer.changed(deadline - time.monotonic())
    return time.time()


def state_of(swarm: dict[str, Any], rank: int) -> str:
    return next((peer["state"] for peer in swarm["peers"] if peer["world_rank"] == rank), "")


def has_all(swarm: dict[str, Any], *ranks: int) -> bool:
    shown = {peer["world_rank"]: peer for peer in swarm["peers"]}
    return shown.keys() >= set(ranks) and all(shown[rank]["answers"] for rank in ranks)


def events_of(swarm: dict[str, Any], rank: int, *, since: float) -> list[str]:
    """The events of a peer that the observer itself has seen."""
    return [
        event["what"]
        for event in swarm["events"]
        if event["said_by"] is None and event["world_rank"] == rank and event["time"] >= since
    ]


def all_have_signed(swarm: dict[str, Any]) -> bool:
    """Whether the peers all signed the certificate that each is at, and are all on its roster."""
    peers, certificates = swarm["peers"], swarm["certificates"]
    members = [{"peer_id": peer["peer_id"], "world_rank": peer["world_rank"]} for peer in peers]
    ids = [member["peer_id"] for member in members]
    return all(
        len(peer["head"]) == 64 and certificates.get(peer["head"]) == {"signers": ids, "roster": members}
        for peer in peers
    )


async def test_a_peers_death_and_its_return_are_seen_at_once(swarm):
    light = swarm(local_steps=4, max_steps=100000, step_s=0.05, tells_loss=True)
    light.start_all(3)
    wait_until(lambda: all(peer.epoch >= 1 for peer in light.peers.values()), "epoch 1")
    async with observing(light.run_id, light.initial_peers, timeout_s=20) as observer:
        await observer.settled(20)
        await until(observer, lambda seen: has_all(seen, 0, 1, 2))
        await until(observer, lambda seen: all_have_signed(seen))
        num_before = len(channels_lost(light))
        await asyncio.to_thread(light.peers[0].kill)
        died_at = light.peers[0].killed[-1]
        await until(observer, lambda seen: state_of(seen, 0) == "lost")
        # A broken channel showed the death at once, rather than the silence after it.
        told = await asyncio.to_thread(
            wait_until, lambda: channels_lost(light)[num_before:], "a lost channel"
        )
        assert any("no message within" not in line for line in told), told
        # A single look sees it too, before the dead peer's record expires in the DHT.
        while state_of(await read_swarm(light.run_id, light.initial_peers, timeout_s=20), 0) != "lost":
            assert time.time() - died_at < RECORD_TTL_S
        light.start(0)
        await until(observer, lambda seen: state_of(seen, 0) in ("training", "averaging"))
        seen = observer.swarm()
        events = events_of(seen, 0, since=died_at)
        assert "came back" in events[events.index("was lost") :]
        check_figures(seen, observer)


def channels_lost(light: LightSwarm) -> list[str]:
    """What peer 1 logs of its lost channels to peer 0."""
    return [line for line in light.peers[1].log.splitlines() if "lost the channel to peer 0" in line]


def check_figures(seen: dict[str, Any], observer: Observer) -> None:
    """Check the figures of peer 1, which was there all the time."""
    one = next(peer for peer in seen["peers"] if peer["world_rank"] == 1)
    assert one["loss"] > 0 and one["steps_per_epoch"] == 4
    assert one["num_rounds"] >= 1 and one["sent_bytes"] > 0 and one["upload_bytes_per_s"] > 0
    assert any(event["said_by"] == 1 and event["what"] == "lost peer 0" for event in seen["events"]), seen[
        "events"
    ]
    told = [round_ for round_ in seen["rounds"] if len(round_["peers"]) >= 2]
    assert told and all(round_["agrees"] for round_ in told)
    for peer in told[-1]["peers"]:
        assert {"wait_s", "connect_s", "reduce_s", "vote_s", "apply_s"} <= peer.keys()
    assert len(observer.curves()[1]) >= 2


def test_whom_a_round_waits_for_and_why_is_seen_and_metrics_are_the_daemons_own(swarm):
    light = swarm(local_steps=4, max_steps=100000, step_s=0.05, tells_loss=True)
    light.galaxy_size = 2
    light.start(0)
    light.extra["metrics_port"] = port = free_port()
    light.start(1, step_s=0.75)
    wait_until(lambda: all(peer.epoch >= 1 for peer in light.peers.values()), "epoch 1")

    async def watch() -> None:
        async with observing(light.run_id, light.initial_peers, timeout_s=20) as observer:
            await until(observer, lambda seen: any("to go" in one["reason"] for one in seen["stragglers"]))
            (late,) = observer.swarm()["stragglers"]
            assert (late["world_rank"], late["leader"]) == (1, 0)
            assert "it still trains, at step" in late["reason"] and "of 4" in late["reason"]

    asyncio.run(watch())
    status, text = get(port)
    found, run = values(text), f'run_id="{light.run_id}"'
    assert status == 200 and found["diloco_peers", run] == 2
    assert [labels for name, labels in found if name == "diloco_epoch"] == [f'{run},world_rank="1"']
    assert found["diloco_rounds_total", f'{run},world_rank="1"'] >= 1
    assert found["diloco_loss", f'{run},world_rank="1"'] > 0


async def test_a_leaving_peer_is_not_taken_for_lost(swarm):
    light = swarm(local_steps=4, max_steps=100000, step_s=0.05)
    light.start_all(2)
    wait_until(lambda: all(peer.epoch >= 1 for peer in light.peers.values()), "epoch 1")
    async with observing(light.run_id, light.initial_peers, timeout_s=20) as observer:
        await observer.settled(20)
        await until(observer, lambda seen: has_all(seen, 0, 1))
        left_at = time.time()
        light.peers[1].process.terminate()
        await until(observer, lambda seen: state_of(seen, 1) == "")
        assert events_of(observer.swarm(), 1, since=left_at) == ["left"]


Call = Callable[[], Awaitable[socket.socket]]


@contextlib.asynccontextmanager
async def serving(secret: SwarmSecret | None = None) -> AsyncIterator[Call]:
    """A service of reports in this process. Yields the function with which the peer `observer` calls it."""
    network = Network()
    service = ReportService("r", "peer", network.transport("peer"), lambda _: full_report(), secret=secret)
    await service.start()
    try:
        yield partial(network.transport("observer").open, "peer", report_protocol("r"), timeout_s=5.0)
    finally:
        await network.close()


async def hello(call: Call) -> Channel:
    channel = Channel(await call())
    await channel.send(Hello(), 5.0)
    return channel


async def test_only_who_has_the_swarm_secret_is_told_where_there_is_one():
    secret, other = AdmissionKey.new().secret, AdmissionKey.new().secret
    refusal = Refusal(why=Why.WRONG_SECRET)
    async with serving(secret) as call:
        for key, is_fresh, answer in (
            (secret, False, refusal),
            (None, True, refusal),
            (other, True, refusal),
            (secret, True, full_report()),
        ):
            channel = await hello(call)
            nonce = (await channel.read(_NONCE, 5.0)).nonce
            proof = proof_of(key, "r", "observer", "peer", nonce if is_fresh else b"") if key else b"\0" * 32
            await channel.send(Proof(proof=proof), 5.0)
            assert await channel.read(_ANSWER, 5.0) == answer
            channel.close()


async def test_observers_are_so_many_at_most_and_make_room_when_they_go(monkeypatch):
    monkeypatch.setattr("peers.monitor.report_service.MAX_OBSERVERS", 2)
    async with serving() as call:

        async def first_word() -> tuple[Channel, Any]:
            channel = await hello(call)
            return channel, await channel.read(_ANSWER, 5.0)

        async def has_room() -> bool:
            late, word = await first_word()
            late.close()
            return word == full_report()

        (one, first), (two, second) = [await first_word() for _ in range(2)]
        assert first == second == full_report() and not await has_room()
        one.close()
        await eventually(has_room, 10)
        two.close()


@pytest.mark.parametrize(
    "words", [b"\xc1" * 50, msgpack.packb({"type": "hello", "more": 1}), msgpack.packb({"type": "rank"})]
)
async def test_who_says_anything_else_is_hung_up_on(words):
    async with serving() as call:
        with contextlib.closing(Channel(await call())) as channel:
            await channel.send_bytes(memoryview(len(words).to_bytes(4, "little") + words), 5.0)
            with pytest.raises((PeerUnreachable, ProtocolError)):
                await channel.read(_ANSWER, 5.0)


async def test_a_peer_that_reports_nonsense_is_shown_as_it_announces_itself(swarm, tmp_path):
    """A real daemon beside a peer whose reports are not valid: they do no harm to an observer."""
    light = swarm(local_steps=4, max_steps=100000, step_s=0.05)
    light.start_all(1)
    wait_until(lambda: light.peers[0].epoch >= 1, "epoch 1")
    from peers.protocol.records import PEERS_KEY
    from tests.support.announcements import announced

    identity = load_or_create(tmp_path / "liar.key")
    liar = await Dht.join(
        identity=identity, initial_peers=light.initial_peers, host_maddrs=("/ip4/127.0.0.1/tcp/0",)
    )
    maddrs = tuple(await liar.maddrs())

    async def announce_forever() -> None:
        # Repeat it as peers do, since a record may be refused and expires soon.
        while True:
            record = announced(
                identity.peer_id, run_id=light.run_id, world_rank=7, state="joining",
                maddrs=maddrs, time=time.time(),
            )  # fmt: skip
            await liar.store(PEERS_KEY(light.run_id), identity.peer_id, record.encode(identity), 20)
            await asyncio.sleep(1.0)

    announcing = asyncio.create_task(announce_forever())
    try:

        async def lie(_peer_id: str, sock: Any) -> None:
            channel = Channel(sock)
            await channel.read(_HELLO, 5.0)
            await channel.send({"type": "report", "status": b"", "figures": {"loss": "<script>"}}, 5.0)
            channel.close()

        await liar.transport.serve(report_protocol(light.run_id), lie)
        async with observing(light.run_id, light.initial_peers, timeout_s=20) as observer:
            await until(observer, lambda seen: has_all(seen, 0) and state_of(seen, 7) != "")
            await observer.settled(20)
            await until(observer, lambda seen: has_all(seen, 0))
            seen = observer.swarm()
    finally:
        announcing.cancel()
        await liar.close()
        identity.release()
    assert [(peer["world_rank"], peer["answers"]) for peer in seen["peers"]] == [(0, True), (7, False)]
    assert seen["peers"][1]["loss"] is None and seen["peers"][1]["state"] == "joining"
