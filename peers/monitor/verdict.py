"""One sentence on a run: that it is well, or what is wrong and what to do. A pure function of what peers report.

It says nothing about a peer that is starting, nor about unknown figures.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from peers.core.defaults import SHARE_OF_EPOCH, lighter_compression
from peers.monitor.figures import short_figure, span
from peers.timing import CLOCK_OFF_S, COMMIT_S, OFTEN_S

Level = Literal["good", "busy", "warning", "fault"]

STILL_S = 5 * OFTEN_S
"""A training without progress for so long stands still, unless its steps take as long."""
_STILL_STEPS = 8
_BUSY_STILL_S = 2 * COMMIT_S
"""As above, for every other phase that reports progress, and for a peer's first step."""
SLOW = 2.0
"""A peer whose steps take this many times as long as the others' is slow."""
MUCH_OF_EPOCH = 2 * SHARE_OF_EPOCH
ENOUGH_BYTES = 1e6
"""Bytes in a round from which its rate says something about the link; with fewer, round trips dominate."""
_MANY_FAILURES = 3
_ENOUGH_ROUNDS = 3
_FRACTIONS = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth", 10: "a tenth"}


@dataclass(frozen=True, kw_only=True)
class PeerFacts:
    """What is known of one peer. Unknown figures do not count against it."""

    world_rank: int
    state: str = "training"
    """As shown, so also `lost` or `silent`."""
    doing: str = "training"
    """The name of its phase."""
    in_words: str = ""
    """The phase with its progress."""
    gone_s: float | None = None
    """How long it has been lost or silent."""
    for_s: float = 0.0
    """How long it has been in this phase."""
    idle_s: float = 0.0
    """How long it has made no progress."""
    step: int = 0
    step_s: float = 0.0
    losses: Sequence[tuple[int, float]] = ()
    rewards: Sequence[tuple[int, float]] = ()
    """(step, reward) of training by rewards, where the loss says nothing."""
    not_learning: Sequence[str] = ()
    """Why its last steps taught it nothing, and what to do."""
    round_share: float = 0.0
    """Share of its time for which training stood still for rounds, from the group to the commit."""
    wait_share: float = 0.0
    """Share of its time spent waiting for other peers to come to a round."""
    num_rounds: int = _ENOUGH_ROUNDS
    """Rounds since it was started."""
    bytes_per_s: float = 0.0
    """Its send rate in a round."""
    round_bytes: float = 0.0
    """Bytes that it sends in a round."""
    compression: str = ""
    overlaps: bool = False
    """Whether its rounds take place while training goes on, for as long as they take."""
    clock_ahead_s: float = 0.0
    """How far its clock is ahead of the observer's."""
    troubles: Sequence[str] = ()
    num_failures: int = 0
    """Attempts that failed in its last rounds."""
    failure: str = ""


@dataclass(frozen=True, kw_only=True)
class SwarmFacts:
    peers: Sequence[PeerFacts] = ()
    num_peers: int = 0
    """Peers of the run, if there may be more than those whose facts are known."""
    differs_at: int | None = None
    """The first epoch after which peers held different anchors."""
    withheld: str = ""
    """Why no peer reports to this observer, and what the user can do; empty if any does."""


@dataclass(frozen=True)
class Verdict:
    level: Level
    text: str
    more: tuple[str, ...] = ()
    """Other problems, the worst first."""


def verdict_of(swarm: SwarmFacts) -> Verdict:
    """The worst of what is wrong, else that all is well."""
    faults = [text for check in _FAULTS for text in check(swarm)]
    warnings = [text for check in _WARNINGS for text in check(swarm)]
    # First, because an observer that hears nobody cannot judge the rest.
    found = [text for text in (swarm.withheld, *faults, *warnings) if text]
    if found:
        return Verdict("fault" if faults else "warning", found[0], tuple(found[1:]))
    there = _there(swarm)
    if not there:
        return Verdict("busy", "nobody is there: start a peer, or check the name of the run")
    busy = [peer for peer in there if peer.doing not in ("training", "averaging", "evaluating", "saving")]
    if busy:
        most = ", ".join(f"peer {peer.world_rank} is {peer.in_words or peer.doing}" for peer in busy[:3])
        return Verdict("busy", f"getting ready: {most}{' and so on' if len(busy) > 3 else ''}")
    return Verdict("good", _healthy(there, max(swarm.num_peers, len(there))))


