"""The ledger: one SQLite file with all orders made from this machine, written before every request that costs money.

There is one row per order, identified by its label. A pod counts as gone only after the provider has said that it does
not exist; its row stays, as a record of its cost. Reading and `extend` need no lock. A command that changes pods holds
the lock of the file.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec

from provisioning.errors import Busy, UserError
from provisioning.ledger.lock import held
from provisioning.pods.pod import Offer, Pod, PodSpec, Row, State, label_prefix, may_follow, stray

_BUSY_TIMEOUT_S = 10.0
_POLL_S = 0.05
_VERSION = 2
_TABLES = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    """CREATE TABLE pods (
    label TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    state TEXT NOT NULL,
    provider_id TEXT,
    spec TEXT NOT NULL,
    offer TEXT NOT NULL,
    asked_at REAL NOT NULL,
    ends_at REAL,
    host_key TEXT NOT NULL,
    absent_since REAL,
    num_absences INTEGER NOT NULL,
    ended_at REAL
)""",
    # A second row of one name is allowed only while the first is being deleted, or is gone.
    "CREATE UNIQUE INDEX names ON pods (name) WHERE state NOT IN ('deleting', 'gone')",
    f"PRAGMA user_version = {_VERSION}",
)
_COLUMNS = tuple(item.name for item in fields(Row))


class Ledger:
    """The rows of one state file. Every method that changes it returns after the change is on disk."""

    def __init__(self, path: Path) -> None:
        """Open the file, or create it, readable by its owner only. Raises UserError if it cannot be used."""
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._db = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            _make_tables(self._db)
            if (found := self._db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                raise sqlite3.DatabaseError(found)
            self._db.execute("INSERT OR IGNORE INTO meta VALUES ('owner', ?)", (secrets.token_hex(4),))
        except (sqlite3.Error, OSError) as error:
            raise self._unusable(error) from error
        self.owner = self.recall("owner")

    def close(self) -> None:
        """May be repeated."""
        self._db.close()

    @contextlib.contextmanager
    def locked(self, *, wait_s: float = 0.0, for_jobs: bool = False) -> Iterator[None]:
        """Hold the lock for changing pods; it is released if the process dies. Raises Busy after `wait_s`.

        `for_jobs`: hold the lock for running jobs instead. While those run, perhaps for hours, other commands may still
        extend the pods or give them back.
        """
        path = self.path.with_name(f"{self.path.name}.{'jobs-' if for_jobs else ''}lock")
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(held(path, wait_s=wait_s))
            except Busy as busy:
                doing = "running jobs on" if for_jobs else "changing"
                raise Busy(
                    f"Another command (process {busy}) is {doing} the pods of {self.path}; wait for it, or stop it."
                ) from None
            yield

    @contextlib.asynccontextmanager
    async def locked_within(self, wait_s: float) -> AsyncIterator[None]:
        """As `locked`, for a task: while it waits, other tasks and signals are attended to."""
        deadline = time.monotonic() + wait_s
        with contextlib.ExitStack() as stack:
            while True:
                try:
                    stack.enter_context(self.locked())
                    break
                except Busy:
                    if time.monotonic() > deadline:
                        raise
                await asyncio.sleep(_POLL_S)
            yield

    def rows(self) -> list[Row]:
        """The rows of all orders whose pod is not gone."""
        return self._rows("WHERE state != ?", State.GONE)

    def bills(self) -> list[Row]:
        """The rows of all pods that were ever rented, those that are gone included."""
        return self._rows("WHERE provider_id IS NOT NULL")

    def named(self, names: Sequence[str]) -> list[Row]:
        """The rows with these names; all rows if `names` is empty. Raises UserError if a name is unknown."""
        rows = self.rows()
        known = dict.fromkeys(row.name for row in rows)
        for name in names:
            if name not in known:
                raise UserError(
                    f"There is no pod {name} in {self.path}; there is {', '.join(known) or 'none'}."
                )
        return [row for row in rows if not names or row.name in names]

    def current(self, row: Row) -> Row | None:
        """The present state of this row; None: its pod is gone."""
        return next((one for one in self.rows() if one.label == row.label), None)

    def providers(self) -> list[str]:
        """All providers that were ever used. A pod without a row may appear at any of them."""
        return list(dict.fromkeys(row.provider for row in self._rows("")))

    def add(self, spec: PodSpec, offer: Offer, *, now: float) -> Row:
        """Add a planned order with a new, unique label; its rental begins now. Replaces a planned row of the same name.

        The caller makes sure that there is no other row of that name.
        """
        label = f"{label_prefix(self.owner)}{spec.name}-{secrets.token_hex(4)}"
        row = Row(
            name=spec.name,
            label=label,
            state=State.PLANNED,
            provider_id=None,
            spec=spec,
            offer=offer,
            asked_at=now,
            ends_at=None if spec.ttl_hours is None else now + spec.ttl_hours * 3600,
        )
        with self._transaction():
            self._db.execute("DELETE FROM pods WHERE name = ? AND state = ?", (spec.name, State.PLANNED))
            self._insert(row)
        return row

    def found(self, pod: Pod, provider: str, *, now: float) -> Row:
        """Add a row for a stray pod, so that it is given back. May be repeated."""
        with self._transaction():
            known = [row for row in self._rows("WHERE provider_id = ?", pod.id) if row.provider == provider]
            if known:
                # The provider had said that this pod is gone, but lists it again.
                if known[0].state == State.GONE:
                    return self._set(known[0], state=State.DELETING, ended_at=None)
                return known[0]
            row = stray(pod, provider, self.owner, now)
            if self._rows("WHERE label = ?", row.label):
                # One order made two pods, and its row already uses the label.
                row = replace(row, label=f"{pod.label}/{pod.id}")
            self._insert(row)
            return row

    def advance(self, row: Row, state: State, **changes: Any) -> Row:
        """Change the state of a row, and the columns in `changes`. Returns the new row."""
        with self._transaction():
            known = self.current(row)
            assert known is not None, row.label
            assert may_follow(known.state, state) and state != State.GONE, (
                f"{row.name}: {known.state} -> {state}"
            )
            return self._set(row, state=state, **changes)

    def set_pod(
        self, row: Row, provider_id: str, price: float | None, state: State = State.BOOTING, **more: Any
    ) -> Row:
        """Record the pod of this order; its cost counts from the time of the order. May be repeated.

        `price`: the provider's price in dollars per hour; None: the price of the offer.
        """
        offer = row.offer if price is None else replace(row.offer, price_per_hour=price)
        return self.advance(row, state, provider_id=provider_id, offer=_to_json(offer), **more)

    def extend(self, row: Row, extra_s: float) -> float:
        """Postpone the rental end, whatever state the row is in by now, and return it. Needs no lock.

        Raises UserError if the pod is being given back or is gone.
        """
        with self._transaction():
            known = self.current(row)
            if known is None or known.state == State.DELETING:
                raise UserError(f"{row.name} is given back, so its rental was not extended.")
            assert known.ends_at is not None, row.label
            ends_at = known.ends_at + extra_s
            self._set(known, ends_at=ends_at)
        return ends_at

    def count_absence(self, row: Row, *, now: float) -> None:
        """Record that one more listing lacks the pod of this order."""
        since = now if row.absent_since is None else row.absent_since
        self.advance(row, row.state, absent_since=since, num_absences=row.num_absences + 1)

    def forget(self, row: Row, *, now: float) -> None:
        """Record that the pod is gone and costs nothing from now on; delete the row of an order that made no pod.

        May be repeated.
        """
        with self._transaction():
            known = self.current(row)
            if known is not None:
                assert may_follow(known.state, State.GONE), known.state
                others = {row.provider for row in self._rows("WHERE label != ?", known.label)}
                # One row is kept for each provider, since a pod without a row may appear there.
                if known.provider_id is None and known.provider in others:
                    self._db.execute("DELETE FROM pods WHERE label = ?", (known.label,))
                else:
                    self._set(known, state=State.GONE, ended_at=now)

    def remember(self, key: str, value: str) -> None:
        """Store a value outside the rows (keys.py). An empty value deletes the key."""
        if value == self.recall(key):
            return
        with self._transaction():
            self._db.execute("DELETE FROM meta WHERE key = ?", (key,))
            if value:
                self._db.execute("INSERT INTO meta VALUES (?, ?)", (key, value))

    def recall(self, key: str) -> str:
        """The value stored under this key; "": there is none."""
        return next((str(value) for (value,) in self._read("SELECT value FROM meta WHERE key = ?", key)), "")

    def _rows(self, condition: str, *values: Any) -> list[Row]:
        query = f"SELECT {', '.join(_COLUMNS)} FROM pods {condition} ORDER BY rowid"
        try:
            return [_row(found) for found in self._read(query, *values)]
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            raise self._unusable(error) from error

    def _read(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Raises UserError if the file is damaged."""
        try:
            return self._db.execute(query, values).fetchall()
        except sqlite3.DatabaseError as error:
            raise self._unusable(error) from error

    def _insert(self, row: Row) -> None:
        values = {**vars(row), "spec": _to_json(row.spec), "offer": _to_json(row.offer)}
        marks = ", ".join("?" for _ in _COLUMNS)
        self._db.execute(
            f"INSERT INTO pods ({', '.join(_COLUMNS)}) VALUES ({marks})", [values[name] for name in _COLUMNS]
        )

    def _set(self, row: Row, **columns: Any) -> Row:
        assignments = ", ".join(f"{column} = ?" for column in columns)
        self._db.execute(f"UPDATE pods SET {assignments} WHERE label = ?", (*columns.values(), row.label))
        (changed,) = self._rows("WHERE label = ?", row.label)
        return changed

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """Commits at the end, rolls back on an error. Raises UserError if the file cannot be written."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
        except BaseException as error:
            # SQLite rolls back by itself after some errors.
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            if not isinstance(error, sqlite3.OperationalError):
                raise
            raise UserError(
                f"--state-file {self.path} cannot be written: {error}. Fix that and run the same command again."
            ) from error

    def _unusable(self, error: Exception) -> UserError:
        return UserError(
            f"--state-file {self.path} cannot be used: {error}. It knows which pods are yours; name another file, or "
            "look at the provider's web site for what is rented before you move it away."
        )


def _make_tables(db: sqlite3.Connection) -> None:
    """Create the tables in a new file. Raises sqlite3.Error, also for a file of another version; nothing is changed."""
    db.execute("BEGIN IMMEDIATE")
    try:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        is_new = not db.execute("SELECT 1 FROM sqlite_master").fetchone()
        if not is_new and version != _VERSION:
            raise sqlite3.DatabaseError(f"it is of version {version}, and this is version {_VERSION}")
        for statement in _TABLES if is_new else ():
            db.execute(statement)
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise


def _row(values: tuple[Any, ...]) -> Row:
    found = dict(zip(_COLUMNS, values, strict=True))
    found["spec"] = msgspec.json.decode(found["spec"], type=PodSpec)
    found["offer"] = msgspec.json.decode(found["offer"], type=Offer)
    return Row(**{**found, "state": State(found["state"])})


def _to_json(item: PodSpec | Offer) -> str:
    return msgspec.json.encode(item).decode()
