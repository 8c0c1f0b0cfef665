"""Every constant of time in peers/, each with its reason. Times learned from rounds and epochs: core/timing.py.

Other waiting times are multiples of these, written where they are used.
"""

from __future__ import annotations

# One message, stream or process

RETRY_S = 0.25
"""Before retrying after a transient failure: crossed dials, a lack of descriptors."""
GRACE_S = 0.5
"""For further answers, once one peer has offered what is wanted: more than round trips differ by."""
OFTEN_S = 1.0
"""Between two checks for what somebody waits for, two reports of a peer, two steps of a brief search."""
PROBE_S = 3.0
"""For a peer that may be gone, if others can be asked instead: an endpoint, a DHT node, the holder of a rank."""
ANSWER_S = 5.0
"""For one message of a peer that is alive: several times what a busy machine takes."""
LOOK_S = 5.0
"""Between two checks of what changes slowly: lost contacts, this peer's token, a coordinator's announcements."""
STOP_S = 5.0
"""For a process or a thread of ours to end, last messages included."""
CONNECT_S = 10.0
"""To open a stream, greeting included, while nothing waits for it."""
STALL_S = 15.0
"""A transfer that moves nothing for this long has failed; a peer that shows no sign of life for this long is lost."""
START_S = 30.0
"""For a process to send its first message, after all that it loads and compiles; for a newcomer's next request."""
COMMIT_S = 60.0
"""For an answer that may have to wait at the other end, for a running commit or for a free slot."""
FORGET_S = 600.0
"""How long people are shown what is over, and the longest back-off of a path that keeps failing. The first back-off is
START_S, each further one twice as long."""

# Announcements in the DHT

RECORD_TTL_S = 20.0
"""An announcement's lifetime: far above what a store takes under load. It is renewed at least four times meanwhile."""
CLOCK_TOLERANCE_S = 10.0
"""How far another machine's clock may be ahead."""
ANNOUNCE_INTERVAL_S = 3 * OFTEN_S
"""Among few peers: between two announcements of a peer, and two look-ups of all announcements."""
EARLY_INTERVAL_S = OFTEN_S / 2
"""The same while no other peer is reached, or this peer has no world rank."""
CLOCK_OFF_S = 3.0
"""People are told of a clock that is off by more: Hivemind refuses it."""

# Which path a stream takes

DIRECT_HEAD_START_S = 1.0
"""Enough for a greeting over a round trip of 200 ms. If no direct path opens, a stream opens this much later, once per
back-off."""
LIBP2P_HEAD_START_S = 0.75
"""For libp2p to open a connection, before relays are asked as well."""
RELAY_HEAD_START_S = 2.0
"""Head start of relays when libp2p's connection may be dead: p2pd would open a stream on it at once, and win."""

# The mesh

BEAT_S = 0.5
"""Among few peers: between two heartbeats on a channel (`heartbeat_s`), and two statuses of a peer (`status_s`)."""
BEAT_PEERS = 8
FULL_MESH = 32
"""Up to this many peers, each has a channel with every other; among more, with a few neighbours (net/overlay.py)."""
LEAST_SILENCE_S, LOST_BEATS = 8.0, 10
"""A peer that sends nothing for this long and this many heartbeats counts as lost. Far above one heartbeat: a busy
machine is not dead. Rounds stop waiting much earlier (core/timing.py), and a channel that breaks shows at once."""
DOUBT_BEATS = 4
"""After this many heartbeats without an answer, the next streams to a peer take another path, if there is one: the link
may be down. Heartbeats count, not seconds: a peer that was frozen itself has sent none, and missed no answer."""

# Rounds

STREAMS_S = 4.0
"""For all streams of an attempt to open, once rounds have been seen."""
MATCHMAKING_S = 15.0
"""How long a commit waits for its members under NO_WAIT, as in OpenDiLoCo."""
WINDOW_S = 0.5
"""The window in which a link's bandwidth is measured: longer than the bursts of queues and shapers, and shorter than
any round for which the division into shares matters."""
SLICE_S = 0.05
"""How long a thread waits for a socket before it checks whether the reduction goes on."""
NEAR_S = 200e-6
"""A peer with a shorter round trip is on the same machine or next to it."""


def heartbeat_s(num_peers: int) -> float:
    """Between two heartbeats on a channel. It grows with the number of a peer's channels, which is bounded."""
    return BEAT_S * max(1.0, min(num_peers, FULL_MESH) / BEAT_PEERS)


def status_s(num_peers: int) -> float:
    """Between two statuses of a healthy peer. All peers hear each status: each hears the same number per second."""
    return BEAT_S * max(1.0, num_peers / BEAT_PEERS)


def announce_interval_s(num_peers: int, *, is_early: bool) -> float:
    """The time between two announcements without news, of a peer that sees so many peers, itself included.

    It grows with their number, since an announcement is stored at many nodes.
    """
    usual_s = EARLY_INTERVAL_S if is_early else ANNOUNCE_INTERVAL_S
    return min(usual_s * max(1.0, num_peers / BEAT_PEERS), RECORD_TTL_S / 4)


def rest_s(num_peers: int) -> float:
    """How long after an announcement the next one waits even with news: the mesh has told it to the others already. So
    observers that look more often find nothing new."""
    return 0.0 if num_peers <= BEAT_PEERS else announce_interval_s(num_peers, is_early=True)


def look_interval_s(num_peers: int, *, is_early: bool) -> float:
    """The mean time between two look-ups of all announcements by one of so many peers.

    All ask the same few nodes, and each answer has all records: as the interval grows with the square of the number, a
    node sends as much per second to any number of peers. Peers tell one another of newcomers, and newcomers look when
    they enter; later look-ups only rejoin parts of a swarm that have lost each other, for which one part has to look.
    Of n peers one looks every 3n / 64 seconds: a small part soon, half of a thousand peers within 23 s on average. A
    peer's interval is random, so that they do not all look at the same time.
    """
    usual_s = EARLY_INTERVAL_S if is_early else ANNOUNCE_INTERVAL_S
    return usual_s * max(1.0, num_peers / BEAT_PEERS) ** 2
