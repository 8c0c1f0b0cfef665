"""Serializes weights, either all of them or only the elements that have changed, with digests to verify them.

A blob is a safetensors file with metadata. A whole blob holds tensors by name; a patch holds, for each tensor that
changed, flat indices (`<name>::at`) and the differences of the values' bits as integers (`<name>::by`). With small
learning rates few weights change after rounding from fp32 to bf16 (arXiv 2602.03839), most of them to the next value,
so a patch may be a hundredth of the whole: gaps between indices and differences are small numbers, of which zlib packs
the planes of their bytes. NaN payloads and signed zeros are preserved.

Used by trainers and, in another Python environment, by the vLLM server: this module imports only torch and safetensors.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

FORMAT = "diloco-weights-6"
_AT, _BY = "::at", "::by"
_WORTH_PACKING = 4
"""A patch that changes more than one in this many values is no shorter than a whole blob."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SIGNED = {**_BITS, 1: torch.int8}

State = dict[str, Tensor]
Expected = Mapping[str, tuple[str, tuple[int, ...]]]
"""By the names of a model's tensors: their dtypes as torch prints them, or ANY_FLOAT, and their shapes."""
ANY_FLOAT = "any floating-point type"


class BadBlob(ValueError):
    """A blob is invalid and must not be used; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Label:
    """A blob's metadata."""

    digest: str
    """Digest of all weights (see digest_of); for a patch, of the weights after patching."""
    base: str = ""
    """Digest of the weights that a patch applies to; empty for a whole blob."""


