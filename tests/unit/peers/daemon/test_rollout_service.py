"""A learner's daemon and a rollout peer over a stream: policies one way, rollouts the other."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peers.admission.secrets import AdmissionKey
from peers.daemon import link, rollout_service
from peers.daemon.link import DaemonConnection, WorkerLink
from peers.daemon.rollout_queue import Taken
from peers.daemon.rollout_service import _IDLE_S, _PATIENCE_S, _SILENCE_S, RolloutService, WeightsFile, way_to
from peers.errors import LinkLost, NotWanted, PeerUnreachable, ProtocolError
from peers.net.gate import Gate
from peers.net.identity import Identity, load_or_create
from peers.net.rollouts import _VERDICT, LearnerStream
from peers.protocol.refusal import Refused
from peers.protocol.rollouts import BlobName, signed
from peers.protocol.tokens import BanList, Token
from tests.support.in_process import until
from tests.support.rollout_messages import ME, RUN, completion, rollout, terms

CONTENT = bytes(range(256)) * 5000
POLICY = "a" * 64
LEARNER: Any = SimpleNamespace(peer_id=ME, maddrs=())


class Loopback:
    """Streams to one service, each over a socket pair."""

    def __init__(self, service: RolloutService, caller: str) -> None:
        self._service, self._caller = service, caller
        self.serving: list[asyncio.Task[None]] = []

    async def open(self, *_: Any, **__: Any) -> socket.socket:
        here, there = socket.socketpair()
        there.setblocking(False)
        here.setblocking(False)
        self.serving.append(asyncio.create_task(self._service.handle(self._caller, there)))
        return here

    async def serve(self, *_: Any) -> None:
        raise AssertionError("a rollout peer is called by nobody")


def service_with(gate: Gate | None = None) -> RolloutService:
    return RolloutService(RUN, ME, gate or Gate(RUN), lambda: {"mode": "grpo"})


def publish(
    service: RolloutService, directory: Path, step: int = 3, content: bytes = CONTENT, **changes: Any
) -> BlobName:
    path = directory / "policy"
    path.write_bytes(content)
    name = BlobName(digest=hashlib.sha256(CONTENT).hexdigest(), num_bytes=len(CONTENT))
    fields = {
        "path": str(path),
        "sha256": name.digest,
        "num_bytes": len(CONTENT),
        "leads_to": POLICY,
        "base": "",
    }
    told = dataclasses.asdict(terms(**changes))
    service._published({"digest": POLICY, "step": step, "files": [fields], "terms": told})
    return name


@asynccontextmanager
async def stream_to(
    service: RolloutService, identity: Identity, token: bytes = b""
) -> AsyncIterator[LearnerStream]:
    transport = Loopback(service, identity.peer_id)
    try:
        with await LearnerStream.open(transport, RUN, LEARNER, token) as stream:
            yield stream
    finally:
        await asyncio.gather(*transport.serving)


@pytest.fixture
def identity(tmp_path):
    return load_or_create(tmp_path / "own.key")


async def test_a_rollout_peer_gets_the_manifest_and_the_verified_policy(identity, tmp_path):
    service = service_with()
    name = publish(service, tmp_path)
    async with stream_to(service, identity) as stream:
        assert stream.welcome.manifest.fields == {"mode": "grpo"}
        policy = await stream.newest("")
        assert (policy.digest, policy.step, policy.blobs) == (POLICY, 3, (name,))
        path = await stream.download(name, tmp_path)
        assert path is not None and path.read_bytes() == CONTENT
        assert (await stream.newest(POLICY)).blobs == ()
        assert service.present == {identity.peer_id}
    assert service.present == frozenset()


async def test_bytes_that_are_not_those_announced_are_thrown_away(identity, tmp_path):
    service = service_with()
    name = publish(service, tmp_path, content=CONTENT[:-1] + b"?")
    async with stream_to(service, identity) as stream:
        with pytest.raises(ProtocolError, match="do not match its digest"):
            await stream.download(name, tmp_path)
    assert list(tmp_path.glob("*.safetensors")) == []


async def test_a_file_that_has_gone_meanwhile_is_no_error(identity, tmp_path):
    service = service_with()
    name = publish(service, tmp_path)
    (tmp_path / "policy").unlink()
    async with stream_to(service, identity) as stream:
        assert await stream.download(name, tmp_path) is None


async def test_the_trainer_gets_what_was_handed_over_and_the_figures_of_who_did(identity, tmp_path):
    service = service_with()
    publish(service, tmp_path)
    async with stream_to(service, identity) as stream:
        first = stream.welcome.next_number
        taking = asyncio.create_task(service._take(2, 60.0))
        for index in range(2):
            given = signed(rollout(first + index, POLICY), identity)
            assert await stream.hand_over(given) == ""
        taken = await taking
        assert [one.number for one in taken.rollouts] == [first, first + 1]
        assert [one.staleness for one in taken.rollouts] == [0, 0]
    async with stream_to(service, identity) as stream:
        assert stream.welcome.next_number == first + 2
    (shown,) = service.senders_shown()
    assert (shown.peer_id, shown.taken, shown.received, shown.is_here) == (identity.peer_id, 2, 2, False)


async def answered(work):
    return await work


async def test_what_is_taken_goes_over_the_link_though_it_is_longer_together_than_a_frame_may_be(
    tmp_path, monkeypatch
):
    """20 rollouts of 8 KiB each."""
    monkeypatch.setattr(link, "_MAX_FRAME_BYTES", 64 << 10)
    service = service_with()
    publish(service, tmp_path, max_tokens=500, num_kept=20)
    tokens, logprobs = (7,) * 400, (-0.5,) * 400
    for index in range(20):
        one = completion(tokens=tokens, logprobs=logprobs)
        worse = completion(tokens=tokens, logprobs=logprobs, scores=(0.0, 0.0))
        given = rollout(service.queue.sender("peer").next_number, POLICY, completions=(one, worse))
        assert service.queue.offer("peer", given, float(index)) == ""
    here, there = socket.socketpair()
    there.setblocking(False)
    connection, worker = DaemonConnection(there), WorkerLink(here)
    asked = {"kind": "take", "count": 20, "timeout_s": 60.0}
    serving = asyncio.create_task(service.serve_trainer(connection, asked, answered))
    answer = await asyncio.to_thread(worker.receive, "rollouts")
    assert (answer["num_rollouts"], answer["num_uniform"], answer["is_alone"]) == (20, 0, False)
    for _ in range(20):
        told = await asyncio.to_thread(worker.receive, "rollout")
        assert (told["peer_id"], told["staleness"]) == ("peer", 0)
        assert [one["tokens"] for one in told["completions"]] == [list(tokens)] * 2
        assert told["completions"][1]["logprobs"] == list(logprobs)
    worker.close()
    with pytest.raises(LinkLost):
        await serving
    connection.close()


@pytest.fixture
def clock(monkeypatch):
    """Replaces the service's clock, which stands still unless a test sets it."""
    clock = SimpleNamespace(now=0.0, time_ns=time.time_ns)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(rollout_service, "time", clock)
    return clock


