from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from provisioning.ledger import Ledger, Row
from provisioning.pods import Offer, Pod, PodSpec
from provisioning.reconcile import Adopt, Destroy, Forget, Reorder, Wait, decide
from provisioning.states import State

OWNER = "0a1b2c3d"
SETTLE_S = 60.0
OFFER = Offer(id="o", provider="p", gpu_type="A100", gpu_count=1, price_per_hour=1.0)


def row(name: str = "pod-0", state: State = State.RUNNING, pod_id: str | None = "id", **values) -> Row:
    common = {
        "label": f"diloco-{OWNER}-{name}-1",
        "idempotency_key": "k",
        "provider": "p",
        "spec": PodSpec(name=name),
        "offer": OFFER,
        "asked_at": 0.0,
        "ends_at": None,
        "host_key": "",
        "trouble": "",
    }
    return Row(name=name, state=state, provider_id=pod_id, **{**common, **values})


def pod(pod_id: str = "id", label: str = f"diloco-{OWNER}-pod-0-1") -> Pod:
    return Pod(id=pod_id, label=label, is_ready=True)


def decided(rows, listed, *, now=1000.0, repeatable=False):
    return decide(rows, listed, owner=OWNER, now=now, settle_s=SETTLE_S, repeatable=repeatable)


def test_where_ledger_and_provider_agree_there_is_nothing_to_do():
    assert decided([row()], [pod()]) == []
    assert decided([row(state=State.PLANNED, pod_id=None)], []) == []


def test_an_order_whose_answer_was_lost_is_found_by_its_label():
    waiting = row(state=State.CREATING, pod_id=None)
    assert decided([waiting], [pod()]) == [Adopt(waiting, pod())]


def test_an_order_is_repeated_at_once_only_where_repeating_is_safe():
    waiting = row(state=State.CREATING, pod_id=None)
    assert decided([waiting], [], now=10.0) == [Wait(waiting, SETTLE_S)]
    assert decided([waiting], [], now=10.0, repeatable=True) == [Reorder(waiting)]
    assert decided([waiting], [], now=61.0) == [Reorder(waiting)]


def test_a_pod_that_vanished_is_forgotten_but_not_while_lists_may_lag():
    assert decided([row()], [], now=10.0) == [Wait(row(), SETTLE_S)]
    (action,) = decided([row()], [])
    assert isinstance(action, Forget) and "vanished" in action.reason


def test_a_pod_that_is_being_given_back_is_asked_for_again_until_it_is_gone():
    leaving = row(state=State.DELETING)
    assert decided([leaving], [pod()]) == [Destroy(pod(), leaving, "to be given back")]
    assert decided([leaving], [], now=1.0) == [Forget(leaving, "gone")]


def test_an_order_given_up_before_it_was_answered_is_watched_until_it_cannot_appear():
    leaving = row(state=State.DELETING, pod_id=None)
    assert decided([leaving], [], now=10.0) == [Wait(leaving, SETTLE_S)]
    assert decided([leaving], []) == [Forget(leaving, "gone")]


def test_when_its_time_is_over_a_pod_goes():
    (action,) = decided([row(ends_at=999.0)], [pod()])
    assert isinstance(action, Destroy) and action.reason == "its time is over"


def test_our_orphans_go_and_nobody_elses_machine_is_touched():
    orphan, neighbour = pod("b", f"diloco-{OWNER}-pod-7-9"), pod("c", "diloco-ffffffff-pod-0-1")
    others = [neighbour, pod("d", "web server"), pod("e", f"my diloco-{OWNER}-pod")]
    assert decided([row()], [pod(), orphan, *others]) == [
        Destroy(orphan, None, "ours, but in no row of the state file")
    ]


rows = st.lists(
    st.builds(
        row,
        name=st.sampled_from(["a", "b", "c"]),
        state=st.sampled_from([state for state in State if state != State.GONE]),
        pod_id=st.none() | st.sampled_from(["1", "2"]),
        asked_at=st.floats(0, 1000),
        ends_at=st.none() | st.floats(0, 2000),
    ),
    unique_by=lambda row: row.name,
)
listed = st.lists(
    st.builds(
        pod,
        st.sampled_from("1234567"),
        st.sampled_from(
            [*(f"diloco-{OWNER}-{name}-1" for name in "abcd"), "diloco-ffffffff-a-1", "other", ""]
        ),
    ),
    unique_by=lambda pod: pod.id,
)


