"""What hostile or hanging donors and joiners may cost the others."""

import asyncio
import contextlib
import threading
import time
from types import SimpleNamespace

import pytest
from msgspec.msgpack import Decoder

from peers.core.timing import Timing
from peers.errors import PeersError, PeerUnreachable, StateUnavailable
from peers.net.channel import Channel
from peers.net.states import server as state_server
from peers.net.states import transfer as state_transfer
from peers.net.states.server import MAX_DOWNLOADS
from peers.protocol.states import (
    Commits,
    State,
    Unavailable,
    WantChunk,
    WantCommits,
    WantState,
    state_protocol,
)
from peers.reduce.commit_log import CommitLog, Recording
from peers.state import outer_state
from tests.support.certified import begun
from tests.support.in_process import until
from tests.support.state_network import (
    RUN,
    answer_with_header,
    assert_same,
    committed_state,
    download,
    encoded,
    serve,
    serve_badly,
)

_STATE = Decoder(State)


async def ask(network, joiner, head):
    """A joiner's stream after its first request: the channel and its socket."""
    sock = await network.transport(joiner).open("a", state_protocol(RUN), timeout_s=1)
    channel = Channel(sock)
    await channel.send(WantState(head=head))
    return channel, sock


async def test_a_donor_that_says_nothing_at_all_delays_no_other(network):
    state = committed_state((1000,))

    async def silent(_peer, sock):
        with sock:
            await asyncio.sleep(60)

    await network.transport("silent").serve(state_protocol(RUN), silent)
    await serve(network, "good", state)
    started = time.monotonic()
    assert_same(await download(network, ["silent", "good"], state), state)
    assert time.monotonic() - started < 30


async def test_a_donor_that_trickles_is_left_when_others_have_nothing_to_do(network, monkeypatch):
    monkeypatch.setattr(state_transfer, "ANSWER_S", 0.3)
    state = committed_state()

    async def trickle(_peer, sock):
        loop = asyncio.get_running_loop()
        channel = Channel(sock)
        with contextlib.suppress(PeersError, OSError):
            await answer_with_header(channel, sock, state)
            while True:
                await loop.sock_sendall(sock, b"\0")
                await asyncio.sleep(0.05)
        channel.close()

    await network.transport("trickle").serve(state_protocol(RUN), trickle)
    await serve(network, "good", state)
    assert_same(await download(network, ["trickle", "good"], state, timeout_s=15), state)


async def test_the_only_donor_may_be_as_slow_as_it_likes(network, monkeypatch):
    monkeypatch.setattr(state_transfer, "ANSWER_S", 0.1)
    state = committed_state((100,))

    def slowly(payload):
        time.sleep(0.3)
        return payload

    await serve_badly(network, "slow", state, slowly)
    assert_same(await download(network, ["slow"], state), state)


async def test_one_joiner_holds_one_download_however_many_it_begins(network):
    state = committed_state((8,))
    await serve(network, "a", state)
    greedy = []
    for _ in range(2 * MAX_DOWNLOADS):
        greedy.append((await ask(network, "greedy", state.head))[0])
        await greedy[-1].read(_STATE, 5)
    assert len(state._snapshots) == 1
    started = time.monotonic()
    assert_same(await download(network, ["a"], state), state)
    assert time.monotonic() - started < 30
    for channel in greedy:
        channel.close()
    await until(lambda: not state._snapshots)


async def test_a_snapshot_is_held_for_no_longer_than_a_download_may_take(network, monkeypatch):
    monkeypatch.setattr(state_server, "download_timeout_s", lambda sizes: 1.5)
    state = committed_state((8,))
    await serve(network, "a", state)
    channel, sock = await ask(network, "hoarder", state.head)
    await channel.read(_STATE, 5)
    await asyncio.get_running_loop().sock_recv(sock, 64)
    assert len(state._snapshots) == 1
    # A request that the donor no longer reads resets the stream.
    with pytest.raises((PeersError, ConnectionResetError)):
        while True:
            await channel.send(WantChunk(values="anchor", position=0), 5)
            assert len(await asyncio.wait_for(asyncio.get_running_loop().sock_recv(sock, 32), 5)) == 32 or (
                await channel.read(_STATE, 5)
            )
            await asyncio.sleep(0.02)
    assert not state._snapshots
    channel.close()


def test_a_donor_serves_for_as_long_as_a_joiner_on_the_slowest_link_waits():
    sizes, timing = (10**9, 10**6), Timing(most_grace_s=0.0, most_attempt_s=0.0)
    timing.set_sizes(fragment_bytes=4 * 10**9, state_bytes=8 * sum(sizes))
    assert timing.fetch_timeout_s < state_server.download_timeout_s(sizes) < 1.1 * timing.fetch_timeout_s


