import itertools
import json

import datasets
import numpy as np
import pytest

from diloco.data.batches import Block
from diloco.data.corpus import is_held_out
from diloco.data.streaming import NUM_LANES, HubDataset, StreamingSource
from diloco.data.tokenizer import load_tokenizer
from diloco.errors import DilocoError, UserError


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("2m")


def streamed(tmp_path, *, num_documents=640, num_files=1, column="text", prefix="d"):
    texts = [f"{prefix}{n} " + "lorem ipsum dolor " * (n % 5 + 1) for n in range(num_documents)]
    paths = []
    for file in range(num_files):
        path = tmp_path / f"{prefix}-{file:03}.jsonl"
        path.write_text(
            "".join(json.dumps({"id": 1, column: text}) + "\n" for text in texts[file::num_files])
        )
        paths.append(str(path))
    cache = str(tmp_path / "hf")
    return texts, datasets.load_dataset(
        "json", data_files=paths, split="train", streaming=True, cache_dir=cache
    )


def source_of(dataset, tokenizer, *, seq_length=16, samples_per_block=3, eval_tokens=256):
    limits = {"seq_length": seq_length, "samples_per_block": samples_per_block, "eval_tokens": eval_tokens}
    return StreamingSource(dataset, tokenizer, num_kept=2, **limits)


@pytest.mark.parametrize("num_files", [1, NUM_LANES])
def test_every_document_is_in_one_lane_or_held_out(tmp_path, num_files):
    texts, rows = streamed(tmp_path, num_files=num_files)
    dataset = HubDataset("local", rows)
    lanes = [list(dataset.lane(number)) for number in range(NUM_LANES)]
    assert sorted([*itertools.chain(*lanes), *dataset.held_out()]) == sorted(text.encode() for text in texts)
    assert 0 < len(list(dataset.held_out())) == sum(is_held_out(text.encode()) for text in texts)


def test_a_lane_is_read_the_same_from_any_point(tokenizer, tmp_path):
    dataset = HubDataset("local", streamed(tmp_path)[1])
    undisturbed, late = (source_of(dataset, tokenizer) for _ in range(2))
    offsets = np.arange(3)
    epochs = [
        undisturbed.read(Block(epoch=e, world_rank=2, data_base=0), offsets).tolist() for e in range(12)
    ]
    joined = late.read(Block(epoch=7, world_rank=2, data_base=99), offsets[1:])
    assert joined.tolist() == epochs[7][1:]
    # Another lane, then back to an earlier epoch.
    assert late.read(Block(epoch=7, world_rank=3, data_base=0), offsets).tolist() != epochs[7]
    assert late.read(Block(epoch=4, world_rank=2, data_base=0), offsets).tolist() == epochs[4]
    stream = [ids for epoch in epochs for window in epoch for ids in window[:-1]]
    text = bytes(token for token in stream if token < 256)
    assert b"".join(dataset.lane(2)).startswith(text[:100])


def test_what_was_read_a_moment_ago_is_read_again_without_a_new_start(tokenizer, tmp_path, monkeypatch):
    dataset = HubDataset("local", streamed(tmp_path)[1])
    source, passes, lane = source_of(dataset, tokenizer), [], dataset.lane
    monkeypatch.setattr(dataset, "lane", lambda number: passes.append(number) or lane(number))
    offsets = np.arange(3)
    once, following = (
        source.read(Block(epoch=e, world_rank=2, data_base=0), offsets).tolist() for e in (0, 1)
    )
    assert source.read(Block(epoch=1, world_rank=2, data_base=0), offsets[1:]).tolist() == following[1:]
    assert passes == [2]
    assert source.read(Block(epoch=0, world_rank=2, data_base=0), offsets).tolist() == once
    assert passes == [2, 2]
    assert source.read(Block(epoch=1, world_rank=2, data_base=0), offsets).tolist() == following
    source.read(Block(epoch=1, world_rank=3, data_base=0), offsets[2:])
    assert passes == [2, 2, 3]


def test_a_lane_that_ends_begins_its_next_pass(tokenizer, tmp_path):
    dataset = HubDataset("local", streamed(tmp_path, num_documents=70)[1])
    source = source_of(dataset, tokenizer)
    once = b"".join(content + b"\xff" for content in dataset.lane(5))
    windows = source.read(Block(epoch=0, world_rank=5, data_base=0), np.arange(3))
    stream = windows[:, :-1].ravel()
    expected = [257 if byte == 0xFF else byte for byte in (once * 50)[: len(stream)]]
    assert stream.tolist() == expected


def test_validation_comes_from_the_validation_split_where_there_is_one(tokenizer, tmp_path):
    _, train = streamed(tmp_path)
    texts, held_out = streamed(tmp_path, num_documents=40, prefix="v")
    validation = source_of(HubDataset("local", train, held_out), tokenizer).validation()
    assert bytes(validation.windows[0].tolist()).startswith(texts[0][:10].encode())
    assert validation.windows.shape == (16, 17)
    assert 240 <= validation.num_bytes <= 256 and 2 < validation.byte_frequency_bits < 6


def test_validation_without_a_split_is_in_no_lane(tokenizer, tmp_path):
    dataset = HubDataset("local", streamed(tmp_path)[1])
    validation = source_of(dataset, tokenizer).validation()
    trained = b"\n".join(content for lane in range(NUM_LANES) for content in dataset.lane(lane))
    first = bytes(token for token in validation.windows[0].tolist() if token < 256)
    assert first.split(b" ")[0] + b" " not in trained


class Interrupted:
    """Rows until the hub's HTTP library, whose errors have a base of their own, raises one."""

    num_shards = 1

    def __init__(self, num_rows):
        self.num_rows = num_rows

    def __iter__(self):
        yield from ({"text": f"document {n}"} for n in range(self.num_rows))
        raise type("HTTPError", (Exception,), {})("server disconnected")


def test_an_outage_in_mid_training_lets_the_worker_be_started_again():
    with pytest.raises(DilocoError, match="reading far failed: server disconnected") as outage:
        list(HubDataset("far", Interrupted(200)).lane(0))
    assert not isinstance(outage.value, UserError)
    with pytest.raises(UserError, match="reading far failed: server disconnected"):
        HubDataset("far", Interrupted(0))


def test_a_stream_without_text_or_documents_is_refused(tokenizer, tmp_path):
    no_text = datasets.Dataset.from_dict({"label": [1, 2, 3]}).to_iterable_dataset()
    with pytest.raises(UserError, match="no column with text"):
        HubDataset("labels", no_text)
    with pytest.raises(UserError, match="is empty"):
        HubDataset("nothing", datasets.IterableDataset.from_generator(lambda: iter(())))
    few = HubDataset("few", datasets.Dataset.from_dict({"text": ["only one"]}).to_iterable_dataset())
    with pytest.raises(UserError, match="too small to be streamed"):
        source_of(few, tokenizer).read(Block(epoch=0, world_rank=9, data_base=0), np.arange(1))
    with pytest.raises(UserError, match="one too high"):
        list(few.lane(NUM_LANES))
