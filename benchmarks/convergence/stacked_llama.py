"""Many Llamas of one shape side by side: every weight has a leading dimension, one entry for each model.

A model of a million parameters leaves a GPU nearly idle; a hundred of them in one batched product do not. The forward
pass is that of transformers' LlamaForCausalLM; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from diloco.train.model import outline

Weights = Mapping[str, Tensor]
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Shape:
    """What the forward pass needs of a model's config.json."""

    num_layers: int
    num_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """Raises ValueError if the model is not a plain Llama."""
        expected = {"model_type": "llama", "tie_word_embeddings": False, "hidden_act": "silu"}
        expected["num_key_value_heads"] = config["num_attention_heads"]
        for name, value in expected.items():
            if config[name] != value:
                raise ValueError(f"only a plain Llama runs side by side: {name} is {config[name]!r}")
        return cls(
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            head_dim=config["head_dim"],
            rms_norm_eps=config["rms_norm_eps"],
            rope_theta=config["rope_theta"],
        )


class Stack:
    """The weights of `num_models` models as rows of one matrix: fp32 [num_models, number of parameters].

    Hidden matrices come first in a row, those of one shape together, then embedding, head and norms, so that an
    optimizer that treats hidden matrices differently works on slices.
    """

    def __init__(self, config: Mapping[str, Any], num_models: int, device: torch.device) -> None:
        parameters = dict(outline(config).named_parameters())
        ordered = sorted(parameters, key=lambda name: _place(name, parameters[name]))
        self.shapes = {name: parameters[name].shape for name in ordered}
        self.num_hidden = sum(p.numel() for name, p in parameters.items() if is_hidden_matrix(name, p))
        self.rows = torch.empty(num_models, sum(p.numel() for p in parameters.values()), device=device)

    def views(self, start: int = 0, end: int | None = None, *, of: Tensor | None = None) -> dict[str, Tensor]:
        """Parameters of models `start` to `end` by name, [end - start, *shape], in these rows or the rows `of`."""
        rows = (self.rows if of is None else of)[start:end]
        found, offset = {}, 0
        for name, shape in self.shapes.items():
            found[name] = rows[:, offset : offset + shape.numel()].unflatten(1, shape)
            offset += shape.numel()
        return found

    def named_parameters(self, model: int) -> Iterator[tuple[str, Tensor]]:
        """One model's parameters, views of its row."""
        for name, values in self.views(model, model + 1).items():
            yield name, values[0]

    def hidden_groups(self, rows: Tensor) -> list[Tensor]:
        """Views of the hidden matrices in `rows`, one for each shape: [models, matrices, fan_out, fan_in]."""
        groups: dict[torch.Size, int] = {}
        for name, shape in self.shapes.items():
            if is_hidden_matrix(name, torch.empty(shape, device="meta")):
                groups[shape] = groups.get(shape, 0) + 1
        found, offset = [], 0
        for shape, count in groups.items():
            size = count * shape.numel()
            found.append(rows[:, offset : offset + size].unflatten(1, (count, *shape)))
            offset += size
        return found

    def decayed(self) -> Tensor:
        """Which values have weight decay: 1.0 in matrices, 0.0 in vectors, [number of parameters]."""
        parts = [torch.full((shape.numel(),), float(len(shape) >= 2)) for shape in self.shapes.values()]
        return torch.cat(parts).to(self.rows.device)


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.ndim == 2 and not name.startswith(("model.embed_tokens", "lm_head"))


def _place(name: str, parameter: nn.Parameter) -> tuple[bool, tuple[int, ...], str]:
    return (not is_hidden_matrix(name, parameter), tuple(parameter.shape), name)


