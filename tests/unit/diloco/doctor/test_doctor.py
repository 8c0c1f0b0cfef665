"""The doctor's conclusions from figures that no single machine has; tests/e2e/test_doctor.py plants real faults."""

from __future__ import annotations

import errno
import json
from importlib import metadata

import pytest

from diloco.cli.doctor import _check_with_torch
from diloco.doctor import speed
from diloco.doctor.findings import Finding, as_json, passed, run_check
from diloco.doctor.gpu import judge_gpus
from diloco.doctor.nat import Observation, Port, judge_announcement, judge_nat, judge_port
from diloco.doctor.p2pd import identity_of_peer
from diloco.doctor.resources import Place, check_model_memory, check_place, places_to_check
from diloco.doctor.software import check_packages, check_vllm
from diloco.doctor.swarm import admission_refused, judge_clock
from diloco.options.flags import CkptConfig, GrpoConfig, HvConfig
from diloco.options.trainer import TrainConfig
from diloco.train.devices import Machine
from peers.net.identity import load_or_create
from peers.protocol.refusal import Why

PUBLIC, PRIVATE = "203.0.113.7", "192.168.1.5"


def seen(
    host: str = PUBLIC, local: str = PUBLIC, error: str = "", there: str = "198.51.100.1"
) -> Observation:
    return Observation("peer 3", host, local, there, {"data port": error})


def port(*, announced: int = 30003, is_named: bool = True) -> Port:
    return Port("data port", 30003, announced, is_named, "--hv.announce-data-maddrs")


@pytest.mark.parametrize(
    ("local", "error", "kind"),
    [
        (PUBLIC, "", "direct"),
        (PUBLIC, "no answer in time", "filtered"),
        (PRIVATE, "", "mapped"),
        (PRIVATE, "connection refused", "hidden"),
    ],
)
def test_the_kind_of_nat_follows_from_two_addresses_and_a_call(local, error, kind):
    found = judge_nat(seen(local=local, error=error))
    assert seen(local=local, error=error).kind == kind
    assert found.said.startswith(kind)
    assert found.verdict == ("pass" if not error else "warn")


def test_only_an_address_of_the_internet_is_called_public():
    found = judge_nat(seen(host="9.9.9.9", local="9.9.9.9"))
    assert found.said == "public: seen as 9.9.9.9, this machine's own address"
    found = judge_nat(seen(host=PRIVATE, local=PRIVATE))
    assert found.said == f"direct: seen as {PRIVATE}, this machine's own address, on a private network"


def test_a_peer_on_this_machine_proves_nothing_of_the_outside():
    assert judge_nat(seen(host="127.0.0.1", local="127.0.0.1")).verdict == "warn"
    assert judge_nat(seen(there=PUBLIC)).verdict == "warn"
    assert judge_nat(seen()).verdict == "pass"


def test_a_port_that_was_named_has_to_be_reached_and_another_need_not():
    assert judge_port(port(), seen()).verdict == "pass"
    assert judge_port(port(), seen(error="no answer in time")).verdict == "fail"
    assert judge_port(port(is_named=False), seen(error="no answer in time")).verdict == "warn"


def test_what_mends_a_closed_port_depends_on_what_is_in_its_way():
    closed = "no answer in time"
    assert judge_port(port(), seen(error=closed)).fix.startswith("sudo ufw allow 30003/tcp")
    assert f"/ip4/{PUBLIC}/tcp/" in judge_port(port(), seen(local=PRIVATE, error=closed)).fix
    assert "map port 41003 to 30003" in judge_port(port(announced=41003), seen(error=closed)).fix


def test_an_announced_address_that_is_another_machines_is_told():
    assert judge_announcement(PUBLIC, "--hv.announce-maddrs", seen()) is None
    found = judge_announcement("198.51.100.1", "--hv.announce-maddrs", seen())
    assert found and found.verdict == "warn" and f"/ip4/{PUBLIC}/" in found.fix


