"""A corpus as two sequences of token ids, tokenised once and read from a cache afterwards.

The cache keeps the tokens of each part of the corpus, a few files, in a directory of its own. So a part is tokenised
again only if one of its files has changed, tokenising that was cut short continues after the last complete part, and
corpora share the parts that they have in common.

The cache does not use `datasets`, whose import takes most of a second and 90 MB on every rank.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash
from filelock import FileLock, Timeout

from diloco.data.corpus import Corpus, CorpusPart, Document, StdlibCorpus
from diloco.data.token_files import TokenFiles, Tokens
from diloco.data.tokenizer import encode_documents, is_byte_level
from diloco.errors import UserError
from peers.system import num_cores

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

# Part of every cache key: increment it when a change makes the same corpus tokenise differently.
_FORMAT = 2
# Bytes of text, and documents, per call of the tokenizer. It spreads the documents over the cores, and takes about 100
# bytes of memory for each token.
_BATCH_BYTES, _BATCH_SIZE = 2**22, 1024
# Reading the documents and storing the ids takes one core at a time, about as long as 16 cores encode. So several parts
# are read at once, but no more than keep the cores busy.
_MOST_AT_ONCE, _CORES_EACH = 4, 4
_POLL_S = 0.5
_TRAIN, _HELD_OUT = "train.bin", "held_out.bin"
_UNFINISHED = ".partial"
# Earlier versions kept the tokens of a whole corpus in one directory.
_EARLIER = re.compile(r"[0-9a-f]{32}(\.partial)?")


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME/diloco/tokens, or ~/.cache/diloco/tokens."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "diloco" / "tokens"


def tokenized(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    cache_dir: Path | None = None,
    on_tokenized: Callable[[float], None] = lambda _num_bytes: None,
    *,
    fills_cache: bool = True,
    agreed: Callable[[str], str] = lambda key: key,
) -> tuple[Tokens, Tokens]:
    """Training ids and held-out ids: 1-D, uint16 or uint32, documents in order, each followed by eos.

    Fills the cache on first use; processes that call it at once divide the parts. `on_tokenized` is called with the
    number of bytes that this process has tokenised so far. Without `fills_cache`, waits until another process has
    filled it, with the death of which this one ends. `agreed` returns that process's key of the corpus: the files may
    change while processes start. Raises UserError.
    """
    if isinstance(corpus, StdlibCorpus) and is_byte_level(tokenizer):
        # Not cached: encoding takes less time than checking the files for changes.
        ids_of: dict[bool, list[np.ndarray]] = {False: [], True: []}
        for document, ids in _encoded(corpus.documents(), tokenizer):
            ids_of[document.held_out].append(ids)
        return np.concatenate(ids_of[False]), np.concatenate(ids_of[True])
    cache_dir = cache_dir or default_cache_dir()
    parts = corpus.parts()
    key = " ".join([tokenizer_digest(tokenizer), *map(_text_digest, parts)])
    of_tokenizer, *of_texts = agreed(key).split()
    directories = [cache_dir / f"{of_text}-{of_tokenizer}" for of_text in of_texts]
    try:
        if fills_cache:
            cache_dir.mkdir(parents=True, exist_ok=True)
            missing = [pair for pair in zip(directories, parts, strict=True) if not pair[0].is_dir()]
            if missing:
                _name_earlier(cache_dir)
                _Tokenising(corpus.name, tokenizer, on_tokenized).fill(missing)
        else:
            for directory in directories:
                while not directory.is_dir():
                    time.sleep(_POLL_S)
        train, held_out = (
            TokenFiles.of([directory / name for directory in directories], token_dtype(tokenizer))
            for name in (_TRAIN, _HELD_OUT)
        )
    except OSError as error:
        raise UserError(
            f"cannot keep the tokens of {corpus.name} in {cache_dir}: {error.strerror or error}; "
            "name a directory with room in XDG_CACHE_HOME"
        ) from error
    return train, held_out


def to_tokenize(corpus: Corpus, cache_dir: Path) -> tuple[int, list[Path]]:
    """The size of the files whose tokens are not in the cache, and the directories with unfinished tokens of these.

    Tokens of any tokenizer count.
    """
    entries = list(cache_dir.iterdir()) if cache_dir.is_dir() else []
    there = {_text_of(entry) for entry in entries if not entry.suffix}
    missing = {digest: part for part in corpus.parts() if (digest := _text_digest(part)) not in there}
    unfinished = [entry for entry in entries if entry.suffix == _UNFINISHED and _text_of(entry) in missing]
    return sum(part.num_bytes for part in missing.values()), unfinished


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest that is equal for tokenizers that encode every text to the same ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return xxhash.xxh3_128_hexdigest(f"{text} {tokenizer.eos_token_id}".encode())


def token_dtype(tokenizer: PreTrainedTokenizerBase) -> np.dtype:
    """The smallest dtype that holds every id."""
    return np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)


def _text_digest(part: CorpusPart) -> str:
    return xxhash.xxh3_128_hexdigest(f"{_FORMAT} {part.fingerprint}".encode())


def _text_of(entry: Path) -> str:
    """The digest of the text whose tokens are in this directory of the cache."""
    return entry.name.partition("-")[0]


def _name_earlier(cache_dir: Path) -> None:
    earlier = sorted(entry.name for entry in cache_dir.iterdir() if _EARLIER.fullmatch(entry.name))
    if earlier:
        log.warning(
            "%s has %d directories with tokens of an earlier format, which nothing reads (%s): delete those that "
            "have no - in their names",
            cache_dir,
            len(earlier),
            earlier[0],
        )


class _Tokenising:
    """Tokenises parts of one corpus, several at a time."""

    def __init__(
        self, name: str, tokenizer: PreTrainedTokenizerBase, on_tokenized: Callable[[float], None]
    ) -> None:
        self._name = name
        self._tokenizer = tokenizer
        self._on_tokenized = on_tokenized
        self._num_bytes, self._counting = 0, threading.Lock()
        self._is_cut_short = threading.Event()

    def fill(self, missing: Sequence[tuple[Path, CorpusPart]]) -> None:
        """Tokenise each part into its directory, or wait until another process has."""
        log.info("tokenising %s", self._name)
        # The first call sets options of the tokenizer, which must not change while another thread uses it.
        encode_documents(self._tokenizer, [b""], byte_level=False)
        num_threads = max(1, min(_MOST_AT_ONCE, num_cores() // _CORES_EACH))
        with ThreadPoolExecutor(num_threads, thread_name_prefix="tokenise") as pool:
            taken = {pool.submit(self._take, *pair, waits=False): pair for pair in missing}
            try:
                for future in as_completed(taken):
                    future.result()
            except BaseException:
                self._is_cut_short.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        elsewhere = [pair for future, pair in taken.items() if not future.result()]
        if not all(directory.is_dir() for directory, _ in elsewhere):
            log.warning("waiting for another process, which tokenises %s", self._name)
        for directory, part in elsewhere:
            self._take(directory, part, waits=True)

    def _take(self, directory: Path, part: CorpusPart, *, waits: bool) -> bool:
        """Tokenise the part unless it is there by now. Returns False if another process does so, and not `waits`.

        Waits however long: if the other process dies, the kernel releases its lock.
        """
        lock_path = directory.with_suffix(".lock")
        lock = FileLock(lock_path)
        try:
            lock.acquire(blocking=waits)
        except Timeout:
            return False
        try:
            if not directory.is_dir():
                self._build(directory, part)
            # Whoever acquires a lock, be it on this file or on the next of its name, finds the directory.
            lock_path.unlink(missing_ok=True)
        finally:
            lock.release()
        return True

    def _build(self, directory: Path, part: CorpusPart) -> None:
        """Tokenise the part into `directory`. The caller holds the lock, so a `.partial` is a dead process's."""
        partial = directory.with_suffix(_UNFINISHED)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            with (partial / _TRAIN).open("wb") as train, (partial / _HELD_OUT).open("wb") as held_out:
                for document, ids in _encoded(part.documents(), self._tokenizer, self._count):
                    (held_out if document.held_out else train).write(ids.data)
                for file in (train, held_out):
                    file.flush()
                    os.fsync(file.fileno())
            partial.rename(directory)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _count(self, num_bytes: int) -> None:
        if self._is_cut_short.is_set():
            raise CancelledError
        with self._counting:
            self._num_bytes += num_bytes
            self._on_tokenized(self._num_bytes)


def _encoded(
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
    count: Callable[[int], None] = lambda _num_bytes: None,
) -> Iterator[tuple[Document, np.ndarray]]:
    """Yields each document with its ids; calls `count` with the bytes of text of each batch that has been encoded."""
    byte_level, dtype = is_byte_level(tokenizer), token_dtype(tokenizer)
    for batch in _batches(documents):
        contents = [document.content for document in batch]
        encoded = encode_documents(tokenizer, contents, byte_level=byte_level)
        for document, ids in zip(batch, encoded, strict=True):
            yield document, ids.astype(dtype)
        count(sum(map(len, contents)))


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    num_bytes = 0
    for document in documents:
        if document.content:
            batch.append(document)
            num_bytes += len(document.content)
        if num_bytes >= _BATCH_BYTES or len(batch) >= _BATCH_SIZE:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch
