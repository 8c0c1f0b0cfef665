"""Events and effects as short texts, for the trace of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass

from msgspec import Struct

from peers.core import events
from peers.core.events import Event
from peers.protocol.certificates import Certificate, Plan, Signature
from peers.protocol.messages import Status

_HASH_LENGTH = 64


def describe(event: Event | None) -> str:
    """The event as text; empty: omitted from the trace."""
    match event:
        case None | events.WorkerTrains() | events.RoundTrip() | events.Received(_, Status()):
            return ""
    return text_of(event)


def text_of(value: object) -> str:
    """The beginning of a hash, what identifies a plan or certificate, the fields of anything else."""
    match value:
        case str():
            return value[:6] if len(value) == _HASH_LENGTH else value
        case float():
            return f"{value:.6g}"
        case tuple():
            return f"[{' '.join(map(text_of, value))}]"
        case frozenset():
            return f"[{' '.join(sorted(map(text_of, value)))}]"
        case Certificate(body=body):
            return f"{text_of(body.head)}: {text_of(body.plan)}"
        case Plan(parent=parent, attempt=attempt, epoch=epoch, signers=group, roster=roster):
            where = f"plan {text_of(value.digest)} on {text_of(parent)}.{attempt} to epoch {epoch}"
            return f"({where}, group {text_of(group)}, roster {text_of(tuple(m.peer_id for m in roster))})"
        case Struct():
            named = {name: getattr(value, name) for name in value.__struct_fields__}
        case _ if is_dataclass(value):
            named = {field.name: getattr(value, field.name) for field in fields(value)}
        case _:
            return str(value)
    told = (f"{name} {text_of(part)}" for name, part in named.items() if _is_told(part))
    return " ".join((type(value).__name__, *told))


def _is_told(part: object) -> bool:
    return not (part is None or part in ("", ()) or isinstance(part, Signature | Mapping))
