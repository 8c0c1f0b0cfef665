"""Error feedback: nothing that a codec loses is lost for good, and nothing is sent twice."""

from __future__ import annotations

import contextlib
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from peers.core.defaults import residual_decay_for
from peers.protocol.codecs import BITS_BY_CODEC, CODEC_NAMES
from peers.reduce import kernels
from peers.reduce.arithmetic import norm_of_pseudo_gradient
from peers.reduce.codecs import codec_named
from peers.reduce.plan import CHUNK_NUMEL, equal_bounds
from peers.reduce.residuals import Residuals
from tests.support.coding import coded
from tests.support.exhaustive import exhaustive_but
from tests.support.reduction_group import ReductionGroup

LOSSY = [name for name in CODEC_NAMES if not codec_named(name).lossless]
SMALL = 9000
"""A number of values: with two members, each one's share is two blocks of top-k and part of a third."""


class Group(ReductionGroup):
    """Members that go through rounds with each other, and the residuals that each of them keeps."""

    def __init__(self, num_members, numel, codec):
        super().__init__(num_members, numel, codec=codec)
        self.numel, self.decay = numel, 1.0
        self.residuals = [Residuals(numel) for _ in range(num_members)]

    def trained(self, size=1e-2):
        """The local weights of each member after some training."""
        return [
            self.anchor + size * torch.randn(self.numel, generator=self.generator) for _ in self.residuals
        ]

    def plans(self, locals_, bounds=None):
        self.num_attempts += 1
        self.locals, self.bounds = locals_, bounds or equal_bounds(self.numel, len(self))
        self.norms = [
            norm_of_pseudo_gradient(self.anchor, local, residuals.contribution_residual)
            for local, residuals in zip(locals_, self.residuals, strict=True)
        ]
        return [self.plan(me) for me in range(len(self))]

    def attempt(self, locals_, bounds=None):
        """The plans and the reports of one attempt in which no member fails."""
        plans = self.plans(locals_, bounds)
        with ThreadPoolExecutor(len(self)) as pool:
            reports = pool.map(lambda me: self.reduce(me, residuals=self.residuals[me]), range(len(self)))
            return plans, list(reports)

    def commit(self, plans, locals_):
        """Commit each member's residuals, then take the outer step of plain averaging."""
        for plan, residuals, local in zip(plans, self.residuals, locals_, strict=True):
            residuals.commit(plan, self.anchor, local, decay=self.decay)
        self.anchor = self.anchor - self.results[0]

    def epoch(self, locals_, bounds=None):
        plans, reports = self.attempt(locals_, bounds)
        self.commit(plans, locals_)
        return reports


@pytest.fixture
def group():
    with contextlib.ExitStack() as stack:

        def build(*args, **kwargs):
            return stack.enter_context(contextlib.closing(Group(*args, **kwargs)))

        yield build


def kept_of_results(group):
    """The residuals that the owners keep of the average, each at its place in the whole vector."""
    whole = torch.zeros(group.numel, dtype=torch.float64)
    for residuals in group.residuals:
        with residuals.held() as tensors:
            if "result" in tensors:
                start = int(tensors["result_start"])
                whole[start : start + tensors["result"].numel()] += tensors["result"].double()
    return whole


def same_bits(a, b):
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


# Through whole rounds


@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("numel", exhaustive_but((0, 7, SMALL), [0, 1, 7, SMALL]))
@pytest.mark.parametrize("num_members", exhaustive_but((1, 3), [1, 2, 3, 4]))
def test_all_members_hold_the_same_bits_epoch_after_epoch(group, num_members, numel, codec):
    swarm = group(num_members, numel, codec)
    for _ in range(3):
        swarm.epoch(swarm.trained())
        for result in swarm.results[1:]:
            assert same_bits(result, swarm.results[0])


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("num_members", [1, 3])
def test_all_that_was_trained_arrives_but_for_the_last_residuals(group, num_members, codec):
    swarm = group(num_members, SMALL, codec)
    trained, received = (torch.zeros(SMALL, dtype=torch.float64) for _ in range(2))
    for _ in range(6):
        locals_ = swarm.trained()
        trained += sum((swarm.anchor - local).double() for local in locals_) / num_members
        swarm.epoch(locals_)
        received += swarm.results[0].double()
    kept = sum(residuals.contribution_residual.double() for residuals in swarm.residuals) / num_members
    kept += kept_of_results(swarm)
    assert float(kept.norm()) > 1e-6 * float(trained.norm())
    assert float((trained - kept - received).abs().max()) < 1e-6 * float(trained.abs().max())


@pytest.mark.parametrize("codec", ["int4", "2bit", "1bit", "topk"])
def test_feedback_keeps_the_error_of_the_sum_from_growing(group, codec):
    swarm = group(2, SMALL, codec)
    swarm.decay = residual_decay_for(codec, 30)
    drift = 1e-3 * torch.randn(SMALL, generator=swarm.generator)
    start = swarm.anchor.clone()
    for _ in range(100):
        swarm.epoch([swarm.anchor - drift] * 2)
    arrived = (start - swarm.anchor) / 100
    # Top-k alone would only ever send 2 % of these values; its decay keeps a small value from adding up for ever.
    least = {"int4": 0.99, "2bit": 0.98, "1bit": 0.95, "topk": 0.5}[codec]
    assert float(torch.dot(arrived, drift) / (arrived.norm() * drift.norm())) > least


