import hashlib
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from diloco.data.tokenizer import load_tokenizer
from diloco.errors import UserError
from diloco.options.model_files import (
    PRESETS_DIR,
    clean_config,
    load_model_config,
    preset_names,
    save_pretrained_dir,
)
from diloco.train.model import load_model, model_from_config, num_parameters

VLLM_HEAD_DIMS = {32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512}
SMALL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 264,
}


def digest(model):
    parts = [tensor.detach().numpy().tobytes() for tensor in model.state_dict().values()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def write_config(directory, config=SMALL):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def test_presets_have_the_sizes_of_their_names():
    sizes = {name: num_parameters(load_model_config(name)) for name in preset_names()}
    assert list(sizes) == ["demo", "2m", "15m", "150m", "1b"]
    assert 0.3e6 < sizes["demo"] < 0.4e6
    assert 1.7e6 < sizes["2m"] < 2.3e6
    assert 13e6 < sizes["15m"] < 17e6
    # 150m and 1b are named after PrimeIntellect's, whose embeddings are not counted in the name.
    assert 145e6 < sizes["150m"] - 2 * 32_000 * 1024 < 155e6
    assert 1.0e9 < sizes["1b"] < 1.2e9


def test_presets_have_heads_that_servers_accept_and_byte_level_ones_a_matching_vocabulary():
    for name in preset_names():
        config = load_model_config(name)
        assert config["hidden_size"] // config["num_attention_heads"] in VLLM_HEAD_DIMS
        assert config["head_dim"] * config["num_attention_heads"] == config["hidden_size"]
    for name in ("demo", "2m", "15m"):
        assert (
            load_model_config(name)["vocab_size"]
            == len(AutoTokenizer.from_pretrained(PRESETS_DIR / name))
            == 264
        )


def test_the_model_of_the_tests_is_the_smallest_preset(request):
    directory = request.config.rootpath / "tests" / "models" / "llama-2m-fresh"
    names = sorted(path.name for path in (PRESETS_DIR / "2m").iterdir())
    assert sorted(path.name for path in directory.iterdir()) == names
    for name in names:
        assert (directory / name).read_bytes() == (PRESETS_DIR / "2m" / name).read_bytes()


def test_fresh_weights_depend_on_the_seed_alone_and_leave_the_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    one = model_from_config(SMALL, seed=1)
    assert torch.equal(torch.rand(4), expected)
    torch.manual_seed(99)
    assert digest(one) == digest(model_from_config(SMALL, seed=1))
    assert digest(one) != digest(model_from_config(SMALL, seed=2))
    assert {parameter.dtype for parameter in one.parameters()} == {torch.float32}


def test_preset_directory_and_config_give_the_same_fresh_model(tmp_path):
    path = write_config(tmp_path / "fresh", load_model_config("2m"))
    models = [
        load_model("2m", seed=3),
        load_model(path, seed=3),
        model_from_config(load_model_config("2m"), seed=3),
    ]
    assert len({digest(model) for model in models}) == 1


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_model_loads_with_transformers_and_with_us(tmp_path, tied):
    config = {**SMALL, "tie_word_embeddings": tied}
    model = model_from_config(config, seed=1)
    directory = tmp_path / "run" / "model"
    for _ in range(2):
        save_pretrained_dir(directory, model.state_dict(), config, load_tokenizer("2m"))
    assert [path.name for path in directory.parent.iterdir()] == ["model"]
    theirs, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    ids = AutoTokenizer.from_pretrained(directory)("hello", return_tensors="pt")["input_ids"]
    ours = load_model(str(directory), seed=77)
    assert theirs.dtype == torch.float32
    assert torch.equal(theirs(ids).logits, model(ids).logits)
    assert torch.equal(ours(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("stored", "kept"),
    [
        ([torch.bfloat16, torch.bfloat16], torch.bfloat16),
        ([torch.float16, torch.float16], torch.float16),
        ([torch.bfloat16, torch.float32], torch.float32),
    ],
)
def test_a_model_keeps_the_type_of_its_files_on_demand_if_they_have_one(tmp_path, stored, kept):
    state = model_from_config(SMALL, seed=1).state_dict()
    # The config.json names the first type, whatever the others are.
    types = [stored[0], *[stored[1]] * (len(state) - 1)]
    state = {name: tensor.to(dtype) for (name, tensor), dtype in zip(state.items(), types, strict=True)}
    save_pretrained_dir(tmp_path / "model", state, SMALL, None)
    ours = load_model(str(tmp_path / "model"), seed=1, keeps_dtype=True).state_dict()
    assert {tensor.dtype for tensor in ours.values()} == {kept}
    assert all(torch.equal(ours[name].float(), tensor.float()) for name, tensor in state.items())
    assert load_model(str(tmp_path / "model"), seed=1).dtype == torch.float32
    assert load_model(write_config(tmp_path / "new"), seed=1, keeps_dtype=True).dtype == torch.float32


def test_a_model_that_is_tied_by_default_is_saved_without_its_second_name(tmp_path):
    config = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 264}
    model = model_from_config(config, seed=1)
    save_pretrained_dir(tmp_path / "model", model.state_dict(), config, None)
    theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert digest(theirs) == digest(model)


def test_a_save_that_fails_leaves_the_old_model(tmp_path):
    directory = tmp_path / "model"
    model = model_from_config(SMALL, seed=1)
    save_pretrained_dir(directory, model.state_dict(), SMALL, None)
    before = (directory / "model.safetensors").read_bytes()
    with pytest.raises(TypeError):
        save_pretrained_dir(directory, model.state_dict(), {**SMALL, "broken": object()}, None)
    assert (directory / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("name", ["nope", "./nope", "no/such/model", "/nowhere", "~/nowhere", "a b/c"])
def test_a_path_that_is_no_model_is_refused_with_the_presets(name):
    with pytest.raises(UserError, match="2m, 15m, 150m, 1b"):
        load_model_config(name)


def test_a_directory_without_a_config_is_refused(tmp_path):
    with pytest.raises(UserError, match="has no config\\.json"):
        load_model(str(tmp_path), seed=1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[]", "no model_type"),
        ("{}", "no model_type"),
        ("{", "not a model's config.json"),
        ('{"model_type": "none-such"}', "cannot use this config.json"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "cannot use this config.json"),
        ('{"model_type": "llama", "num_hidden_layers": 1000000}', "at most 1024"),
        ('{"model_type": "vit"}', "no causal language model"),
        ('{"model_type": "llama", "auto_map": {"AutoConfig": "x.y"}}', "run code from elsewhere"),
    ],
)
def test_a_config_that_is_no_causal_lm_is_refused(tmp_path, config, message):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(UserError, match=message):
        load_model(str(tmp_path), seed=1)


def test_a_config_from_a_peer_cannot_choose_code_to_run():
    sent = {**SMALL, "_attn_implementation": "someone/kernel", "attn_implementation": "someone/kernel"}
    assert "attn_implementation" not in clean_config(sent, origin="peer")
    assert model_from_config(sent, seed=1).config._attn_implementation == "sdpa"


def test_pickled_partial_and_broken_weights_are_refused(tmp_path):
    pickled = write_config(tmp_path / "pickled")
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(UserError, match="safetensors"):
        load_model(pickled, seed=1)
    partial = write_config(tmp_path / "partial")
    save_file(
        {"model.norm.weight": torch.ones(64)}, tmp_path / "partial" / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(UserError, match="lack 20 tensors"):
        load_model(partial, seed=1)
    broken = write_config(tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"short")
    with pytest.raises(UserError, match="do not load"):
        load_model(broken, seed=1)


def test_reading_a_config_loads_no_torch():
    program = (
        "import sys; from diloco.options.model_files import load_model_config, preset_names\n"
        "load_model_config('2m'), preset_names(); sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