@dataclass(frozen=True)
class Forward:
    """The forward pass. Its expensive parts may be compiled; all layers share one compilation."""

    shape: Shape
    compiled: Compile = lambda function: function

    @cached_property
    def _layer(self) -> Callable[..., Tensor]:
        return self.compiled(_layer)

    @cached_property
    def _head(self) -> Callable[..., Tensor]:
        return self.compiled(_head)

    def losses(self, weights: Weights, tokens: Tensor) -> Tensor:
        """Each model's mean next-token loss in nats, fp32 [models]; `tokens` is int64 [models, batch, length + 1]."""
        inputs, targets = tokens[:, :, :-1], tokens[:, :, 1:]
        embedding = weights["model.embed_tokens.weight"]
        first = torch.arange(len(tokens), device=tokens.device).view(-1, 1, 1) * embedding.shape[1]
        hidden = functional.embedding(inputs + first, embedding.flatten(0, 1))
        rotation = _rotation(inputs.shape[2], self.shape, tokens.device)
        for layer in range(self.shape.num_layers):
            hidden = self._layer(hidden, _part(weights, f"model.layers.{layer}."), rotation, self.shape)
        head = {"norm": weights["model.norm.weight"], "lm_head": weights["lm_head.weight"]}
        return self._head(hidden, head, targets, self.shape)

    def gradients(
        self, weights: Weights, tokens: Tensor, *, dtype: torch.dtype
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Every model's loss, [models], and the gradient of each in its own weights, in the order of `weights`.

        `weights` require gradients. Matrix products are in `dtype`, as under diloco.train.sharding.Precision.
        """
        with torch.autocast(tokens.device.type, dtype=dtype, enabled=dtype != torch.float32):
            each = self.losses(weights, tokens)
        # Models share no weights, so the gradient of the summed loss is each model's own gradient.
        return each.detach(), torch.autograd.grad(each.sum(), tuple(weights.values()))


def _part(weights: Weights, prefix: str) -> dict[str, Tensor]:
    cut = len(prefix)
    return {n[cut:].removesuffix(".weight"): w for n, w in weights.items() if n.startswith(prefix)}


def _layer(hidden: Tensor, weights: Weights, rotation: tuple[Tensor, Tensor], shape: Shape) -> Tensor:
    states = _normed(hidden, weights["input_layernorm"], shape)
    query, key, value = (_linear(states, weights[f"self_attn.{part}_proj"]) for part in "qkv")
    attended = _attention(query, key, value, rotation, shape)
    hidden = hidden + _linear(attended, weights["self_attn.o_proj"])
    states = _normed(hidden, weights["post_attention_layernorm"], shape)
    gate = functional.silu(_linear(states, weights["mlp.gate_proj"]))
    return hidden + _linear(gate * _linear(states, weights["mlp.up_proj"]), weights["mlp.down_proj"])


def _head(hidden: Tensor, weights: Weights, targets: Tensor, shape: Shape) -> Tensor:
    logits = _linear(_normed(hidden, weights["norm"], shape), weights["lm_head"])
    each = functional.cross_entropy(logits.float().flatten(0, 2), targets.flatten(), reduction="none")
    return each.view(len(targets), -1).mean(dim=1)


def _normed(states: Tensor, weight: Tensor, shape: Shape) -> Tensor:
    scale = torch.rsqrt(states.square().mean(dim=-1, keepdim=True) + shape.rms_norm_eps)
    return weight.view(len(weight), 1, 1, -1) * (states * scale)


def _linear(states: Tensor, weight: Tensor) -> Tensor:
    product = torch.bmm(states.flatten(1, 2), weight.mT)
    return product.view(*states.shape[:-1], -1)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, rotation: tuple[Tensor, Tensor], shape: Shape
) -> Tensor:
    """Causal attention within each sample: [models, batch, length, width] each."""
    models, batch, length, _ = query.shape
    cosine, sine = rotation

    def heads(states: Tensor) -> Tensor:
        return states.reshape(models * batch, length, shape.num_heads, shape.head_dim).transpose(1, 2)

    def rotated(states: Tensor) -> Tensor:
        half = shape.head_dim // 2
        turned = torch.cat((-states[..., half:], states[..., :half]), dim=-1)
        return (states * cosine + turned * sine).to(value.dtype)

    found = functional.scaled_dot_product_attention(
        rotated(heads(query)), rotated(heads(key)), heads(value), is_causal=True
    )
    return found.transpose(1, 2).reshape(models, batch, length, -1)


def _rotation(length: int, shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary embedding, fp32 [length, head_dim] each."""
    exponents = torch.arange(0, shape.head_dim, 2, device=device).float() / shape.head_dim
    angles = torch.outer(torch.arange(length, device=device).float(), shape.rope_theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()
