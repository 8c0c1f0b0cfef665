"""Which values a DHT node stores for others and accepts from them: under known keys those that pass the key's check.

Hivemind's nodes let anybody replace any value by one that expires later, so a stranger could make every peer of a run
invisible. Ours neither store such values nor accept them from other nodes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from msgspec.msgpack import Decoder

from peers.errors import ProtocolError
from peers.net.dht.values import value_in
from peers.net.rate_limit import RateLimit
from peers.protocol.wire import decode
from peers.timing import ANSWER_S, RECORD_TTL_S

if TYPE_CHECKING:
    from hivemind.dht.protocol import DHTProtocol


class Check(Protocol):
    """Whether a value counts: to be stored here, or found elsewhere for a reader who will look closer."""

    def __call__(self, subkey: str, value: bytes, *, expiry: float, is_found: bool) -> bool: ...


MAX_OTHER_PER_S = 400.0
MAX_OTHER_AT_ONCE = 1000
MAX_OTHER_TTL_S = 2 * RECORD_TTL_S + ANSWER_S
MAX_OTHER_BYTES = 4200
"""For values under keys that this node has no check for: bounds their memory to some 80 MB."""
_MAX_SUBKEY_BYTES = 256
_SUBKEY = Decoder(str)

_is_finding: ContextVar[bool] = ContextVar("is_finding", default=False)

log = logging.getLogger(__name__)


class KeptRecords(RecordValidatorBase):
    """Hivemind asks `validate` of every value that it is to store."""

    def __init__(self) -> None:
        self._checks: dict[bytes, Check] = {}
        self._others = RateLimit(MAX_OTHER_PER_S, MAX_OTHER_AT_ONCE)

    def keep(self, key: str, check: Check) -> None:
        """From now on, keep under `key` only what this check lets through."""
        self._checks[DHTID.generate(source=key).to_bytes()] = check

    def guards(self, key: bytes) -> bool:
        """Whether it is known what belongs under this key (its DHT id)."""
        return key in self._checks

    def guard(self, protocol: DHTProtocol) -> None:
        """Drop, one by one, the values that other nodes return and this one would not store.

        Hivemind drops everything found at a node if one value is invalid.
        """
        find = protocol.call_find

        async def call_find(peer: Any, keys: Collection[DHTID]) -> Any:
            token = _is_finding.set(True)
            try:
                found = await find(peer, keys)
            finally:
                _is_finding.reset(token)
            return {key: self._sifted(key, item) for key, item in found.items()} if found else found

        protocol.call_find = call_find

    def validate(self, record: DHTRecord) -> bool:
        if _is_finding.get():
            return True
        if (check := self._checks.get(record.key)) is None:
            return self._has_room(record)
        try:
            subkey = decode(_SUBKEY, record.subkey, _MAX_SUBKEY_BYTES)
        except ProtocolError:
            return False
        return _passes(check, subkey, record.value, record.expiration_time, is_found=False)

    def _has_room(self, record: DHTRecord) -> bool:
        """Whether to store for somebody under a key of another run. How many such values there are at once follows."""
        is_small = len(record.value) <= MAX_OTHER_BYTES and len(record.subkey) <= _MAX_SUBKEY_BYTES
        is_brief = record.expiration_time <= time.time() + MAX_OTHER_TTL_S
        return is_small and is_brief and self._others.take(time.monotonic())

    def _sifted(self, key: DHTID, item: tuple[Any, Any]) -> tuple[Any, Any]:
        """What was found for a key, with the nearest nodes beside it, but for what does not pass."""
        found, nearest = item
        check = self._checks.get(key.to_bytes())
        if check is None or found is None:
            return item
        if not isinstance(found.value, DictionaryDHTValue):
            # It would replace all values with subkeys.
            return None, nearest
        sifted = DictionaryDHTValue()
        for subkey, (value, expiry) in found.value.items():
            if _passes(check, subkey, value, expiry, is_found=True):
                sifted.store(subkey, value, expiry)
        return (type(found)(sifted, sifted.latest_expiration_time) if sifted else None), nearest


def _passes(check: Check, subkey: Any, packed: Any, expiry: float, *, is_found: bool) -> bool:
    value = value_in(packed)
    if value is None or not isinstance(subkey, str):
        return False
    is_kept = check(subkey, value, expiry=expiry, is_found=is_found)
    if not is_kept:
        log.debug("passed over the value of %.80r", subkey)
    return is_kept
