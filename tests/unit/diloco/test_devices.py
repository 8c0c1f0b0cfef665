from __future__ import annotations

from pathlib import Path

import pytest

from diloco.devices import hardware_in_words, num_cores

ON_CPU = f"CPU, {num_cores()} cores"


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs of one kind and one of another, as far as it tells."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
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
