"""Streams Hugging Face datasets that are too large to store, dividing their documents among the peers.

Documents are divided into NUM_LANES disjoint lanes. The peer of world rank r packs the text of lane r into windows and
trains B windows per epoch, in epoch e from window e * B on, so a sample depends on (world rank, epoch) only. A peer
that joins late must read its lane from the start.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from diloco.data.corpus import is_held_out, text_column_of, text_of
from diloco.data.held_out import Validation, validation_of
from diloco.data.sampling import Block, check_offsets
from diloco.data.tokenizer import encode_documents, is_byte_level
from diloco.errors import DilocoError, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

# Upper limit of world ranks. A constant, since another number would assign every document to another lane.
NUM_LANES = 64
_SKIP_WORTH_A_LINE = 1000
_HUB_TIMEOUT_S = 10.0
# Byte frequencies are estimated from this many documents of lane 0.
_COUNTED_DOCUMENTS = 256

Documents = Callable[[], Iterable[bytes]]


class StreamingSource:
    """A SampleSource over a streamed dataset. Reading far backward restarts the stream from the beginning."""

    def __init__(
        self,
        dataset: HubDataset,
        tokenizer: PreTrainedTokenizerBase,
        *,
        seq_length: int,
        samples_per_block: int,
        num_kept: int,
        eval_tokens: int,
    ) -> None:
        """`num_kept` is how many samples back from the last one can be read again without restarting the stream."""
        self.seq_length = seq_length
        self.samples_per_block = samples_per_block
        self._dataset = dataset
        self._tokenizer = tokenizer
        self._eval_tokens = eval_tokens
        self._lane: tuple[int, Iterator[np.ndarray], int] | None = None
        self._last: deque[np.ndarray] = deque(maxlen=num_kept)

    def read(self, block: Block, offsets: np.ndarray) -> np.ndarray:
        """Samples of the peer's block, int64 [len(offsets), seq_length + 1]. Offsets must be ascending."""
        check_offsets(offsets, self.samples_per_block)
        first = block.epoch * self.samples_per_block
        return np.stack([self._window(block.world_rank, first + int(offset)) for offset in offsets])

    def validation(self) -> Validation:
        """Windows of the dataset's validation split, else of the documents held out by their hash."""
        # Up to eval_tokens predicted ids, and one more window's worth.
        wanted = self._eval_tokens + self.seq_length + 1
        parts: list[np.ndarray] = []
        for ids in self._encoded(self._dataset.held_out()):
            parts.append(ids)
            wanted -= len(ids)
            if wanted <= 0:
                break
        tokens = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        if len(tokens) <= self.seq_length:
            raise UserError(
                f"{self._dataset.name} has {len(tokens)} tokens of held-out text, fewer than a sample of "
                f"{self.seq_length + 1}; lower --seq-length or name a larger dataset"
            )
        counts = np.zeros(256, dtype=np.int64)
        for content in itertools.islice(self._dataset.lane(0), _COUNTED_DOCUMENTS):
            counts += np.bincount(np.frombuffer(content, dtype=np.uint8), minlength=256)
        limits = {"seq_length": self.seq_length, "max_tokens": self._eval_tokens}
        return validation_of(tokens, counts, self._tokenizer, **limits)

    def _window(self, lane: int, number: int) -> np.ndarray:
        if self._lane is None or self._lane[0] != lane or self._lane[2] - len(self._last) > number:
            self._lane = (lane, self._windows(lane), 0)
            self._last.clear()
        _, windows, position = self._lane
        if number - position >= _SKIP_WORTH_A_LINE:
            log.info(
                "skipping %d samples of %s to reach this peer's position",
                number - position,
                self._dataset.name,
            )
        # If reading fails, the next call starts over.
        self._lane = None
        self._last.extend(itertools.islice(windows, max(0, number + 1 - position)))
        position = max(position, number + 1)
        self._lane = (lane, windows, position)
        return self._last[number - position]

    def _windows(self, lane: int) -> Iterator[np.ndarray]:
        """Yields the lane's packed windows, repeating the lane for ever."""
        pending = np.zeros(0, dtype=np.int64)
        while True:
            num_tokens = 0
            for ids in self._encoded(self._dataset.lane(lane)):
                num_tokens += len(ids)
                pending = np.concatenate([pending, ids])
                while len(pending) > self.seq_length:
                    yield pending[: self.seq_length + 1]
                    pending = pending[self.seq_length :]
            if num_tokens == 0:
                raise UserError(
                    f"{self._dataset.name} has no document for world rank {lane}: it is too small "
                    f"to be streamed to {NUM_LANES} lanes; save it as JSONL or Parquet and name that file"
                )

    def _encoded(self, documents: Iterable[bytes]) -> Iterator[np.ndarray]:
        byte_level = is_byte_level(self._tokenizer)
        for content in documents:
            yield from encode_documents(self._tokenizer, [content], byte_level=byte_level)


