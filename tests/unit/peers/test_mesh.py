import asyncio

from peers import mesh as mesh_module
from peers.errors import PeerUnreachable
from peers.mesh import HEARTBEAT_S, MAX_DIALLED, SILENCE_S, Mesh, heartbeat_s
from tests.support.announcements import announced


def record(peer_id):
    return announced(peer_id, state="joining")


class Transport:
    """Every peer that is dialled is silent for a while, and then found to be none."""

    def __init__(self, silence_s=0.0):
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


def mesh_over(transport, status=lambda: b""):
    return Mesh(
        run_id="run",
        peer_id="a",
        transport=transport,
        status=status,
        on_change=lambda: None,
        on_message=lambda *_: None,
    )


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def test_records_of_peers_that_do_not_exist_are_dialled_a_few_at_a_time_and_all_in_turn():
    async def scenario():
        transport = Transport(silence_s=0.02)
        mesh = mesh_over(transport)
        records = {f"p{number}": record(f"p{number}") for number in range(5 * MAX_DIALLED)}
        mesh.discovered(records)
        while mesh._dialling:
            await asyncio.sleep(0.005)
        assert sorted(transport.dialled) == sorted(records)
        assert transport.most_at_once == MAX_DIALLED
        await mesh.close()

    run(scenario())


def test_a_peer_that_is_in_no_record_any_more_is_forgotten(monkeypatch):
    monkeypatch.setattr(mesh_module, "LET_THE_OTHER_DIAL_S", 60.0)

    async def scenario():
        mesh = mesh_over(Transport())
        for number in range(10):
            mesh.discovered({f"A{number}": record(f"A{number}")})
        assert list(mesh._first_heard_of) == ["A9"]
        await mesh.close()

    run(scenario())


def test_heartbeats_get_rarer_with_many_peers_and_stay_far_below_the_silence_of_a_lost_one():
    assert heartbeat_s(1) == heartbeat_s(16) == HEARTBEAT_S
    assert heartbeat_s(32) == 2 * HEARTBEAT_S
    assert heartbeat_s(1000) <= SILENCE_S / 3


def test_one_signature_serves_all_heartbeats_of_a_moment_and_none_is_older_than_the_last_broadcast():
    statuses = [b"newest", b"new", b"old"]
    mesh = mesh_over(Transport(), status=lambda: statuses.pop())
    assert [mesh._recent_status() for _ in range(50)] == [b"old"] * 50
    mesh.broadcast_status()
    assert mesh._recent_status() == b"new"
    assert statuses == [b"newest"]
