"""Peers' announcements in the DHT that pass all checks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from peers.errors import ProtocolError
from peers.net.dht.node import Dht
from peers.protocol.records import Record

R = TypeVar("R", bound=Record)

log = logging.getLogger(__name__)


async def announced(
    dht: Dht, key: str, kind: type[R], run_id: str, check: Callable[[R], object]
) -> dict[str, R]:
    """By peer id: the records under this key that are signed, fresh, of this run, and accepted by `check`, which
    raises ProtocolError for the others (such as Gate.check_record for a peer that is not admitted).
    """
    found = {}
    for peer_id, blob in (await dht.get(key)).items():
        try:
            record = kind.decode(peer_id, blob, time.time(), run_id=run_id)
            check(record)
        except ProtocolError as error:
            log.debug("ignored a record: %s", error)
            continue
        found[peer_id] = record
    return found
