"""Streams Hugging Face datasets that are too large to store, dividing their documents among the peers.

Documents are divided into NUM_LANES disjoint lanes. A peer reads one lane after the other, in an order of its own (see
`lane_of`), and packs their text into windows, B for each epoch in which it trains. So the windows depend on the seed,
the world rank and the place where the peer began. A peer that resumes continues at the place in its checkpoint, however
many epochs it has missed: no other peer reads its lane meanwhile. One that joins late, without a checkpoint of its own,
begins with a file of its lane that the epoch determines; text before a place is never tokenised to reach it.

A peer that has read all lanes has read the dataset once, and begins the next cycle. Each cycle reads the files in
another order. Inside a file the order is kept: with a shuffle buffer, checkpoints would have to save its content.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from diloco.data.corpus import is_held_out, text_column_of, text_of
from diloco.data.held_out import Validation, validation_of
from diloco.data.sampling import Block, check_offsets, permuted
from diloco.data.tokenizer import encode_documents, is_byte_level
from diloco.errors import DilocoError, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

Place: TypeAlias = tuple[int, int]
"""The number of a lane's files read to their end, and the number of rows read of the next one."""
Document: TypeAlias = tuple[Place, bytes]
"""A document's text, and the place after it."""

# World ranks have at most this many bits. A constant, since another number would assign documents to other lanes.
_LANE_BITS = 6
NUM_LANES = 2**_LANE_BITS
# Part of every saved state: increment it when its numbers mean something else.
_FORMAT = 2
# Where the length of samples is in `_identity`.
_LENGTH = -2
_HUB_TIMEOUT_S = 10.0
_TRANSIENT_STATUSES = 408, 429
"""HTTP statuses below 500 with which the hub refuses a request for now: timeout, and too many requests."""
# Byte frequencies are estimated from this many documents of lane 0.
_COUNTED_DOCUMENTS = 256
# Documents are encoded in batches of this much text at most: the tokenizer spreads them over the cores.
_BATCH_BYTES = 2**20


def lane_of(world_rank: int, passes: int) -> int:
    """The lane that a peer reads after `passes` others. In each pass, peers read different lanes; in NUM_LANES passes
    a peer reads each lane once.

    Because the bits are reversed, 2, 4, 8 ... peers from world rank 0 on together read all lanes before any of them
    reads one that another has read, without communicating.
    """
    reversed_bits = int(f"{passes % NUM_LANES:0{_LANE_BITS}b}"[::-1], 2)
    return world_rank ^ reversed_bits


@dataclass(frozen=True, kw_only=True)
class Point:
    """A point between two documents from which a peer can continue to read its windows."""

    world_rank: int
    number: int = 0
    """Windows before this point, since the peer began."""
    passes: int = 0
    """Lanes read to their end."""
    file: int = 0
    """Files of the present lane read to their end."""
    row: int = 0
    """Rows read of the next file."""
    pending: tuple[int, ...] = ()
    """Token ids that were read and are in no window yet; fewer than a window has."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Where a peer reads: the same on all its ranks."""

    begun: int = 0
    """How often the peer has begun to read at a place that does not follow from what it read before."""
    start: Point = Point(world_rank=-1)
    """Where it began."""
    epoch: int = 0
    first: int = 0
    """The number of the first window of this epoch's block. Windows of earlier blocks are not read again."""


