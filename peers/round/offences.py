"""Who has spoilt rounds, and from how many it is left out for that: pure, counted in epochs.

One spoilt round may be a bad link's fault, so it costs nothing beyond that round. Who spoils several is left out of
rounds from the start, for longer each time, so that a broken or hostile peer costs the others a few failed attempts
and not one an epoch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

TOLERATED = 2
FIRST_TERM = 16
"""Epochs."""
LONGEST_TERM = 4096
FORGOTTEN_AFTER = 64
"""Epochs without an offence, and out of bars, after which nothing is held against a peer."""
MAX_OFFENDERS = 1024


@dataclass
class _Record:
    count: int = 0
    barred_until: int = 0
    last_epoch: int = 0


class Offences:
    """By peer id, so that a restart or another world rank changes nothing."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def note(self, offenders: Iterable[str], epoch: int, proven: Collection[str] = ()) -> dict[str, int]:
        """These peers have spoilt attempts of this epoch. Returns the terms of those that are left out from now on.

        Of those that this peer has `proven` to lie nobody waits for a second time, or sees the end of the term.
        """
        barred = {}
        for peer_id in offenders:
            record = self._records.pop(peer_id, _Record())
            if epoch > max(record.last_epoch, record.barred_until) + FORGOTTEN_AFTER:
                record = _Record()
            record.count, record.last_epoch = record.count + 1, epoch
            if peer_id in proven or record.count > TOLERATED:
                term = min(FIRST_TERM * 2 ** max(0, record.count - TOLERATED - 1), LONGEST_TERM)
                term = LONGEST_TERM if peer_id in proven else term
                record.barred_until = epoch + 1 + term
                barred[peer_id] = term
            self._records[peer_id] = record
        while len(self._records) > MAX_OFFENDERS:
            del self._records[next(iter(self._records))]
        return barred

    def is_barred(self, peer_id: str, epoch: int) -> bool:
        record = self._records.get(peer_id)
        return record is not None and epoch < record.barred_until
