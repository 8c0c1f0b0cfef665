"""The training step."""

from __future__ import annotations

import torch

from diloco.train.inner import InnerLoop
from diloco.train.model import load_model
from diloco.train.sharding import Precision
from tests.support.commands import model_directory


def test_a_model_loaded_from_weights_drops_out_from_the_first_step(tmp_path):
    heads = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "attention_dropout": 0.5}
    directory = model_directory(tmp_path / "model", **heads, num_hidden_layers=2, intermediate_size=27)
    load_model(str(directory), seed=1).save_pretrained(directory)
    model = load_model(str(directory), seed=1)
    inner = InnerLoop(
        model,
        torch.optim.SGD(model.parameters()),
        precision=Precision(torch.float32),
        device=torch.device("cpu"),
        micro_batch_size=2,
        max_grad_norm=1.0,
    )
    assert (directory / "model.safetensors").is_file()
    assert all(module.training for module in inner.model.modules())
    samples = torch.arange(34).reshape(2, 17)
    assert inner.step(samples, lr=0.0).loss != inner.step(samples, lr=0.0).loss
