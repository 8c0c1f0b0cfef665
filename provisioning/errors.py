"""Errors of renting and using pods, grouped by what the caller should do.

ProvisioningError
├── UserError         stop before anything is rented and tell the user: a key, a flag, a file, money (exit 2)
│   ├── Busy          another command holds the lock of the state file
│   ├── NoOffer       no current offer fits; try again later
│   └── HostKeyChanged  the machine at this address does not show the pinned host key
├── ProviderError     a request to a provider failed; its subclasses say what may help
│   ├── NoCapacity    take the next offer
│   ├── Unavailable   ask again later: a broken server, no network
│   │   └── TooManyRequests  send all further requests to this provider later
│   └── OutcomeUnknown  the request may have been carried out: check before sending it again
├── MachineError      a command on a pod failed, or the pod cannot be reached
│   └── CommandFailed  the pod answered, and asking again would not help
└── ResultsNotFetched  the pod was kept because its results could not be fetched: ask whether to go on
"""

from __future__ import annotations


class ProvisioningError(Exception):
    """Base class of all errors of this package."""


class UserError(ProvisioningError):
    """The message says what is wrong, which value is wrong, and what to do next."""


class Busy(UserError):
    """Another command holds the lock of this state file."""


class NoOffer(UserError):
    """The offers do not suffice for all requested pods."""


class HostKeyChanged(UserError):
    """A machine shows a host key other than the pinned one; nothing was sent to it."""


class ProviderError(ProvisioningError):
    """The provider refused a request, or its answer cannot be understood."""


class NoCapacity(ProviderError):
    """The offer is no longer available, or its pod failed."""


class Unavailable(ProviderError):
    """No answer now; asking again is safe. `retry_after_s`: how long the provider asks to wait; None: not said."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TooManyRequests(Unavailable):
    """The provider did not carry out the request, and would refuse others that follow too fast."""


class OutcomeUnknown(ProviderError):
    """The answer to a request that changes something was lost, so the request may have been carried out."""


class MachineError(ProvisioningError):
    """A command on a pod failed, or the pod cannot be reached."""


class CommandFailed(MachineError):
    """The pod answered: the command has failed there, or its output cannot be used."""


class ResultsNotFetched(ProvisioningError):
    """A pod was not given back, because its results could not be fetched."""


def in_words(error: Exception) -> str:
    """The message of one of our own errors; any other, such as a fault of ours, with the name of its type."""
    return str(error) if isinstance(error, ProvisioningError) else f"{type(error).__name__}: {error}"