@pytest.mark.parametrize(
    ("off_s", "verdict"),
    [(0.2, "pass"), (-0.9, "pass"), (-1.5, "warn"), (2.9, "warn"), (3.1, "fail"), (-40, "fail")],
)
def test_a_clock_may_be_off_by_less_than_three_seconds(off_s, verdict):
    found = judge_clock({"peer 0": 0.0, "peer 1": off_s})
    assert found.verdict == verdict
    assert f"{abs(off_s):.2f} s {'ahead of' if off_s > 0 else 'behind'} that of peer 1" in found.said


@pytest.mark.parametrize(
    ("gpus", "built_for", "names", "verdict", "fix"),
    [
        (["0"], "13.0", ["NVIDIA H200"], "pass", ""),
        (["0"], None, [], "fail", "pip install --force-reinstall"),
        (["0"], "13.0", [], "fail", "nvidia-smi"),
        ([], "13.0", [], "fail", "leave out --device cuda"),
    ],
)
def test_gpus_that_torch_cannot_use_are_told_from_those_that_are_not_there(
    gpus, built_for, names, verdict, fix
):
    found = judge_gpus(gpus, built_for, names)
    assert (found.verdict, fix in found.fix) == (verdict, True)


def test_packages_out_of_their_range_are_named_with_the_range():
    versions = {"torch": "2.9.1", "blake3": None}

    def version_of(name: str) -> str:
        if versions.get(name, "") is None:
            raise metadata.PackageNotFoundError(name)
        return versions.get(name) or metadata.version(name)

    torch, blake3 = check_packages(version_of=version_of)
    assert (torch.name, torch.verdict) == ("packages", "fail")
    assert "torch 2.9.1 is installed" in torch.said and torch.fix == 'pip install "torch<2.14,>=2.10"'
    assert (blake3.name, "blake3 is not installed" in blake3.said) == ("packages", True)
    assert [finding.verdict for finding in check_packages()] == ["pass"]


def test_a_mode_with_packages_of_its_own_has_them_looked_at():
    def version_of(name: str) -> str:
        if name == "trl":
            raise metadata.PackageNotFoundError(name)
        return {"reasoning-gym": "0.1.25", "datasets": "5.0"}.get(name) or metadata.version(name)

    assert "trl" in next(iter(check_packages({"grpo"}, version_of))).fix
    assert [finding.verdict for finding in check_packages((), version_of)] == ["pass"]


def test_a_python_without_vllm_is_no_server(tmp_path):
    (found,) = check_vllm(GrpoConfig(vllm_python="/usr/bin/true"))
    assert found.verdict == "pass"
    (found,) = check_vllm(GrpoConfig(vllm_python="/usr/bin/false"))
    assert (found.verdict, "has no vLLM" in found.said) == ("fail", True)
    (found,) = check_vllm(GrpoConfig(vllm_python=str(tmp_path / "python")))
    assert (found.verdict, "cannot be started" in found.said) == ("fail", True)


def test_a_check_that_breaks_is_a_finding_and_not_the_end():
    def breaks():
        yield passed("first", "fine")
        raise RuntimeError("boom")

    first, second = run_check("thing", breaks)
    assert (first.verdict, second.verdict, second.name) == ("pass", "fail", "thing")
    assert "boom" in second.said


def test_whatever_does_not_pass_says_what_mends_it():
    with pytest.raises(AssertionError):
        Finding("thing", "fail", "broken")
    with pytest.raises(AssertionError):
        Finding("thing", "pass", "fine", "fix it")


def test_json_says_at_its_top_whether_anything_fails():
    found = [passed("a", "fine"), Finding("b", "warn", "so so", "x")]
    assert as_json(found)["ok"] is True
    assert as_json([*found, Finding("c", "fail", "bad", "y")])["ok"] is False
    check = json.loads(json.dumps(as_json(found)))["checks"][1]
    assert check == {"name": "b", "verdict": "warn", "said": "so so", "fix": "x"}


def test_checkpoints_take_room_only_where_some_are_made(tmp_path):
    names = [place.name for place in places_to_check(TrainConfig(hv=HvConfig()), tmp_path, 10**9)]
    assert names == ["run directory", "state directory", "temporary files"]
    kept = TrainConfig(ckpt=CkptConfig(interval=100, topk=3, path=str(tmp_path)))
    assert places_to_check(kept, tmp_path, 10**9)[-1].needed_bytes == 4 * 20 * 10**9
    remote = TrainConfig(ckpt=CkptConfig(interval=100, path="s3://bucket/run"))
    assert len(places_to_check(remote, tmp_path, 10**9)) == 3


