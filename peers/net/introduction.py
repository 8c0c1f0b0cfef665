"""How two peers begin a channel of the mesh: each says who it is, after the ban list that it has (protocol/mesh.py)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from msgspec.msgpack import Decoder

from peers.errors import PeerUnreachable, ProtocolError
from peers.net.channel import Channel
from peers.net.gate import Gate
from peers.protocol.admission import Bans
from peers.protocol.mesh import Announced, Introduction
from peers.protocol.records import Spoken
from peers.protocol.refusal import Refusal, Why
from peers.timing import ANSWER_S

log = logging.getLogger(__name__)

_INTRODUCTION: Decoder[Introduction] = Decoder(Introduction)


class NotAdmitted(PeerUnreachable):
    """A peer that was reached says that this one is not admitted."""

    def __init__(self, why: Why) -> None:
        super().__init__(f"turned away: {why}")
        self.why = why


class Introduced(NamedTuple):
    """The other end, and the ban list that it has heard from here."""

    spoken: Spoken
    record: bytes
    told_bans: bytes


class Introductions:
    """`own_record`: what this peer says of itself, signed."""

    def __init__(self, run_id: str, gate: Gate, own_record: Callable[[], bytes]) -> None:
        self._run_id, self._gate, self._own_record = run_id, gate, own_record

    async def as_caller(self, channel: Channel, peer_id: str) -> Introduced:
        """Raises NotAdmitted, Refused, PeerUnreachable, ProtocolError."""
        told = await self._say(channel)
        return Introduced(*await self._hear(channel, peer_id), told)

    async def as_called(self, channel: Channel, peer_id: str) -> Introduced:
        """Raises as `as_caller`."""
        spoken, record = await self._hear(channel, peer_id)
        return Introduced(spoken, record, await self._say(channel))

    async def turn_away(self, channel: Channel, why: Why) -> None:
        """Tell a refused peer the reason, and a banned one the signed ban list."""
        try:
            await self._tell_bans(channel)
            await channel.send_last(Refusal(why=why), ANSWER_S)
        except PeerUnreachable as error:
            log.debug("a refused peer did not hear why: %s", error)
        finally:
            channel.close()

    def decode(self, peer_id: str, record: bytes) -> Spoken:
        """What this peer has said of itself. Raises ProtocolError, and Refused for one that is not admitted."""
        spoken = Spoken.decode(peer_id, record, run_id=self._run_id, now=time.time())
        self._gate.check(peer_id, spoken.token, "mesh")
        return spoken

    async def _say(self, channel: Channel) -> bytes:
        """Say who is here, after the ban list, which is returned."""
        bans = await self._tell_bans(channel)
        await channel.send(Announced(record=self._own_record()), timeout_s=ANSWER_S)
        return bans

    async def _tell_bans(self, channel: Channel) -> bytes:
        if bans := self._gate.bans_blob:
            await channel.send(Bans(signed=bans), timeout_s=ANSWER_S)
        return bans

    async def _hear(self, channel: Channel, peer_id: str) -> tuple[Spoken, bytes]:
        said = await channel.read(_INTRODUCTION, timeout_s=ANSWER_S)
        if isinstance(said, Bans):
            self._gate.learn(said.signed)
            said = await channel.read(_INTRODUCTION, timeout_s=ANSWER_S)
        match said:
            case Announced(record):
                return self.decode(peer_id, record), record
            case Refusal(why):
                raise NotAdmitted(why)
        raise ProtocolError("two ban lists in one introduction")