@given(rows, listed, st.booleans())
def test_whatever_there_is_only_pods_of_ours_are_destroyed_and_each_row_keeps_one_at_most(
    rows, listed, repeatable
):
    actions = decided(rows, listed, repeatable=repeatable)
    destroyed = {action.pod.id for action in actions if isinstance(action, Destroy)}
    for one in listed:
        ours = one.label.startswith(f"diloco-{OWNER}-") or any(row.provider_id == one.id for row in rows)
        assert ours or one.id not in destroyed
    left = [one for one in listed if one.id not in destroyed and one.label.startswith(f"diloco-{OWNER}-")]
    for one in left:
        assert any(row.is_pod(one) for row in rows), "an orphan was left"
    for row in rows:
        assert len({one.id for one in left if one.label == row.label}) <= 1, "a duplicate was left"


@dataclass
class World:
    """A provider whose answers get lost and whose pods appear late, and a process that dies between any two steps."""

    pods: dict[str, Pod] = field(default_factory=dict)
    late: list[tuple[float, Pod]] = field(default_factory=list)
    orders: int = 0

    def order(self, label: str, delay_s: float, now: float) -> str:
        self.orders += 1
        made = Pod(id=f"pod{self.orders}", label=label, is_ready=True)
        self.late.append((now + delay_s, made))
        return made.id

    def listed(self, now: float) -> list[Pod]:
        for at, made in [late for late in self.late if late[0] <= now]:
            self.pods[made.id] = made
            self.late.remove((at, made))
        return list(self.pods.values())


# What becomes of each step, in turn: whether an order reaches the provider, after how long its pod is listed, and
# whether we live to write down the answer.
steps = st.lists(st.tuples(st.booleans(), st.floats(0, SETTLE_S - 1), st.booleans()), max_size=25)


@given(steps, st.booleans())
def test_however_often_it_dies_in_the_end_there_is_one_pod_or_none(tmp_path_factory, steps, then_down):
    ledger, world, now = Ledger(tmp_path_factory.mktemp("l") / "s"), World(), 1000.0
    fates = iter(steps)
    for _ in range(80):
        now += 7.0
        _one_run(ledger, world, now, next(fates, (True, 0.0, True)), down=False)
    (only,) = ledger.rows()
    assert only.state == State.BOOTING
    assert [one.id for one in world.listed(now + 999)] == [only.provider_id]
    if then_down:
        for _ in range(20):
            now += 7.0
            _one_run(ledger, world, now, (True, 0.0, True), down=True)
        assert ledger.rows() == [] and world.listed(now + 999) == []
    ledger.close()


def _one_run(ledger: Ledger, world: World, now: float, fate: tuple[bool, float, bool], *, down: bool) -> None:
    """One command from its start to its end, or to its death."""
    arrives, delay_s, survives = fate
    actions = decide(
        ledger.rows(), world.listed(now), owner=ledger.owner, now=now, settle_s=SETTLE_S, repeatable=False
    )
    for action in actions:
        match action:
            case Adopt(row, pod):
                ledger.rented(row.name, pod.id, 1.0)
            case Destroy(pod, _, _):
                world.pods.pop(pod.id, None)
            case Forget(row, _):
                ledger.forget(row.name, now=now)
            case Reorder(row):
                ledger.advance(row.name, State.PLANNED)
    current = ledger.row("pod-0")
    if down:
        if current and current.state not in (State.PLANNED, State.DELETING):
            ledger.advance("pod-0", State.DELETING)
        elif current and current.state == State.PLANNED:
            ledger.forget("pod-0", now=now)
        return
    if current is None or current.state == State.PLANNED:
        ledger.plan(PodSpec(name="pod-0"), OFFER, now=now, ends_at=None)
        row = ledger.advance("pod-0", State.CREATING, asked_at=now)
        pod_id = world.order(row.label, delay_s, now) if arrives else "lost"
        if survives and arrives:
            ledger.rented("pod-0", pod_id, 1.0)
