"""What peers announce of themselves in the DHT, as far as it is in order."""

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
    """By peer id: the records under this key that are signed, fresh, of this run, and pass `check`.

    That one raises ProtocolError where a record does not count, as Gate.check_record does for a peer that is not
    admitted.
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