async def test_a_trainer_is_told_when_its_time_is_up_and_when_nobody_is_left_to_wait_for(tmp_path, clock):
    service = service_with()
    publish(service, tmp_path)
    assert await service._take(1, 0.0) == Taken()
    clock.now += _PATIENCE_S
    assert await service._take(1, 3600.0) == Taken()


async def test_a_learner_counts_as_alone_only_while_no_rollout_peer_is_there(identity, tmp_path, clock):
    service = service_with()
    publish(service, tmp_path)
    assert service._alone_from() == _PATIENCE_S
    clock.now = 3 * _PATIENCE_S
    async with stream_to(service, identity) as stream:
        assert service._alone_from() == clock.now + _IDLE_S
        clock.now += 100.0
        given = rollout(stream.welcome.next_number, POLICY)
        assert await stream.hand_over(signed(given, identity)) == ""
        assert service._alone_from() == clock.now + _IDLE_S
        publish(service, tmp_path, step=4)
        clock.now += 100.0
        old = rollout(stream.welcome.next_number + 1, "b" * 64)
        assert await stream.hand_over(signed(old, identity)) == "stale"
        assert service._alone_from() == clock.now - 100.0 + _IDLE_S
        async with stream_to(service, identity):
            assert service._alone_from() == clock.now - 100.0 + _IDLE_S
    assert service._alone_from() == clock.now + _PATIENCE_S


