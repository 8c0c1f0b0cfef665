from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from diloco.cli import pods_flags
from provisioning.ledger.ledger import Ledger
from provisioning.ledger.lock import held
from provisioning.swarm import watcher


def test_a_command_waits_for_the_lock_where_a_watcher_may_hold_it_for_seconds(tmp_path, monkeypatch):
    waits = list[float]()

    @contextmanager
    def locked(self: Ledger, *, wait_s: float, for_jobs: bool) -> Iterator[None]:
        waits.append(wait_s)
        yield

    async def work() -> int:
        return 0

    monkeypatch.setattr(Ledger, "locked", locked)
    ledger = Ledger(tmp_path / "pods.sqlite")
    pods_flags.locked(ledger, work)
    with held(watcher.lock_path(ledger.path)):
        pods_flags.locked(ledger, work)
        pods_flags.locked(ledger, work, for_jobs=True)
    ledger.close()
    assert waits == [0.0, 30.0, 0.0]
