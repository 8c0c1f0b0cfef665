"""How a peer agrees with the swarm on the manifest, over a fake mesh."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from diloco.launch.swarm_config import adopt_manifest, daemon_config
from diloco.options.trainer import TrainConfig, parse_train_config
from peers.core.joining import manifest_digest
from peers.daemon import agreement
from peers.daemon.agreement import Agreement
from peers.errors import ProtocolError, UserError
from peers.protocol.mesh import Manifest, WantManifest
from peers.timing import START_S


@dataclass
class Swarm:
    """A fake presence with one other peer, whose run has begun and which sends its manifest when asked."""

    theirs: dict
    me: str = "me"
    galaxy_size: int = 1
    agreement: Agreement = field(init=False)

    def __post_init__(self):
        other = SimpleNamespace(
            peer_id="other", world_rank=0, manifest_digest=manifest_digest(self.theirs), head="ab"
        )
        mine = SimpleNamespace(peer_id="me", world_rank=1, manifest_digest="", head="")
        self.view = {"other": other, "me": mine}
        self.mesh = self
        self.agreement = Agreement(self)

    def send_to(self, peer_id, message):
        assert (peer_id, message) == ("other", WantManifest())
        self.agreement.received(self.view[peer_id], Manifest(fields=self.theirs))

    def publish(self):
        pass


def test_only_the_manifest_that_was_announced_is_taken_from_whoever_sends_it(monkeypatch):
    """The other peer announces one manifest and sends another whenever it is asked."""
    monkeypatch.setattr(agreement, "FETCH_TIMEOUT_S", 0.01)
    swarm = Swarm(announced := {"hv.local_steps": 7}, galaxy_size=2)
    asked = []

    def send_to(peer_id, _):
        asked.append(peer_id)
        swarm.agreement.received(swarm.view[peer_id], Manifest(fields=announced | {"hv.local_steps": 8}))

    swarm.send_to, swarm.wait_for_change = send_to, swarm_is_quiet
    with pytest.raises(Quiet):
        asyncio.run(swarm.agreement.reach({"hv.local_steps": 1}, (), deadline=math.inf))
    assert asked == ["other"] * agreement.MAX_FAILURES
    assert not swarm.agreement.manifest


def test_a_peer_whose_manifest_cannot_be_one_is_asked_once():
    swarm, asked = Swarm({"seed": "many"}, galaxy_size=2), []
    send_to = swarm.send_to
    swarm.send_to = lambda *told: (asked.append(told), send_to(*told))
    swarm.wait_for_change = swarm_is_quiet
    with pytest.raises(Quiet):
        asyncio.run(swarm.agreement.reach({"seed": 1}, (), deadline=math.inf))
    assert len(asked) == 1


@pytest.mark.parametrize("is_over", [False, True])
def test_a_peer_of_lower_rank_that_publishes_no_manifest_holds_nobody_up_for_ever(monkeypatch, is_over):
    swarm = Swarm({}, galaxy_size=2)
    swarm.view["other"].manifest_digest = swarm.view["other"].head = ""
    now, times = 100.0, []
    monkeypatch.setattr(agreement, "time", SimpleNamespace(monotonic=lambda: now + 10.0 * len(times)))

    async def wait_for_change():
        times.append(10.0)
        if len(times) > 10:
            raise Quiet

    swarm.wait_for_change = wait_for_change
    reach = swarm.agreement.reach({"seed": 1}, (), deadline=0.0 if is_over else math.inf)
    if not is_over:
        with pytest.raises(Quiet):
            asyncio.run(reach)
        return
    assert asyncio.run(reach) == {"seed": 1}
    assert swarm.agreement.is_own
    # The other one, which may be about to publish its own, had START_S to do so.
    assert START_S <= sum(times) <= START_S + 10.0


def test_a_manifest_that_no_peer_can_run_by_is_an_error_of_its_sender():
    swarm = Swarm({})
    with pytest.raises(ProtocolError, match="not a manifest"):
        swarm.agreement.received(swarm.view["other"], Manifest(fields={"hv.local_steps": 0}))


class Quiet(Exception):
    """Raised when this peer waits for a change in the swarm."""


async def swarm_is_quiet():
    raise Quiet


def test_a_setting_that_the_user_has_named_and_the_swarm_contradicts_is_refused():
    with pytest.raises(UserError, match=r"hv.local_steps: here 1, in the swarm 7"):
        asyncio.run(
            Swarm({"hv.local_steps": 7}).agreement.reach(
                {"hv.local_steps": 1}, {"hv.local_steps"}, deadline=math.inf
            )
        )


def proposed(*argv, has_own_worker):
    config, named = parse_train_config(["--world-rank", "0", *argv])
    told = daemon_config(config, named, has_own_worker=has_own_worker)
    return told["manifest"], told["named"]


def agreed(here, swarm):
    """The manifest that is agreed on; `here` and `swarm`: whether this peer and the swarm have `--worker`."""
    ours, named = proposed(has_own_worker=here)
    theirs, _ = proposed("--hv.local-steps", "7", has_own_worker=swarm)
    return asyncio.run(Swarm(theirs).agreement.reach(ours, named, deadline=math.inf))


@pytest.mark.parametrize(
    ("here", "swarm", "text"),
    [
        (False, True, "The swarm trains with a program of its own.*: give the --worker"),
        (True, False, "The swarm trains with diloco's trainer.*: leave out --worker"),
    ],
)
def test_a_peer_whose_worker_has_other_tensors_than_the_swarms_is_refused(here, swarm, text):
    with pytest.raises(UserError, match=text):
        agreed(here, swarm)


@pytest.mark.parametrize("own", [False, True])
def test_a_peer_takes_over_the_manifest_of_a_swarm_with_the_same_kind_of_worker(own, tmp_path):
    manifest = agreed(own, own)
    assert manifest["hv.local_steps"] == 7
    assert adopt_manifest(TrainConfig(), manifest, (), run_dir=tmp_path).hv.local_steps == 7


def test_of_a_swarm_that_trains_a_program_of_its_own_nothing_is_said_that_only_our_trainer_follows():
    manifest = agreed(True, True)
    ours = {"path_model", "model", "tokenizer", "total_steps", "total_batch_size", "lr"}
    assert not ours & manifest.keys()
    # The outer step depends on the optimizer, so that one stays.
    assert manifest["optimizer"] == "adamw"
