"""Errors of renting pods and of working on them, by what the caller would do.

ProvisioningError
├── UserError         stop before anything is bought and tell the user: a key, a flag, a file, money (exit 2)
│   ├── Busy          another command holds the state file
│   ├── NoOffer       nothing that is offered now fits; something may later
│   └── HostKeyChanged  the machine at this address is not the one that was pinned
├── ProviderError     a request to a provider failed for good
│   ├── NoCapacity    take the next offer
│   ├── Unavailable   ask again later: too many requests, a broken server, no network
│   └── OutcomeUnknown  a request may have been carried out: look before asking again
├── MachineError      a command on a pod failed, or the pod cannot be reached
└── ResultsNotFetched  a pod is kept, because what was made on it could not be brought home: ask whether to go on
"""

from __future__ import annotations


class ProvisioningError(Exception):
    """Base of everything raised here."""


class UserError(ProvisioningError):
    """What is wrong, the value, and the next move."""


class Busy(UserError):
    """Another command is changing the pods of this state file."""


class NoOffer(UserError):
    """Not all pods that are wanted can be rented now."""


class HostKeyChanged(UserError):
    """A machine shows another host key than the pinned one; nothing was sent to it."""


class ProviderError(ProvisioningError):
    """The provider refused, or answered what makes no sense."""


class NoCapacity(ProviderError):
    """What the offer promised is not there any more."""


class Unavailable(ProviderError):
    """No answer for now; `retry_after_s` where the provider names a time."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class OutcomeUnknown(ProviderError):
    """The answer to a request that changes something was lost."""


class MachineError(ProvisioningError):
    """Something on a pod did not work."""


class ResultsNotFetched(ProvisioningError):
    """A pod was not given back: its results would have been lost."""