class StreamingSource:
    """A SampleSource over a streamed dataset. Reading far backward in a block restarts the stream before that block."""

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
        self.num_files = dataset.num_files
        self._dataset = dataset
        self._tokenizer = tokenizer
        self._eval_tokens = eval_tokens
        self.reader = WindowReader(dataset, tokenizer, seq_length=seq_length, num_kept=num_kept)
        self.windows: Callable[[Reading, list[int]], np.ndarray] = self.reader.windows
        """Reads windows by their numbers; replaced if another rank of the node reads for this one."""
        self._reading = Reading()

    def begin(self, block: Block, offset: int, state: bytes | None = None) -> None:
        """Read on from `state`; the next sample is the one at this offset of the block.

        Without a state, or with that of other data or of another world rank, reading begins at a place that depends on
        the epoch.
        """
        content = json.loads(state) if state is not None else {}
        start, number = self._start_of(block), 0
        own = self._identity()
        saved = content.get("data", list(own))
        # A place in the text does not depend on the length of samples.
        saved_length, _ = saved.pop(_LENGTH), own.pop(_LENGTH)
        # Earlier commits saved neither a format nor the sample's number: a few windows before it are read again.
        is_own = saved in (own, own[1:])
        if content and is_own and content["point"]["world_rank"] == block.world_rank:
            point = content["point"]
            # Of another length, the first window begins at the sample or less than a window before it.
            num_windows = content.get("number", point["number"]) - point["number"]
            number = point["number"] + num_windows * saved_length // self.seq_length
            start = Point(**{**point, "pending": tuple(point["pending"])})
        elif content:
            saved_by = content["point"]["world_rank"]
            whose = f"world rank {saved_by}, not {block.world_rank}" if is_own else "other data"
            log.warning("the checkpoint's place in the data is of %s, and is not used", whose)
        begun = self._reading.begun + 1
        self._reading = Reading(begun=begun, start=start, epoch=block.epoch, first=number - offset)

    def read(self, block: Block, offsets: np.ndarray) -> np.ndarray:
        """Samples of the peer's block, int64 [len(offsets), seq_length + 1]. Offsets must be ascending."""
        check_offsets(offsets, self.samples_per_block)
        if self._reading.start.world_rank != block.world_rank:
            self.begin(block, 0)
        self._reading = replace(self._reading, epoch=block.epoch, first=self._first_of(block))
        return self.windows(self._reading, [self._number(block, int(offset)) for offset in offsets])

    def state(self, block: Block, offset: int) -> bytes:
        """For a checkpoint: the place from which `begin` reads this sample of the block, and those after it."""
        point, number = self._start_of(block), 0
        if self._reading.start.world_rank == block.world_rank:
            number = self._number(block, offset)
            point = self.reader.point_before(self._reading, number)
        return json.dumps({"data": self._identity(), "point": asdict(point), "number": number}).encode()

    def _start_of(self, block: Block) -> Point:
        """Where a peer begins that has no state: in a late epoch rarely at what its world rank has read before."""
        files = self._dataset.files_of(lane_of(block.world_rank, 0))
        return Point(world_rank=block.world_rank, file=block.epoch % len(files))

    def _first_of(self, block: Block) -> int:
        """The number of a block's first window. The block after the present one follows it, whatever its epoch."""
        first = self._reading.first
        return first if block.epoch == self._reading.epoch else first + self.samples_per_block

    def _number(self, block: Block, offset: int) -> int:
        number = self._first_of(block) + offset
        # Reading began in the middle of a block: windows for its first samples are taken from the block after it.
        return number if number >= self._reading.start.number else number + self.samples_per_block

    def validation(self) -> Validation:
        """Windows of the dataset's validation split, else of the documents held out by their hash."""
        # Up to eval_tokens predicted ids, and one more window's worth.
        wanted = self._eval_tokens + self.seq_length + 1
        parts: list[np.ndarray] = []
        is_bytes = is_byte_level(self._tokenizer)
        for content in self._dataset.held_out():
            [ids] = encode_documents(self._tokenizer, [content], byte_level=is_bytes)
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

    def _identity(self) -> list[Any]:
        """All that the content of a window depends on, except its number and the world rank."""
        return [_FORMAT, *self._dataset.identity(), self.seq_length, len(self._tokenizer)]


