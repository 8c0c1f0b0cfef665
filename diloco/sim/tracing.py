"""Events and effects as short texts, for the trace of a run."""

from __future__ import annotations

from peers.core import effects, events
from peers.core.effects import Effect
from peers.core.events import Event
from peers.protocol.certificates import Certificate, Plan
from peers.protocol.messages import Abort, Ask, Certificates, Decline, Found, Message, Propose, Status, Vote

_SHORT = 6


def short(head: str) -> str:
    return head[:_SHORT] or "-"


def describe(event: Event | None) -> str:
    """Empty: omitted from the trace."""
    match event:
        case events.Received(peer_id, message):
            text = describe_message(message)
            return f"{peer_id}: {text}" if text else ""
        case events.Reduced(plan, anchor, _):
            return f"reduced {short(plan)} to {short(anchor)}"
        case events.ReduceFailed(plan, reason, suspects):
            return f"reduction {short(plan)} failed: {reason}, suspects {', '.join(sorted(suspects)) or 'nobody'}"
        case events.FetchFailed(head, reason, suspects):
            return (
                f"fetch of {short(head)} failed: {reason}, suspects {', '.join(sorted(suspects)) or 'nobody'}"
            )
        case events.Fetched(head):
            return f"fetched {short(head)}"
        case events.Connected(peer_id):
            return f"connected with {peer_id}"
        case events.Disconnected(peer_id):
            return f"disconnected from {peer_id}"
        case events.WorkReady(work):
            return f"work ready: {work.tokens} tokens"
        case None | events.WorkerTrains() | events.RoundTrip():
            return ""
    return type(event).__name__


def describe_effect(effect: Effect) -> str:
    match effect:
        case effects.Send(peer_id, message):
            text = describe_message(message)
            return f"{peer_id}: {text}" if text else ""
        case effects.Broadcast(message):
            return describe_message(message, is_own=True)
        case effects.Pledge(head, attempt):
            return f"pledge on {short(head)}, attempt {attempt}"
        case effects.Reduce(plan, timeout_s):
            return f"reduce {describe_plan(plan)}, {timeout_s:.0f} s"
        case effects.Apply(certificate):
            return f"apply {describe_certificate(certificate)}"
        case effects.Adopt(certificate):
            return f"adopt {describe_certificate(certificate)}"
        case effects.Fetch(path, donors, _):
            return f"fetch {describe_certificate(path[-1])} from {', '.join(donors) or 'nobody'}"
        case effects.Answer(how=how, epoch=epoch, local_step=local_step):
            return f"answer {how}, epoch {epoch}, step {local_step}"
        case effects.Tell(kind, text, _):
            return f"({kind}: {text})"
    return type(effect).__name__


def describe_message(message: Message, *, is_own: bool = False) -> str:
    match message:
        case Status():
            work = f", {message.work.tokens} tokens since {message.work.based_on}" if message.work else ""
            stands = (
                f"{message.phase} at {short(message.head)}, epoch {message.epoch}, attempt {message.attempt}"
            )
            return f"status: {stands}, step {message.local_step}{work}" if is_own else ""
        case Propose(plan):
            return f"propose {describe_plan(plan)}"
        case Vote():
            return f"vote on {short(message.head)}.{message.attempt} for {short(message.anchor)}"
        case Decline():
            blamed = ", ".join(message.suspects) or "nobody"
            return f"decline {short(message.head)}.{message.attempt}: {message.reason}, suspects {blamed}"
        case Abort():
            lost = ", ".join(message.lost) or "nobody"
            return f"abort {short(message.head)}.{message.attempt}: {message.reason}, lost {lost}"
        case Certificates(head, certificates):
            return f"certificates to {short(head)}: {'; '.join(map(describe_certificate, certificates)) or 'none'}"
        case Ask(head, have):
            return f"ask for {short(head)} from {short(have)}"
        case Found(body):
            return f"found {describe_plan(body.plan)}"


def describe_plan(plan: Plan) -> str:
    members = " ".join(contributor.peer_id for contributor in plan.contributors)
    roster = " ".join(member.peer_id for member in plan.roster)
    where = f"{short(plan.parent)}.{plan.attempt} to epoch {plan.epoch}"
    return f"{where}, group [{members}], roster [{roster}], plan {short(plan.digest)}"


def describe_certificate(certificate: Certificate) -> str:
    plan = certificate.plan
    signers = " ".join(plan.signers)
    return (
        f"{short(certificate.head)} (epoch {plan.epoch}, on {short(plan.parent)}.{plan.attempt}, [{signers}])"
    )
