"""The tables of the state file, and how a file of an earlier version gets them without losing a pod."""

from __future__ import annotations

import sqlite3

_VERSION = 1
_TABLES = (
    "CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    """CREATE TABLE IF NOT EXISTS pods (
    label TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    idempotency_key TEXT NOT NULL,
    state TEXT NOT NULL,
    provider TEXT NOT NULL,
    provider_id TEXT,
    spec TEXT NOT NULL,
    offer TEXT NOT NULL,
    asked_at REAL NOT NULL,
    ends_at REAL,
    host_key TEXT NOT NULL DEFAULT '',
    trouble TEXT NOT NULL DEFAULT '',
    absent_since REAL,
    num_absences INTEGER NOT NULL DEFAULT 0
)""",
    # Two pods of one name are there only while one of them is being given back.
    "CREATE UNIQUE INDEX IF NOT EXISTS names ON pods (name) WHERE state != 'deleting'",
    "CREATE TABLE IF NOT EXISTS providers (name TEXT PRIMARY KEY)",
    """CREATE TABLE IF NOT EXISTS bills (
    label TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    provider TEXT NOT NULL,
    price_per_hour REAL NOT NULL,
    began_at REAL NOT NULL,
    ended_at REAL
)""",
)
_COLUMNS_0 = (
    "name, label, idempotency_key, state, provider, provider_id, spec, offer, asked_at, ends_at, "
    "host_key, trouble"
)


def brought_up_to_date(db: sqlite3.Connection) -> None:
    """Make what is missing. Raises sqlite3.Error, and then has changed nothing."""
    if _version(db) >= _VERSION:
        return
    db.execute("BEGIN IMMEDIATE")
    try:
        # Another command may have done it while this one waited.
        if _version(db) < _VERSION:
            _upgrade(db)
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise


def _version(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def _upgrade(db: sqlite3.Connection) -> None:
    had_pods = db.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'pods'").fetchone()
    if had_pods:
        # Their key was the name, of which there can be two.
        db.execute("ALTER TABLE pods RENAME TO pods_0")
    for statement in _TABLES:
        db.execute(statement)
    if had_pods:
        db.execute(f"INSERT INTO pods ({_COLUMNS_0}) SELECT {_COLUMNS_0} FROM pods_0 ORDER BY rowid")
        db.execute("DROP TABLE pods_0")
        db.execute("INSERT INTO providers SELECT provider FROM pods UNION SELECT provider FROM bills")
    db.execute(f"PRAGMA user_version = {_VERSION}")
