"""Carries out the effects of a virtual peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from diloco.sim import values
from diloco.sim.tracing import describe_effect
from diloco.sim.values import NOTHING, State
from peers.core import effects
from peers.core.effects import Effect
from peers.protocol.messages import Message, Status

if TYPE_CHECKING:
    from diloco.sim.runtime import VirtualPeer


def carry_out(peer: VirtualPeer, effect: Effect) -> None:
    """Instant effects are done on return; those that take time keep the peer busy."""
    world = peer.world
    if (happens := peer.before.pop(type(effect), None)) is not None:
        happens()
        if not peer.is_running:
            return
    if world.trace.is_on:
        _trace(peer, effect)
    _RUNNERS[type(effect)](peer, effect)


def _trace(peer: VirtualPeer, effect: Effect) -> None:
    text = describe_effect(effect)
    if isinstance(effect, effects.Broadcast) and isinstance(effect.message, Status) and peer.said is not None:
        old = peer.said
        is_news = (old.phase, old.head, old.attempt, old.work) != (
            effect.message.phase,
            effect.message.head,
            effect.message.attempt,
            effect.message.work,
        )
        text = text if is_news else ""
    if text:
        peer.world.trace.add(peer.peer_id, f"-> {text}")


def _send(peer: VirtualPeer, effect: effects.Send) -> None:
    _note_sent(peer, effect.message)
    peer.world.network.send(peer.peer_id, effect.peer_id, effect.message)


def _broadcast(peer: VirtualPeer, effect: effects.Broadcast) -> None:
    if isinstance(effect.message, Status):
        peer.said = effect.message
    _note_sent(peer, effect.message)
    peer.world.network.broadcast(peer.peer_id, effect.message)


def _note_sent(peer: VirtualPeer, message: Message) -> None:
    if peer.is_honest:
        peer.world.invariants.sends(peer, message)


def _pledge(peer: VirtualPeer, effect: effects.Pledge) -> None:
    peer.disk.pledges[effect.head] = effect.attempt


def _reduce(peer: VirtualPeer, effect: effects.Reduce) -> None:
    peer.world.invariants.begins_to_reduce(peer, effect.plan)
    pieces = peer.in_hand.pieces if peer.in_hand is not None else NOTHING
    peer.world.reductions.begin(peer, effect.plan, pieces, effect.timeout_s)


def _cancel_reduce(peer: VirtualPeer, effect: effects.CancelReduce) -> None:
    peer.world.reductions.end(peer.peer_id)


def _fetch(peer: VirtualPeer, effect: effects.Fetch) -> None:
    peer.world.downloads.begin(peer, effect.path[-1].body, effect.donors, effect.timeout_s)


def _apply(peer: VirtualPeer, effect: effects.Apply) -> None:
    def end() -> None:
        world, certificate = peer.world, effect.certificate
        world.invariants.applies(peer, certificate)
        assert peer.state is not None and peer.outcome is not None
        _move_to(peer, values.apply_outcome(peer.state, peer.outcome, certificate, world.clock.now))
        peer.outcome = None

    _take_time(peer, end)


def _adopt(peer: VirtualPeer, effect: effects.Adopt) -> None:
    def end() -> None:
        world, certificate = peer.world, effect.certificate
        fetched, offered, body = peer.fetched_state, peer.offered, certificate.body
        world.invariants.adopts(peer, certificate)
        if fetched is not None and fetched.head == certificate.head:
            _move_to(peer, fetched)
        elif certificate.is_genesis and (offered.anchor, offered.momentum) == (body.anchor, body.momentum):
            _move_to(peer, values.begin_from(offered, certificate, world.clock.now))
        else:
            world.invariants.violated(f"{peer.peer_id} adopts a state that it has not fetched")
        peer.fetched_state = peer.outcome = None

    _take_time(peer, end)


def _move_to(peer: VirtualPeer, state: State) -> None:
    peer.state = peer.world.truth.holds(peer, state, peer.world.clock.now)
    peer.kept.append(peer.state)
    if peer.saves:
        peer.disk.checkpoint = peer.state


def _rebase(peer: VirtualPeer, effect: effects.Rebase) -> None:
    def end() -> None:
        peer.world.invariants.rebases(peer)
        if peer.in_hand is not None and peer.state is not None:
            peer.in_hand = peer.in_hand.on(peer.state.head)

    _take_time(peer, end)


def _answer(peer: VirtualPeer, effect: effects.Answer) -> None:
    def end() -> None:
        peer.world.invariants.answers(peer, effect)
        head = peer.state.head if peer.state is not None else ""
        if effect.how == "begin":
            # A new worker may have started since, which has not asked yet.
            if peer.worker is not None and peer.worker is peer.asking:
                peer.worker.begin(head, effect)
            return
        handed, peer.in_hand = peer.in_hand, None
        # The worker may have been replaced since.
        if handed is not None and handed.worker is peer.worker:
            # With "keep", work that was rebased before stays on its new base.
            handed.worker.answered(handed.base if effect.how == "keep" else head, effect)

    _take_time(peer, end)


def _go_ahead(peer: VirtualPeer, effect: effects.GoAhead) -> None:
    handed = peer.in_hand
    if handed is not None and handed.worker is peer.worker:
        handed.worker.goes_ahead(effect)


def _tell(peer: VirtualPeer, effect: effects.Tell) -> None:
    pass


def _take_time(peer: VirtualPeer, end: Callable[[], None]) -> None:
    peer.busy(peer.slowness * peer.world.between(peer.world.durations.apply_s), end)


_RUNNERS: dict[type, Callable[[VirtualPeer, Any], None]] = {
    effects.Send: _send,
    effects.Broadcast: _broadcast,
    effects.Pledge: _pledge,
    effects.Reduce: _reduce,
    effects.CancelReduce: _cancel_reduce,
    effects.Fetch: _fetch,
    effects.Apply: _apply,
    effects.Adopt: _adopt,
    effects.Rebase: _rebase,
    effects.Answer: _answer,
    effects.GoAhead: _go_ahead,
    effects.Tell: _tell,
}
