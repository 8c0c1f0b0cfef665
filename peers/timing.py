"""Every constant of time in peers/, each with its reason. What is learned from rounds and epochs: core/timing.py.

Other waiting times are multiples of these, written where they are used.
"""

from __future__ import annotations

# One message, stream or process

RETRY_S = 0.25
"""Before retrying after a transient failure: crossed dials, a lack of descriptors."""
GRACE_S = 0.5
"""For the next answer after one peer has offered what is wanted: more than round trips differ by."""
OFTEN_S = 1.0
"""Between two looks at what somebody waits for, two reports of a peer, two steps of a brief search."""
PROBE_S = 3.0
"""For a peer that may be gone, if others can be asked instead: an endpoint, a DHT node, the holder of a rank."""
ANSWER_S = 5.0
"""For one message of a peer that is alive: several times what a busy machine takes."""
LOOK_S = 5.0
"""Between two checks of what changes slowly: lost contacts, the own token, a coordinator's announcements."""
STOP_S = 5.0
"""For a process or a thread of ours to end, and for what it still has to say."""
CONNECT_S = 10.0
"""To open a stream, greeting included, if nothing waits for it."""
STALL_S = 15.0
"""A transfer that moves nothing for so long has failed; a peer that shows nothing of itself for so long is lost."""
START_S = 30.0
"""For a process to come to its first word, whatever it loads and compiles before; for a newcomer to come back."""
COMMIT_S = 60.0
"""For what may have to wait at the other end: a commit under way, or a free slot."""
FORGET_S = 600.0
"""For so long people are shown what is over, and a path that has failed again and again is not tried: a few streams a
day at the most. The first failure costs it START_S, each further one twice as much."""

# Announcements in the DHT

RECORD_TTL_S = 20.0
"""An announcement is valid for so long; it is renewed four times meanwhile. Far above what a store takes under load."""
CLOCK_TOLERANCE_S = 10.0
"""Another machine's clock may be so far ahead."""

CLOCK_OFF_S = 3.0
"""Of which people are told: Hivemind refuses clocks that are so far off."""

# Which path a stream takes

DIRECT_HEAD_START_S = 1.0
"""Enough for a greeting over a round trip of 200 ms. If nobody answers directly, a stream is this late, once per
back-off.
"""
LIBP2P_HEAD_START_S = 0.75
"""For libp2p to open a connection, before a third peer is asked as well."""
RELAY_HEAD_START_S = 2.0
"""Head start of a relay when libp2p's connection may be dead: opening a libp2p stream would always succeed first."""

# The mesh

BEAT_S = 0.5
"""Among few peers: between two heartbeats on a channel (`heartbeat_s`), and two statuses of a peer (`status_s`)."""
BEAT_PEERS = 8
FULL_MESH = 32
"""Up to so many peers, all have channels with one another; of more, each has channels with a few (net/overlay.py)."""
LEAST_SILENCE_S, LOST_BEATS = 8.0, 10
"""A peer that says nothing for so long counts as lost. Far above a heartbeat: a busy machine is not a dead one. Rounds
wait for nobody who is silent much shorter (core/timing.py), and a channel that breaks tells at once."""
UNACKNOWLEDGED_S = 6.0
"""What a channel carries has to arrive within this time: longer than a packet takes that is lost four times in a row.
So a machine that is switched off is lost sooner than one that is busy.
"""
DOUBT_BEATS = 4
"""After so many heartbeats without an answer the next streams to a peer go another way, if there is one: the link may
carry nothing. Own beats count and not seconds: a peer that was frozen itself has sent none, and missed nothing."""

# Rounds

STREAMS_S = 4.0
"""For all streams of an attempt to open, once rounds have been seen."""
MATCHMAKING_S = 15.0
"""What a commit waits for its members under NO_WAIT, as OpenDiLoCo does."""
WINDOW_S = 0.5
"""In which a link's bandwidth is measured: long enough to outlast the bursts of queues and shapers, short enough to lie
within a round that is worth sharing."""
SLICE_S = 0.05
"""After which a thread that waits for a socket looks whether the reduction goes on."""
NEAR_S = 200e-6
"""A peer whose round trip is no longer than that is on the same machine or beside it."""


def heartbeat_s(num_peers: int) -> float:
    """Between two heartbeats on a channel. It grows with the number of a peer's channels, which is bounded."""
    return BEAT_S * max(1.0, min(num_peers, FULL_MESH) / BEAT_PEERS)


def status_s(num_peers: int) -> float:
    """Between two statuses of a peer that is well, which all others hear: each hears equally many a second."""
    return BEAT_S * max(1.0, num_peers / BEAT_PEERS)
