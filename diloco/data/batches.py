"""Training samples and validation text from the dataset that --dataset-name-or-path names.

Every sample is a pure function of (seed, epoch, world rank, data_base, local step), so there is no read position to
save or restore. Only a streamed dataset has one, since finding a sample by its number would mean reading all before it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

import numpy as np

from diloco.data.corpus import Corpus, FileCorpus, StdlibCorpus
from diloco.data.held_out import Validation, validation_of, windows_among, windows_at
from diloco.data.sampling import Block, random_tokens, step_offsets, windows_of
from diloco.data.streaming import StreamingSource, open_hub_dataset
from diloco.data.token_cache import tokenized
from diloco.data.token_files import Tokens
from diloco.data.tokenizer import is_byte_level, text_byte_counts
from diloco.errors import DilocoError, UserError, print_note
from diloco.options.trainer import TrainConfig
from diloco.outages import PATIENCE_S, waited_out

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

# If a corpus is so small that no document is held out, the last 1/_HELD_OUT_TAIL of its windows are.
_HELD_OUT_TAIL = 50
# Byte frequencies are estimated from this many training tokens.
_COUNTED_TOKENS = 2**18
# First sample index of the fake validation set; no run trains that many samples.
_FAKE_VALIDATION_BLOCK = 2**40
# On random ids a few windows give the same loss as many.
_FAKE_EVAL_TOKENS = 8192
# Steps whose samples wait to be trained on.
_READ_AHEAD = 2
# Time limit of `check_data`.
_CHECK_S = 2.0


class SampleSource(Protocol):
    """Where a trainer reads its samples. Every rank of a peer opens its own."""

    seq_length: int
    samples_per_block: int
    """Samples that a peer trains in an epoch: total_batch_size * steps_per_epoch."""

    def read(self, block: Block, offsets: np.ndarray) -> np.ndarray:
        """Samples of the peer's block, int64 [len(offsets), seq_length + 1]. Offsets must be ascending."""
        ...

    def validation(self) -> Validation:
        """Held-out text, which is in no block."""
        ...


def open_data(
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    cache_dir: Path | None = None,
    on_tokenized: Callable[[float], None] = lambda _num_bytes: None,
    fills_cache: bool = True,
    agreed: Callable[[str], str] = lambda key: key,
) -> SampleSource:
    """The source that the configuration names. A finite dataset is tokenised on first use.

    Raises UserError, and DilocoError if a Hugging Face dataset cannot be reached for long.

    `on_tokenized` is called with the number of bytes tokenised so far. One rank of a node has to be the one that
    `fills_cache`, and `agreed` returns what it is called with on that rank.
    """
    block = config.total_batch_size * config.hv.steps_per_epoch
    if config.fake_data:
        return FakeSource(
            seq_length=config.seq_length,
            samples_per_block=block,
            vocab_size=len(tokenizer),
            seed=config.seed,
            eval_tokens=config.eval_tokens,
        )
    corpus = open_corpus(config)
    if corpus is None:
        return StreamingSource(
            waited_out(
                lambda: open_hub_dataset(config.dataset_name_or_path, config.text_column, seed=config.seed)
            ),
            tokenizer,
            seq_length=config.seq_length,
            samples_per_block=block,
            # If training went ahead of a commit, the samples that were read ahead are read again after it. Another
            # rank of the node may be a step ahead.
            num_kept=(_READ_AHEAD + 2) * config.total_batch_size,
            eval_tokens=config.eval_tokens,
        )
    if fills_cache and isinstance(corpus, FileCorpus) and (left_out := corpus.left_out()):
        log.warning("%s", left_out)
    return FiniteSource(
        *tokenized(corpus, tokenizer, cache_dir, on_tokenized, fills_cache=fills_cache, agreed=agreed),
        tokenizer,
        name=corpus.name,
        seq_length=config.seq_length,
        samples_per_block=block,
        seed=config.seed,
        eval_tokens=config.eval_tokens,
    )


def check_data(config: TrainConfig) -> None:
    """Check, before anything is started, that the dataset exists, is readable and large enough. Raises UserError.

    Reads for _CHECK_S at most; errors further on are found by tokenising. A Hugging Face dataset that cannot be reached
    at present is left to the workers, which wait for it. Does not import torch.
    """
    if config.fake_data:
        return
    corpus = open_corpus(config)
    if corpus is None:
        try:
            open_hub_dataset(config.dataset_name_or_path, config.text_column)
        except UserError:
            raise
        except DilocoError as error:
            print_note(f"{error}; the training waits up to {PATIENCE_S / 60:g} minutes for it")
    elif isinstance(corpus, FileCorpus):
        corpus.check_left_out()
        _check_files(corpus, config.seq_length)
        if left_out := corpus.left_out():
            print_note(left_out)


def _check_files(corpus: FileCorpus, seq_length: int) -> None:
    deadline = time.monotonic() + _CHECK_S
    for _ in corpus.first_texts():
        if time.monotonic() > deadline:
            return
    num_bytes = num_documents = 0
    for document in corpus.documents():
        num_bytes, num_documents = num_bytes + len(document.content), num_documents + 1
        if time.monotonic() > deadline:
            return
    if not num_bytes:
        raise UserError(f"{corpus.name} holds no text; name a dataset that does")
    # An upper bound for any tokenizer: one token per byte, and eos after each document.
    if num_bytes + num_documents < 2 * (seq_length + 1):
        raise UserError(
            f"{corpus.name} has {num_bytes} bytes of text, too few for training and validation samples of "
            f"{seq_length + 1} tokens; lower --seq-length or name a larger dataset"
        )


