from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3

import pytest

from provisioning.errors import Busy, UserError
from provisioning.ledger.ledger import Ledger
from provisioning.pods.pod import Offer, Pod, PodSpec, State, may_follow

SPEC = PodSpec(provider="lium", name="pod-0", gpu_count=1, ttl_hours=2)
OFFER = Offer(id="o", provider="lium", gpu_type="A100", gpu_count=1, price_per_hour=3.0, details={"a": [1]})


@pytest.fixture
def ledger(tmp_path):
    opened = Ledger(tmp_path / "pods.sqlite")
    yield opened
    opened.close()


def test_a_row_is_on_disk_with_all_that_it_needs_before_anything_is_asked_for(ledger):
    row = ledger.add(SPEC, OFFER, now=100.0)
    other = Ledger(ledger.path)
    assert other.rows() == [row]
    assert (row.state, row.spec, row.offer, row.ends_at) == (State.PLANNED, SPEC, OFFER, 7300.0)
    assert row.label.startswith(f"diloco-{ledger.owner}-pod-0-")
    assert other.owner == ledger.owner
    other.close()


def test_each_order_has_a_label_of_its_own(ledger):
    first = ledger.add(SPEC, OFFER, now=0)
    second = ledger.add(SPEC, OFFER, now=0)
    assert first.label != second.label
    assert ledger.rows() == [second]


def test_a_pod_that_was_ordered_is_never_planned_over(ledger):
    ledger.advance(ledger.add(SPEC, OFFER, now=0), State.CREATING)
    with pytest.raises(sqlite3.IntegrityError):
        ledger.add(SPEC, OFFER, now=0)


def test_states_follow_each_other_only_as_they_may(ledger):
    row = ledger.add(SPEC, OFFER, now=0)
    with pytest.raises(AssertionError):
        ledger.advance(row, State.RUNNING)
    assert all(may_follow(state, State.DELETING) for state in State if state not in ("planned", "gone"))
    assert not any(may_follow(State.DELETING, state) for state in State if state not in ("deleting", "gone"))


def test_a_provider_that_was_used_once_is_remembered(ledger):
    ledger.forget(ledger.add(SPEC, OFFER, now=0), now=1)
    assert (ledger.rows(), ledger.providers()) == ([], ["lium"])


def test_what_a_pod_cost_stays_when_its_row_goes(ledger):
    row = ledger.advance(ledger.add(SPEC, OFFER, now=3600.0), State.CREATING)
    ledger.set_pod(row, "id-1", 3.0)
    ledger.set_pod(row, "id-1", 2.0)
    (bill,) = ledger.bills()
    assert bill.dollars(now=3600.0 + 1800.0) == 1.0
    ledger.forget(row, now=2 * 3600.0)
    (bill,) = ledger.bills()
    assert ledger.rows() == [] and bill.dollars(now=9e9) == 2.0


def test_one_command_at_a_time_changes_pods(ledger):
    other = Ledger(ledger.path)
    with ledger.locked(), pytest.raises(Busy, match=str(os.getpid())), other.locked():
        raise AssertionError
    with other.locked():
        pass
    other.close()


async def test_a_task_that_waits_for_another_command_lets_other_tasks_go_on(ledger):
    other = Ledger(ledger.path)
    with pytest.raises(Busy, match=str(os.getpid())), other.locked():
        async with ledger.locked_within(0.0):
            raise AssertionError
    held = other.locked()
    with contextlib.ExitStack() as stack:
        stack.enter_context(held)
        asyncio.get_running_loop().call_later(0.01, stack.pop_all().close)
        async with ledger.locked_within(60.0):
            with pytest.raises(Busy), other.locked():
                raise AssertionError
    other.close()


def test_the_state_file_is_its_owners_alone(ledger):
    assert ledger.path.stat().st_mode & 0o077 == 0


def test_a_file_that_is_no_ledger_is_named(tmp_path):
    (tmp_path / "pods.sqlite").write_text("hello, this is no database at all" * 40)
    with pytest.raises(UserError, match=r"pods\.sqlite cannot be used"):
        Ledger(tmp_path / "pods.sqlite")