def test_a_disk_with_too_little_room_fails_and_one_with_just_enough_warns(tmp_path):
    assert check_place(Place("disk", tmp_path / "not" / "there", 1, "--disk ")).verdict == "pass"
    too_small = check_place(Place("disk", tmp_path, 10**18, "--disk "))
    assert (too_small.verdict, too_small.fix) == ("fail", "--disk /a/larger/disk")
    assert list(tmp_path.iterdir()) == []


def test_a_larger_disk_is_advised_only_in_place_of_a_full_one(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    found = check_place(Place("run directory", tmp_path / "file", 1, "--run-dir "))
    assert "Not a directory" in found.said and found.fix == "--run-dir /a/directory/of/yours"

    def fsync(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", fsync)
    found = check_place(Place("run directory", tmp_path, 1, "--run-dir "))
    assert "No space left" in found.said and found.fix == "--run-dir /a/larger/disk"


def test_a_program_of_ones_own_is_not_judged_by_the_model_that_nobody_trains(monkeypatch):
    monkeypatch.setattr(speed, "flops_of", lambda _device: 100e9)
    config, machine = TrainConfig(path_model="2m", device="cpu"), Machine(num_cores=2)
    usual, own = (
        {finding.name for finding in _check_with_torch(config, 1, machine, has_own_worker=has_one)}
        for has_one in (False, True)
    )
    assert usual - own == {"memory", "speed"}


def test_a_batch_that_is_too_large_is_told_which_would_fit():
    """The GPU has 3 GiB, in which the model itself fits."""
    (found,) = check_model_memory(TrainConfig(path_model="15m"), 1, 3 * 2**30)
    assert found.verdict == "fail" and "GiB of GPU memory" in found.said
    size = int(found.fix.removeprefix("--per-device-train-batch-size "))
    fitting = TrainConfig(path_model="15m", per_device_train_batch_size=size)
    assert [one.verdict for one in check_model_memory(fitting, 1, 3 * 2**30)] == ["pass"]
    assert 32 % size == 0 and size < 32
    recomputing = TrainConfig(path_model="15m", activation_checkpointing=True)
    assert [one.verdict for one in check_model_memory(recomputing, 1, 3 * 2**30)] == ["pass"]


def test_an_epoch_that_would_take_hours_is_a_warning_and_its_length_is_said(monkeypatch):
    monkeypatch.setattr(speed, "flops_of", lambda _device: 100e9)
    slow, quick = (
        TrainConfig(path_model="150m", device="cpu"),
        TrainConfig(path_model="demo", total_batch_size=8),
    )
    (found,) = speed.check_speed(slow, 1)
    # 500 steps of 512 * 1024 tokens, 6 FLOPs each for every weight, at half the speed of matrix products.
    assert found.verdict == "warn" and "an epoch of 500 steps takes 78.3 days" in found.said
    assert [one.verdict for one in speed.check_speed(quick, 1)] == ["pass"]


def test_the_speed_of_a_machine_is_shared_by_its_peers(monkeypatch):
    monkeypatch.setattr(speed, "flops_of", lambda _device: 100e9)
    config = TrainConfig(path_model="demo", total_batch_size=8, device="cpu")
    (alone,), (shared,) = (list(speed.check_speed(config, 1, num_peers=n)) for n in (1, 10_000))
    assert (alone.verdict, shared.verdict) == ("pass", "warn")


def test_a_machine_on_which_no_peer_has_run_has_no_id_for_the_allowlist_yet(tmp_path):
    with identity_of_peer(HvConfig(), tmp_path / "state", tmp_path) as spare:
        found = admission_refused(Why.NOT_LISTED, spare)
    assert spare.peer_id not in found.said + found.fix and "diloco peer" in found.fix
    stored = load_or_create(tmp_path / "state/diloco/0.key")
    stored.release()
    with identity_of_peer(HvConfig(run_id="diloco"), tmp_path / "state", tmp_path) as own:
        assert f"echo {stored.peer_id} >> ALLOWLIST" in admission_refused(Why.NOT_LISTED, own).fix