def is_still(peer: PeerFacts) -> bool:
    """Whether its training stands still."""
    if peer.state not in ("training", "joining"):
        return False
    if peer.doing == "training":
        # Before its first step is done, nobody knows how long one takes.
        return peer.idle_s > (max(STILL_S, _STILL_STEPS * peer.step_s) if peer.step_s else _BUSY_STILL_S)
    # One that waits for rollouts has no fault of its own, and goes on by itself.
    return peer.doing not in ("averaging", "starting", "waiting") and peer.idle_s > _BUSY_STILL_S


def _healthy(there: Sequence[PeerFacts], num_peers: int) -> str:
    text = f"healthy: {num_peers} peer{'' if num_peers == 1 else 's'}"
    first = [peer for peer in there if peer.doing == "training" and not peer.step_s and peer.for_s > STILL_S]
    if first:
        longest = max(first, key=lambda peer: peer.for_s)
        text += (
            f", step {longest.step + 1} of peer {longest.world_rank} has taken {span(longest.for_s)} so far"
        )
    shares = [peer.round_share for peer in there if peer.round_share > 0]
    return f"{text}, averaging takes {statistics.median(shares):.1%} of the time" if shares else text


def _differing(swarm: SwarmFacts) -> Iterator[str]:
    if swarm.differs_at is not None:
        yield (
            f"peers hold different weights since epoch {swarm.differs_at}: restart those of the smaller part, which "
            "then fetch the weights of the others"
        )


def _troubles(swarm: SwarmFacts) -> Iterator[str]:
    for peer in _there(swarm):
        for trouble in peer.troubles:
            yield f"peer {peer.world_rank}: {trouble}"


def _gone(swarm: SwarmFacts) -> Iterator[str]:
    others = "the others continue without it" if _there(swarm) else "nobody is left"
    for peer in swarm.peers:
        if peer.state in ("lost", "silent"):
            # An observer that has just come knows that the peer is lost, and not since when.
            since = f" {span(peer.gone_s)} ago" if peer.gone_s is not None and peer.gone_s >= 1 else ""
            what = f"was lost{since}" if peer.state == "lost" else "does not answer"
            yield f"peer {peer.world_rank} {what}, {others}; start it again with the same command"


def _standing_still(swarm: SwarmFacts) -> Iterator[str]:
    for peer in _there(swarm):
        if is_still(peer):
            what = f"at step {peer.step}" if peer.doing == "training" else f"({peer.doing})"
            yield (
                f"peer {peer.world_rank} has stood still for {span(peer.idle_s)} {what}: see its worker.log, and "
                "start it again if it does not go on"
            )


def _clocks(swarm: SwarmFacts) -> Iterator[str]:
    """Against the median clock: the observer's own may be the wrong one."""
    there = _there(swarm)
    if not there:
        return
    middle = statistics.median_low([peer.clock_ahead_s for peer in there] + [0.0])
    for peer in there:
        ahead_s = peer.clock_ahead_s - middle
        if abs(ahead_s) > CLOCK_OFF_S:
            way = "ahead" if ahead_s > 0 else "behind"
            yield (
                f"peer {peer.world_rank}'s clock is {span(abs(ahead_s))} {way}: set it right, say by "
                "`timedatectl set-ntp true`, or its records will be refused"
            )


def _slow_peers(swarm: SwarmFacts) -> Iterator[str]:
    timed = [peer for peer in _there(swarm) if peer.step_s > 0]
    for peer in timed:
        others = [other for other in timed if other is not peer]
        waited = max((other.wait_share for other in others), default=0.0)
        if not others or waited <= SHARE_OF_EPOCH:
            continue
        times = peer.step_s / statistics.median(other.step_s for other in others)
        # The first steps of a peer, and what others wait for it then, say little of its speed.
        if times >= SLOW and peer.num_rounds >= _ENOUGH_ROUNDS:
            yield (
                f"peer {peer.world_rank} trains at {_fraction(times)} of the others' speed, so they wait for it "
                f"{waited:.0%} of the time: begin the run with --hv.local-time auto, or leave this peer out"
            )


def _slow_links(swarm: SwarmFacts) -> Iterator[str]:
    there = [peer for peer in _there(swarm) if peer.round_share > 0]
    if not there:
        return
    share = statistics.median(peer.round_share for peer in there)
    if share <= MUCH_OF_EPOCH:
        return
    rates = [peer.bytes_per_s for peer in there if peer.bytes_per_s > 0 and peer.round_bytes >= ENOUGH_BYTES]
    lighter = lighter_compression(there[0].compression, SHARE_OF_EPOCH / share) if rates else None
    links = f"links carry {short_figure(8 * min(rates))}bit/s, " if rates else ""
    fix = f"--hv.compression {lighter}" if lighter else "more --hv.local-steps"
    hides = "" if there[0].overlaps else " or --hv.overlap-steps auto"
    yield f"{links}averaging takes {share:.0%} of the time: try {fix}{hides}"


