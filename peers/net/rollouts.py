"""The rollout peer's end of one stream to a learner; the messages are those of peers/protocol/rollouts.py."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Self

from msgspec.msgpack import Decoder

from peers.errors import NotWanted, PeerUnreachable, ProtocolError
from peers.net.channel import Channel, call
from peers.net.socket_io import closed_on_error
from peers.net.transport import StreamTransport
from peers.protocol.records import Announcement
from peers.protocol.refusal import Refusal, Refused
from peers.protocol.rollouts import (
    MAX_MESSAGE_BYTES,
    STALE,
    Blob,
    BlobName,
    Hello,
    NoBlob,
    NoPolicy,
    Policy,
    Signed,
    Verdict,
    WantBlob,
    WantPolicy,
    Welcome,
    rollout_protocol,
)
from peers.timing import CONNECT_S, STALL_S

_WELCOME: Decoder[Welcome | NoPolicy | Refusal] = Decoder(Welcome | NoPolicy | Refusal)
_POLICY: Decoder[Policy | NoPolicy] = Decoder(Policy | NoPolicy)
_BLOB: Decoder[Blob | NoBlob] = Decoder(Blob | NoBlob)
_VERDICT: Decoder[Verdict] = Decoder(Verdict)
_PIECE_BYTES = 1 << 20


class LearnerStream:
    """Used by one task at a time. All methods raise PeerUnreachable and ProtocolError."""

    def __init__(self, channel: Channel, welcome: Welcome) -> None:
        self._channel, self.welcome = channel, welcome

    @classmethod
    async def open(
        cls, transport: StreamTransport, run_id: str, learner: Announcement, token: bytes
    ) -> LearnerStream:
        """Raises Refused and NotWanted, too, and PeerUnreachable if the learner has no policy."""
        channel = await call(
            transport,
            learner.peer_id,
            rollout_protocol(run_id),
            timeout_s=CONNECT_S,
            maddrs=learner.maddrs,
            max_message_bytes=MAX_MESSAGE_BYTES,
        )
        with closed_on_error(channel):
            await channel.send(Hello(token=token), STALL_S)
            said = await channel.read(_WELCOME, STALL_S)
            if isinstance(said, Refusal):
                raise Refused(said.why)
            if isinstance(said, NoPolicy):
                if said.why:
                    raise NotWanted(f"it takes no rollouts of this peer: {said.why}")
                raise PeerUnreachable("it takes no rollouts, or not yet")
            return cls(channel, said)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    async def newest(self, held: str) -> Policy:
        """The newest policy, and what leads to it from the weights of the digest `held` (empty: none)."""
        await self._channel.send(WantPolicy(held=held), STALL_S)
        answer = await self._channel.read(_POLICY, STALL_S)
        if isinstance(answer, NoPolicy):
            raise PeerUnreachable("it has no policy any more")
        return answer

    async def download(self, name: BlobName, directory: Path) -> Path | None:
        """The file, once its bytes have been verified; None if the learner does not have it any more."""
        await self._channel.send(WantBlob(digest=name.digest), STALL_S)
        answer = await self._channel.read(_BLOB, STALL_S)
        if isinstance(answer, NoBlob):
            return None
        path = directory / f"{name.digest}.safetensors"
        digest, left, piece = hashlib.sha256(), name.num_bytes, bytearray(_PIECE_BYTES)
        try:
            with path.open("wb") as file:
                while left:
                    view = memoryview(piece)[: min(left, _PIECE_BYTES)]
                    await self._channel.fill(view, STALL_S)
                    await asyncio.to_thread(digest.update, view)
                    await asyncio.to_thread(file.write, view)
                    left -= len(view)
            if digest.hexdigest() != name.digest:
                raise ProtocolError(f"the bytes of the policy {name.digest[:12]} do not match its digest")
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return path

    async def hand_over(self, message: Signed) -> str:
        """Why the learner has dropped the rollout; empty if it has taken it. Raises NotWanted if it takes no more."""
        await self._channel.send(message, STALL_S)
        dropped = (await self._channel.read(_VERDICT, STALL_S)).dropped
        if dropped not in ("", STALE):
            raise NotWanted(f"it refuses a rollout of this peer: {dropped}")
        return dropped
