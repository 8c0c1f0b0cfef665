"""Members of a run are found on the same network without an address, and nobody is led astray by an answer."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time

import msgspec
import pytest

from peers.errors import UserError
from peers.net import lan
from peers.net.lan import answering, found_here
from peers.protocol.lan import LAN_GROUP, LAN_PORT, MAX_LAN_BYTES, AskLan, HereOnLan
from tests.support.namespaces import hub, inside, why_not

PEER = "12D3KooWPsyLiDLY7odWsSNVNk4Q5nCuf7AvdwatJKRZZTWJHsKD"
LISTENS = [f"/ip4/10.91.1.1/tcp/30001/p2p/{PEER}", f"/ip4/127.0.0.1/tcp/30001/p2p/{PEER}"]


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_newcomer_finds_the_member_of_its_run_on_the_next_machine_and_no_other_run():
    with hub(1) as machines:

        async def looked_for(run_id: str, timeout_s: float) -> list[str]:
            with inside(machines.middle):
                answers = answering("demo", LISTENS)
                await answers.__aenter__()
            try:
                return await asyncio.to_thread(look, run_id, timeout_s)
            finally:
                await answers.__aexit__(None, None, None)

        def look(run_id: str, timeout_s: float) -> list[str]:
            with inside(machines.spokes[0]):
                return found_here(run_id, timeout_s)

        # By the address that it answers from.
        assert asyncio.run(looked_for("demo", 10)) == [f"/ip4/10.91.1.1/tcp/30001/p2p/{PEER}"]
        assert asyncio.run(looked_for("another", 0.3)) == []


@contextlib.contextmanager
def an_answerer(here: HereOnLan):
    """What it sends is kept."""

    class Kept(list):
        def sendto(self, data, addr):
            self.append((data, addr))

    answers = lan._Answering(here)
    kept = Kept()
    answers.connection_made(kept)
    yield answers, kept


HERE = HereOnLan(run_id="demo", peer_id=PEER, port=30001)
ASKER = ("10.0.0.9", 5000)


def test_an_answer_is_never_longer_than_the_question_and_rubbish_gets_none():
    question = lan._padded("demo")
    assert len(question) <= MAX_LAN_BYTES
    unpadded = msgspec.msgpack.encode(AskLan(run_id="demo"))
    with an_answerer(HERE) as (answers, sent):
        for data in (unpadded, b"\xff" * 300, lan._padded("another"), question + b" " * MAX_LAN_BYTES):
            answers.datagram_received(data, ASKER)
        assert sent == []
        answers.datagram_received(question, ASKER)
    ((answer, to),) = sent
    assert to == ASKER and len(answer) <= len(question)


def test_who_asks_without_end_is_answered_a_few_times():
    began = time.monotonic()
    with an_answerer(HERE) as (answers, sent):
        for _ in range(500):
            answers.datagram_received(lan._padded("demo"), ASKER)
    assert 20 <= len(sent) <= 21 + 5 * (time.monotonic() - began)


def test_what_answers_is_checked():
    def read(**changes):
        fields = {"run_id": "demo", "peer_id": PEER, "port": 30001, **changes}
        data = msgspec.msgpack.encode({"type": "diloco-here", **fields})
        return str(lan._answer(data, "10.0.0.7", "demo"))

    assert read() == f"/ip4/10.0.0.7/tcp/30001/p2p/{PEER}"
    for changes in ({"run_id": "other"}, {"peer_id": "not-a-key"}, {"port": 0}, {"port": 70_000}):
        assert read(**changes) == "None"
    assert lan._answer(b"rubbish", "10.0.0.7", "demo") is None


def test_a_member_that_only_this_machine_reaches_says_so_and_a_taken_port_too():
    async def answer(maddrs: list[str]) -> None:
        async with answering("demo", maddrs):
            pass

    with pytest.raises(UserError, match=r"--host-maddrs /ip4/0\.0\.0\.0/tcp/0"):
        asyncio.run(answer(LISTENS[1:]))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind((LAN_GROUP, LAN_PORT))
        with pytest.raises(UserError, match=f"cannot listen on UDP port {LAN_PORT}: Address already in use"):
            asyncio.run(answer(LISTENS))
