"""The byte-level tokenizer of the presets, and any Hugging Face tokenizer.

The byte-level vocabulary is the 256 byte values, with id = value, followed by special tokens. It is an ordinary Hugging
Face tokenizer (a BPE without merges), so transformers, TRL and vLLM can load it from the directory of a saved model.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from diloco.errors import UserError
from diloco.options.model_files import PRESETS_DIR, directory_of, load_model_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

NUM_BYTES = 256
_BYTE_LEVEL = PRESETS_DIR / "2m"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def load_tokenizer(path_model: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a preset, directory or hub id; the byte-level one if the model has none.

    Raises UserError if the tokenizer does not load, has no eos, or has more ids than the model's vocabulary.
    """
    directory = directory_of(path_model, weights=False)
    if has_own := _has_tokenizer(directory):
        tokenizer = _from_directory(directory, path_model)
    else:
        tokenizer = _from_directory(_BYTE_LEVEL, "2m")
        log.warning("%s brings no tokenizer: text is read byte by byte (%d ids)", path_model, len(tokenizer))
    _check_ids_fit(path_model, len(tokenizer), has_own=has_own)
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer of {path_model} has no eos_token; name one in its tokenizer_config.json"
        )
    return tokenizer


def check_vocabulary(path_model: str) -> None:
    """Raise UserError if the model's vocabulary is too small for its tokenizer. A tokenizer that is in another file
    than tokenizer.json is checked only when it is loaded. Does not import torch."""
    num_ids = num_token_ids(path_model)
    if num_ids is not None:
        has_own = _has_tokenizer(directory_of(path_model, weights=False))
        _check_ids_fit(path_model, num_ids, has_own=has_own)


def num_token_ids(path_model: str) -> int | None:
    """How many ids the tokenizer has that `load_tokenizer` returns; None if it is in another file than tokenizer.json.

    Does not import torch. Raises UserError.
    """
    from tokenizers import Tokenizer

    directory = directory_of(path_model, weights=False)
    path = (directory if _has_tokenizer(directory) else _BYTE_LEVEL) / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        return int(Tokenizer.from_file(str(path)).get_vocab_size(with_added_tokens=True))
    except Exception as error:  # tokenizers raises nothing more specific
        raise UserError(f"the tokenizer of {path_model} does not load from {path}: {error}") from error


def chat_template_of(path_model: str) -> str:
    """The template by which the tokenizer that `load_tokenizer` returns formats a chat; empty if it has none.

    Does not import torch. Raises UserError.
    """
    directory = directory_of(path_model, weights=False)
    if not _has_tokenizer(directory):
        directory = _BYTE_LEVEL
    template, config = directory / "chat_template.jinja", directory / "tokenizer_config.json"
    try:
        if template.is_file():
            return template.read_text(encoding="utf-8")
        found = (
            json.loads(config.read_text(encoding="utf-8")).get("chat_template") if config.is_file() else None
        )
        # Several templates have names.
        named = (
            {one["name"]: one["template"] for one in found} if isinstance(found, list) else {"default": found}
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"the chat template of {path_model} does not load from {directory}: {error}"
        ) from error
    return str(named.get("default") or "")


def is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the ids below 256 are the byte values themselves and all others are special."""
    ids = tokenizer.convert_tokens_to_ids(list(_byte_symbols()))
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return ids == list(range(NUM_BYTES)) and len(tokenizer) == NUM_BYTES + len(set(added) - set(ids))


def encode_documents(
    tokenizer: PreTrainedTokenizerBase, contents: Sequence[bytes], *, byte_level: bool
) -> list[np.ndarray]:
    """Token ids (int64) of each document, without bos and with eos. Names of special tokens in the text stay text.

    The tokenizer spreads the documents over the cores.
    """
    rows: Iterable[Any]
    if byte_level:
        rows = (np.frombuffer(content, dtype=np.uint8) for content in contents)
    else:
        texts = [content.decode("utf-8", errors="replace") for content in contents]
        only_ids = {"return_attention_mask": False, "return_token_type_ids": False}
        # Not verbose: the warning "longer than the maximum sequence length" does not apply, since windows are cut.
        options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False, **only_ids}
        rows = tokenizer(texts, **options)["input_ids"]
    return [np.append(np.asarray(row, dtype=np.int64), tokenizer.eos_token_id) for row in rows]


def text_byte_counts(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray, *, byte_level: bool) -> np.ndarray:
    """How often each byte occurs in the text of the ids, int64 [256]; special tokens count as no text."""
    if byte_level:
        return np.bincount(ids[ids < NUM_BYTES], minlength=NUM_BYTES)
    text = str(tokenizer.decode(ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False))
    content = np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)
    return np.bincount(content, minlength=NUM_BYTES)


def _byte_symbols() -> tuple[str, ...]:
    """GPT-2's printable symbol for each byte: the byte itself if printable, else a character from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(NUM_BYTES, 2 * NUM_BYTES))
    return tuple(chr(byte if byte in printable else next(spare)) for byte in range(NUM_BYTES))


def _check_ids_fit(path_model: str, num_ids: int, *, has_own: bool) -> None:
    vocab_size = int(load_model_config(path_model).get("vocab_size", 0))
    if not vocab_size or num_ids <= vocab_size:
        return
    needs = (
        "its tokenizer has" if has_own else "but has no tokenizer, so text is read byte by byte, which takes"
    )
    raise UserError(
        f"the model {path_model} knows {vocab_size} token ids, {needs} {num_ids}: "
        f"set vocab_size in config.json to {num_ids} or put the matching tokenizer beside it"
    )


def _has_tokenizer(directory: Path) -> bool:
    return any((directory / name).is_file() for name in _TOKENIZER_FILES)


def _from_directory(directory: Path, path_model: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(f"the tokenizer of {path_model} does not load from {directory}: {error}") from error
    return tokenizer
