import threading
from multiprocessing import Pipe

import datasets
import numpy as np
import pytest

from diloco.data.batches import Block, Prefetched, batches
from diloco.data.streaming import HubDataset, StreamingSource
from diloco.data.tokenizer import load_tokenizer
from diloco.errors import DilocoError, UserError
from diloco.outer.world import barrier
from diloco.train.node_stream import _Remote, _serve, read_for_node
from tests.support.torch_ranks import Ranks

BATCH, STEPS = 8, 6


def source_of(num_documents=4000):
    texts = [f"{n} lorem ipsum dolor sit amet" for n in range(num_documents)]
    rows = datasets.Dataset.from_dict({"text": texts}).to_iterable_dataset(num_shards=3)
    limits = {"seq_length": 16, "samples_per_block": STEPS * BATCH, "num_kept": 4 * BATCH, "eval_tokens": 64}
    return StreamingSource(HubDataset("far/away", rows), load_tokenizer("2m"), **limits)


def steps_of(source, blocks, rank=0, num_ranks=1):
    read = []
    for block in blocks:
        place = {"local_steps": range(STEPS), "total_batch_size": BATCH, "rank": rank, "num_ranks": num_ranks}
        with Prefetched(batches(source, block, **place)) as samples:
            for _, sample in zip(range(STEPS - 1), samples, strict=False):
                read.append(sample.tolist())
                # As the exchange of gradients: no rank begins a step before all have the samples of the one before.
                barrier()
            # As if the commit came early: the last step, which was read ahead, is dropped.
    return read


def blocks():
    """The peer trains two epochs, then moves to another world rank and misses some epochs."""
    places = [(0, 5), (1, 5), (7, 3), (8, 3)]
    return [Block(epoch=epoch, world_rank=rank, data_base=0) for epoch, rank in places]


def read_on_ranks(world):
    """The samples of this rank, and how many documents it has read itself."""
    source, documents = source_of(), []
    inner = source.reader._dataset.documents
    source.reader._dataset.documents = lambda *place: (
        documents.append(1) or document for document in inner(*place)
    )
    with read_for_node(source, world):
        source.begin(blocks()[0], 0)
        read = steps_of(source, blocks(), world.rank, world.num_ranks)
        barrier()
    return read, len(documents)


@pytest.fixture(scope="module")
def ranks():
    with Ranks(4) as ranks:
        yield ranks


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_all_ranks_get_the_samples_of_an_own_reading_and_one_of_each_node_reads(ranks, num_nodes):
    alone = source_of()
    alone.begin(blocks()[0], 0)
    expected = steps_of(alone, blocks())
    outcomes = ranks.run(read_on_ranks, num_nodes=num_nodes)
    for step, samples in enumerate(expected):
        assert [outcomes[n % 4][0][step][n // 4] for n in range(BATCH)] == samples
    readers = [rank for rank, (_, num_documents) in enumerate(outcomes) if num_documents]
    assert readers == list(range(0, 4, 4 // num_nodes))


@pytest.mark.parametrize(
    ("raised", "kind", "message"),
    [
        (UserError("no document"), UserError, "^no document$"),
        (DilocoError("the hub is down"), DilocoError, "^the hub is down$"),
        (ZeroDivisionError("by zero"), DilocoError, r"cannot read the data: ZeroDivisionError\('by zero'\)"),
    ],
)
def test_an_error_of_the_reader_is_raised_on_the_rank_that_asked(monkeypatch, raised, kind, message):
    source, (block, *_) = source_of(), blocks()

    def fails(*_):
        raise raised

    here, there = Pipe()
    server = threading.Thread(target=_serve, args=(there, source))
    server.start()
    asking = source_of()
    asking.windows = _Remote(here)
    with here:
        with monkeypatch.context() as patch:
            patch.setattr(source.reader, "_window", fails)
            with pytest.raises(DilocoError, match=message) as refused:
                asking.read(block, np.arange(2))
        assert type(refused.value) is kind
        assert asking.read(block, np.arange(2)).tolist() == source_of().read(block, np.arange(2)).tolist()
    server.join()


def test_a_rank_whose_reader_has_ended_says_so():
    source, (here, there) = source_of(), Pipe()
    source.windows = _Remote(here)
    there.close()
    with here, pytest.raises(DilocoError, match="which reads the data, has ended"):
        source.read(blocks()[0], np.arange(2))


def test_a_rank_that_is_behind_gets_the_samples_that_it_asked_for_or_an_error():
    first, second, third, fourth = blocks()
    ahead, behind = source_of(), source_of()
    behind.windows = ahead.windows
    offsets = np.arange(BATCH)
    expected = behind.read(first, offsets).tolist()
    assert ahead.read(first, offsets).tolist() == expected
    ahead.read(second, offsets)
    assert behind.read(first, offsets).tolist() == expected
    following = [ahead.read(second, offsets + n * BATCH).tolist() for n in range(STEPS)]
    assert [behind.read(second, offsets + n * BATCH).tolist() for n in range(STEPS)] == following
    # The other one begins at another place.
    expected = ahead.read(third, offsets).tolist()
    with pytest.raises(DilocoError, match="are of an earlier block"):
        behind.read(second, offsets)
    assert behind.read(third, offsets).tolist() == expected
    assert behind.read(fourth, offsets).tolist() == ahead.read(fourth, offsets).tolist()
