"""Why a peer was refused: the reason it is told, and what its user can do."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

from peers.errors import ProtocolError
from peers.protocol.wire import Struct

T = TypeVar("T")


class Why(StrEnum):
    """The reasons to refuse a peer, in the words of its answer and of the log."""

    NO_TOKEN = "it has shown no token"
    FORGED = "its token is not of this run"
    ANOTHERS = "its token is another peer's"
    EARLY = "its token is not valid yet"
    EXPIRED = "its token has expired"
    BANNED = "it is banned"
    WRONG_SECRET = "it does not have the swarm secret"
    NOT_LISTED = "it is not on the allowlist"

    def advice(self, peer_id: str) -> str:
        """What the reason means to the user of the refused peer, and what to do about it."""
        return _ADVICE[self].format(peer_id=peer_id)


_ADVICE = {
    Why.NO_TOKEN: "this swarm admits only peers that have its secret. Copy the file that `diloco dht start` names on "
    "the coordinator's machine to this one, and give it by --swarm-secret-file, or its content in DILOCO_SWARM_SECRET",
    Why.FORGED: "the others hold another swarm secret than this peer. Copy the coordinator's file to this machine "
    "anew, and check --run-id",
    Why.ANOTHERS: "this peer's token was issued to another identity. Remove the .token file beside its key and start "
    "it again: a new one is issued",
    Why.EARLY: "this peer's token is not valid yet by the others' clocks. Is the clock of this machine, and the "
    "coordinator's, right?",
    Why.EXPIRED: "this peer's token has expired, and nobody renewed it. Start the coordinator again, or a peer with "
    "--admission-key-file, then this peer",
    Why.BANNED: "this peer, {peer_id}, is banned from the run. Whoever holds the admission key can lift that by "
    "`diloco peers unban {peer_id}`",
    Why.WRONG_SECRET: "the swarm secret that this peer has is not the run's, or not any more. Copy the coordinator's "
    "file to this machine anew",
    Why.NOT_LISTED: "the run's allowlist does not name this peer. Have {peer_id} added to it on the coordinator's "
    "machine, then start this peer again",
}


class Refused(ProtocolError):
    """A peer that is not admitted."""

    def __init__(self, why: Why) -> None:
        super().__init__(f"refused: {why}")
        self.why = why


class Refusal(Struct, frozen=True, tag="refused"):
    why: Why


def unless_refused(answer: T | Refusal) -> T:
    """The answer. Raises Refused if it is a Refusal."""
    if isinstance(answer, Refusal):
        raise Refused(answer.why)
    return answer
