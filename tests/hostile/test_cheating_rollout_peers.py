"""Rollout peers that cheat: the learner leaves them out soon, and goes on with the honest ones."""

from __future__ import annotations

import sys

import pytest

from tests.e2e.conftest import start  # noqa: F401
from tests.e2e.test_readme import ROLLOUT_LEARNER, ROLLOUT_PEER
from tests.e2e.test_rollout_peers import LEARNER, REWARD, SHORT
from tests.support.cheating_rollout_peer import CHEATS
from tests.support.commands import coordinator_at, records_of, wait_until
from tests.support.documents import typed
from tests.support.tiny_model import small_bare_model

WITHIN_BATCHES = 20


@pytest.mark.exhaustive
@pytest.mark.parametrize("cheat", CHEATS)
def test_a_cheating_rollout_peer_is_left_out_and_an_honest_one_is_not(start, tmp_path, cheat):  # noqa: F811
    (tmp_path / "reward.py").write_text(REWARD)
    model = small_bare_model(tmp_path / "model", initializer_range=0.2)
    maddr, run_dir = coordinator_at(start), tmp_path / "run"
    common = ("--device", "cpu", "--grpo.reward", f"{tmp_path / 'reward.py'}:early")
    more = ("--total-steps", 100_000, "--grpo.eval-prompts", 0, "--run-dir", run_dir)
    learner = start(
        *typed(ROLLOUT_LEARNER, *common, *LEARNER, *SHORT, *more, maddr=maddr, path_model=model),
        name="learner",
    )
    peer = typed(ROLLOUT_PEER, *common, maddr=maddr, path_model=model)
    start(*peer, name="honest")
    # `python -m diloco peer …` becomes `python -m tests.support.cheating_rollout_peer KIND peer …`.
    cheating = start(
        sys.executable,
        "-m",
        "tests.support.cheating_rollout_peer",
        cheat,
        *peer[peer.index("peer") :],
        name="cheat",
    )

    def events() -> list[dict[str, str]]:
        return [one for one in records_of(run_dir, "event") if one["event"] == "rollout_peer_left_out"]

    wait_until(events, "a rollout peer to be left out", command=learner)
    [left_out] = events()
    assert left_out["peer_id"] in cheating.stdout + cheating.stderr + _log_of(cheating)
    of_it = [one for one in records_of(run_dir, "rollouts") if one["peer_id"] == left_out["peer_id"]]
    assert of_it[-1]["taken"] <= WITHIN_BATCHES * 2
    steps = len(records_of(run_dir, "step"))
    wait_until(lambda: len(records_of(run_dir, "step")) > steps + 5, "steps after it", command=learner)
    assert len(events()) == 1


def _log_of(command) -> str:
    logs = command.directory.glob("runs/*/logs/daemon.log")
    return "".join(path.read_text() for path in logs)
