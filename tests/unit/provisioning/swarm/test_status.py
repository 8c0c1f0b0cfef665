"""What is said of all pods together."""

from __future__ import annotations

from provisioning.ledger.row import Row, State
from provisioning.machines.jobs import JobState
from provisioning.pods.pod import Offer
from provisioning.pods.spec import PodSpec
from provisioning.swarm.peer import PeerProgress
from provisioning.swarm.status import Overview, Status

OFFER = Offer(id="o", provider="lium", gpu_type="A100", gpu_count=8, price_per_hour=2.0)
ROW = Row(
    **{"name": "pod-0", "label": "l", "state": State.RUNNING},
    **{"provider_id": "id", "spec": PodSpec(name="pod-0"), "offer": OFFER, "asked_at": 0.0, "ends_at": None},
)


def test_a_billion_tokens_cost_what_the_pods_cost_that_say_what_they_have_trained():
    looks = [PeerProgress(JobState(True, None), tokens=tokens) for tokens in (1_500_000_000, 500_000_000)]
    pods = [Status(ROW, True, "trains", look, dollars=2.0) for look in looks]
    seen = Overview([*pods, Status(ROW, None, "not known", dollars=3.0)], {}, dollars=900.0)
    assert (seen.tokens, seen.dollars_per_billion_tokens) == (2_000_000_000, 2.0)
    assert Overview(pods[:0], {}, dollars=7.0).dollars_per_billion_tokens is None
