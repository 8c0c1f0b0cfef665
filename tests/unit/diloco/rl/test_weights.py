"""Weights as bytes: what comes out is what went in, bit for bit, or nothing."""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save

from diloco.rl import weights
from diloco.rl.push import Publisher
from diloco.rl.weights import (
    ANY_FLOAT,
    FORMAT,
    BadBlob,
    Held,
    Label,
    check_state,
    digest_of,
    patched,
    unpacked,
)
from tests.support.rollouts import packed_changes

LABEL = Label(digest="b" * 64, base="a" * 64)


def state(dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "a.weight": torch.randn(7, 5, generator=generator).to(dtype),
        "b": torch.randn(11, generator=generator).to(dtype),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_patch_makes_the_new_weights_of_the_old_to_the_bit(dtype):
    old = state(dtype)
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["a.weight"][3, 2] = -0.0
    new["b"][::3] += 1
    old["a.weight"][3, 2] = 0.0
    label, changes = unpacked(packed_changes(old, new, LABEL))
    assert label == LABEL
    again = patched(old, changes)
    assert digest_of(again) == digest_of(new) != digest_of(old)
    assert torch.signbit(again["a.weight"][3, 2])


def test_weights_that_are_the_same_make_an_empty_patch():
    assert unpacked(packed_changes(state(), state(), LABEL))[1] == {}


def test_a_patch_of_few_small_changes_takes_little_more_than_the_information_in_it():
    count, share = 1_000_000, 0.04
    generator = torch.Generator().manual_seed(0)
    old = {"w": torch.randn(count, generator=generator).bfloat16()}
    is_changed = torch.rand(count, generator=generator) < share
    up_or_down = torch.randint(0, 2, (count,), generator=generator, dtype=torch.int16) * 2 - 1
    new = {"w": (old["w"].view(torch.int16) + is_changed * up_or_down).view(torch.bfloat16)}
    patch = packed_changes(old, new, LABEL)
    assert digest_of(patched(old, unpacked(patch)[1])) == digest_of(new)
    places = -(share * math.log2(share) + (1 - share) * math.log2(1 - share))
    assert len(patch) < 1.25 * count * (places + share) / 8


def test_a_patch_that_says_it_is_longer_than_the_model_is_refused():
    old = state()
    new = {name: tensor + 1 for name, tensor in old.items()}
    patch = packed_changes(old, new, LABEL)
    with pytest.raises(BadBlob, match="larger than the model"):
        unpacked(patch, 40)
    assert len(unpacked(patch, 46)[1]) == 4
    with pytest.raises(BadBlob, match="another length than it says"):
        unpacked(patch.replace(b"[35, 4]", b"[34, 4]").replace(b"[35, 2]", b"[34, 2]"))


@pytest.mark.parametrize("damage", [b"", b"\0" * 20, b"{}", b"\xff" * 8])
def test_bytes_that_are_no_blob_are_refused(damage):
    with pytest.raises(BadBlob):
        unpacked(damage)


@pytest.mark.parametrize(
    ("label", "shapes"),
    [
        ({"digest": 1}, "{}"),
        ({}, "{}"),
        ({"digest": "x", "base": 1}, "{}"),
        ({"digest": "x", "base": "y"}, "[]"),
        ({"digest": "x", "base": "y"}, '{"b::at": [1e400, 4]}'),
        ({"digest": "x", "base": "y"}, '{"b::at": [-1, -3]}'),
        ({"digest": "x", "base": "y"}, '{"b::at": [1, 3]}'),
        ({"digest": "x", "base": "y"}, '{"b::at": ["3", 1]}'),
        ({"digest": "x", "base": "y"}, "{}"),
        ({"digest": "x", "base": "y"}, '{"b::at": 3}'),
    ],
)
def test_a_blob_whose_metadata_has_other_types_is_refused(label, shapes):
    planes = torch.frombuffer(bytearray(zlib.compress(b"\0\0\0")), dtype=torch.uint8)
    blob = save({"b::at": planes}, {"format": FORMAT, "label": json.dumps(label), "shapes": shapes})
    with pytest.raises(BadBlob):
        Held().after([blob], {"b": (ANY_FLOAT, (4,))})


@pytest.mark.parametrize("more", [{"none": [-1000, 1]}, {"none": [0, 1]}, {}])
def test_nothing_is_inflated_that_is_larger_than_the_model(monkeypatch, more):
    monkeypatch.setattr(weights, "_expanded", lambda *_: pytest.fail("inflated"))
    planes = torch.frombuffer(bytearray(zlib.compress(bytes(8000))), dtype=torch.uint8)
    label, shapes = {"digest": "x", "base": "y"}, {"b::at": [1000, 8], **more}
    blob = save(
        {"b::at": planes}, {"format": FORMAT, "label": json.dumps(label), "shapes": json.dumps(shapes)}
    )
    with pytest.raises(BadBlob, match="shapes" if more else "larger than the model"):
        unpacked(blob, 10)


def test_a_safetensors_file_of_others_is_refused():
    with pytest.raises(BadBlob):
        unpacked(save(state()))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"c::at": torch.tensor([0]), "c::by": torch.zeros(1, dtype=torch.int16)}, "which does not exist"),
        ({"b::at": torch.tensor([0])}, "do not belong together"),
        ({"b::at": torch.tensor([11]), "b::by": torch.zeros(1, dtype=torch.int16)}, "past its end"),
        ({"b::at": torch.tensor([-1]), "b::by": torch.zeros(1, dtype=torch.int16)}, "past its end"),
        ({"b::at": torch.tensor([0]), "b::by": torch.zeros(1)}, "another type"),
        ({"b::at": torch.tensor([0, 1]), "b::by": torch.zeros(1, dtype=torch.int16)}, "other shapes"),
    ],
)
def test_a_patch_that_does_not_fit_is_refused(changes, says):
    with pytest.raises(BadBlob, match=says):
        patched(state(), changes)


