"""What this machine has rented or is about to: one SQLite file, written before every request that costs money.

A row goes only when the provider no longer lists the pod; what it cost stays. Readers need no lock; whoever changes
pods holds the lock of the file, one command at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import sqlite3
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from provisioning.errors import Busy, UserError
from provisioning.pods import Offer, Order, Pod, PodSpec, label_prefix
from provisioning.states import State, may_follow

_BUSY_TIMEOUT_S = 10.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS pods (
    name TEXT PRIMARY KEY,
    label TEXT NOT NULL UNIQUE,
    idempotency_key TEXT NOT NULL,
    state TEXT NOT NULL,
    provider TEXT NOT NULL,
    provider_id TEXT,
    spec TEXT NOT NULL,
    offer TEXT NOT NULL,
    asked_at REAL NOT NULL,
    ends_at REAL,
    host_key TEXT NOT NULL DEFAULT '',
    trouble TEXT NOT NULL DEFAULT ''
);
CREATE TABLE IF NOT EXISTS bills (
    label TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    provider TEXT NOT NULL,
    price_per_hour REAL NOT NULL,
    began_at REAL NOT NULL,
    ended_at REAL
);
"""
_FIELDS = (
    "name, label, idempotency_key, state, provider, provider_id, spec, offer, asked_at, ends_at, "
    "host_key, trouble"
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One pod that is wanted, rented, or being given back."""

    name: str
    label: str
    idempotency_key: str
    state: State
    provider: str
    provider_id: str | None
    spec: PodSpec
    offer: Offer
    asked_at: float
    """Unix time at which the order was written down, before it was sent."""
    ends_at: float | None
    host_key: str
    trouble: str
    """What went wrong last; empty when nothing did."""

    def order(self, public_key: str) -> Order:
        return Order(
            label=self.label,
            idempotency_key=self.idempotency_key,
            spec=self.spec,
            offer=self.offer,
            ends_at=self.ends_at,
            public_key=public_key,
        )

    def is_pod(self, pod: Pod) -> bool:
        return pod.id == self.provider_id or pod.label == self.label


@dataclass(frozen=True, kw_only=True)
class Bill:
    """What one pod cost, or costs."""

    label: str
    name: str
    provider: str
    price_per_hour: float
    began_at: float
    ended_at: float | None

    def dollars(self, now: float) -> float:
        until = now if self.ended_at is None else self.ended_at
        return max(until - self.began_at, 0.0) / 3600 * self.price_per_hour


class Ledger:
    """The rows of one state file. A change is on disk when the call ends."""

    def __init__(self, path: Path) -> None:
        """Open the file, or make it, readable by its owner only. Raises UserError."""
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._db = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(_SCHEMA)
            self._db.execute("INSERT OR IGNORE INTO meta VALUES ('owner', ?)", (secrets.token_hex(4),))
        except (sqlite3.Error, OSError) as error:
            raise UserError(
                f"--state-file {path} cannot be used: {error}. It knows which pods are yours; name another file, or "
                "look at the provider's web site for what is rented before you move it away."
            ) from error
        self.owner: str = self._meta("owner")

    def close(self) -> None:
        """May be repeated."""
        self._db.close()

    @contextlib.contextmanager
    def locked(self, *, wait_s: float = 0.0, for_jobs: bool = False) -> Iterator[None]:
        """Be the one command that changes pods; the lock goes with the process. Raises Busy after `wait_s`.

        `for_jobs`: the one that runs jobs on them, for hours perhaps, while others may put their end off, or end them.
        """
        path = self.path.with_name(f"{self.path.name}.{'jobs-' if for_jobs else ''}lock")
        with _opened(path) as file:
            deadline = time.monotonic() + wait_s
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        file.seek(0)
                        raise Busy(
                            f"Another command (process {file.read().strip() or 'unknown'}) is "
                            f"{'running jobs on' if for_jobs else 'changing'} the pods of {self.path}; wait for it, or "
                            "stop it."
                        ) from None
                    time.sleep(0.05)
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    def rows(self) -> list[Row]:
        found = self._db.execute(f"SELECT {_FIELDS} FROM pods ORDER BY rowid").fetchall()
        return [_row(values) for values in found]

    def row(self, name: str) -> Row | None:
        found = self._db.execute(f"SELECT {_FIELDS} FROM pods WHERE name = ?", (name,)).fetchone()
        return _row(found) if found else None

    def plan(self, spec: PodSpec, offer: Offer, *, now: float, ends_at: float | None) -> Row:
        """Write down that this pod is wanted, with a label and a key that no other order has.

        Replaces a row that is planned still; any other row of that name is an error of the caller's.
        """
        nonce = secrets.token_hex(4)
        with self._transaction():
            self._db.execute("DELETE FROM pods WHERE name = ? AND state = ?", (spec.name, State.PLANNED))
            self._db.execute(
                "INSERT INTO pods (name, label, idempotency_key, state, provider, spec, offer, asked_at, ends_at) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    spec.name,
                    f"{label_prefix(self.owner)}{spec.name}-{nonce}",
                    secrets.token_hex(16),
                    State.PLANNED,
                    spec.provider,
                    spec.to_json(),
                    offer.to_json(),
                    now,
                    ends_at,
                ),
            )
        return self._known(spec.name)

    def advance(self, name: str, state: State, **changes: Any) -> Row:
        """Put a pod into another state, with what is known by then (columns of the row)."""
        with self._transaction():
            return self._advance(name, state, changes)

    def rented(self, name: str, provider_id: str, price_per_hour: float) -> Row:
        """There is a pod of this order: it boots, and is paid for since the order. May be repeated."""
        with self._transaction():
            row = self._advance(name, State.BOOTING, {"provider_id": provider_id, "trouble": ""})
            self._bill(row, price_per_hour)
            return row

    def bill(self, row: Row, price_per_hour: float) -> None:
        """A pod of this order was found, and has cost money since. May be repeated: the newest price counts."""
        with self._transaction():
            self._bill(row, price_per_hour)

    def forget(self, name: str, *, now: float) -> None:
        """The provider no longer lists the pod: its row goes, and its bill ends. May be repeated."""
        with self._transaction():
            row = self.row(name)
            if row is None:
                return
            assert may_follow(row.state, State.GONE), row.state
            self._db.execute("DELETE FROM pods WHERE name = ?", (name,))
            self._db.execute(
                "UPDATE bills SET ended_at = ? WHERE label = ? AND ended_at IS NULL", (now, row.label)
            )

    def bills(self) -> list[Bill]:
        columns = "label, name, provider, price_per_hour, began_at, ended_at"
        found = self._db.execute(f"SELECT {columns} FROM bills ORDER BY began_at").fetchall()
        return [Bill(**dict(zip(columns.split(", "), values, strict=True))) for values in found]

    def remember(self, key: str, value: str) -> None:
        """Keep something about all pods, such as the address of their swarm. An empty value forgets it."""
        with self._transaction():
            self._db.execute("DELETE FROM meta WHERE key = ?", (key,))
            if value:
                self._db.execute("INSERT INTO meta VALUES (?, ?)", (key, value))

    def recall(self, key: str) -> str:
        """What was kept; nothing is an empty string."""
        found = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return str(found[0]) if found else ""

    def _meta(self, key: str) -> str:
        return str(self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()[0])

    def _advance(self, name: str, state: State, changes: Mapping[str, Any]) -> Row:
        row = self._known(name)
        assert may_follow(row.state, state) and state != State.GONE, f"{name}: {row.state} -> {state}"
        columns = {"state": state, **changes}
        assignments = ", ".join(f"{column} = ?" for column in columns)
        self._db.execute(f"UPDATE pods SET {assignments} WHERE name = ?", (*columns.values(), name))
        return self._known(name)

    def _bill(self, row: Row, price_per_hour: float) -> None:
        self._db.execute(
            "INSERT INTO bills VALUES (?, ?, ?, ?, ?, NULL) "
            "ON CONFLICT (label) DO UPDATE SET price_per_hour = excluded.price_per_hour",
            (row.label, row.name, row.provider, price_per_hour, row.asked_at),
        )

    def _known(self, name: str) -> Row:
        row = self.row(name)
        assert row is not None, name
        return row

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """All of it or nothing. Raises UserError where it cannot be written."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
        except BaseException as error:
            # Some failures have rolled it back already.
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            if not isinstance(error, sqlite3.OperationalError):
                raise
            raise UserError(
                f"--state-file {self.path} cannot be written: {error}. Mend that, and the same command goes on."
            ) from error


def _opened(path: Path) -> TextIO:
    try:
        return path.open("a+", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from error


def _row(values: tuple[Any, ...]) -> Row:
    named = dict(zip(_FIELDS.split(", "), values, strict=True))
    return Row(
        **{
            **named,
            "state": State(named["state"]),
            "spec": PodSpec.from_json(named["spec"]),
            "offer": Offer.from_json(named["offer"]),
        }
    )
