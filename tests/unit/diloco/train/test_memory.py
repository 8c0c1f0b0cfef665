import subprocess
import sys

import pytest

from diloco.errors import UserError
from diloco.options.model_files import load_model_config, preset_names
from diloco.train.memory import (
    check_memory,
    check_peers_fit,
    least_num_parameters,
    memory_needed_bytes,
)
from diloco.train.model import num_parameters
from tests.support.commands import model_directory

GIB = 2**30


def test_weights_gradients_optimizer_and_swarm_are_counted():
    config = load_model_config("1b")
    need = memory_needed_bytes(10**9, activation_tokens=0, config=config)
    assert need.host_bytes == 32 * 10**9 and need.device_bytes == 0
    alone = memory_needed_bytes(10**9, activation_tokens=0, config=config, in_swarm=False)
    assert alone.host_bytes == 16 * 10**9
    muon = memory_needed_bytes(10**9, activation_tokens=0, config=config, optimizer="muon", in_swarm=False)
    assert muon.host_bytes == 12 * 10**9
    lossy = memory_needed_bytes(10**9, activation_tokens=0, config=config, compression="int4")
    assert lossy.host_bytes == 36 * 10**9
    beside = memory_needed_bytes(10**9, activation_tokens=0, config=config, has_adapters=True)
    assert beside.host_bytes == 4 * 10**9
    for optimizer, per_parameter, compression in (
        ("adamw", 12 + 8, "fp32"),
        ("muon", 8 + 8, "fp32"),
        ("muon", 8 + 12, "int4"),
    ):
        for on_gpu in (False, True):
            plain, saving = (
                memory_needed_bytes(
                    10**9,
                    activation_tokens=0,
                    config=config,
                    optimizer=optimizer,
                    on_gpu=on_gpu,
                    copies_state=copies_state,
                    compression=compression,
                    num_copies=2,
                )
                for copies_state in (False, True)
            )
            assert saving.host_bytes - plain.host_bytes == per_parameter * 10**9
            assert saving.device_bytes == plain.device_bytes
    on_gpu = memory_needed_bytes(10**9, activation_tokens=1024, config=config, on_gpu=True)
    assert on_gpu.host_bytes == 16 * 10**9 and on_gpu.device_bytes > 16 * 10**9


def test_activations_that_are_recomputed_are_counted_for_one_layer():
    config = {"hidden_size": 1024, "num_hidden_layers": 20, "vocab_size": 100}
    kept, recomputed = (
        memory_needed_bytes(0, activation_tokens=1, config=config, recomputes=it) for it in (False, True)
    )
    assert kept.activation_bytes == 2 * 1024 * 16 * 20 + 800
    assert recomputed.activation_bytes == 2 * 1024 * (16 + 20) + 800


def test_a_model_too_large_for_the_machine_is_refused_with_both_figures():
    need = memory_needed_bytes(10**9, activation_tokens=0, config={})
    check_memory(need, path_model="1b", available=30 * GIB)
    with pytest.raises(UserError, match=r"1b needs about 59.6 GiB of memory for 2 peers, 30.0 GiB are free"):
        check_memory(need, path_model="1b", num_peers=2, available=30 * GIB)


def test_what_is_advised_would_help():
    def advice(params, tokens, *, peers=1, **options):
        config = load_model_config("2m")
        need = memory_needed_bytes(params, activation_tokens=tokens, config=config, **options)
        with pytest.raises(UserError) as refusal:
            check_memory(need, path_model="2m", num_peers=peers, available=30 * GIB)
        return str(refusal.value).rpartition("; take ")[2]

    shorter = "a smaller --per-device-train-batch-size, a shorter --seq-length, or --activation-checkpointing"
    assert advice(10**6, 10**8) == advice(10**6, 10**8, peers=2) == shorter
    assert advice(10**10, 0) == advice(10**10, 10**8) == advice(10**10, 0, peers=2) == "a smaller model"
    assert advice(10**9, 0, peers=2) == "a smaller model, or fewer peers here"
    no_checkpoints = "a smaller model, or no checkpoints (--ckpt.interval)"
    assert advice(10**9, 0, copies_state=True) == no_checkpoints
    assert advice(10**10, 0, copies_state=True) == "a smaller model"


def test_a_model_too_large_for_the_gpus_is_refused():
    need = memory_needed_bytes(10**9, activation_tokens=0, config={}, on_gpu=True)
    check_memory(need, path_model="1b", available=30 * GIB, device_available=15 * GIB)
    with pytest.raises(UserError, match=r"about 14.9 GiB of GPU memory, 14.0 GiB are free"):
        check_memory(need, path_model="1b", available=30 * GIB, device_available=14 * GIB)


TRILLIONS = {
    "hidden_size": 65536,
    "intermediate_size": 262144,
    "num_hidden_layers": 160,
    "num_attention_heads": 512,
}


@pytest.mark.parametrize("name", preset_names())
def test_the_least_number_of_parameters_is_near_the_exact_one_and_never_above(name):
    config = load_model_config(name)
    assert 0.7 < least_num_parameters(config) / num_parameters(config) <= 1


@pytest.mark.parametrize(
    "config", [{}, {"hidden_size": [1, 2], "num_hidden_layers": "many"}, {"n_embd": 768, "n_layer": -1}]
)
def test_a_model_that_names_its_sizes_otherwise_is_not_guessed_at(config):
    assert least_num_parameters({"model_type": "other", **config}) == 0


def test_a_model_of_trillions_is_refused_on_any_machine_and_one_that_fits_is_not(tmp_path):
    huge = str(model_directory(tmp_path / "huge", **TRILLIONS))
    with pytest.raises(UserError, match=r"needs about \d+\.\d GiB of memory for 2 peers"):
        check_peers_fit(huge, num_peers=2, on_gpu=False, optimizer="muon")
    with pytest.raises(UserError, match="GiB of memory, "):
        check_peers_fit(huge, on_gpu=True, optimizer="muon")
    check_peers_fit(str(model_directory(tmp_path / "tiny")), num_peers=2, on_gpu=False, optimizer="adamw")


def test_checking_loads_no_torch():
    script = "import sys, diloco.train.memory; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30)
