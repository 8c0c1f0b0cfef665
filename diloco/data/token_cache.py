"""A corpus as one array of token ids on disk: tokenised once, memory-mapped ever after."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
import xxhash

from diloco.data.corpus import Corpus
from diloco.data.tokenizer import encode_document, is_byte_level
from diloco.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

# Part of every key: raise it when the same corpus would be tokenised otherwise.
_FORMAT = 1
_LOCK_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Tokens:
    """A tokenised corpus, documents in order, each followed by eos."""

    train: np.ndarray
    """uint16 or uint32, memory-mapped."""
    held_out: np.ndarray
    train_byte_counts: np.ndarray
    """int64 [256]: how often each byte occurs in the training documents."""
    digest: str
    """Of all ids: equal on two peers if and only if they train on the same text."""


@dataclass(frozen=True)
class _Meta:
    dtype: str
    digest: str
    train_byte_counts: list[int]


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME/diloco/tokens, or ~/.cache/diloco/tokens."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "diloco" / "tokens"


def tokenized(corpus: Corpus, tokenizer: PreTrainedTokenizerBase, cache_dir: Path | None = None) -> Tokens:
    """The corpus's tokens, from the cache or written to it; any number of processes may ask at once."""
    cache_dir = cache_dir or default_cache_dir()
    key = f"{_FORMAT} {corpus.fingerprint()} {tokenizer_digest(tokenizer)}"
    directory = cache_dir / xxhash.xxh3_128_hexdigest(key.encode())
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        if not directory.is_dir():
            # The lock saves the others the work; the rename alone makes it safe.
            with _locked(directory.with_suffix(".lock")) as is_locked:
                if is_locked:
                    _remove_leftovers(directory)
                if not directory.is_dir():
                    _build(corpus, tokenizer, directory)
    except OSError as error:
        raise UserError(
            f"cannot keep the tokens of {corpus.name} in {cache_dir}: {error.strerror or error}; "
            "name a directory with room in XDG_CACHE_HOME"
        ) from error
    return _open(directory)


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Equal for tokenizers that give every text the same ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return xxhash.xxh3_128_hexdigest(f"{text} {tokenizer.eos_token_id}".encode())


def token_dtype(tokenizer: PreTrainedTokenizerBase) -> np.dtype:
    """The smallest type that holds every id."""
    return np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)


def _build(corpus: Corpus, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    log.info("tokenising %s", corpus.name)
    temporary = directory.with_name(f"{directory.name}.{uuid.uuid4().hex[:12]}.tmp")
    temporary.mkdir()
    try:
        with (
            (temporary / "train.bin").open("wb") as train,
            (temporary / "held_out.bin").open("wb") as held_out,
        ):
            meta = _write(corpus, tokenizer, train, held_out)
        (temporary / "meta.json").write_text(json.dumps(asdict(meta)), encoding="utf-8")
        # Loses to another process that was first: its directory is as good.
        with contextlib.suppress(OSError):
            temporary.rename(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if not directory.is_dir():
        raise UserError(f"could not write the tokens of {corpus.name} to {directory}; is the disk full?")


def _remove_leftovers(directory: Path) -> None:
    """What a process that was killed while it wrote has left."""
    for leftover in directory.parent.glob(f"{directory.name}.*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)


def _write(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, train: IO[bytes], held_out: IO[bytes]
) -> _Meta:
    byte_level, dtype = is_byte_level(tokenizer), token_dtype(tokenizer)
    eos = np.asarray([tokenizer.eos_token_id], dtype=dtype).tobytes()
    counts = np.zeros(256, dtype=np.int64)
    digest = xxhash.xxh3_128(dtype.str.encode())
    for document in corpus.documents():
        if not document.content:
            continue
        if not document.held_out:
            counts += np.bincount(np.frombuffer(document.content, dtype=np.uint8), minlength=256)
        ids = (
            encode_document(tokenizer, document.content, byte_level=byte_level).astype(dtype).tobytes() + eos
        )
        digest.update(b"\1" if document.held_out else b"\0")
        digest.update(ids)
        (held_out if document.held_out else train).write(ids)
    return _Meta(dtype.str, digest.hexdigest(), counts.tolist())


def _open(directory: Path) -> Tokens:
    meta = _Meta(**json.loads((directory / "meta.json").read_text(encoding="utf-8")))
    train, held_out = (_mapped(directory / name, meta.dtype) for name in ("train.bin", "held_out.bin"))
    return Tokens(train, held_out, np.asarray(meta.train_byte_counts, dtype=np.int64), meta.digest)


def _mapped(path: Path, dtype: str) -> np.ndarray:
    # An empty file cannot be mapped.
    if path.stat().st_size == 0:
        return np.zeros(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold the lock (yields True), or after a deadline go on without it: it only saves work."""
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_locked = True
                break
            except OSError:
                if time.monotonic() > deadline:
                    log.warning("%s is held for %g s; tokenising without it", path, _LOCK_TIMEOUT_S)
                    is_locked = False
                    break
                time.sleep(0.1)
        yield is_locked
