from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from diloco.errors import UserError
from diloco.options.flags import TrainConfig
from diloco.outer.exchange import SharedWeights
from diloco.outer.layout import layout_of, pieces_of
from diloco.train.sharding import Precision, prepare
from tests.support.tiny_model import tiny_llama

CPU = torch.device("cpu")


def written(model: nn.Module, num_fragments: int = 1) -> list[torch.Tensor]:
    layout = layout_of(model, num_fragments)
    memories = [torch.full((size,), float("nan")) for size in layout.sizes]
    SharedWeights(pieces_of(model, layout), memories, []).put()
    return memories


def test_layout_lists_every_parameter_once_without_gaps():
    model = tiny_llama()
    (fragment,) = layout_of(model).fragments
    assert [slot.name for slot in fragment] == [name for name, _ in model.named_parameters()]
    assert [slot.offset for slot in fragment[1:]] == [slot.offset + slot.numel for slot in fragment[:-1]]


def test_tied_and_frozen_parameters_take_no_place_of_their_own():
    model = tiny_llama(tied=True)
    model.model.norm.weight.requires_grad_(False)
    names = [slot.name for slot in layout_of(model).fragments[0]]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert "model.norm.weight" not in names


def test_weights_written_by_one_model_are_read_by_another():
    ours, theirs = tiny_llama(seed=1), tiny_llama(seed=2)
    SharedWeights(pieces_of(theirs, layout_of(theirs)), [], written(ours)).take()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_memory_holds_the_parameters_in_order():
    model = tiny_llama()
    (memory,) = written(model)
    assert torch.equal(memory, torch.cat([p.detach().flatten() for p in model.parameters()]))


def test_layers_go_round_the_fragments_and_all_else_goes_where_least_is():
    model = tiny_llama()
    layout = layout_of(model, 2)
    assert sum(layout.sizes) == layout_of(model).sizes[0]
    for index, fragment in enumerate(layout.fragments):
        layers = {slot.name.split(".")[2] for slot in fragment if slot.name.startswith("model.layers.")}
        assert layers == {str(index)}
    rest = [slot.name for fragment in layout.fragments for slot in fragment if ".layers." not in slot.name]
    assert sorted(rest) == ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]
    assert max(layout.sizes) < 1.2 * min(layout.sizes)


def test_a_model_of_too_few_layers_is_refused():
    with pytest.raises(UserError, match="num-fragments 9: 2 would do"):
        layout_of(nn.Linear(2, 2), 9)


def test_a_model_that_is_sharded_in_the_old_way_is_refused():
    # Its constructor refuses machines without a GPU.
    block = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(block)
    with pytest.raises(UserError, match="fully_shard"):
        layout_of(nn.Sequential(nn.Linear(2, 2), block))


def test_fragments_hold_the_parameters_where_the_layout_says():
    model = tiny_llama()
    parameters, memories = dict(model.named_parameters()), written(model, 3)
    for fragment, memory in zip(layout_of(model, 3).fragments, memories, strict=True):
        for slot in fragment:
            found = memory[slot.offset : slot.offset + slot.numel].view(slot.shape)
            assert torch.equal(found, parameters[slot.name])


def test_what_was_trained_since_the_snapshot_is_kept_whole_by_a_merge():
    model = nn.Linear(2, 1, bias=False)
    pieces = pieces_of(model, layout_of(model))
    nn.init.constant_(model.weight, 11.0)
    SharedWeights(pieces, [torch.full((2,), 10.0)], [torch.full((2,), 4.0)]).merge(0, mixing=None)
    assert model.weight.unique().tolist() == [5.0]
    SharedWeights(pieces, [], [torch.full((2,), -1.0)]).shift(0)
    assert model.weight.unique().tolist() == [4.0]


@pytest.mark.parametrize(("mixing", "merged"), [(0.0, 4.0), (0.25, 5.75), (1.0, 11.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_published_merge_lies_between_own_and_new_weights_whatever_the_snapshot(mixing, merged, dtype):
    model = nn.Linear(2, 1, bias=False).to(dtype)
    nn.init.constant_(model.weight, 11.0)
    snapshot, target = torch.full((2,), 10.0), torch.full((2,), 4.0)
    SharedWeights(pieces_of(model, layout_of(model)), [snapshot], [target]).merge(0, mixing=mixing)
    assert model.weight.unique().tolist() == [merged]


def test_wrappers_do_not_change_the_layout():
    wrapped = tiny_llama()
    config = TrainConfig(activation_checkpointing=True, torch_compile=True)
    prepare(wrapped, config, precision=Precision(torch.float32), device=CPU, mesh=None)
    assert layout_of(wrapped).digest == layout_of(tiny_llama()).digest
    assert layout_of(torch.compile(tiny_llama())).digest == layout_of(tiny_llama()).digest


def test_half_precision_parameters_travel_as_fp32():
    model = nn.Linear(3, 5).to(torch.bfloat16)
    (memory,) = written(model)
    assert memory.dtype == torch.float32
    assert torch.equal(memory[:15].view(5, 3).to(torch.bfloat16), model.weight)


def test_a_scalar_parameter_has_a_place():
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(3.0))
    (memory,) = written(model)
    assert memory.tolist() == [3.0]