async def test_a_rollout_peer_that_was_left_out_is_not_waited_for(identity, tmp_path, clock):
    service = service_with()
    publish(service, tmp_path)
    async with stream_to(service, identity):
        service.queue.leave_out(identity.peer_id, "lies")
        assert service._alone_from() == _PATIENCE_S


async def test_a_stream_may_be_silent_for_as_long_as_its_peer_speaks_on_another(
    identity, tmp_path, monkeypatch
):
    now, looked = 0.0, set[object]()

    def monotonic() -> float:
        looked.add(asyncio.current_task())
        return now

    # Only this clock decides how long the peer has been silent, however busy the machine.
    clock = SimpleNamespace(monotonic=monotonic, time_ns=time.time_ns)
    monkeypatch.setattr(rollout_service, "time", clock)
    monkeypatch.setattr(rollout_service, "_SILENCE_S", 0.2)
    service = service_with()
    publish(service, tmp_path)
    async with stream_to(service, identity) as slow:
        (served,) = service._streams
        async with stream_to(service, identity) as policies:
            for _ in range(3):
                now += 0.15
                await policies.newest(POLICY)
                looked.clear()
                await until(lambda: served in looked)
        given = signed(rollout(slow.welcome.next_number, POLICY), identity)
        assert await slow.hand_over(given) == ""
    async with stream_to(service, identity) as one, stream_to(service, identity):
        now += 1
        with pytest.raises(PeerUnreachable):
            await one._channel.read(_VERDICT, 60.0)
    assert service._heard_at == service._gave_at == {}


async def test_a_peer_that_takes_a_large_policy_is_not_silent(identity, tmp_path, monkeypatch, clock):
    """Its other stream says nothing meanwhile: it has nothing to generate with."""
    send_bytes = rollout_service.Channel.send_bytes

    async def slowly(*arguments):
        await send_bytes(*arguments)
        clock.now += 3 * _SILENCE_S

    monkeypatch.setattr(rollout_service.Channel, "send_bytes", slowly)
    service = service_with()
    name = publish(service, tmp_path)
    async with stream_to(service, identity) as policies:
        assert await policies.download(name, tmp_path) is not None
        await until(lambda: service._heard_at[identity.peer_id] == clock.now)


async def test_who_sends_a_false_rollout_hears_why_and_its_stream_ends(identity, tmp_path):
    service = service_with()
    publish(service, tmp_path)
    async with stream_to(service, identity) as stream:
        with pytest.raises(NotWanted, match="rollout 0 in place of"):
            await stream.hand_over(signed(rollout(0, POLICY), identity))
    assert len(service.queue) == 0


async def test_a_rollout_that_is_longer_than_the_terms_allow_is_not_even_decoded(identity, tmp_path, caplog):
    service = service_with()
    publish(service, tmp_path)
    async with stream_to(service, identity) as stream:
        bomb = completion(logprobs=(0,) * terms().most_bytes)
        given = rollout(stream.welcome.next_number, POLICY, completions=(bomb,))
        with pytest.raises(PeerUnreachable):
            await stream.hand_over(signed(given, identity))
    assert f"at most {terms().most_bytes} are allowed" in caplog.text
    assert service.senders_shown()[0].received == 0


