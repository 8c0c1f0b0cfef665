import asyncio
import contextlib
import socket
import time

import pytest
from msgspec.msgpack import Decoder
from msgspec.structs import replace

from peers.admission.secrets import AdmissionKey
from peers.core import events
from peers.errors import PeerUnreachable
from peers.net import channels as channels_module
from peers.net import mesh as mesh_module
from peers.net import overlay
from peers.net.channel import Channel
from peers.net.channels import MAX_DIALLED, Introduced
from peers.net.gate import Gate
from peers.net.identity import claim_slot
from peers.net.mesh import Mesh
from peers.protocol.mesh import News, Parting, Ping, Pong, Said, Told
from peers.protocol.messages import Ask, Status
from peers.protocol.records import MAX_AGE_S, Lost
from peers.protocol.refusal import Refusal, Why
from peers.protocol.tokens import BanList, Token
from peers.timing import ANSWER_S, CLOCK_TOLERANCE_S
from tests.support.announcements import announced, spoken
from tests.support.in_process import until


def record(peer_id):
    return announced(peer_id, state="joining")


class Transport:
    """A transport on which every dialled peer is silent for `silence_s`, and then unreachable."""

    def __init__(self, silence_s=0.0):
        self.unanswered = []
        self.dialled, self.num_at_once, self.most_at_once, self.silence_s = [], 0, 0, silence_s

    async def open(self, peer_id, protocol, *, timeout_s, maddrs=()):
        self.dialled.append(peer_id)
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        try:
            await asyncio.sleep(self.silence_s)
        finally:
            self.num_at_once -= 1
        raise PeerUnreachable("nobody there")

    async def serve(self, protocol, handler):
        pass

    def no_answer(self, peer_id):
        self.unanswered.append(peer_id)


def mesh_over(
    transport, *, peer_id="a", own_record=lambda number, lost: b"", post=lambda event: None, gate=None
):
    return Mesh(
        run_id="run",
        peer_id=peer_id,
        transport=transport,
        own_record=own_record,
        on_change=lambda: None,
        post=post,
        on_manifest=lambda *_: None,
        gate=gate or Gate("run"),
    )


