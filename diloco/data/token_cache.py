"""A corpus as two arrays of token ids, tokenised once and memory-mapped from a cache afterwards.

The cache does not use `datasets`, whose import takes most of a second and 90 MB on every rank.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash
from filelock import AcquireReturnProxy, FileLock, Timeout

from diloco.data.corpus import Corpus, StdlibCorpus
from diloco.data.tokenizer import encode_documents, is_byte_level
from diloco.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

# Part of every cache key: increment it when a change makes the same corpus tokenise differently.
_FORMAT = 2
# Documents per call of the tokenizer, which spreads them over the cores.
_BATCH_SIZE = 256
_POLL_S = 0.5
_PARTS = ("train.bin", "held_out.bin")


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
) -> tuple[np.ndarray, np.ndarray]:
    """Training ids and held-out ids: 1-D, uint16 or uint32, documents in order, each followed by eos.

    Fills the cache on first use; any number of processes may call it at once. `on_tokenized` is called with the number
    of bytes that this process has tokenised so far. Without `fills_cache`, waits until another process has filled it,
    with the death of which this one ends. `agreed` returns that process's key of the corpus: the files may change while
    processes start. Raises UserError.
    """
    if isinstance(corpus, StdlibCorpus) and is_byte_level(tokenizer):
        # Not cached: encoding takes less time than checking the files for changes.
        parts = [list(ids) for ids in (_encoded(corpus, tokenizer, held_out) for held_out in (False, True))]
        return np.concatenate(parts[0]), np.concatenate(parts[1])
    cache_dir = cache_dir or default_cache_dir()
    key = f"{_FORMAT} {corpus.fingerprint()} {tokenizer_digest(tokenizer)}"
    directory = cache_dir / agreed(xxhash.xxh3_128_hexdigest(key.encode()))
    try:
        while not fills_cache and not directory.is_dir():
            time.sleep(_POLL_S)
        if not directory.is_dir():
            cache_dir.mkdir(parents=True, exist_ok=True)
            with _acquired(FileLock(directory.with_suffix(".lock")), corpus.name):
                if not directory.is_dir():
                    _build(corpus, tokenizer, directory, on_tokenized)
        train, held_out = (_mapped(directory / name, token_dtype(tokenizer)) for name in _PARTS)
    except OSError as error:
        raise UserError(
            f"cannot keep the tokens of {corpus.name} in {cache_dir}: {error.strerror or error}; "
            "name a directory with room in XDG_CACHE_HOME"
        ) from error
    return train, held_out


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest that is equal for tokenizers that encode every text to the same ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return xxhash.xxh3_128_hexdigest(f"{text} {tokenizer.eos_token_id}".encode())


def token_dtype(tokenizer: PreTrainedTokenizerBase) -> np.dtype:
    """The smallest dtype that holds every id."""
    return np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)


def _acquired(lock: FileLock, name: str) -> AcquireReturnProxy[FileLock]:
    """Wait for another process that tokenises the corpus, however long: if it dies, the kernel releases its lock."""
    try:
        return lock.acquire(blocking=False)
    except Timeout:
        log.warning("waiting for another process, which tokenises %s", name)
        return lock.acquire()


def _build(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    on_tokenized: Callable[[float], None],
) -> None:
    """Tokenise the corpus into `directory`. The caller holds the lock, so a `.partial` is a dead process's."""
    log.info("tokenising %s", corpus.name)
    num_bytes = 0

    def count(more: int) -> None:
        nonlocal num_bytes
        num_bytes += more
        on_tokenized(num_bytes)

    partial = directory.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        for name, held_out in zip(_PARTS, (False, True), strict=True):
            with (partial / name).open("wb") as file:
                for ids in _encoded(corpus, tokenizer, held_out, count):
                    ids.tofile(file)
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _encoded(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    held_out: bool,
    count: Callable[[int], None] = lambda _num_bytes: None,
) -> Iterator[np.ndarray]:
    """Yields the ids of each document; calls `count` with the bytes of text of each batch that has been encoded."""
    byte_level, dtype = is_byte_level(tokenizer), token_dtype(tokenizer)
    contents = (one.content for one in corpus.documents() if one.content and one.held_out == held_out)
    while batch := list(itertools.islice(contents, _BATCH_SIZE)):
        for ids in encode_documents(tokenizer, batch, byte_level=byte_level):
            yield ids.astype(dtype)
        count(sum(map(len, batch)))


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    # An empty file cannot be mapped.
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype=dtype)