EXPECTED = {
    f"l.{name}.weight": ("torch.float32", (4, 2)) for name in ("q_proj", "k_proj", "v_proj", "o_proj")
}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"l.q_proj.weight": None}, r"l\.q_proj\.weight is missing$"),
        ({"l.o_proj.weight": None}, r"l\.o_proj\.weight is missing$"),
        ({"l.k_proj.weight": torch.zeros(2, 4)}, r"has the shape \(2, 4\), the model's has \(4, 2\)"),
        ({"l.k_proj.weight": torch.zeros(4, 2).half()}, r"is torch\.float16, the model's is torch\.float32"),
        ({"l.k_proj.weight": torch.full((4, 2), torch.inf)}, "values that are not finite"),
        ({"lm_head.weight": torch.zeros(1)}, r"the model has no lm_head\.weight"),
    ],
)
def test_weights_that_are_not_the_models_are_refused_by_name(change, says):
    weights = {name: torch.zeros(shape) for name, (_, shape) in EXPECTED.items()}
    check_state(weights, EXPECTED)
    weights = {name: tensor for name, tensor in {**weights, **change}.items() if tensor is not None}
    with pytest.raises(BadBlob, match=says):
        check_state(weights, EXPECTED)


def test_values_that_a_patch_makes_infinite_are_refused_and_only_those_are_looked_at(monkeypatch):
    held, expected = Held(), {"a.weight": (ANY_FLOAT, (7, 5)), "b": (ANY_FLOAT, (11,))}
    held.state, held.digest = state(), digest_of(state())
    new = state()
    new["b"][3] = torch.inf
    label = Label(digest=digest_of(new), base=held.digest)
    with pytest.raises(BadBlob, match="b holds values that are not finite"):
        held.after([packed_changes(held.state, new, label)], expected)
    new["b"][3] = 1.5
    looked_at = []
    monkeypatch.setattr(weights, "_check_finite", lambda tensors: looked_at.extend(tensors))
    held.after([packed_changes(held.state, new, replace(label, digest=digest_of(new)))], expected)
    assert [(name, values.tolist()) for name, values in looked_at] == [("b", [1.5])]


def test_a_digest_says_which_tensor_has_which_type_shape_and_bits():
    ours = state()
    others = [
        {**ours, "b": ours["b"].half()},
        {**ours, "b": ours["b"].view(torch.int16)},
        {**ours, "b": ours["b"][None]},
        {"a.weight": ours["a.weight"], "c": ours["b"]},
        {**ours, "b": -ours["b"]},
        {"a.weight": ours["a.weight"]},
    ]
    assert len({digest_of(one) for one in [ours, *others]}) == 7
    assert digest_of(dict(reversed(ours.items()))) == digest_of(ours)


def test_a_publisher_sends_changes_to_who_has_the_weights_before_and_all_to_others():
    weights = {"w": torch.randn(1000)}
    publisher = Publisher(torch.bfloat16)
    publisher.take(weights.items())
    assert publisher.blob_for("")[0].base == ""
    before = publisher.digest
    weights["w"][5] += 1
    publisher.take(weights.items())
    label, patch = publisher.blob_for(before)
    assert label == Label(digest=publisher.digest, base=before) and len(patch) < publisher.whole_bytes
    whole_label, whole = publisher.blob_for("")
    assert whole_label.base == "" == publisher.blob_for("0" * 64)[0].base
    assert digest_of(unpacked(whole)[1]) == label.digest == whole_label.digest
    weights["w"] += 1
    before = publisher.digest
    publisher.take(weights.items())
    label, blob = publisher.blob_for(before)
    assert label.base == "" and unpacked(blob)[0] == label, "a patch of everything is longer than everything"
