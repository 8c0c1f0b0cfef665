"""Waiting times of net and admission: constants, each with its reason. Those of rounds are in peers/core/timing.py.

They bound what one message, stream or transfer between two processes may take. What a round may take is learned from
the rounds before, and handed in.
"""

from __future__ import annotations

PROBE_S = 3.0
"""For a peer that may be gone, if others can be asked instead: an endpoint, a DHT node, the holder of a rank."""
ANSWER_S = 5.0
"""For one message of a peer that is alive: several times what a busy machine takes."""
CONNECT_S = 10.0
"""To open a stream, greeting included, if nothing waits for it; for p2pd, when fifty start on one machine."""
STALL_S = 15.0
"""A transfer that moves nothing for so long has failed."""
COMMIT_S = 60.0
"""For what may have to wait at the other end: a commit under way, or a free slot."""
RETRY_S = 0.25
"""Before retrying after a transient failure: crossed dials, a lack of descriptors."""
STOP_S = 5.0
"""For a process or a thread of ours to end."""
LOOK_S = 5.0
"""Between two checks of what changes slowly: lost contacts, the own token, a coordinator's announcements."""

# Which path a stream takes (paths/)

DIRECT_HEAD_START_S = 1.0
"""Enough for a greeting over a round trip of 200 ms. If nobody answers directly, a stream is this late, once per
back-off.
"""
LIBP2P_HEAD_START_S = 0.75
"""For libp2p to open a connection, before a third peer is asked as well."""
RELAY_HEAD_START_S = 2.0
"""Head start of a relay when libp2p's connection may be dead: opening a libp2p stream would always succeed first."""
FIRST_BACK_OFF_S, LONGEST_BACK_OFF_S = 30.0, 600.0
"""For which a path that failed is not tried, longer each time: several rounds, and no more than a few streams a day."""
DETOUR_S = 1.0
"""Streams that are on their way may still come by another path after their peer has fallen silent: the two ends of a
link that carries nothing notice it up to a heartbeat apart, the later one in the next attempt."""

# Several peers asked at once

GRACE_S = 0.5
"""For the next answer after one peer has offered what is wanted: more than round trips differ by."""
PATIENCE_S = 5.0
"""For one part of a state, while other donors have nothing to do."""

# The mesh

LEAST_SILENCE_S, SILENT_BEATS = 8.0, 10
"""A peer that says nothing for so long counts as lost. Far above a heartbeat: a busy machine is not a dead one. Rounds
wait for nobody who is silent much shorter (peers/core/timing.py), and a channel that breaks tells at once."""
DOUBT_BEATS = 4
"""After so many heartbeats without an answer the next streams to a peer go another way, if there is one: the link may
carry nothing. Own beats count and not seconds: a peer that was frozen itself has sent none, and missed nothing."""
LET_THE_OTHER_REDIAL_S = 0.5
"""For the smaller peer id to call first after a channel broke: of two dials that cross, libp2p may fail both."""
REDIAL_AFTER_S = 1.0
"""A channel that has stood for so long is made anew as soon as it breaks; others wait for the next look at the DHT, so
that nobody makes this peer dial as fast as it hangs up."""