@pytest.mark.parametrize("codec", LOSSY)
def test_a_failed_attempt_changes_nothing_for_the_next(group, codec):
    swarm = group(2, SMALL, codec)
    swarm.epoch(swarm.trained())
    locals_ = swarm.trained()
    swarm.attempt(locals_)
    result = swarm.results[0].clone()
    for residuals in swarm.residuals:
        residuals.drop_attempt()
    plans, _ = swarm.attempt(locals_)
    assert all(same_bits(again, result) for again in swarm.results)
    swarm.commit(plans, locals_)
    swarm.epoch(swarm.trained())
    assert not same_bits(swarm.results[0], result)


@pytest.mark.parametrize("codec", LOSSY)
def test_pseudo_gradients_that_shrink_at_once_leave_owners_within_their_bounds(group, codec):
    swarm = group(3, SMALL, codec)
    swarm.epoch(swarm.trained(size=100.0))
    for residuals in swarm.residuals:
        # Otherwise the next contributions themselves would contain the large values.
        residuals.contribution_residual.zero_()
    for size in (1e-6, 0.0, 1e-3):
        # The reduction would fail if it found too much energy.
        swarm.epoch(swarm.trained(size=size))


@pytest.mark.parametrize("codec", LOSSY)
def test_bytes_sent_are_so_many_times_fewer_than_fp32s(group, codec):
    sent = []
    for name in ("fp32", codec):
        swarm = group(3, 200_000, name)
        sent.append(sum(report.sent_bytes for report in swarm.epoch(swarm.trained())))
    # topk's averages hold more values than its contributions.
    share = 0.8 if codec == "topk" else 0.97
    assert sent[0] / sent[1] >= share * 32 / BITS_BY_CODEC[codec]


@pytest.mark.parametrize("codec", LOSSY)
def test_what_results_lose_of_random_values_is_less_than_their_owners_may_add(group, codec):
    swarm = group(3, SMALL, codec)
    for _ in range(6):
        swarm.epoch(swarm.trained())
    plans, _ = swarm.attempt(swarm.trained())
    for plan, residuals in zip(plans, swarm.residuals, strict=True):
        with residuals.held() as kept:
            assert 0 < float(kept["result"].norm()) < plan.result_residual_bound()


def test_one_pass_of_all_threads_over_the_residual_comes_before_a_reduction(group, monkeypatch):
    swarm = group(2, 2 * 2 * CHUNK_NUMEL, "int8")
    swarm.epoch(swarm.trained())
    plan = swarm.plans(swarm.trained())[0]
    seen, both = [], threading.Barrier(2)

    def energy(values):
        both.wait(10)
        seen.append(values.size)
        return kernels.energy(values)

    monkeypatch.setattr("peers.threads.num_cores", lambda: 2)
    monkeypatch.setattr("peers.reduce.residuals.energy", energy)
    swarm.residuals[0].for_attempt(plan)
    assert seen == [CHUNK_NUMEL] * 2


@pytest.mark.parametrize("codec", exhaustive_but(("fp32", "int8"), CODEC_NAMES))
@pytest.mark.parametrize("num_cores", [4, 16])
def test_a_peer_that_is_alone_gets_the_same_bits_with_any_number_of_threads(
    group, monkeypatch, codec, num_cores
):
    def found(num_cores):
        monkeypatch.setattr("peers.threads.num_cores", lambda: num_cores)
        swarm = group(1, 5 * CHUNK_NUMEL + 77, codec)
        # The residual of the first results is scaled down in the second epoch.
        for size in (1.0, 1e-4, 1e-4):
            swarm.epoch(swarm.trained(size))
        with swarm.residuals[0].held() as tensors:
            return {"average": swarm.results[0], **tensors}

    one, many = found(1), found(num_cores)
    assert one.keys() == many.keys()
    for name, values in one.items():
        assert torch.equal(values.view(torch.int32), many[name].view(torch.int32)), name


# What one member keeps


def test_nothing_is_kept_where_nothing_is_lost(group):
    swarm = group(2, SMALL, "fp32")
    locals_ = swarm.trained()
    plans, _ = swarm.attempt(locals_)
    assert swarm.residuals[0].for_attempt(plans[0]) is None
    swarm.commit(plans, locals_)
    assert swarm.residuals[0].contribution_residual is None
    with swarm.residuals[0].held() as tensors:
        assert tensors == {}


