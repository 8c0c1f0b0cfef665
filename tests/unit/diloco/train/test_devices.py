from __future__ import annotations

from pathlib import Path

import pytest

from diloco.errors import UserError
from diloco.train import devices
from diloco.train.devices import check_gpus_listed, hardware_in_words, num_cores, this_machine

ON_CPU = f"CPU, {num_cores()} cores"


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake nvidia-smi that reports two GPUs of one kind and one of another."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        '  *memory.total*) printf "81559 MiB\\n81559 MiB\\n23034 MiB\\n";;\n'
        '  *query-gpu=index*) printf "0\\n1\\n2\\n";;\n'
        '  *"-i 0"*) echo "NVIDIA H100";;\n'
        '  *"-i 7"*) echo "No devices were found"; exit 6;;\n'
        '  *query-gpu=name*) printf "NVIDIA H100\\nNVIDIA H100\\nNVIDIA L4\\n";;\n'
        "esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


def test_what_a_peer_trains_on_is_told_in_words(nvidia_smi):
    assert hardware_in_words({}, "auto") == "2 × NVIDIA H100, 1 × NVIDIA L4"
    assert hardware_in_words({"CUDA_VISIBLE_DEVICES": "0"}, "cuda") == "1 × NVIDIA H100"


def test_gpus_that_are_not_used_or_cannot_be_asked_are_not_told(nvidia_smi):
    assert hardware_in_words({}, "cpu") == ON_CPU
    assert hardware_in_words({"CUDA_VISIBLE_DEVICES": ""}, "auto") == ON_CPU
    assert hardware_in_words({"CUDA_VISIBLE_DEVICES": "7"}, "auto") == ON_CPU


def test_a_machine_without_gpus_says_so(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert hardware_in_words({}, "auto") == ON_CPU


def test_peers_on_gpus_share_the_memory_of_the_smallest(nvidia_smi):
    machine = this_machine({}, "auto", num_peers=6)
    assert (machine.num_gpus, machine.gpu_bytes) == (3, 23034 << 20)
    assert machine.gpu_bytes_each == 23034 << 19
    assert machine.in_words() == "3 GPUs of 22 GiB, shared by 6 peers"


def test_peers_on_processors_share_cores_and_memory(nvidia_smi):
    machine = this_machine({}, "cpu", num_peers=2)
    assert (machine.num_gpus, machine.gpu_bytes) == (0, 0)
    assert machine.cores_each == max(num_cores() // 2, 1)


@pytest.mark.parametrize("program", ["exit 9", "exec sleep 60", None], ids=["fails", "hangs", "missing"])
def test_gpus_that_nvidia_smi_does_not_list_are_not_taken_for_none(tmp_path, monkeypatch, program):
    for device in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / device).touch()
    monkeypatch.setattr(devices, "_DEVICES", tmp_path)
    monkeypatch.setattr(devices, "_NVIDIA_SMI_TIMEOUT_S", 0.05)
    if program:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if program else "/nowhere")
    gpus = this_machine({}, "auto").gpus
    with pytest.raises(
        UserError, match=r"has 2 GPUs .* but nvidia-smi lists none.* set CUDA_VISIBLE_DEVICES"
    ):
        check_gpus_listed({}, "auto", gpus)
    check_gpus_listed({}, "cpu", gpus)
    check_gpus_listed({"CUDA_VISIBLE_DEVICES": ""}, "auto", gpus)
    check_gpus_listed({}, "auto", ("0", "1"))
    # One GPU cannot be divided wrongly, whoever lists it.
    (tmp_path / "nvidia1").unlink()
    check_gpus_listed({}, "auto", gpus)