def digest_of(state: Mapping[str, Tensor]) -> str:
    """sha256 of the sha256 of each tensor's name, dtype, shape and bits, in the order of the names."""

    def hashed(name: str) -> bytes:
        tensor = state[name]
        digest = hashlib.sha256(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(_bits(tensor).numpy().data)
        return digest.digest()

    # In threads: hashlib releases the GIL, and one core takes about a second per GB.
    with ThreadPoolExecutor() as pool:
        return hashlib.sha256(b"".join(pool.map(hashed, sorted(state)))).hexdigest()


def own_copies(
    tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, *, may_change: bool = True
) -> State:
    """Copies on the CPU, with floating-point tensors converted to `dtype`.

    Unless the originals may change, as in training, those that need no conversion are not copied. One by one, since
    there may be no room for all tensors if they are computed (rl/adapters.py).
    """
    return {
        name: tensor.detach()
        .to("cpu", dtype if tensor.is_floating_point() else tensor.dtype, copy=may_change)
        .contiguous()
        for name, tensor in tensors
    }


def packed(state: Mapping[str, Tensor], label: Label) -> bytes:
    """A blob of all weights."""
    return _saved(dict(state), label)


def packed_smaller(old: Mapping[str, Tensor], new: Mapping[str, Tensor], label: Label) -> tuple[Label, bytes]:
    """A patch of the weights `label.base`, or a whole blob if that is not larger; returns the matching label, too."""
    changes = _changes(old, new)
    num_changed = sum(tensor.numel() for name, tensor in changes.items() if name.endswith(_AT))
    if num_changed * _WORTH_PACKING <= num_values(new):
        return label, _saved(changes, label)
    whole = Label(digest=label.digest)
    return whole, packed(new, whole)


def num_values(state: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() for tensor in state.values())


def unpacked(blob: bytes, most_values: int = 1 << 40) -> tuple[Label, State]:
    """Parse a blob. Raises BadBlob for anything that this module has not packed, or a patch beyond `most_values`."""
    try:
        tensors = load(blob)
        length = int.from_bytes(blob[:8], "little")
        metadata = json.loads(blob[8 : 8 + length])["__metadata__"]
        if metadata["format"] != FORMAT:
            raise BadBlob(f"its format is not {FORMAT}")
        label = Label(**json.loads(metadata["label"]))
        if type(label.digest) is not str or type(label.base) is not str:
            raise BadBlob("its digests are no texts")
        if not label.base:
            return label, tensors
        shapes = json.loads(metadata["shapes"])
        if not isinstance(shapes, dict) or shapes.keys() != tensors.keys():
            raise BadBlob("its shapes are not those of its tensors")
        if not all(type(count) is int and count >= 0 and width in _BITS for count, width in shapes.values()):
            raise BadBlob("its shapes are no counts and sizes of integers")
        if sum(count for count, _ in shapes.values()) > 2 * most_values:
            raise BadBlob("the patch is larger than the model")
        return label, {name: _expanded(name, tensor, *shapes[name]) for name, tensor in tensors.items()}
    except (
        SafetensorError,
        ValueError,
        KeyError,
        TypeError,
        OverflowError,
        RuntimeError,
        zlib.error,
    ) as error:
        if isinstance(error, BadBlob):
            raise
        raise BadBlob(f"it does not hold weights in the expected format: {error}") from error


def patched(old: Mapping[str, Tensor], changes: Mapping[str, Tensor]) -> State:
    """The state after a patch; unchanged tensors are shared with `old`. Raises BadBlob."""
    new = dict(old)
    names = {name.removesuffix(_AT) for name in changes if name.endswith(_AT)}
    if changes.keys() != {name + end for name in names for end in (_AT, _BY)}:
        raise BadBlob("the patch's indices and values do not belong together")
    for name in names:
        if name not in old:
            raise BadBlob(f"the patch changes {name}, which does not exist")
        at, differences = changes[name + _AT].long(), changes[name + _BY]
        bits = _bits(old[name])
        if at.shape != differences.shape or at.ndim != 1 or differences.dtype != bits.dtype:
            raise BadBlob(f"the patch of {name} has another type or other shapes")
        if at.numel() and (int(at.min()) < 0 or int(at.max()) >= bits.numel()):
            raise BadBlob(f"the patch of {name} reaches past its end")
        flat = bits.clone()
        flat[at] += differences
        new[name] = flat.view(old[name].dtype).view(old[name].shape)
    return new


class Held:
    """Weights, with their digest. Patches apply to them."""

    def __init__(self) -> None:
        self.state: State = {}
        self.digest = ""
        """Empty if there are no weights."""

    def after(self, blobs: Iterable[bytes], expected: Expected) -> tuple[str, State]:
        """The complete weights after these blobs in turn, verified, with their digest. Raises BadBlob; changes nothing.

        The digest of the last weights alone is verified: nobody uses those between.
        """
        values = sum(torch.Size(shape).numel() for _, shape in expected.values())
        digest, state = self.digest, self.state
        for blob in blobs:
            label, content = unpacked(blob, values)
            if not label.base:
                check_state(content, expected)
                state = content
            elif label.base == digest:
                state = patched(state, content)
                # All others were checked before.
                _check_finite(_changed_values(state, content))
            else:
                raise BadBlob("the patch is for other weights than these")
            digest = label.digest
        if digest_of(state) != digest:
            raise BadBlob("the weights are not those that were sent: their digest differs")
        return digest, state


def check_state(state: Mapping[str, Tensor], expected: Expected) -> None:
    """Raise BadBlob, naming the tensor, unless the state has exactly the expected names, dtypes, shapes, and is finite.

    The check matters because vLLM would silently load an incomplete part of a fused tensor, such as only q of qkv.
    """
    if missing := sorted(set(expected) - set(state)):
        raise BadBlob(f"{missing[0]} is missing")
    if unknown := sorted(set(state) - set(expected)):
        raise BadBlob(f"the model has no {unknown[0]}")
    for name, (dtype, shape) in expected.items():
        tensor = state[name]
        if tuple(tensor.shape) != tuple(shape):
            raise BadBlob(f"{name} has the shape {tuple(tensor.shape)}, the model's has {tuple(shape)}")
        if str(tensor.dtype) != dtype and not (dtype == ANY_FLOAT and tensor.is_floating_point()):
            raise BadBlob(f"{name} is {tensor.dtype}, the model's is {dtype}")
    _check_finite(state.items())


def _check_finite(tensors: Iterable[tuple[str, Tensor]]) -> None:
    for name, tensor in tensors:
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise BadBlob(f"{name} holds values that are not finite")


def _changed_values(
    state: Mapping[str, Tensor], changes: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    for key, at in changes.items():
        if key.endswith(_AT):
            name = key.removesuffix(_AT)
            yield name, state[name].flatten()[at.long()]


def _changes(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> State:
    changes: State = {}
    for name, tensor in new.items():
        before, after = _bits(old[name]), _bits(tensor)
        at = (before != after).nonzero().flatten()
        if at.numel():
            # int32 is enough for nearly all tensors.
            changes[name + _AT] = at.to(torch.int32) if before.numel() <= 2**31 else at
            # Integers wrap around, so adding the difference to the old bits always gives the new ones.
            changes[name + _BY] = after[at] - before[at]
    return changes


def _bits(tensor: Tensor) -> Tensor:
    """The tensor's bits as a flat integer tensor."""
    return tensor.detach().contiguous().flatten().view(_BITS[tensor.element_size()])


def _saved(tensors: State, label: Label) -> bytes:
    metadata = {"format": FORMAT, "label": json.dumps(asdict(label))}
    if label.base:
        shapes = {name: (tensor.numel(), tensor.element_size()) for name, tensor in tensors.items()}
        metadata["shapes"] = json.dumps(shapes)
        tensors = {name: _packed_planes(name, tensor) for name, tensor in tensors.items()}
    return save(tensors, metadata)


def _packed_planes(name: str, numbers: Tensor) -> Tensor:
    """Gaps between indices, or differences, as small unsigned numbers: first the lowest byte of each, then the next
    ones, deflated.
    """
    numbers = torch.diff(numbers, prepend=numbers.new_zeros(1)) if name.endswith(_AT) else _zigzag(numbers)
    planes = numbers.view(torch.uint8).view(-1, numbers.element_size()).T.contiguous()
    # Huffman coding and runs of one byte only: such planes have no longer matches, and looking for them takes time.
    deflater = zlib.compressobj(level=1, strategy=zlib.Z_RLE)
    deflated = deflater.compress(planes.numpy().data) + deflater.flush()
    return torch.frombuffer(bytearray(deflated), dtype=torch.uint8)


def _zigzag(numbers: Tensor) -> Tensor:
    """0, -1, 1, -2 … as 0, 1, 2, 3 …, so that the upper bytes of small negative numbers are zeros, too."""
    signed = numbers.view(_SIGNED[numbers.element_size()])
    return (signed << 1) ^ (signed >> 8 * signed.element_size() - 1)


def _unzigzag(numbers: Tensor) -> Tensor:
    signed = numbers.view(_SIGNED[numbers.element_size()])
    # The shift keeps the sign, which here is the number's topmost bit.
    return ((signed >> 1) & torch.iinfo(signed.dtype).max) ^ -(signed & 1)


def _expanded(name: str, packed_planes: Tensor, count: int, width: int) -> Tensor:
    """The reverse of `_packed_planes`. Raises BadBlob, ValueError or zlib.error for an invalid tensor."""
    inflater = zlib.decompressobj()
    # One byte more than is expected, since 0 would be no limit.
    planes = inflater.decompress(packed_planes.numpy().tobytes(), count * width + 1)
    if len(planes) != count * width or not inflater.eof or not planes:
        raise BadBlob(f"the patch of {name} has another length than it says")
    numbers = torch.frombuffer(bytearray(planes), dtype=torch.uint8).view(width, count).T.flatten()
    integers = numbers.view(_BITS[width])
    return integers.long().cumsum(0) if name.endswith(_AT) else _unzigzag(integers).view(integers.dtype)