class HubDataset:
    """The documents of a `datasets.IterableDataset`, by lane, and the held-out ones."""

    def __init__(self, name: str, train: Any, validation: Any = None, text_column: str | None = None) -> None:
        """Reads one row to find the text column. Raises UserError if there is no row or no text."""
        self.name = name
        self._train = train
        self._validation = validation
        try:
            first = next(iter(self._rows(train)), None)
        except DilocoError as error:
            raise UserError(str(error)) from error
        if first is None:
            raise UserError(f"{name} is empty; name a dataset with text")
        self._column = text_column_of(first, named=text_column, dataset=name)

    def lane(self, number: int) -> Iterator[bytes]:
        """One pass over a lane's training documents."""
        if number >= NUM_LANES:
            raise UserError(
                f"{self.name} is streamed to {NUM_LANES} world ranks at most; {number} is one too high"
            )
        if self._train.num_shards >= NUM_LANES:
            # Shard by file, so that each peer downloads only its own files.
            rows = self._rows(self._train.shard(num_shards=NUM_LANES, index=number))
        else:
            rows = itertools.islice(self._rows(self._train), number, None, NUM_LANES)
        for content in self._texts(rows):
            if self._validation is not None or not is_held_out(content):
                yield content

    def held_out(self) -> Iterator[bytes]:
        """Documents that are in no lane."""
        if self._validation is not None:
            return self._texts(self._rows(self._validation))
        return (content for content in self._texts(self._rows(self._train)) if is_held_out(content))

    def _texts(self, rows: Iterable[dict[str, Any]]) -> Iterator[bytes]:
        for row in rows:
            text = text_of(row, self._column, where=self.name)
            if text:
                yield text.encode("utf-8", errors="replace")

    def _rows(self, dataset: Any) -> Iterator[dict[str, Any]]:
        try:
            yield from dataset
        # Not UserError, after which no worker is started again: mostly the hub or the network is down for a while.
        # As in `open_hub_dataset`, its client lets the errors of any HTTP library through.
        except Exception as error:
            raise DilocoError(f"reading {self.name} failed: {error}") from error


def open_hub_dataset(name: str, text_column: str | None = None) -> HubDataset:
    """Open `owner/name` or `owner/name:config`. Raises UserError if it cannot be opened."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"the dataset {name} comes from Hugging Face; pip install 'diloco[data]' reads it"
        ) from error
    path, _, configuration = name.partition(":")
    try:
        _check_is_there(path)
        configuration = configuration or _usual_configuration(datasets, path)
        splits = datasets.load_dataset(path, configuration or None, streaming=True)
    # The hub's client lets the errors of its HTTP library through, and which library that is depends on its version.
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"{name} is not a file here, and cannot be loaded from Hugging Face ({reason}); name `stdlib`, a "
            "text, JSONL or Parquet file, a directory of them, or a dataset there (owner/name[:config])"
        ) from error
    train = splits["train"] if "train" in splits else next(iter(splits.values()))
    held_out = next((splits[split] for split in ("validation", "valid", "dev") if split in splits), None)
    return HubDataset(name, train, held_out, text_column)


def _check_is_there(path: str) -> None:
    """Ask the hub once: `datasets` asks again and again for half a minute before it says that nobody answers."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        HfApi().dataset_info(path, timeout=_HUB_TIMEOUT_S)
    except RepositoryNotFoundError as error:
        raise ValueError("there is no such dataset, or it is not public") from error


def _usual_configuration(datasets: Any, path: str) -> str:
    """`en` if a dataset has several configurations and no default, as allenai/c4; else "", the default."""
    names = datasets.get_dataset_config_names(path)
    if len(names) > 1 and "default" not in names and "en" in names:
        return "en"
    return ""
