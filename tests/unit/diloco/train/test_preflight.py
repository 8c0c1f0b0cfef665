import subprocess
import sys

import pytest

from diloco.errors import UserError
from diloco.options.model_files import load_model_config, preset_names
from diloco.train.memory import check_peers_fit, least_num_parameters
from diloco.train.model import num_parameters
from tests.support.commands import model_directory

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
        check_peers_fit(huge, num_peers=2, on_gpu=False)
    with pytest.raises(UserError, match="GiB of memory, "):
        check_peers_fit(huge, on_gpu=True)
    check_peers_fit(str(model_directory(tmp_path / "tiny")), num_peers=2, on_gpu=False)


def test_checking_loads_no_torch():
    script = "import sys, diloco.train.memory; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30)