def _losses(swarm: SwarmFacts) -> Iterator[str]:
    yield from judged_losses(sorted(point for peer in _there(swarm) for point in peer.losses))


def _rewards(swarm: SwarmFacts) -> Iterator[str]:
    yield from judged_rewards(sorted(point for peer in _there(swarm) for point in peer.rewards))


def _learning_nothing(swarm: SwarmFacts) -> Iterator[str]:
    """Said once, even if it is so on every peer."""
    yield from dict.fromkeys(text for peer in _there(swarm) for text in peer.not_learning)


def _failing_rounds(swarm: SwarmFacts) -> Iterator[str]:
    worst = max(_there(swarm), key=lambda peer: peer.num_failures, default=None)
    if worst is not None and worst.num_failures >= _MANY_FAILURES:
        why = f", the last one: {worst.failure}" if worst.failure else ""
        yield f"{worst.num_failures} attempts at the last rounds failed{why}; `diloco doctor` checks the links"


_FAULTS: tuple[Callable[[SwarmFacts], Iterator[str]], ...] = (
    _differing,
    _troubles,
    _gone,
    _standing_still,
    _clocks,
)
_WARNINGS: tuple[Callable[[SwarmFacts], Iterator[str]], ...] = (
    _slow_peers,
    _slow_links,
    _learning_nothing,
    _losses,
    _rewards,
    _failing_rounds,
)


def _there(swarm: SwarmFacts) -> list[PeerFacts]:
    return [peer for peer in swarm.peers if peer.state not in ("lost", "silent")]


def _fraction(times: float) -> str:
    number = round(times)
    return _FRACTIONS.get(number, f"1/{number}")


Points = Sequence[tuple[int, float]]
"""Of all peers: (step, value)."""

_ENOUGH_POINTS = 40
_MANY_POINTS = 100
"""With fewer points, a loss that does not fall says little: it goes up and down at first."""
_NO_FALL = 0.002
_RISE = 1.2


def judged_losses(found: Points) -> Iterator[str]:
    """What is wrong with these losses, given in order of their steps."""
    window, means = _window_means(found)
    # Not every loss falls: GRPO's is around zero.
    if not means or min(means) <= 0:
        return
    best = min(range(len(means)), key=means.__getitem__)
    # End of the window: nothing after it was better.
    step, last = found[best + window - 1][0], found[-1][0]
    # With few steps between averagings, a loss goes up and down with them.
    lately = min(means[-window:])
    if lately > _RISE * means[best]:
        yield (
            f"the loss rises: {means[-1]:.3g}, from {means[best]:.3g} at step {step}; a lower --lr or a longer "
            "--warmup-steps may help"
        )
    elif (
        len(found) >= _MANY_POINTS
        and last - step > (last - found[0][0]) / 3
        and lately > (1 + _NO_FALL) * means[best]
    ):
        yield f"the loss has not fallen since step {step}: the learning rate may be too high, or training has converged"


def judged_rewards(found: Points) -> Iterator[str]:
    """What is wrong with these rewards, given in order of their steps."""
    window, means = _window_means(found)
    if not means:
        return
    best = max(range(len(means)), key=means.__getitem__)
    if max(means[-window:]) < means[best] / _RISE:
        yield (
            f"the reward falls: {means[-1]:.3g}, from {means[best]:.3g} at step {found[best + window - 1][0]}; a lower "
            "--lr may help"
        )
    elif means[-1] <= means[0]:
        yield (
            f"the reward has not risen: {means[-1]:.3g}, and {means[0]:.3g} at the beginning; more steps, a higher "
            "--lr or an easier --dataset may help"
        )


def _window_means(points: Points) -> tuple[int, list[float]]:
    """The number of points in a window, a tenth of all, and the means of all windows; no means of too few points."""
    window = len(points) // 10
    if len(points) < _ENOUGH_POINTS:
        return window, []
    # Differences from the first value: the means of a curve that stands still are exactly the same.
    first = points[0][1]
    sums = list(itertools.accumulate((value - first for _, value in points), initial=0.0))
    return window, [first + (end - begin) / window for begin, end in zip(sums, sums[window:], strict=False)]