@pytest.mark.parametrize("num_lost", [10, 2000, 4096, 30000, 50000])
def test_a_file_that_has_lost_its_end_is_named(tmp_path, num_lost):
    path = tmp_path / "pods.sqlite"
    ledger = Ledger(path)
    for index in range(60):
        ledger.add(PodSpec(provider="lium", name=f"pod-{index}"), OFFER, now=0.0)
    ledger.close()
    content = path.read_bytes()
    assert len(content) > 51000
    path.write_bytes(content[:-num_lost])
    with pytest.raises(UserError, match=r"pods\.sqlite cannot be used"):
        Ledger(path).rows()


def test_a_file_of_another_version_is_refused_and_left_as_it_was(tmp_path):
    path = tmp_path / "pods.sqlite"
    Ledger(path).close()
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 1")
    db.close()
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"it is of version 1, and this is version 2"):
        Ledger(path)
    assert path.read_bytes() == before


def test_of_orders_that_made_no_pod_one_row_is_kept_so_that_their_provider_is_known(ledger):
    for _ in range(5):
        ledger.forget(ledger.advance(ledger.add(SPEC, OFFER, now=0.0), State.CREATING), now=1.0)
    assert len(ledger._rows("")) == 1 and ledger.providers() == [OFFER.provider]
    assert ledger.rows() == ledger.bills() == []


def test_a_pod_that_was_called_gone_and_is_there_is_to_be_given_back_again(ledger):
    row = ledger.advance(ledger.add(SPEC, OFFER, now=0), State.CREATING)
    row = ledger.set_pod(row, "id-1", 3.0)
    ledger.forget(row, now=3600.0)
    assert (ledger.rows(), ledger.bills()[0].dollars(now=9e9)) == ([], 3.0)
    again = ledger.found(Pod(id="id-1", label=row.label, is_ready=True), "lium", now=7000.0)
    assert (again.label, again.state, ledger.rows()) == (row.label, State.DELETING, [again])
    assert ledger.bills()[0].dollars(now=7200.0) == 6.0


def test_a_pod_that_no_row_knows_of_is_written_down_beside_the_one_that_has_its_name(ledger):
    row = ledger.advance(ledger.add(SPEC, OFFER, now=0), State.CREATING)
    ledger.set_pod(row, "id-1", 3.0)
    twin = ledger.found(Pod(id="id-2", label=row.label, is_ready=True, price_per_hour=3.0), "lium", now=5.0)
    assert (twin.name, twin.state, twin.provider_id) == ("pod-0", State.DELETING, "id-2")
    assert ledger.found(Pod(id="id-2", label=row.label, is_ready=True), "lium", now=6.0) == twin
    assert [one.provider_id for one in ledger.named(["pod-0"])] == ["id-1", "id-2"]
    ledger.forget(twin, now=7.0)
    assert [one.provider_id for one in ledger.rows()] == ["id-1"]
    assert [bill.ended_at for bill in ledger.bills()] == [None, 7.0]


def test_a_full_disk_is_said_and_what_was_written_before_stays(tmp_path):
    ledger = Ledger(tmp_path / "pods.sqlite")
    ledger.remember("key", "value")
    (pages,) = ledger._db.execute("PRAGMA page_count").fetchone()
    ledger._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(UserError, match=r"cannot be written: database or disk is full\. Fix that"):
        ledger.remember("key", "x" * 100_000)
    assert ledger.recall("key") == "value"
    ledger._db.execute("PRAGMA max_page_count = 100000")
    ledger.remember("key", "other")
    assert ledger.recall("key") == "other"
    ledger.close()


def test_while_jobs_run_pods_can_be_changed_and_no_second_command_runs_jobs(tmp_path):
    ledger = Ledger(tmp_path / "pods.sqlite")
    with ledger.locked(for_jobs=True):
        with ledger.locked():
            pass
        with pytest.raises(Busy, match=r"is running jobs on the pods of"), ledger.locked(for_jobs=True):
            pass
    ledger.close()