def test_lossy_codecs_hold_nothing_before_the_first_commit(group):
    swarm = group(2, SMALL, "int4")
    swarm.attempt(swarm.trained())
    assert swarm.residuals[0].contribution_residual is None


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("decay", [1.0, 0.95])
def test_what_is_kept_is_what_the_wire_lost_of_every_share_times_the_decay(group, codec, decay):
    numel = 2 * CHUNK_NUMEL + 4321
    swarm = group(2, numel, codec)
    bounds = (0, 100_003, numel)
    swarm.epoch(swarm.trained(), bounds)
    locals_ = swarm.trained()
    before = swarm.residuals[0].contribution_residual.clone()
    plan = swarm.plans(locals_, bounds)[0]
    values = (swarm.anchor - locals_[0]) + before
    swarm.residuals[0].commit(plan, swarm.anchor, locals_[0], decay=decay)
    coder = codec_named(codec)
    for owner in range(2):
        for chunk in plan.chunks([owner]):
            part = plan.place(chunk)
            expected = (values[part] - coded(coder, values[part])) * np.float32(decay)
            assert torch.equal(swarm.residuals[0].contribution_residual[part], expected)


def test_the_announced_norm_is_that_of_what_is_sent():
    anchor, local, residual = (
        torch.randn(1000, generator=torch.Generator().manual_seed(i)) for i in range(3)
    )
    assert norm_of_pseudo_gradient(anchor, local) == pytest.approx(float((anchor - local).norm()))
    assert norm_of_pseudo_gradient(anchor, local, residual) == pytest.approx(
        float((anchor - local + residual).norm())
    )
    assert math.isnan(norm_of_pseudo_gradient(anchor, local, torch.full((1000,), math.nan)))


def test_what_is_owned_no_longer_is_dropped_and_what_is_new_starts_at_zero(group):
    swarm = group(2, 4000, "int4")
    swarm.epoch(swarm.trained(), (0, 1000, 4000))
    locals_ = swarm.trained()
    plan = swarm.plans(locals_, (0, 3000, 4000))[1]
    added = torch.zeros(1000)
    swarm.residuals[1].for_attempt(plan).add_to_average(
        slice(3000, 4000), added.numpy(), np.empty(1000, np.float32)
    )
    with swarm.residuals[1].held() as tensors:
        assert int(tensors["result_start"]) == 1000
        assert torch.equal(added, tensors["result"][2000:])
    plan = swarm.plans(locals_, (0, 500, 4000))[1]
    added = torch.zeros(3500)
    swarm.residuals[1].for_attempt(plan).add_to_average(
        slice(500, 4000), added.numpy(), np.empty(3500, np.float32)
    )
    assert torch.count_nonzero(added[:500]) == 0
    assert torch.count_nonzero(added[500:]) > 2000


def test_results_of_another_attempt_than_the_committed_one_are_not_taken_over(group):
    swarm = group(2, SMALL, "int4")
    locals_ = swarm.trained()
    plans, _ = swarm.attempt(locals_)
    swarm.attempt(locals_)
    swarm.commit(plans, locals_)
    assert torch.count_nonzero(kept_of_results(swarm)) == 0
    assert torch.count_nonzero(swarm.residuals[0].contribution_residual) > 0


# Saving


def test_what_was_saved_goes_on_where_it_left_off(group):
    saved, unsaved = (group(2, SMALL, "int4") for _ in range(2))
    for swarm in (saved, unsaved):
        swarm.epoch(swarm.trained())
    for me, residuals in enumerate(saved.residuals):
        with residuals.held() as tensors:
            saved.residuals[me] = Residuals.from_tensors(SMALL, tensors)
    for swarm in (saved, unsaved):
        swarm.epoch(swarm.trained())
    assert same_bits(saved.anchor, unsaved.anchor)


def test_a_commit_writes_elsewhere_while_the_tensors_are_held(group):
    swarm = group(2, SMALL, "int4")
    swarm.epoch(swarm.trained())
    with swarm.residuals[0].held() as tensors:
        copies = {name: values.clone() for name, values in tensors.items()}
        swarm.epoch(swarm.trained())
        assert all(torch.equal(tensors[name], copies[name]) for name in copies)
    assert not torch.equal(swarm.residuals[0].contribution_residual, copies["contribution"])


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"contribution": torch.zeros(9)}, "not 10 fp32"),
        ({"contribution": torch.zeros(10, dtype=torch.float64)}, "not 10 fp32"),
        ({"contribution": torch.full((10,), math.inf)}, "not finite"),
        ({"result": torch.zeros(3)}, "come together"),
        ({"result_start": torch.tensor([3])}, "come together"),
        ({"result": torch.zeros(3), "result_start": torch.tensor([8])}, "ends beyond"),
        ({"result": torch.zeros(3), "result_start": torch.tensor([-1])}, "no residual starts"),
        ({"result": torch.zeros(3), "result_start": torch.tensor([0.0])}, "no residual starts"),
        ({"result": torch.zeros(1, 3), "result_start": torch.tensor([0])}, "not 3 fp32"),
        ({"momentum": torch.zeros(10)}, "no residual is named momentum"),
    ],
)
def test_damaged_tensors_are_refused(tensors, message):
    with pytest.raises(ValueError, match=message):
        Residuals.from_tensors(10, tensors)


def test_a_plan_for_another_vector_is_refused(group):
    swarm = group(2, SMALL, "int4")
    with pytest.raises(ValueError, match="do not fit"):
        Residuals(10).for_attempt(swarm.plans(swarm.trained())[0])