class WindowReader:
    """Reads the windows of a peer by their numbers, for one rank or for all of a node."""

    def __init__(
        self, dataset: HubDataset, tokenizer: PreTrainedTokenizerBase, *, seq_length: int, num_kept: int
    ) -> None:
        self._dataset = dataset
        self._tokenizer, self._is_byte_level = tokenizer, is_byte_level(tokenizer)
        self._seq_length = seq_length
        # As many bytes as num_kept samples have ids is about the text of one step, so a batch is gathered while the
        # steps that were read ahead are trained. Bytes are their own ids: there is no work to spread.
        self._batch_bytes = 1 if self._is_byte_level else min(_BATCH_BYTES, num_kept * seq_length)
        self._lock = threading.Lock()
        self._reading = Reading()
        self._start = self._reading.start
        """A point before all windows that are still to be read."""
        self._stream: tuple[Iterator[np.ndarray], int] | None = None
        self._last: deque[np.ndarray] = deque(maxlen=num_kept)
        # The two newest points, at least num_kept windows apart, so that the older one is before every sample that may
        # be read again. The tuple is replaced, not changed: one thread reads ahead while another one saves.
        self._points: tuple[Point, ...] = ()

    def windows(self, reading: Reading, numbers: list[int]) -> np.ndarray:
        """The windows of these numbers, int64 [len(numbers), seq_length + 1].

        Raises DilocoError if another rank has left their block, at whose end this one drops what it has read ahead.
        """
        with self._lock:
            self._follow(reading)
            if reading.begun < self._reading.begun or min(numbers) < self._start.number:
                raise DilocoError(f"the samples from {min(numbers)} on are of an earlier block")
            return np.stack([self._window(number) for number in numbers])

    def point_before(self, reading: Reading, number: int) -> Point:
        """A point from which this window can be read."""
        return self._point_before(number) if reading.begun == self._reading.begun else reading.start

    def _follow(self, reading: Reading) -> None:
        if reading.begun > self._reading.begun:
            self._start, self._points, self._stream = reading.start, (reading.start,), None
            self._reading = reading
        elif reading.begun == self._reading.begun and reading.first > self._reading.first:
            self._start = self._point_before(reading.first)
            self._reading = reading

    def _point_before(self, number: int) -> Point:
        return next((point for point in reversed(self._points) if point.number <= number), self._start)

    def _window(self, number: int) -> np.ndarray:
        if self._stream is None or self._stream[1] - len(self._last) > number:
            start = self._point_before(number)
            self._points = (start,)
            self._stream = self._windows(start), start.number
            self._last.clear()
        windows, position = self._stream
        # If reading fails, the next call starts over from the last point.
        self._stream = None
        self._last.extend(itertools.islice(windows, max(0, number + 1 - position)))
        position = max(position, number + 1)
        self._stream = windows, position
        return self._last[number - position]

    def _windows(self, start: Point) -> Iterator[np.ndarray]:
        """Yields the packed windows after `start`, lane after lane without end, and records points on the way."""
        pending, number = np.array(start.pending, dtype=np.int64), start.number
        place, num_empty = (start.file, start.row), 0
        for passes in itertools.count(start.passes):
            lane, num_empty = lane_of(start.world_rank, passes), num_empty + 1
            documents = self._dataset.documents(lane, passes // NUM_LANES, place)
            for after, ids in self._encoded(documents):
                num_empty = 0
                pending = np.concatenate([pending, ids])
                while len(pending) > self._seq_length:
                    yield pending[: self._seq_length + 1]
                    pending, number = pending[self._seq_length :], number + 1
                if number - self._points[-1].number >= (self._last.maxlen or 0):
                    here = {"number": number, "passes": passes, "file": after[0], "row": after[1]}
                    point = Point(world_rank=start.world_rank, **here, pending=tuple(pending.tolist()))
                    self._points = (*self._points[-1:], point)
            place = 0, 0
            # Twice NUM_LANES, so that they include a whole cycle: lanes hold other documents in the next cycle.
            if num_empty == 2 * NUM_LANES:
                raise UserError(f"{self._dataset.name} has no document to train on; name a larger dataset")

    def _encoded(self, documents: Iterable[Document]) -> Iterator[tuple[Place, np.ndarray]]:
        """The token ids of each document, with the place after it."""
        for batch in _batches(documents, self._batch_bytes):
            contents = [content for _, content in batch]
            ids = encode_documents(self._tokenizer, contents, byte_level=self._is_byte_level)
            yield from zip((place for place, _ in batch), ids, strict=True)


def _batches(documents: Iterable[Document], num_bytes: int) -> Iterator[list[Document]]:
    """Divides documents into lists, each of which ends with the document that makes it reach this size."""
    batch: list[Document] = []
    missing = num_bytes
    for document in documents:
        batch.append(document)
        missing -= len(document[1])
        if missing <= 0:
            yield batch
            batch, missing = [], num_bytes
    if batch:
        yield batch


class HubDataset:
    """The documents of a `datasets.IterableDataset`, by lane, and the held-out ones."""

    def __init__(
        self,
        name: str,
        train: Any,
        validation: Any = None,
        text_column: str | None = None,
        *,
        seed: int = 0,
    ) -> None:
        """Reads one row to find the text column. Raises UserError if there is no row or no text, and DilocoError if
        reading fails.

        `seed` determines the order of the files.
        """
        self.name = name
        self.num_files: int = train.num_shards
        self._seed = seed
        self._train = train
        self._validation = validation
        first = next(iter(self._rows(train)), None)
        if first is None:
            raise UserError(f"{name} is empty; name a dataset with text")
        self._column = text_column_of(first, named=text_column, dataset=name)

    def identity(self) -> list[Any]:
        """All that the content of the lanes depends on."""
        return [self.name, self._column, self.num_files, self._seed]

    def lane(self, number: int, cycle: int = 0) -> Iterator[bytes]:
        """One pass over a lane's training documents."""
        return (content for _, content in self.documents(number, cycle))

    def files_of(self, lane: int, cycle: int = 0) -> np.ndarray:
        """The files with the documents of a lane, in the order in which they are read."""
        if lane >= NUM_LANES:
            raise UserError(
                f"{self.name} can be streamed to at most {NUM_LANES} peers, of world ranks 0 to {NUM_LANES - 1}, and "
                f"this peer's is {lane}; give it the rank of a peer that is gone: --world-rank N"
            )
        files = np.arange(self.num_files, dtype=np.uint64)
        files = permuted(files, size=len(files), seed=self._seed, passes=np.full_like(files, cycle))
        return files[lane::NUM_LANES] if self._has_own_files else files

    @property
    def _has_own_files(self) -> bool:
        # With enough files each lane has files of its own, so that a peer downloads only those.
        return self.num_files >= NUM_LANES

    def documents(self, lane: int, cycle: int, start: Place = (0, 0)) -> Iterator[Document]:
        """A lane's training documents from `start` on."""
        has_own = self._has_own_files
        for number, index in enumerate(self.files_of(lane, cycle)):
            if number < start[0]:
                continue
            first = start[1] if number == start[0] else 0
            for count, values in enumerate(self._rows(self._file(int(index), first)), first):
                if not has_own and (number + count) % NUM_LANES != lane:
                    continue
                for content in self._texts([values]):
                    if self._validation is not None or not is_held_out(content):
                        yield (number, count + 1), content

    def held_out(self) -> Iterator[bytes]:
        """Documents that are in no lane."""
        if self._validation is not None:
            return self._texts(self._rows(self._validation))
        return (content for content in self._texts(self._rows(self._train)) if is_held_out(content))

    def _file(self, index: int, first: int) -> Any:
        """The rows of one file from `first` on; `skip` does not decode the rows before it."""
        rows = self._train
        if self.num_files > 1:
            rows = rows.shard(num_shards=self.num_files, index=index)
        return rows.skip(first) if first else rows

    def _texts(self, rows: Iterable[dict[str, Any]]) -> Iterator[bytes]:
        for row in rows:
            text = text_of(row, self._column, where=self.name)
            if text:
                yield text.encode("utf-8", errors="replace")

    def _rows(self, dataset: Any) -> Iterator[dict[str, Any]]:
        try:
            yield from dataset
        # Not UserError, after which workers are not restarted: usually the hub or the network is down for a while.
        # Any exception, for the reason given in `open_hub_dataset`.
        except Exception as error:
            raise DilocoError(f"reading {self.name} failed: {error}") from error


def open_hub_dataset(name: str, text_column: str | None = None, *, seed: int = 0) -> HubDataset:
    """Open `owner/name` or `owner/name:config`.

    Raises UserError if there is no such dataset for this user, and DilocoError if the hub cannot be asked at present.
    """
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
    # Any exception: the hub's client lets those of its HTTP library through, which depends on the client's version.
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        if not _is_final(error):
            raise DilocoError(f"{name} cannot be loaded from Hugging Face at present: {reason}") from error
        raise UserError(
            f"{name} is not a file here, and cannot be loaded from Hugging Face ({reason}); name `stdlib`, a "
            "text, JSONL or Parquet file, a directory of them, or a dataset there (owner/name[:config])"
        ) from error
    train = splits["train"] if "train" in splits else next(iter(splits.values()))
    held_out = next((splits[split] for split in ("validation", "valid", "dev") if split in splits), None)
    return HubDataset(name, train, held_out, text_column, seed=seed)


def _check_is_there(path: str) -> None:
    """Ask the hub once: `datasets` would retry for half a minute before it reports that the hub does not answer."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        HfApi().dataset_info(path, timeout=_HUB_TIMEOUT_S)
    except RepositoryNotFoundError as error:
        raise ValueError("there is no such dataset, or it is not public") from error


def _is_final(error: Exception) -> bool:
    """Whether the hub has refused the dataset's name or configuration, or must not be asked; else it, or the network,
    may be down."""
    from datasets.data_files import EmptyDatasetError
    from datasets.exceptions import FileNotFoundDatasetsError
    from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled

    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return 400 <= status < 500 and status not in _TRANSIENT_STATUSES
    # `datasets` raises ValueError itself for an unknown configuration. Its subclasses include failures of the network,
    # such as a wrong TLS certificate or an answer that is not JSON; other errors about files, missing answers.
    return type(error) is ValueError or isinstance(
        error, HFValidationError | OfflineModeIsEnabled | FileNotFoundDatasetsError | EmptyDatasetError
    )


def _usual_configuration(datasets: Any, path: str) -> str:
    """`en` if a dataset has several configurations and no default, as allenai/c4; else "", the default."""
    names = datasets.get_dataset_config_names(path)
    if len(names) > 1 and "default" not in names and "en" in names:
        return "en"
    return ""
