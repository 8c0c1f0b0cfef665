"""Weights as bytes: whole, or only the elements that have changed, with everything needed to check them.

A blob is a safetensors file with metadata. Whole ones hold tensors by name; patches hold, for each tensor that
changed, flat indices (`<name>::at`) and the new values (`<name>::to`). Small learning rates change few of the bf16
values that fp32 weights are rounded to (arXiv 2602.03839), so a patch may be a hundredth of the whole. Comparison and
reconstruction are of bits: NaN payloads and signed zeros survive.

Used by trainers and, in another Python environment, by the servers: nothing here imports more than torch and
safetensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

FORMAT = "diloco-weights-1"
_AT, _TO = "::at", "::to"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

State = dict[str, Tensor]


class BadBlob(ValueError):
    """A blob that must not be used, and what is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class Label:
    """What a blob is."""

    version: int
    base: int | None = None
    """The version that a patch applies to; none: it is whole."""
    digest: str = ""
    """Of all the weights that the version has (see digest_of), whatever part of them this blob holds."""
    part: int = 0
    num_parts: int = 1


def digest_of(state: Mapping[str, Tensor]) -> str:
    """sha256 of names, types, shapes and bits, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(_bits(tensor).numpy().data)
    return digest.hexdigest()


def packed(tensors: Mapping[str, Tensor], label: Label) -> bytes:
    """A whole blob, or one part of one."""
    return save({name: tensor.contiguous() for name, tensor in tensors.items()}, _metadata(label))


def packed_changes(old: Mapping[str, Tensor], new: Mapping[str, Tensor], label: Label) -> bytes:
    """A patch from one state to another of the same names, shapes and types."""
    changes: State = {}
    for name, tensor in new.items():
        before, after = _bits(old[name]), _bits(tensor)
        at = (before != after).nonzero().flatten()
        if at.numel():
            # Four bytes reach as far as nearly all tensors do.
            changes[name + _AT] = at.to(torch.int32) if before.numel() <= 2**31 else at
            changes[name + _TO] = tensor.flatten()[at].contiguous()
    return save(changes, _metadata(label))


def unpacked(blob: bytes) -> tuple[Label, State]:
    """What a blob holds. Raises BadBlob for anything that `packed` or `packed_changes` would not have made."""
    try:
        tensors = load(blob)
        length = int.from_bytes(blob[:8], "little")
        header = json.loads(blob[8 : 8 + length])
        fields = json.loads(header["__metadata__"]["label"])
        if header["__metadata__"]["format"] != FORMAT:
            raise BadBlob(f"its format is not {FORMAT}")
        label = Label(**fields)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, BadBlob):
            raise
        raise BadBlob(f"it is no blob of weights: {error}") from error
    return label, tensors


def patched(old: Mapping[str, Tensor], changes: Mapping[str, Tensor]) -> State:
    """The state after a patch; tensors without changes are the old ones themselves. Raises BadBlob."""
    new = dict(old)
    names = {name.removesuffix(_AT) for name in changes if name.endswith(_AT)}
    if changes.keys() != {name + end for name in names for end in (_AT, _TO)}:
        raise BadBlob("the patch's indices and values do not belong together")
    for name in names:
        if name not in old:
            raise BadBlob(f"the patch changes {name}, which there is not")
        at, values = changes[name + _AT].long(), changes[name + _TO]
        tensor = old[name]
        if at.shape != values.shape or at.ndim != 1 or values.dtype != tensor.dtype:
            raise BadBlob(f"the patch of {name} has another type or other shapes")
        if at.numel() and (int(at.min()) < 0 or int(at.max()) >= tensor.numel()):
            raise BadBlob(f"the patch of {name} reaches past its end")
        flat = _bits(tensor).clone()
        flat[at] = _bits(values)
        new[name] = flat.view(tensor.dtype).view(tensor.shape)
    return new


def check_state(state: Mapping[str, Tensor], expected: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Raise BadBlob, naming the tensor, unless exactly the expected ones are there, of those types and shapes, finite.

    `expected` holds (dtype as torch prints it, shape) by name.
    """
    if missing := sorted(set(expected) - set(state)):
        group = fused_group(missing[0], expected)
        why = f", a part of {group}, which the server holds as one" if group else ""
        raise BadBlob(f"{missing[0]} is missing{why}")
    if unknown := sorted(set(state) - set(expected)):
        raise BadBlob(f"the model has no {unknown[0]}")
    for name, (dtype, shape) in expected.items():
        tensor = state[name]
        if tuple(tensor.shape) != tuple(shape):
            raise BadBlob(f"{name} has the shape {tuple(tensor.shape)}, the model's has {tuple(shape)}")
        if str(tensor.dtype) != dtype:
            raise BadBlob(f"{name} is {tensor.dtype}, the model's is {dtype}")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise BadBlob(f"{name} holds values that are not finite")


def fused_group(name: str, names: Iterable[str]) -> str:
    """The group of projections that servers fuse and this one belongs to, as q, k and v; empty: none."""
    for group in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        for part in group:
            others = {name.replace(f".{part}.", f".{other}.") for other in group}
            if f".{part}." in name and len(others & set(names)) > 1:
                return "+".join(group)
    return ""


def parts_of(state: Mapping[str, Tensor], *, most_bytes: int) -> list[State]:
    """The tensors in runs of about so many bytes, in order, so that no blob has to be large: layer by layer."""
    parts: list[State] = [{}]
    size = 0
    for name, tensor in state.items():
        if parts[-1] and size + tensor.nbytes > most_bytes:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += tensor.nbytes
    return parts


def _bits(tensor: Tensor) -> Tensor:
    """The same bytes as whole numbers, flat."""
    return tensor.detach().contiguous().flatten().view(_BITS[tensor.element_size()])


def _metadata(label: Label) -> dict[str, str]:
    return {"format": FORMAT, "label": json.dumps(asdict(label))}
