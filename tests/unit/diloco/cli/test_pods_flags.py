from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from diloco.cli import pods_flags
from diloco.cli.pods_flags import Given, results_of
from provisioning.ledger.ledger import Ledger
from provisioning.ledger.lock import held
from provisioning.machines.results import DEFAULT
from provisioning.pods.pod import Offer, PodSpec
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


def test_what_is_fetched_and_whereto_is_remembered_as_long_as_there_are_pods(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ledger = Ledger(tmp_path / "pods.sqlite")
    given = Given(fetch="logs", run_dir=str(tmp_path / "first"))
    first = results_of(ledger, given, "run")
    first.remember(ledger)
    row = ledger.add(
        PodSpec(name="pod-0", provider="local"),
        Offer(id="o", provider="local", gpu_type="cpu-1", gpu_count=1, price_per_hour=0.0),
        now=0.0,
    )
    assert results_of(ledger, Given(), "run") == first
    ledger.forget(row, now=1.0)
    second = results_of(ledger, Given(), "run")
    assert second.words == DEFAULT and second.place != first.place
    ledger.close()
