"""The states of a pod in the ledger, and which may follow which."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    PLANNED = "planned"
    """Chosen; nothing has been asked of the provider."""
    CREATING = "creating"
    """The request is about to be sent, or has been; there may be a pod."""
    BOOTING = "booting"
    """The provider has a pod; it costs money from here on."""
    REACHABLE = "reachable"
    """It answers, under its pinned host key."""
    SYNCED = "synced"
    """Code and environment are on it."""
    RUNNING = "running"
    """Its peer has been started."""
    DELETING = "deleting"
    """It is to be gone, and may cost money until its provider has said that it is."""
    GONE = "gone"
    """The provider has said that there is no such pod: the row goes."""


_END = {State.DELETING, State.GONE}
_NEXT = {
    State.PLANNED: {State.CREATING, State.GONE},
    State.CREATING: {State.BOOTING, *_END},
    State.BOOTING: {State.REACHABLE, *_END},
    State.REACHABLE: {State.SYNCED, *_END},
    State.SYNCED: {State.RUNNING, *_END},
    State.RUNNING: {State.SYNCED, *_END},
    State.DELETING: {State.GONE},
    State.GONE: set(),
}


def may_follow(old: State, new: State) -> bool:
    """Whether a pod may go from one state to the other. Staying is always allowed."""
    return old == new or new in _NEXT[old]
