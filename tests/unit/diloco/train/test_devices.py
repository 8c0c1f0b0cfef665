from __future__ import annotations

from pathlib import Path

import pytest

from diloco.train.devices import hardware_in_words, num_cores, this_machine

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
