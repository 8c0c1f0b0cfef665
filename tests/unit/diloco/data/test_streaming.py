import itertools
import json
from dataclasses import asdict

import datasets
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from diloco.data.batches import Block
from diloco.data.corpus import is_held_out
from diloco.data.streaming import NUM_LANES, HubDataset, Point, StreamingSource, lane_of
from diloco.data.tokenizer import encode_documents, load_tokenizer
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


@pytest.mark.parametrize(("num_files", "cycle"), [(1, 0), (5, 1), (NUM_LANES, 0), (NUM_LANES + 3, 1)])
def test_every_document_is_in_one_lane_or_held_out(tmp_path, num_files, cycle):
    texts, rows = streamed(tmp_path, num_files=num_files)
    dataset = HubDataset("local", rows)
    lanes = [list(dataset.lane(number, cycle)) for number in range(NUM_LANES)]
    assert sorted([*itertools.chain(*lanes), *dataset.held_out()]) == sorted(text.encode() for text in texts)
    assert 0 < len(list(dataset.held_out())) == sum(is_held_out(text.encode()) for text in texts)


def test_the_files_are_read_in_an_order_of_the_seed_and_the_cycle(tmp_path):
    texts, rows = streamed(tmp_path, num_files=5)
    trained = [text.encode() for text in texts if not is_held_out(text.encode())]
    read = {
        (seed, cycle): list(HubDataset("local", rows, seed=seed).lane(3, cycle))
        for seed in (1, 2)
        for cycle in (0, 1)
    }
    firsts = {tuple(sorted(documents, key=trained.index)[:3]) for documents in read.values()}
    assert len({tuple(documents) for documents in read.values()}) == 4 and len(firsts) > 1
    assert list(HubDataset("local", rows, seed=1).lane(3)) == read[1, 0]
    assert HubDataset("local", rows).num_files == 5


def test_in_a_pass_no_two_peers_read_the_same_lane_and_each_peer_comes_to_read_all():
    ranks, passes = range(NUM_LANES), range(NUM_LANES)
    assert all({lane_of(rank, n) for rank in ranks} == set(range(NUM_LANES)) for n in passes)
    assert all({lane_of(rank, n) for n in passes} == set(range(NUM_LANES)) for rank in ranks)
    assert all(lane_of(rank, NUM_LANES + 5) == lane_of(rank, 5) for rank in ranks)


