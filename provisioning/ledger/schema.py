"""The tables of the state file."""

from __future__ import annotations

import sqlite3

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


def make_tables(db: sqlite3.Connection) -> None:
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
