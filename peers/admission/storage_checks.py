"""Which records of a run this DHT node stores for others: announcements that admitted peers have signed themselves.

Of records found at other nodes only the owner's signature is checked here: the reader wants to know whom it refuses.
"""

from __future__ import annotations

import time

from peers.admission.token_request import ISSUERS_KEY
from peers.errors import ProtocolError
from peers.net.dht.node import Dht
from peers.net.gate import Gate
from peers.protocol.records import COORDINATOR_KEY, PEERS_KEY, Announcement, CoordinatorRecord
from peers.timing import RECORD_TTL_S

MAX_TTL_S = 2 * RECORD_TTL_S
"""Our longest is 30 s. Without a limit, an old record stored again by somebody else with a later expiry would block
newer ones.
"""
MAX_FOUND = 1024
"""Records that have been checked and are valid."""


def guard_storage(dht: Dht, run_id: str, gate: Gate) -> None:
    """From now on store only such records under the run's keys."""

    def keep_records(key: str, kind: type[Announcement] | type[CoordinatorRecord]) -> None:
        found: dict[tuple[str, bytes], None] = {}

        def check(subkey: str, value: bytes, *, expiry: float, is_found: bool) -> bool:
            if expiry > time.time() + MAX_TTL_S:
                return False
            # Every node that has the record returns it, every few seconds.
            if is_found and (subkey, value) in found:
                return True
            try:
                record = kind.decode(subkey, value, time.time(), run_id=run_id)
            except ProtocolError:
                return False
            if not is_found:
                return gate.is_admitted(record)
            found[subkey, value] = None
            while len(found) > MAX_FOUND:
                del found[next(iter(found))]
            return True

        dht.keep(key, check)

    keep_records(PEERS_KEY(run_id), Announcement)
    keep_records(COORDINATOR_KEY(run_id), CoordinatorRecord)
    keep_records(ISSUERS_KEY(run_id), CoordinatorRecord)