@contextlib.contextmanager
def channel_to(mesh, peer_id="b", **status):
    """The other end of a channel of this mesh, on which peer `peer_id` has just introduced itself."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        keep(mesh, ours, peer_id, **status)
        yield theirs


def keep(mesh, sock, peer_id, **status):
    said = Introduced(spoken(peer_id, **status), b"", b"")
    mesh._channels._keep(peer_id, Channel(sock), said, caller="a")


async def test_records_of_peers_that_do_not_exist_are_dialled_a_few_at_a_time_and_all_in_turn():
    transport = Transport(silence_s=0.02)
    mesh = mesh_over(transport)
    records = {f"p{number}": record(f"p{number}") for number in range(5 * MAX_DIALLED)}
    mesh.discovered(records)
    await until(lambda: not mesh._channels.dialling)
    assert sorted(transport.dialled) == sorted(records)
    assert transport.most_at_once == MAX_DIALLED
    await mesh.close()


async def test_what_was_said_last_is_sent_before_the_channels_close():
    mesh = mesh_over(Transport(), own_record=lambda number, lost: b"leaving")
    with channel_to(mesh) as theirs:
        mesh.broadcast_status()
        await mesh.close()
        theirs.setblocking(False)
        assert b"leaving" in theirs.recv(1000)


async def test_the_smaller_peer_id_is_left_one_look_to_dial_in():
    transport = Transport()
    mesh = mesh_over(transport)
    looks = [{"A": record("A"), "b": record("b")}, {}, {"A": record("A")}, {"A": record("A")}]
    for records, dialled in zip(looks, (["b"], ["b"], ["b"], ["b", "A"]), strict=True):
        mesh.discovered(records)
        while mesh._channels.dialling:
            await asyncio.sleep(0)
        assert transport.dialled == dialled
    await mesh.close()


async def test_among_many_who_is_left_to_dial_in_is_dialled_at_the_next_look_whatever_happens_between(
    monkeypatch,
):
    monkeypatch.setattr(overlay, "FULL_MESH", 0)
    monkeypatch.setattr("peers.net.mesh.OFTEN_S", 0.0)
    transport, heard = Transport(), []
    mesh = mesh_over(transport, post=heard.append)
    mesh.discovered({"A": record("A")})
    tending = asyncio.create_task(mesh._tend())
    await until(lambda: len(heard) > 3)
    assert transport.dialled == []
    mesh.discovered({"A": record("A")})
    await until(lambda: transport.dialled == ["A"])
    tending.cancel()
    await mesh.close()


def test_one_signature_serves_all_heartbeats_of_a_moment_and_none_is_older_than_the_last_broadcast():
    statuses = [b"newest", b"new", b"old"]
    mesh = mesh_over(Transport(), own_record=lambda number, lost: statuses.pop())
    assert [mesh.recent_record() for _ in range(50)] == [b"old"] * 50
    mesh.broadcast_status()
    assert mesh.recent_record() == b"new"
    assert statuses == [b"newest"]


@pytest.mark.parametrize(
    ("state", "speaks", "wait_s", "dialled", "unanswered"),
    [
        ("training", True, 0.0, ["b"], []),
        ("training", False, 0.0, ["b"], ["b"]),
        ("leaving", True, 0.0, [], []),
        # A peer that hangs up again at once is not dialled again at once.
        ("training", True, 60.0, [], []),
    ],
)
async def test_a_channel_that_breaks_is_made_anew_at_once_and_another_way_where_it_fell_silent(
    monkeypatch, state, speaks, wait_s, dialled, unanswered
):
    monkeypatch.setattr(channels_module, "OFTEN_S", wait_s)
    if not speaks:
        monkeypatch.setattr(channels_module, "silence_s", lambda _num_peers: 1.0)
        monkeypatch.setattr(channels_module, "heartbeat_s", lambda _num_peers: 0.001)
    transport = Transport()
    mesh = mesh_over(transport)
    with channel_to(mesh, state=state) as theirs:
        if speaks:
            theirs.close()
        await until(lambda: not (mesh.peers or mesh._channels.dialling))
        assert (transport.dialled, sorted(set(transport.unanswered))) == (dialled, unanswered)
        await mesh.close()


async def test_the_core_hears_the_round_trip_to_a_peer_whatever_the_channel_is_made_of():
    posted = []
    mesh = mesh_over(Transport(), post=posted.append)
    with channel_to(mesh) as theirs:
        other = Channel(theirs)
        # An answer to nothing counts for nothing.
        await other.send(Pong(), 5.0)
        await other.send(Ping(), 5.0)
        mesh.broadcast_status()
        said = [type(await other.read(Decoder(Said), 5.0)) for _ in range(3)]
        assert sorted(kind.__name__ for kind in said) == ["Announced", "Ping", "Pong"]
        await asyncio.sleep(0.05)
        await other.send(Pong(), 5.0)
        await until(lambda: events.RoundTrip in map(type, posted))
        await mesh.close()
    (round_trip,) = [event for event in posted if isinstance(event, events.RoundTrip)]
    assert round_trip.peer_id == "b" and 0.05 <= round_trip.seconds < 5
    # The core must know the peer before it gets its round trip.
    assert posted.index(events.Connected("b")) < posted.index(round_trip)


async def test_an_answer_that_comes_far_too_late_measures_nothing():
    posted = []
    mesh = mesh_over(Transport(), post=posted.append)
    mesh.measured("b", ANSWER_S + 1)
    assert not posted


@pytest.mark.parametrize(("num_asks", "is_kept"), [(20, True), (200, False)])
async def test_who_asks_pays_for_the_answers(num_asks, is_kept):
    heard, asks = [], events.Received("b", Ask(head="a" * 64))
    mesh = mesh_over(Transport(), post=lambda event: heard.append(event) if event == asks else None)
    with channel_to(mesh) as theirs:
        asking = Channel(theirs)
        with contextlib.suppress(PeerUnreachable):
            for _ in range(num_asks):
                await asking.send(Ask(head="a" * 64), 5.0)
        await until(lambda: not mesh.peers or len(heard) == num_asks)
        assert bool(mesh.peers) == is_kept
        assert (len(heard) == num_asks) == is_kept
        await mesh.close()


async def test_who_was_frozen_itself_does_not_take_all_others_for_silent(monkeypatch):
    monkeypatch.setattr(channels_module, "silence_s", lambda _num_peers: 0.01)
    transport = Transport()
    mesh = mesh_over(transport)
    # The silence timeout passes before this peer has sent a single heartbeat.
    with channel_to(mesh, state="training"):
        await until(lambda: not mesh.peers)
        assert not transport.unanswered
        await mesh.close()


class Wire:
    """Connects meshes: a call reaches the other mesh's handler after the caller's delay."""

    def __init__(self, delays_s):
        self.handlers, self.delays_s, self.tasks = {}, delays_s, []

    def transport(self, peer_id):
        wire = self

        class Mine(Transport):
            async def open(self, other, protocol, *, timeout_s, maddrs=()):
                await asyncio.sleep(wire.delays_s.get(peer_id, 0.0))
                if other not in wire.handlers:
                    raise PeerUnreachable("connection refused")
                ours, theirs = socket.socketpair()
                wire.tasks.append(asyncio.create_task(wire.handlers[other](peer_id, theirs)))
                return ours

            async def serve(self, protocol, handler):
                wire.handlers[peer_id] = handler

        return Mine()


@pytest.mark.parametrize("delays_s", [{"a": 0.0, "b": 0.0}, {"a": 0.02, "b": 0.0}, {"a": 0.0, "b": 0.02}])
@pytest.mark.parametrize("lag_s", [0.0, 0.005, 0.02])
async def test_of_two_calls_that_cross_one_stands_and_nobody_is_lost(tmp_path, monkeypatch, delays_s, lag_s):
    # Note the loss of a channel however briefly it was open.
    monkeypatch.setattr(channels_module, "OFTEN_S", 0.0)
    identities = [claim_slot(tmp_path, "run", rank) for rank in range(2)]
    by_id = sorted(identities, key=lambda identity: identity.peer_id)
    delays_s = dict(zip((identity.peer_id for identity in by_id), delays_s.values(), strict=True))
    wire, meshes, lost = Wire(delays_s), [], []
    for rank, identity in enumerate(by_id):
        said = spoken(identity.peer_id, world_rank=rank)
        mesh = mesh_over(
            wire.transport(identity.peer_id),
            peer_id=identity.peer_id,
            own_record=lambda number, lost, said=said, identity=identity: replace(said, number=number).encode(
                identity
            ),
            post=lambda event: lost.append(event) if isinstance(event, events.Disconnected) else None,
        )
        await mesh.start()
        meshes.append(mesh)
    small, large = meshes
    records = [announced(identity.peer_id, world_rank=rank) for rank, identity in enumerate(by_id)]

    async def call(mesh, record, wait_s):
        await asyncio.sleep(wait_s)
        return await mesh.reach(record)

    found = await asyncio.gather(call(small, records[1], 0.0), call(large, records[0], lag_s))
    assert found == ["here", "here"]
    await asyncio.wait(wire.tasks)
    assert [len(mesh.peers) for mesh in meshes] == [1, 1] and not lost
    for mesh in meshes:
        await mesh.close()


class Ends:
    """Two meshes of a closed run over a Wire, in the order of their peer ids, each with one of the ban `lists`."""

    def __init__(self, directory, lists):
        self.key = AdmissionKey.new()
        self.identities = sorted(
            (claim_slot(directory, "run", rank) for rank in range(2)), key=lambda i: i.peer_id
        )
        self.wire = Wire({identity.peer_id: 0.0 for identity in self.identities})
        self.gates = [Gate("run", self.key.secret.public_key) for _ in self.identities]
        for gate, banned in zip(self.gates, lists, strict=True):
            if banned is not None:
                gate.learn(self.signed(banned))
        self.meshes = [self.mesh(rank) for rank in range(2)]

    def signed(self, banned, version=1):
        peer_ids = frozenset(self.identities[rank].peer_id for rank in banned)
        return BanList(run_id="run", version=version, peer_ids=peer_ids).encode(self.key.private_key)

    def record(self, rank):
        now, peer_id = time.time(), self.identities[rank].peer_id
        token = Token(run_id="run", peer_id=peer_id, not_before=now - 1, expires=now + 60)
        return spoken(peer_id, world_rank=rank, token=token.encode(self.key.private_key))

    def mesh(self, rank):
        identity = self.identities[rank]
        return mesh_over(
            self.wire.transport(identity.peer_id),
            peer_id=identity.peer_id,
            own_record=lambda number, lost: replace(self.record(rank), number=number).encode(identity),
            gate=self.gates[rank],
        )

    async def introduced(self, caller):
        """Whether a call of this mesh to the other succeeds."""
        for mesh in self.meshes:
            await mesh.start()
        reached = await self.meshes[caller].reach(self.record(1 - caller))
        await asyncio.wait(self.wire.tasks)
        return reached

    async def close(self):
        for mesh in self.meshes:
            await mesh.close()


@pytest.mark.parametrize("caller", [0, 1])
@pytest.mark.parametrize("knows", [0, 1])
async def test_whoever_knows_no_ban_list_has_it_when_the_first_introduction_is_over(tmp_path, caller, knows):
    ends = Ends(tmp_path, [() if rank == knows else None for rank in range(2)])
    assert await ends.introduced(caller) == "here"
    assert [gate.bans.version for gate in ends.gates] == [1, 1]
    assert [len(mesh.peers) for mesh in ends.meshes] == [1, 1]
    await ends.close()


@pytest.mark.parametrize("caller", [0, 1])
@pytest.mark.parametrize("knows", [0, 1])
@pytest.mark.parametrize("banned", [0, 1])
async def test_of_a_banned_peer_and_another_neither_lets_the_other_in_whoever_has_the_list(
    tmp_path, caller, knows, banned
):
    ends = Ends(tmp_path, [(banned,) if rank == knows else None for rank in range(2)])
    assert await ends.introduced(caller) != "here"
    assert ends.gates[banned].bans.peer_ids == {ends.identities[banned].peer_id}
    assert not ends.meshes[1 - banned].peers
    await until(lambda: not ends.meshes[banned].peers)
    if caller == banned:
        assert ends.meshes[banned].turned_away is Why.BANNED
    await ends.close()


async def test_a_list_that_comes_while_two_are_introduced_is_passed_on(tmp_path):
    ends = Ends(tmp_path, [None, None])
    usual = ends.meshes[1]._channels._say

    async def introduce(channel):
        told = await usual(channel)
        ends.gates[1].learn(ends.signed((), version=7))
        return told

    ends.meshes[1]._channels._say = introduce
    assert await ends.introduced(0) == "here"
    await until(lambda: ends.gates[0].bans.version == 7)
    await ends.close()


async def test_after_the_introduction_a_refusal_and_what_is_no_message_end_the_channel(tmp_path):
    for wrong in (Refusal(why=Why.BANNED), {"type": "announced", "record": b""}, {"type": "letter"}):
        ends = Ends(tmp_path, [None, None])
        assert await ends.introduced(0) == "here"
        (peer,) = ends.meshes[0]._channels.open.values()
        await peer.channel.send(wrong)
        await until(lambda ends=ends: not ends.meshes[1].peers)
        await ends.close()
        for identity in ends.identities:
            identity.release()


class Many:
    """Many meshes over a Wire, which all hear of each other at once."""

    def __init__(self, directory, count):
        self.wire, self.heard, self.lost, self.still_here = Wire({}), {}, {}, {}
        self.identities = {
            i.peer_id: i for i in (claim_slot(directory, "run", rank) for rank in range(count))
        }
        self.meshes = {peer_id: self.mesh(peer_id) for peer_id in self.identities}
        self.sequences = dict.fromkeys(self.meshes, 0)

    def mesh(self, peer_id):
        identity, heard = self.identities[peer_id], self.heard.setdefault(peer_id, [])
        lost, still_here = self.lost.setdefault(peer_id, []), self.still_here.setdefault(peer_id, [])

        def post(event):
            match event:
                case events.Received(sender, message):
                    heard.append((sender, message))
                case events.StatusesReceived(statuses):
                    heard.extend(statuses)
                case events.Disconnected(other):
                    lost.append(other)
                case events.StillHere(others):
                    still_here.append(others)

        def own_record(number, losses):
            status = Status(incarnation=1, sequence=self.sequences[peer_id], world_rank=0, phase="training")
            return spoken(peer_id, status, number=number, lost=losses).encode(identity)

        return mesh_over(self.wire.transport(peer_id), peer_id=peer_id, own_record=own_record, post=post)

    async def meet(self):
        records = {peer_id: announced(peer_id) for peer_id in self.meshes}
        for mesh in self.meshes.values():
            await mesh.start()
        for mesh in self.meshes.values():
            for peer_id in mesh.neighbours_among(records):
                await mesh.reach(records[peer_id])
        await until(lambda: all(len(mesh.peers) == len(self.meshes) - 1 for mesh in self.meshes.values()))

    async def kill(self, peer_id):
        del self.wire.handlers[peer_id]
        await self.meshes.pop(peer_id).close()

    async def close(self):
        for mesh in self.meshes.values():
            await mesh.close()
        for identity in self.identities.values():
            identity.release()


async def test_many_keep_few_channels_and_hear_what_all_others_say_and_who_dies(tmp_path, monkeypatch):
    monkeypatch.setattr(overlay, "FULL_MESH", 8)
    many = Many(tmp_path, 14)
    await many.meet()
    num_neighbours = {len(mesh._gossip.neighbours) for mesh in many.meshes.values()}
    assert num_neighbours == {6}
    assert all(len(mesh._channels.open) == 6 for mesh in many.meshes.values())

    speaker, *others = many.meshes
    many.sequences[speaker] = 7
    many.meshes[speaker].broadcast_status()

    def has_heard(peer_id):
        return any(sender == speaker and said.sequence == 7 for sender, said in many.heard[peer_id])

    await until(lambda: all(map(has_heard, others)))

    victim = others[0]
    await many.kill(victim)
    await until(lambda: all(victim in many.lost[peer_id] for peer_id in many.meshes))
    assert all(many.lost[peer_id].count(victim) == 1 for peer_id in many.meshes)
    assert all(len(mesh.peers) == 12 for mesh in many.meshes.values())
    await many.close()


async def test_many_are_told_again_and_again_who_is_still_here_and_few_hear_everybody_themselves(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(mesh_module, "OFTEN_S", 0.02)
    few = Many(tmp_path / "few", 4)
    await few.meet()
    for _ in range(5):
        # One short sleep at a time, so that each mesh gets as many turns.
        await asyncio.sleep(mesh_module.OFTEN_S)
    await few.close()
    assert not any(few.still_here.values())

    monkeypatch.setattr(overlay, "FULL_MESH", 8)
    many = Many(tmp_path / "many", 14)
    await many.meet()
    listener, victim, *_ = many.meshes
    told = many.still_here[listener]
    await until(lambda: told and set(told[-1]) == many.meshes.keys() - {listener})
    await many.kill(victim)
    await until(lambda: victim not in told[-1])
    assert set(told[-1]) == many.meshes.keys() - {listener}
    await many.close()


async def test_what_nobody_passes_on_is_heard_by_asking_one_neighbour_after_another(tmp_path, monkeypatch):
    monkeypatch.setattr(overlay, "FULL_MESH", 8)
    monkeypatch.setattr(mesh_module, "OFTEN_S", 0.05)
    monkeypatch.setattr(mesh_module, "status_s", lambda num_peers: 0.05)
    many = Many(tmp_path, 14)
    await many.meet()
    monkeypatch.setattr(Mesh, "_pass_on", lambda mesh: None)
    speaker, *others = many.meshes
    many.sequences[speaker] = 7
    many.meshes[speaker].broadcast_status()

    def sequences(peer_id):
        return [said.sequence for sender, said in many.heard[peer_id] if sender == speaker]

    await until(lambda: all(7 in sequences(peer_id) for peer_id in others))
    await many.close()


async def test_what_is_meant_for_one_that_is_no_neighbour_arrives_on_a_channel_that_is_closed_when_idle(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(overlay, "FULL_MESH", 8)
    monkeypatch.setattr(mesh_module, "OFTEN_S", 0.05)
    monkeypatch.setattr(mesh_module, "_IDLE_S", 0.2)
    many = Many(tmp_path, 12)
    await many.meet()
    speaker = next(iter(many.meshes))
    mesh = many.meshes[speaker]
    # Channels that were opened while fewer peers were known become idle and are closed first.
    await until(lambda: mesh._channels.open.keys() <= mesh._gossip.neighbours)
    other = next(peer_id for peer_id in many.meshes if peer_id not in {*mesh._channels.open, speaker})
    asked = [Ask(head=letter * 64) for letter in "abc"]
    with monkeypatch.context() as busy:
        busy.setattr(mesh_module, "_IDLE_S", 60.0)
        for one in asked:
            mesh.send_to(other, one)
        await until(lambda: (speaker, asked[-1]) in many.heard[other])
        assert [said for sender, said in many.heard[other] if isinstance(said, Ask)] == asked
        assert other in mesh._channels.open
    await until(lambda: other not in mesh._channels.open)
    # Neither end takes the closing for a loss.
    await until(lambda: speaker not in many.meshes[other]._channels.open)
    assert not many.lost[speaker] and not many.lost[other]
    assert other in mesh._gossip.here
    await many.close()


async def test_channels_to_peers_for_which_messages_are_expected_are_open_before_and_stay_open(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(overlay, "FULL_MESH", 8)
    monkeypatch.setattr(mesh_module, "OFTEN_S", 0.02)
    monkeypatch.setattr(mesh_module, "_IDLE_S", 0.0)
    many = Many(tmp_path, 12)
    await many.meet()
    leader, *others = many.meshes
    mesh, checks = many.meshes[leader], many.still_here[leader]
    await until(lambda: mesh._channels.open.keys() <= mesh._gossip.neighbours)
    mesh.expect(frozenset(others))
    await until(lambda: mesh._channels.open.keys() == set(others))
    num_checks = len(checks)
    await until(lambda: len(checks) > num_checks + 2)
    assert mesh._channels.open.keys() == set(others)
    mesh.expect(frozenset())
    await until(lambda: mesh._channels.open.keys() <= mesh._gossip.neighbours)
    await many.close()


@pytest.mark.parametrize(
    ("full_mesh", "number", "num_answers"), [(1, 1, 1), (1, 0, 0), (1, 1 << 62, 0), (32, 1, 0)]
)
def test_who_is_said_to_be_lost_answers_once_and_only_those_that_have_heard_its_newest_word(
    tmp_path, monkeypatch, full_mesh, number, num_answers
):
    monkeypatch.setattr(overlay, "FULL_MESH", full_mesh)
    identities, signed = [claim_slot(tmp_path, "run", rank) for rank in range(3)], list[int]()
    mesh = mesh_over(Transport(), own_record=lambda number, lost: bytes(signed.append(number) or 0))
    mesh.broadcast_status()
    monkeypatch.setattr(mesh, "_pass_on_soon", lambda **_: None)
    lost = (Lost(peer_id="a", incarnation=1, number=number),)
    words = {one.peer_id: spoken(one.peer_id, lost=lost).encode(one) for one in identities}
    told = tuple(Told(peer_id=who, incarnation=1, number=0, record=word) for who, word in words.items())
    mesh.received("b", News(told=told))
    assert len(mesh.peers) == 3
    assert len(signed) == 1 + num_answers
    for identity in identities:
        identity.release()


async def test_a_channel_that_the_other_end_has_parted_with_is_served_no_more(tmp_path):
    mesh = mesh_over(Transport())
    with channel_to(mesh) as theirs:
        parting = Channel(theirs)
        await parting.send(Parting())
        with pytest.raises(PeerUnreachable, match="closed the stream"):
            await parting.read(Decoder(Said), 5.0)
        assert not mesh._channels.open
        assert [one.peer_id for one in mesh.peers] == ["b"]
        await mesh.close()


@pytest.mark.parametrize("early_s", [-(MAX_AGE_S + 1), CLOCK_TOLERANCE_S + 1])
def test_a_word_that_has_grown_too_old_on_its_way_is_no_fault_of_who_passes_it_on(tmp_path, early_s):
    identity = claim_slot(tmp_path, "run", 0)
    posted = []
    mesh = mesh_over(Transport(), post=posted.append)
    record = spoken(identity.peer_id, number=3, time=time.time() + early_s).encode(identity)
    mesh.received("b", News(told=(Told(peer_id=identity.peer_id, incarnation=1, number=3, record=record),)))
    assert not mesh.peers and not posted
    identity.release()


async def test_words_that_are_passed_on_under_a_false_number_or_unsigned_end_the_channel(tmp_path):
    many = Many(tmp_path, 2)
    await many.meet()
    liar, honest = many.meshes
    third = claim_slot(tmp_path, "run", 5)
    true = spoken(third.peer_id, number=3).encode(third)
    forged = spoken(third.peer_id, number=4).encode(many.identities[liar])
    for number, record in ((9, true), (4, forged)):
        said = Told(peer_id=third.peer_id, incarnation=1, number=number, record=record)
        before = len(many.lost[honest])
        many.meshes[liar]._channels.open[honest].enqueue(News(told=(said,)))
        await until(lambda before=before: len(many.lost[honest]) > before)
        assert third.peer_id not in many.meshes[honest]._gossip.here
        await many.meshes[liar].reach(announced(honest))
    third.release()
    await many.close()
