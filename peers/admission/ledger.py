"""Which identity holds which world rank of a run. On disk: a restarted coordinator forgets nothing."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from peers.errors import UserError
from peers.protocol.admission import Taken
from peers.timing import ANSWER_S

MAX_HOLDERS = 4096
"""Identities that are remembered. Strangers can make any number: beyond it, the highest rank's holder is forgotten."""
MOST_RANKS = 2
"""Before ranks grow beyond this many times the most peers that were present at once, the rank of one that has been away
the longest is given again: each epoch hands a data block to every rank up to the highest."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS holders (
    world_rank INTEGER PRIMARY KEY,
    peer_id TEXT NOT NULL UNIQUE
);
CREATE TABLE IF NOT EXISTS seen (
    peer_id TEXT PRIMARY KEY,
    at_grant INTEGER NOT NULL,
    num_present INTEGER NOT NULL
);
"""
_MAKE_ROOM = """
DELETE FROM holders WHERE world_rank IN (SELECT world_rank FROM holders ORDER BY world_rank LIMIT -1 OFFSET ?)
"""


class RankLedger:
    """One run's ranks: an identity has at most one rank, a rank at most one identity. A change is on disk on return."""

    def __init__(self, path: Path) -> None:
        """Open the ledger at `path`, or make it. Raises UserError when it cannot be read or written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._db = sqlite3.connect(path, timeout=ANSWER_S, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(_SCHEMA)
        except (sqlite3.Error, OSError) as error:
            raise UserError(
                f"cannot use the ledger of world ranks {path}: {error}. Move it away to begin a new one; its "
                "ranks are forgotten then"
            ) from error

    def assign(
        self,
        peer_id: str,
        wanted: int | None = None,
        *,
        evict: str | None = None,
        avoid: Collection[int] = (),
        present: Collection[str] = (),
    ) -> int | Taken:
        """Give this identity a rank: the wanted one, else the one it has, else the lowest free one or, before ranks
        grow beyond `MOST_RANKS`, that of the holder that has been away the longest.

        Repeating it gives the same rank. If another identity has the rank, the answer is Taken, unless that identity is
        `evict`, which loses it. A rank to `avoid` is given only to a peer that asks for it. `present`: the other
        identities that are here.
        """
        with self._transaction():
            rank = wanted if wanted is not None else self._rank_of(peer_id)
            if rank is None or (wanted is None and rank in avoid):
                rank = self._lowest_free(avoid)
                if rank >= MOST_RANKS * self._most_present(len(present) + 1):
                    rank = self._longest_away({peer_id, *present}, avoid, otherwise=rank)
            holder = self.holder(rank)
            if holder == peer_id:
                return rank
            if holder is not None and holder != evict:
                return Taken(holder=holder)
            self._db.execute("DELETE FROM holders WHERE world_rank = ? OR peer_id = ?", (rank, peer_id))
            self._db.execute(_MAKE_ROOM, (MAX_HOLDERS - 1,))
            self._db.execute("INSERT INTO holders VALUES (?, ?)", (rank, peer_id))
            self._saw({peer_id, *present})
            return rank

    def holder(self, world_rank: int) -> str | None:
        row = self._db.execute("SELECT peer_id FROM holders WHERE world_rank = ?", (world_rank,)).fetchone()
        return row[0] if row else None

    def close(self) -> None:
        """May be repeated."""
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def _rank_of(self, peer_id: str) -> int | None:
        row = self._db.execute("SELECT world_rank FROM holders WHERE peer_id = ?", (peer_id,)).fetchone()
        return row[0] if row else None

    def _saw(self, present: Collection[str]) -> None:
        """These identities are here at this grant."""
        (last,) = self._db.execute("SELECT coalesce(max(at_grant), 0) FROM seen").fetchone()
        rows = [(peer_id, last + 1, len(present)) for peer_id in present]
        self._db.executemany("INSERT OR REPLACE INTO seen VALUES (?, ?, ?)", rows)
        self._db.execute("DELETE FROM seen WHERE peer_id NOT IN (SELECT peer_id FROM holders)")

    def _most_present(self, num_present: int) -> int:
        (most,) = self._db.execute("SELECT coalesce(max(num_present), 0) FROM seen").fetchone()
        return max(int(most), num_present)

    def _longest_away(self, present: Collection[str], avoid: Collection[int], *, otherwise: int) -> int:
        """The rank of the holder, none of `present`, that was seen longest ago."""
        rows = self._db.execute(
            "SELECT world_rank, peer_id FROM holders LEFT JOIN seen USING (peer_id) "
            "ORDER BY coalesce(at_grant, 0), world_rank"
        )
        away = (rank for rank, peer_id in rows if peer_id not in present and rank not in avoid)
        return next(away, otherwise)

    def _lowest_free(self, avoid: Collection[int]) -> int:
        taken = {row[0] for row in self._db.execute("SELECT world_rank FROM holders")} | set(avoid)
        return next(rank for rank in itertools.count() if rank not in taken)