@pytest.mark.parametrize("num_peers", [1, 2, 4, 8, 64])
def test_peers_together_read_all_lanes_before_one_is_read_again(num_peers):
    lanes = [lane_of(rank, n) for n in range(NUM_LANES // num_peers) for rank in range(num_peers)]
    assert sorted(lanes) == list(range(NUM_LANES))


def counted(dataset, monkeypatch):
    """The documents that are read from now on."""
    read, documents = [], dataset.documents

    def counting(*place):
        for after, content in documents(*place):
            read.append(content)
            yield after, content

    monkeypatch.setattr(dataset, "documents", counting)
    return read


def blocks(world_rank, *epochs):
    return [Block(epoch=epoch, world_rank=world_rank, data_base=0) for epoch in epochs]


def test_each_epoch_continues_the_text_of_a_lane_and_each_rank_has_its_own(tokenizer, tmp_path):
    dataset = HubDataset("local", streamed(tmp_path)[1])
    undisturbed, other = (source_of(dataset, tokenizer) for _ in range(2))
    offsets = np.arange(3)
    epochs = [undisturbed.read(block, offsets).tolist() for block in blocks(2, *range(12))]
    stream = [ids for epoch in epochs for window in epoch for ids in window[:-1]]
    text = bytes(token for token in stream if token < 256)
    assert b"".join(dataset.lane(2)).startswith(text[:100])
    (third,) = blocks(3, 0)
    assert other.read(third, offsets).tolist() != epochs[0]


def test_who_was_away_reads_on_where_its_checkpoint_was(tokenizer, tmp_path, monkeypatch):
    dataset = HubDataset("local", streamed(tmp_path, num_files=5)[1])
    here, back = (source_of(dataset, tokenizer) for _ in range(2))
    offsets = np.arange(3)
    *_, last, following = (
        [here.read(block, offsets).tolist(), here.state(block, 1)] for block in blocks(2, *range(4))
    )
    expected = (last[0] + following[0])[1:]
    read = counted(dataset, monkeypatch)
    late, later = blocks(2, 1000, 2000)
    back.begin(late, 1, last[1])
    assert back.read(late, offsets[1:]).tolist() == expected[:2]
    assert back.read(later, offsets).tolist() == expected[2:]
    assert len(read) < 10
    # Begun anew in the middle of an epoch: each sample once.
    back.begin(late, 2, last[1])
    assert back.read(late, offsets[2:]).tolist() == expected[:1]
    assert len({tuple(sample) for sample in back.read(late, offsets).tolist()}) == 3


@pytest.mark.parametrize("seq_length", [16, 32])
def test_a_place_that_an_earlier_commit_saved_is_read_on_from(tokenizer, tmp_path, seq_length):
    dataset = HubDataset("local", streamed(tmp_path)[1])
    source = source_of(dataset, tokenizer, seq_length=seq_length)
    point = Point(world_rank=2, number=700, passes=3, pending=(65, 66))
    identity = [*dataset.identity(), 16, len(tokenizer)]
    (block,) = blocks(2, 233)
    source.begin(block, 1, json.dumps({"data": identity, "point": asdict(point)}).encode())
    sample = bytes(source.read(block, np.arange(1, 2))[0, :10].tolist())
    assert sample.startswith(b"AB" + next(dataset.lane(lane_of(2, 3)))[:8])


@pytest.mark.parametrize(("before", "after"), [(16, 32), (32, 16), (16, 25)])
def test_samples_of_another_length_continue_the_text(tokenizer, tmp_path, caplog, before, after):
    dataset = HubDataset("local", streamed(tmp_path, num_files=5)[1])
    block, (late,) = Block(epoch=0, world_rank=5, data_base=0), blocks(5, 40)
    source = source_of(dataset, tokenizer, seq_length=before, samples_per_block=100)
    text = source.read(block, np.arange(100))[:, :-1].ravel().tolist()
    for num_read in (0, 1, 7, 8, 9):
        source = source_of(dataset, tokenizer, seq_length=before, samples_per_block=100)
        source.read(block, np.arange(num_read + 1))
        state = source.state(block, num_read)
        other = source_of(dataset, tokenizer, seq_length=after, samples_per_block=100)
        other.begin(late, 20, state)
        read = other.read(late, np.arange(20, 30))[:, :-1].ravel().tolist()
        trained = num_read * before
        assert any(
            text[first : first + len(read)] == read for first in range(trained, max(-1, trained - after), -1)
        )
    assert not caplog.messages


def test_a_place_that_is_not_used_is_told_of(tokenizer, tmp_path, caplog):
    dataset = HubDataset("local", streamed(tmp_path)[1])
    source, other = source_of(dataset, tokenizer), source_of(HubDataset("other", dataset._train), tokenizer)
    block, another = *blocks(2, 0), *blocks(3, 0)
    source.begin(block, 0, source.state(block, 0))
    assert not caplog.messages
    source.begin(another, 0, source.state(block, 0))
    source.begin(block, 0, other.state(block, 0))
    said = "the checkpoint's place in the data is of {}, and is not used"
    assert caplog.messages == [said.format("world rank 2, not 3"), said.format("other data")]


@pytest.mark.parametrize(("num_files", "first"), [(1, 0), (5, 2), (2 * NUM_LANES, 0), (3 * NUM_LANES, 2)])
def test_who_joins_late_begins_with_a_file_of_its_lane_and_reads_nothing_before(
    tokenizer, tmp_path, monkeypatch, num_files, first
):
    dataset = HubDataset("local", streamed(tmp_path, num_files=num_files)[1])
    place, expected = next(dataset.documents(2, 0, (first, 0)))
    source, read = source_of(dataset, tokenizer), counted(dataset, monkeypatch)
    (block,) = blocks(2, 1202)
    source.begin(block, 1)
    sample = source.read(block, np.arange(1, 2))[0]
    assert place[0] == first and bytes(sample.tolist()).startswith(expected[:8])
    assert 0 < len(read) < 5
    # A worker that is started again before its first checkpoint reads the same.
    again = source_of(dataset, tokenizer)
    again.begin(block, 1, source.state(block, 1))
    assert again.read(block, np.arange(1, 2))[0].tolist() == sample.tolist()


def test_what_was_read_a_moment_ago_is_read_again_without_a_new_start(tokenizer, tmp_path, monkeypatch):
    dataset = HubDataset("local", streamed(tmp_path)[1])
    source, passes, documents = source_of(dataset, tokenizer), [], dataset.documents
    monkeypatch.setattr(
        dataset, "documents", lambda lane, *place: passes.append(lane) or documents(lane, *place)
    )
    offsets = np.arange(3)
    _, following = (source.read(block, offsets).tolist() for block in blocks(2, 0, 1))
    (second,), (third,) = blocks(2, 1), blocks(3, 1)
    assert source.read(second, offsets[1:]).tolist() == following[1:]
    assert passes == [2]
    assert source.read(second, offsets).tolist() == following
    assert passes == [2, 2]
    source.read(third, offsets[2:])
    assert passes == [2, 2, 3]


@pytest.fixture(scope="module")
def word_tokenizer():
    words = {"<eos>": 0, "?": 1, "lorem": 2, "ipsum": 3, "dolor": 4, **{f"d{n}": 5 + n for n in range(640)}}
    backend = Tokenizer(models.WordLevel(words, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def test_documents_are_encoded_in_batches_and_samples_and_places_do_not_depend_on_them(
    word_tokenizer, tmp_path, monkeypatch
):
    dataset = HubDataset("local", streamed(tmp_path, num_files=3)[1])
    sizes, block = [], Block(epoch=0, world_rank=5, data_base=0)
    monkeypatch.setattr(
        "diloco.data.streaming.encode_documents",
        lambda tokenizer, contents, **how: (
            sizes.append(len(contents)) or encode_documents(tokenizer, contents, **how)
        ),
    )

    def samples_and_states(batch_bytes):
        source = source_of(dataset, word_tokenizer, samples_per_block=60)
        source.reader._batch_bytes = batch_bytes or source.reader._batch_bytes
        return [(source.read(block, np.arange(n, n + 1)).tolist(), source.state(block, n)) for n in range(60)]

    one_by_one = samples_and_states(1)
    assert set(sizes) == {1}
    sizes.clear()
    assert samples_and_states(None) == one_by_one and 1 < max(sizes) < 5
    sizes.clear()
    assert samples_and_states(2**20) == one_by_one and max(sizes) > 5
    # From a place between two documents of a batch.
    source = source_of(dataset, word_tokenizer, samples_per_block=60)
    source.begin(block, 31, one_by_one[31][1])
    expected = [sample for [sample], _ in one_by_one[31:]]
    assert source.read(block, np.arange(31, 60)).tolist() == expected


def documents_read(source, world_rank, num_windows):
    """The text of the peer's first windows, cut at the ends of documents; the last one may be incomplete."""
    windows = source.read(Block(epoch=0, world_rank=world_rank, data_base=0), np.arange(num_windows))
    ids = windows[:, :-1].ravel()
    ends = np.flatnonzero(ids == 257) + 1
    return [bytes(part[part < 256].tolist()) for part in np.split(ids, ends)]


def test_two_peers_read_all_documents_and_none_twice_before(tokenizer, tmp_path):
    texts, rows = streamed(tmp_path, num_documents=300, num_files=3)
    dataset = HubDataset("local", rows)
    trained = sorted(text.encode() for text in texts if not is_held_out(text.encode()))
    read = []
    for rank in (0, 1):
        lanes = [lane_of(rank, n) for n in range(NUM_LANES // 2)]
        documents = [content for lane in lanes for content in dataset.lane(lane)]
        num_windows = (sum(map(len, documents)) + len(documents)) // 16
        source = source_of(dataset, tokenizer, samples_per_block=num_windows + 2)
        assert documents_read(source, rank, num_windows)[: len(documents) - 1] == documents[:-1]
        # The text continues with another lane, not with the first one again.
        following = next(itertools.chain(dataset.lane(lane_of(rank, NUM_LANES // 2)), [b""]))
        assert documents_read(source, rank, num_windows + 2)[len(documents)][:8] == following[:8]
        read += documents
    assert sorted(read) == trained


def test_a_peer_alone_reads_everything_before_it_begins_anew(tokenizer, tmp_path):
    texts, rows = streamed(tmp_path, num_documents=90, num_files=2)
    trained = sorted(text.encode() for text in texts if not is_held_out(text.encode()))
    num_windows = 2 * sum(len(content) + 1 for content in trained) // 16
    source = source_of(HubDataset("local", rows), tokenizer, samples_per_block=num_windows)
    read = documents_read(source, 9, num_windows)[:-1]
    first, second = read[: len(trained)], read[len(trained) :]
    assert sorted(first) == trained
    assert set(second) <= set(first) and len(set(second)) == len(second)


@pytest.mark.parametrize("num_files", [1, 5, NUM_LANES + 3])
@pytest.mark.parametrize("step", [1, 7, 90])
def test_who_resumes_from_a_checkpoint_gets_the_batches_of_an_undisturbed_run_without_reading_all_again(
    tokenizer, tmp_path, monkeypatch, num_files, step
):
    """Steps have two samples. One step is read ahead before the save; 130 steps cross several lanes."""
    dataset = HubDataset("local", streamed(tmp_path, num_files=num_files)[1])
    sources = [source_of(dataset, tokenizer, samples_per_block=260) for _ in range(3)]
    block = Block(epoch=0, world_rank=5, data_base=0)
    batches = [[sources[0].read(block, np.arange(2 * n, 2 * n + 2)).tolist() for n in range(130)]]
    for ahead in range(step + 1):
        sources[1].read(block, np.arange(2 * ahead, 2 * ahead + 2))
    state = sources[1].state(block, 2 * step)
    sources[2].begin(block, 2 * step, state)
    begun, documents = [], dataset.documents
    monkeypatch.setattr(
        dataset,
        "documents",
        lambda lane, cycle, place: begun.append((lane, place)) or documents(lane, cycle, place),
    )
    batches.append([sources[2].read(block, np.arange(2 * n, 2 * n + 2)).tolist() for n in range(step, 130)])
    assert batches[1] == batches[0][step:]
    assert step < 7 or begun[0] != (lane_of(5, 0), (0, 0))
    # A peer at another place in the data cannot use it, and reads from the beginning.
    other = source_of(HubDataset("local", dataset._train, seed=4), tokenizer)
    other.begin(block, 2 * step, state)
    assert json.loads(other.state(block, 2 * step))["point"]["number"] == 0


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
    """Rows that end in an error of the hub's HTTP library, whose class derives directly from Exception."""

    num_shards = 1

    def __init__(self, num_rows):
        self.num_rows = num_rows

    def __iter__(self):
        yield from ({"text": f"document {n}"} for n in range(self.num_rows))
        raise type("HTTPError", (Exception,), {})("server disconnected")


def test_an_outage_lets_the_worker_be_started_again():
    for num_rows in (200, 0):
        with pytest.raises(DilocoError, match="reading far failed: server disconnected") as outage:
            list(HubDataset("far", Interrupted(num_rows)).lane(0))
        assert not isinstance(outage.value, UserError)


def test_a_stream_without_text_or_documents_is_refused(tokenizer, tmp_path):
    no_text = datasets.Dataset.from_dict({"label": [1, 2, 3]}).to_iterable_dataset()
    with pytest.raises(UserError, match="no column with text"):
        HubDataset("labels", no_text)
    with pytest.raises(UserError, match="is empty"):
        HubDataset("nothing", datasets.IterableDataset.from_generator(lambda: iter(())))
    few = HubDataset("few", datasets.Dataset.from_dict({"text": ["", ""]}).to_iterable_dataset())
    with pytest.raises(UserError, match="no document to train on"):
        source_of(few, tokenizer).read(Block(epoch=0, world_rank=9, data_base=0), np.arange(1))
    with pytest.raises(
        UserError, match=r"of world ranks 0 to 63, and this peer's is 70; .*: --world-rank N$"
    ):
        source_of(few, tokenizer).begin(Block(epoch=9, world_rank=70, data_base=0), 0)