def open_corpus(config: TrainConfig) -> Corpus | None:
    """The finite dataset that the configuration names; None if the name can only be a Hugging Face dataset's."""
    name = config.dataset_name_or_path
    if name == "stdlib":
        return StdlibCorpus()
    path = Path(name).expanduser()
    if path.exists():
        return FileCorpus(path, config.text_column)
    if name.startswith(("/", ".", "~")) or path.suffix or "/" not in name:
        raise UserError(
            f"there is no {name} here; name `stdlib`, a text, JSONL or Parquet file, a directory of them, or "
            "a Hugging Face dataset (owner/name)"
        )
    return None


def batches(
    source: SampleSource,
    block: Block,
    *,
    local_steps: range,
    total_batch_size: int,
    rank: int = 0,
    num_ranks: int = 1,
) -> Iterator[np.ndarray]:
    """Yields this rank's samples of each local step, int64 [total_batch_size / num_ranks, seq_length + 1].

    Wrap it in Prefetched to read ahead. A peer that joins in mid-epoch passes range(s, local_steps).
    """
    for step in local_steps:
        offsets = step_offsets(step, total_batch_size=total_batch_size, rank=rank, num_ranks=num_ranks)
        yield source.read(block, offsets)


class FiniteSource:
    """Samples of a tokenised corpus, in a different order each pass."""

    def __init__(
        self,
        train: Tokens,
        held_out: Tokens,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str,
        seq_length: int,
        samples_per_block: int,
        seed: int,
        eval_tokens: int,
    ) -> None:
        self.seq_length = seq_length
        self.samples_per_block = samples_per_block
        self._seed = seed
        self._train, self._held_out = _divided(train, held_out, seq_length, name)
        self._tokenizer = tokenizer
        self._eval_tokens = eval_tokens
        self.num_windows = (len(self._train) - 1) // seq_length

    def read(self, block: Block, offsets: np.ndarray) -> np.ndarray:
        """Samples of the peer's block, int64 [len(offsets), seq_length + 1]."""
        indices = block.indices(offsets, self.samples_per_block)
        return self.windows(windows_of(indices, num_windows=self.num_windows, seed=self._seed))

    def windows(self, numbers: np.ndarray) -> np.ndarray:
        """Windows by their number in the text, int64 [len(numbers), seq_length + 1]."""
        return windows_at(numbers, self._train, self.seq_length)

    def validation(self) -> Validation:
        """Windows spread evenly over the held-out text, of eval_tokens tokens at most."""
        sample = windows_among(self._train, self.seq_length, max_tokens=_COUNTED_TOKENS)[:, 1:].ravel()
        counts = text_byte_counts(self._tokenizer, sample, byte_level=is_byte_level(self._tokenizer))
        limits = {"seq_length": self.seq_length, "max_tokens": self._eval_tokens}
        return validation_of(self._held_out, counts, self._tokenizer, **limits)


class FakeSource:
    """Random ids, each a pure function of (seed, sample index, position in the sample)."""

    def __init__(
        self, *, seq_length: int, samples_per_block: int, vocab_size: int, seed: int, eval_tokens: int
    ) -> None:
        self.seq_length = seq_length
        self.samples_per_block = samples_per_block
        self._vocab_size = vocab_size
        self._seed = seed
        self._eval_tokens = eval_tokens

    def read(self, block: Block, offsets: np.ndarray) -> np.ndarray:
        """Samples of the peer's block, int64 [len(offsets), seq_length + 1]."""
        return self._samples(block.indices(offsets, self.samples_per_block))

    def validation(self) -> Validation:
        """Random ids as well; each counts as one byte."""
        num_windows = max(1, min(self._eval_tokens, _FAKE_EVAL_TOKENS) // self.seq_length)
        windows = self._samples(_FAKE_VALIDATION_BLOCK + np.arange(num_windows))
        return Validation(windows, num_windows * self.seq_length, float(np.log2(self._vocab_size)))

    def _samples(self, indices: np.ndarray) -> np.ndarray:
        return random_tokens(
            indices, length=self.seq_length + 1, vocab_size=self._vocab_size, seed=self._seed
        )


def _divided(train: Tokens, held_out: Tokens, seq_length: int, name: str) -> tuple[Tokens, Tokens]:
    """Training and held-out ids, at least one window of each; raises UserError if there are too few."""
    num_tokens = len(train) + len(held_out)
    if len(held_out) <= seq_length < len(train):
        num_windows = (len(train) - 1) // seq_length
        tail = max(1, num_windows // _HELD_OUT_TAIL) * seq_length + 1
        train, held_out = train[: len(train) - tail], train[len(train) - tail :]
    if len(train) <= seq_length or len(held_out) <= seq_length:
        raise UserError(
            f"{name} has {num_tokens} tokens, too few for training and "
            f"validation samples of {seq_length + 1}; lower --seq-length or name a larger dataset"
        )
    return train, held_out


T = TypeVar("T")


class _End:
    """Stands for the end of the items."""


class Prefetched(Generic[T]):
    """Iterates over `items`, reading up to `depth` + 1 items ahead. An error of `items` is raised to the consumer.

    A context manager: leaving it ends the thread, even if items are left.
    """

    def __init__(self, items: Iterator[T], depth: int = _READ_AHEAD) -> None:
        self._items = items
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._ahead = deque(self._submitted() for _ in range(depth + 1))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[T]:
        # The end, or an error, stays in the queue, so that iterating again meets it again.
        while not isinstance(item := self._ahead[0].result(), _End):
            self._ahead.popleft()
            self._ahead.append(self._submitted())
            yield item

    def close(self) -> None:
        """End the thread; repeating it is safe."""
        self._reader.shutdown(cancel_futures=True)

    def _submitted(self) -> Future[T | _End]:
        return self._reader.submit(next, self._items, _End())