async def test_without_a_trainer_that_wants_rollouts_a_rollout_peer_is_told_to_look_elsewhere(identity):
    with pytest.raises(PeerUnreachable, match="takes no rollouts"):
        async with stream_to(service_with(), identity):
            pass


async def test_who_was_left_out_gets_no_policy_and_hears_why(identity, tmp_path):
    service = service_with()
    publish(service, tmp_path)
    service.queue.leave_out(identity.peer_id, "false rewards")
    with pytest.raises(NotWanted, match="takes no rollouts of this peer: it was left out: false rewards"):
        async with stream_to(service, identity):
            pass


async def test_who_is_not_admitted_hears_why(identity, tmp_path):
    service = service_with(Gate(RUN, b"k" * 32))
    publish(service, tmp_path)
    with pytest.raises(Refused, match="no token"):
        async with stream_to(service, identity):
            pass


@pytest.mark.parametrize("wanted", ["a policy", "a file", "to hand over"])
async def test_a_peer_that_is_banned_while_its_stream_stands_gets_nothing_more(identity, tmp_path, wanted):
    key = AdmissionKey.new()
    service = service_with(Gate(RUN, key.secret.public_key))
    name = publish(service, tmp_path)
    token = Token(run_id=RUN, peer_id=identity.peer_id, not_before=0.0, expires=1e12)
    async with stream_to(service, identity, token.encode(key.private_key)) as stream:
        first = stream.welcome.next_number
        assert await stream.hand_over(signed(rollout(first, POLICY), identity)) == ""
        bans = BanList(run_id=RUN, version=1, peer_ids=frozenset({identity.peer_id}))
        service._gate.learn(bans.encode(key.private_key))
        asking = {
            "a policy": lambda: stream.newest(""),
            "a file": lambda: stream.download(name, tmp_path),
            "to hand over": lambda: stream.hand_over(signed(rollout(first + 1, POLICY), identity)),
        }
        with pytest.raises(PeerUnreachable):
            await asking[wanted]()
    assert len(service.queue) == 1


async def test_of_more_streams_than_may_be_the_next_is_turned_away(identity, tmp_path, monkeypatch):
    monkeypatch.setattr(rollout_service, "MAX_STREAMS", 1)
    service = service_with()
    publish(service, tmp_path)
    async with stream_to(service, identity):
        with pytest.raises(PeerUnreachable, match="takes no rollouts"):
            async with stream_to(service, identity):
                pass


WHOLE, PATCH = 100, 10


def file(leads_to: str, base: str = "", num_bytes: int = 0) -> WeightsFile:
    size = num_bytes or (PATCH if base else WHOLE)
    return WeightsFile(path="nowhere", sha256="0" * 64, num_bytes=size, leads_to=leads_to, base=base)


FILES = [file("a"), file("b", "a"), file("c", "b"), file("c"), file("d", "c")]


def way(held: str, files: list[WeightsFile] = FILES) -> list[str]:
    found = way_to("d", held, files)
    assert found is not None
    return [f"{one.base}>{one.leads_to}" for one in found]


def test_who_has_earlier_weights_gets_the_patches_since():
    assert way("c") == ["c>d"]
    assert way("a") == ["a>b", "b>c", "c>d"]
    assert way("d") == []


def test_who_has_none_or_others_gets_all_weights_once_and_the_patches_since():
    assert way("") == way("unknown") == [">c", "c>d"]


def test_patches_that_are_longer_than_all_weights_are_not_taken():
    large = [file("a"), file("b", "a", 80), file("d", "b", 80), file("d")]
    assert way("a", large) == [">d"]


def test_weights_to_which_nothing_leads_are_not_promised():
    assert way_to("d", "", [file("d", "c")]) is None


def test_a_patch_that_changes_nothing_does_not_lead_round_in_circles():
    assert way_to("d", "x", [file("d", "d")]) is None
