from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from provisioning.pods.pod import Offer, Pod, PodSpec, Row, State
from provisioning.renting.reconcile import Action, Do, Observation, decide
from tests.support.hostile_provider import HostileProvider

OWNER = "0a1b2c3d"
OFFER = Offer(id="o", provider="p", gpu_type="A100", gpu_count=1, price_per_hour=1.0)


def row(name: str = "pod-0", state: State = State.RUNNING, pod_id: str | None = "id", **values) -> Row:
    common = {
        "label": f"diloco-{OWNER}-{name}-1",
        "spec": PodSpec(provider="lium", name=name),
        "offer": OFFER,
        "asked_at": 0.0,
        "ends_at": None,
    }
    return Row(name=name, state=state, provider_id=pod_id, **{**common, **values})


def pod(pod_id: str = "id", label: str = f"diloco-{OWNER}-pod-0-1") -> Pod:
    return Pod(id=pod_id, label=label, is_ready=True)


def decided(rows, listed, *, now=1000.0, repeatable=False, **said):
    observation = Observation(pods=listed, **said)
    return decide(rows, observation, HostileProvider(repeatable=repeatable), now=now)


def test_where_ledger_and_provider_agree_there_is_nothing_to_do():
    assert decided([row()], [pod()]) == []
    assert decided([row(state=State.PLANNED, pod_id=None)], []) == []


def test_a_planned_pod_that_was_never_ordered_is_forgotten_after_its_end_so_that_nobody_watches_it_forever():
    planned = row(state=State.PLANNED, pod_id=None, ends_at=500.0)
    assert decided([planned], [], now=499.0) == []
    (action,) = decided([planned], [], now=500.0)
    assert action.do == Do.FORGET and "never ordered" in action.reason


def test_an_order_whose_answer_was_lost_is_found_by_its_label():
    waiting = row(state=State.CREATING, pod_id=None)
    assert decided([waiting], [pod()]) == [Action(Do.ADOPT, waiting, pod())]


def test_an_order_that_made_no_pod_in_time_is_given_up_unless_it_can_be_sent_again():
    waiting = row(state=State.CREATING, pod_id=None)
    assert decided([waiting], [], now=10.0) == []
    assert decided([waiting], [], now=61.0) == [Action(Do.GIVE_UP, waiting)]
    assert decided([waiting], [], now=61.0, repeatable=True) == []


def test_a_list_that_lacks_a_known_pod_proves_nothing():
    for state in (State.CREATING, State.BOOTING, State.RUNNING, State.DELETING):
        assert decided([row(state=state)], []) == []
        assert decided([row(state=state)], [], unknown={"id": "no answer"}) == []


def test_a_known_pod_is_forgotten_once_the_provider_says_that_there_is_none_and_it_is_not_too_new():
    assert decided([row()], [], gone={"id"}, now=10.0) == []
    (action,) = decided([row()], [], gone={"id"})
    assert action.do == Do.FORGET and "vanished" in action.reason
    leaving = row(state=State.DELETING)
    assert decided([leaving], [], gone={"id"}) == [Action(Do.FORGET, leaving, reason="gone")]


def test_a_pod_that_is_being_given_back_is_asked_for_again_until_it_is_gone():
    leaving = row(state=State.DELETING)
    assert decided([leaving], [pod()]) == [Action(Do.DESTROY, leaving, pod(), "to be given back")]


def test_an_order_that_was_given_up_is_looked_for_until_several_lists_over_minutes_agree():
    leaving = row(state=State.DELETING, pod_id=None)
    assert decided([leaving], [], now=10.0) == []
    assert decided([leaving], [], now=100.0) == [Action(Do.COUNT_ABSENCE, leaving)]
    for since, number, now in ((100.0, 1, 2000.0), (100.0, 20, 650.0)):
        missed = row(state=State.DELETING, pod_id=None, absent_since=since, num_absences=number)
        assert decided([missed], [], now=now) == [Action(Do.COUNT_ABSENCE, missed)]
    missed = row(state=State.DELETING, pod_id=None, absent_since=100.0, num_absences=2)
    assert decided([missed], [], now=701.0) == [Action(Do.FORGET, missed, reason="its order made no pod")]
    assert decided([missed], [], now=701.0, silent={"office": "no answer"}) == []
    assert decided([missed], [pod()], now=701.0) == [Action(Do.DESTROY, missed, pod(), "to be given back")]


def test_when_its_time_is_over_a_pod_goes():
    (action,) = decided([row(ends_at=999.0)], [pod()])
    assert action.do == Do.DESTROY and action.reason == "its time is over"


def test_our_orphans_go_and_nobody_elses_machine_is_touched():
    orphan, neighbour = pod("b", f"diloco-{OWNER}-pod-7-9"), pod("c", "diloco-ffffffff-pod-0-1")
    others = [neighbour, pod("d", "web server"), pod("e", f"my diloco-{OWNER}-pod")]
    observation = Observation(pods=[pod(), orphan, *others])
    assert observation.strays([row()], OWNER) == [orphan] and decided([row()], observation.pods) == []


def test_of_two_pods_that_one_order_made_the_one_that_the_ledger_names_stays():
    observation = Observation(pods=[pod("a"), pod()])
    assert observation.strays([row()], OWNER) == [pod("a")] and decided([row()], observation.pods) == []


rows = st.lists(
    st.builds(
        row,
        name=st.sampled_from(["a", "b", "c"]),
        state=st.sampled_from([state for state in State if state != State.GONE]),
        pod_id=st.none() | st.sampled_from(["1", "2"]),
        asked_at=st.floats(0, 1000),
        ends_at=st.none() | st.floats(0, 2000),
    ),
    unique_by=(lambda row: row.name, lambda row: row.provider_id or row.name),
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
    destroyed = {action.pod.id for action in actions if action.do == Do.DESTROY}
    destroyed |= {one.id for one in Observation(pods=listed).strays(rows, OWNER)}
    for one in listed:
        ours = one.label.startswith(f"diloco-{OWNER}-") or any(row.is_pod(one) for row in rows)
        assert ours or one.id not in destroyed
    kept = {one.id for one in Observation(pods=listed).pods_of(rows).values()}
    for one in listed:
        if one.label.startswith(f"diloco-{OWNER}-") and one.id not in destroyed:
            assert one.id in kept, "an orphan or a duplicate was left"