async def test_recorded_commits_are_held_for_no_longer_than_a_download_may_take(network, monkeypatch):
    monkeypatch.setattr(state_server, "download_timeout_s", lambda sizes: 0.5)
    state, log = committed_state((8,)), CommitLog()
    parent = state.header.certificate.plan.parent
    log.add(Recording(), parent=parent, head=state.head, state_numel=8)
    await state_server.StateServer(network.transport("a"), RUN, lambda: state, log).start()
    sock = await network.transport("hoarder").open("a", state_protocol(RUN), timeout_s=1)
    channel = Channel(sock)
    await channel.send(WantCommits(since=parent, until=state.head))
    await channel.read(Decoder(Commits), 5)
    # The joiner never confirms that it wants the commits.
    with pytest.raises(PeerUnreachable, match=r"closed|broke"):
        await channel.read(Decoder(Commits), 10)
    channel.close()


@pytest.mark.parametrize("asks", [False, True])
async def test_who_only_asks_is_not_one_for_whom_commits_are_kept(network, asks):
    state, log = committed_state((8,)), CommitLog()
    parent = state.header.certificate.plan.parent
    log.add(Recording(), parent=parent, head=state.head, state_numel=8)
    server = await serve(network, "a", state, log)
    wanted = [WantState(head="0" * 64), WantCommits(since="0" * 64, until=state.head)]
    for request in [*wanted, WantCommits(since=parent, until=state.head)] if asks else []:
        sock = await network.transport("stranger").open("a", state_protocol(RUN), timeout_s=1)
        with Channel(sock) as channel:
            await channel.send(request)
            await channel.read(Decoder(Unavailable | Commits), 5)
        await until(lambda: not server._newest)
    assert not log.is_wanted and not log.sent_bytes
    if not asks:
        await download(network, ["a"], state)
        assert log.is_wanted and log.sent_bytes > 0


async def test_who_waits_for_a_free_place_does_so_in_vain_only_for_so_long(network, monkeypatch):
    monkeypatch.setattr(state_server, "COMMIT_S", 0.3)
    state = committed_state((8,))
    server = await serve(network, "a", state)
    for _ in range(MAX_DOWNLOADS):
        await server._slots[WantState].acquire()
    with pytest.raises(StateUnavailable, match="as many as it can") as caught:
        await download(network, ["a"], state)
    assert not caught.value.suspects


async def test_who_takes_next_to_nothing_loses_its_place_to_one_that_waits(network, monkeypatch):
    now = 0.0
    monkeypatch.setattr(state_server, "time", SimpleNamespace(monotonic=lambda: now))
    state = committed_state((8,))
    server = await serve(network, "a", state)
    channels = []
    for number in range(MAX_DOWNLOADS):
        channels.append((await ask(network, f"hoarder {number}", state.head))[0])
        await channels[-1].read(_STATE, 5)
    *slow, _, _ = served = list(server._began)
    # A link of 8 Mbit/s brings them no more from each of eight donors.
    for each in slow:
        each.sent_bytes = 110_000_000
    now = 1000.0
    assert list(server._began) == served
    assert_same(await download(network, ["a"], state), state)
    # One place was needed.
    await until(lambda: len(server._began) == MAX_DOWNLOADS - 1)
    assert list(server._began)[: len(slow)] == slow
    for channel in channels:
        channel.close()


async def test_a_joiner_is_handed_commits_while_others_download_the_state(network):
    state, log = committed_state((8,)), CommitLog()
    parent = state.header.certificate.plan.parent
    log.add(Recording(), parent=parent, head=state.head, state_numel=8)
    server = await serve(network, "a", state, log)
    for _ in range(MAX_DOWNLOADS):
        await server._slots[WantState].acquire()
    sock = await network.transport("joiner").open("a", state_protocol(RUN), timeout_s=1)
    with Channel(sock) as channel:
        await channel.send(WantCommits(since=parent, until=state.head))
        assert await channel.read(Decoder(Commits), 10) == Commits(count=1)


async def test_requests_that_are_there_already_let_others_run_between_them(network, monkeypatch):
    state, num_served = begun([committed_state((8,)).anchor[0]]), 0
    original = state_server._wanted_values

    def counted(*arguments):
        nonlocal num_served
        num_served += 1
        return original(*arguments)

    monkeypatch.setattr(state_server, "_wanted_values", counted)
    await serve(network, "a", state)
    channel, sock = await ask(network, "pump", state.head)
    await channel.read(_STATE, 5)
    await asyncio.get_running_loop().sock_recv(sock, 64)
    sock.send(encoded(WantChunk(values="anchor", position=0)) * 200)
    while num_served < 200:
        before = num_served
        await asyncio.sleep(0)
        assert num_served <= before + 1
    channel.close()


async def test_a_joiner_does_not_stand_still_while_it_finds_out_which_chunks_are_zero(network, monkeypatch):
    hashed = []
    original = state_transfer.hash_chunk

    def counted(values):
        hashed.append(threading.current_thread())
        return original(values)

    weights = committed_state((1000,)).anchor[0]
    monkeypatch.setattr("peers.state.header.STATE_CHUNK_NUMEL", 10)
    state = begun([weights])
    await serve(network, "a", state)
    for module in (state_transfer, outer_state):
        monkeypatch.setattr(module, "hash_chunk", counted)
    assert_same(await download(network, ["a"], state), state)
    assert threading.main_thread() not in hashed
    # One hash of a chunk of zeros, and one of each of the anchor's 100 chunks.
    assert len(hashed) == 101
