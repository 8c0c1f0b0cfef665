"""How a peer agrees with the swarm on the manifest, over a mesh that is faked."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from diloco.launch.swarm_config import adopt_manifest, daemon_config
from diloco.options.trainer import TrainConfig, parse_train_config
from peers.core.joining import manifest_digest
from peers.daemon.agreement import Agreement
from peers.errors import UserError
from peers.protocol.mesh import Manifest, WantManifest


@dataclass
class Swarm:
    """A presence whose only other peer is of a run that has begun, and hands over its manifest."""

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


def proposed(*argv, has_own_worker):
    config, named = parse_train_config(["--world-rank", "0", *argv])
    told = daemon_config(config, named, has_own_worker=has_own_worker)
    return told["manifest"], told["named"]


def agreed(here, swarm):
    """The manifest, where this peer and the swarm were started with `--worker` or without."""
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
    # The outer step follows it.
    assert manifest["optimizer"] == "adamw"
