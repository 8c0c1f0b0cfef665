"""The limits of everything that a peer sends, as types: a message outside them is never decoded."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MAX_MESSAGE_BYTES = 1 << 20
MAX_PEERS = 1024
"""In one roster or group. Messages about that many still fit into MAX_MESSAGE_BYTES."""
MAX_WORLD_RANK = 1 << 20
MAX_EPOCH = 1 << 40
"""Of a state that is offered or certified. Lower than the limit of the type Epoch: later epochs can be counted."""
MAX_TOKENS = 1 << 40
"""Of one peer in one epoch: far more than any peer trains."""
MAX_COUNT = 1 << 62
MAX_NORM = 1e30
"""Of one contribution: its square is far below the limit of a double."""
MAX_REAL = 1e15
MAX_CERTIFICATES = 32
"""In one message; together at most MAX_CERTIFICATES_BYTES, or a single larger one."""
MAX_CERTIFICATES_BYTES = 1 << 19
MAX_SHORT_TEXT = 300

Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
MAX_ATTEMPT = 1 << 20
AttemptNumber = Annotated[int, Meta(ge=0, le=MAX_ATTEMPT)]
Epoch = Annotated[int, Meta(ge=0, le=2 * MAX_EPOCH)]
WorldRank = Annotated[int, Meta(ge=0, le=MAX_WORLD_RANK)]
ClaimedRank = Annotated[int, Meta(ge=-1, le=MAX_WORLD_RANK)]
"""-1: the peer has none yet."""
Norm = Annotated[float, Meta(ge=0, le=MAX_NORM)]
Real = Annotated[float, Meta(ge=0, le=MAX_REAL)]
Share = Annotated[float, Meta(ge=0, le=1)]
RUN_ID = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
RunId = Annotated[str, Meta(pattern=rf"^{RUN_ID}\Z")]
PeerId = Annotated[str, Meta(min_length=1, max_length=128)]
Hash = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
HashOrNone = Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")]
"""Empty: there is none."""
ShortText = Annotated[str, Meta(max_length=MAX_SHORT_TEXT)]
ShownText = Annotated[
    str,
    Meta(
        pattern=r"^[^\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
        r"\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]*\Z"
    ),
]
"""Text shown to people: no control characters, which a terminal would obey, no line and paragraph separators, and no
characters that change the direction of writing or have no width. Each user of the type bounds its length.
"""
Port = Annotated[int, Meta(ge=1, le=65535)]
KeyBytes = Annotated[bytes, Meta(max_length=1024)]
SignatureBytes = Annotated[bytes, Meta(max_length=1024)]
MAX_TOKEN_BYTES = 512
TokenBytes = Annotated[bytes, Meta(max_length=MAX_TOKEN_BYTES)]
"""Empty: the peer has none, as in an open swarm."""
MAX_BANS_BYTES = 1 << 15
