"""Documents on this machine: the standard library's sources, text, JSONL and Parquet files.

A corpus yields its documents in the same order on every machine that has the same files. A hash decides which documents
are held out for validation, so no peer trains on a document that another validates with.
"""

from __future__ import annotations

import itertools
import json
import os
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import xxhash

from diloco.errors import UserError

_STDLIB_HELD_OUT = 1 / 16
_STDLIB_HELD_OUT_BYTES = 384 * 1024
_HELD_OUT = 1 / 50
# Long text files are cut at line ends into documents of about this size, so that some of them can be held out.
_PIECE_BYTES = 32 * 1024
# Average size of the parts that small files are joined to; larger files are parts of their own.
_PART_BYTES = 256 * 2**20
# Bytes of the start, the middle and the end of a file each, which tell files of the same name, size and time apart.
_SAMPLE_BYTES = 4 * 1024
_TEXT_SUFFIXES = (".txt", ".md", ".text", ".py", ".rst", ".tex", ".html")
_SUFFIXES = (*_TEXT_SUFFIXES, ".jsonl", ".json", ".parquet")
_COMPRESSED_SUFFIXES = (".gz", ".zst", ".xz", ".bz2", ".zip")
# Compressed text is refused if its bytes are more than this share of those of the files that can be read.
_MOST_COMPRESSED = 0.03
# Directories to skip. Tests of the library are often packaged separately, and some contain invalid source on purpose.
_NO_SOURCES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"}
# One generated file of help texts, so large that it would dominate the text.
_GENERATED = {"pydoc_data"}


@dataclass(frozen=True)
class Document:
    """A document's bytes, UTF-8 except where a text file holds others."""

    content: bytes
    held_out: bool


@dataclass(frozen=True)
class CorpusPart:
    """Consecutive files of a corpus, or a single one."""

    fingerprint: str
    """Changes when the documents may have changed; it does not depend on the directories in which the files are."""
    num_bytes: int
    """The size of the files."""
    documents: Callable[[], Iterator[Document]]
    """The documents of these files, always in the same order."""


class StdlibCorpus:
    """The sources of the Python standard library: real text on every machine, without a download."""

    name = "stdlib"

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or Path(sysconfig.get_path("stdlib"))
        sources = _sorted_files(self.root, (".py",), without=_NO_SOURCES | _GENERATED)
        # _sysconfigdata*.py is generated when Python is built and contains that machine's paths.
        self.files = [path for path in sources if not path.name.startswith("_sysconfigdata")]
        if not self.files:
            raise UserError(f"this Python has no sources in {self.root}; name a dataset of your own instead")
        self.held_out = _held_out_files(self.root, self.files)

    def parts(self) -> list[CorpusPart]:
        """A single part, since all files decide together which ones are held out."""
        facts = [_FileFacts.of(path, path.relative_to(self.root).as_posix()) for path in self.files]
        return [_part_of(facts, "", self.documents)]

    def documents(self) -> Iterator[Document]:
        """All documents, always in the same order."""
        for path in self.files:
            yield Document(_read_bytes(path), held_out=path in self.held_out)


class FileCorpus:
    """Text, JSONL or Parquet: one file, or all files of a directory, ordered by name."""

    def __init__(self, path: Path, text_column: str | None = None) -> None:
        self.name = str(path)
        self.root = path if path.is_dir() else path.parent
        if self.root != path and path.suffix in _COMPRESSED_SUFFIXES:
            raise UserError(f"{path} is compressed, so it cannot be read; decompress it")
        found = _sorted_files(path, (*_SUFFIXES, *_COMPRESSED_SUFFIXES)) if path.is_dir() else [path]
        self.files = [one for one in found if one.suffix not in _COMPRESSED_SUFFIXES]
        compressed = [one for one in found if one.suffix in _COMPRESSED_SUFFIXES]
        # A compressed file beside the same one decompressed is no loss.
        self._left_out = [one for one in compressed if not one.with_suffix("").exists()]
        self.text_column = text_column
        if not self.files:
            self.check_left_out()
            raise UserError(f"{path} holds no {', '.join(_SUFFIXES)} file, so there is no text to train on")

    def left_out(self) -> str:
        """Says which files of the directory are not read because they are compressed; "" if there are none."""
        if not self._left_out:
            return ""
        one, num_others = self._left_out[0].relative_to(self.root), len(self._left_out) - 1
        return f"{self.name} holds compressed files, which are not read ({one} and {num_others} others)"

    def check_left_out(self) -> None:
        """Raise UserError if much text is compressed, or archives are larger than all files that can be read.

        Smaller ones belong to many a tree of sources.
        """
        num_bytes = _num_bytes(self.files)
        texts = [path for path in self._left_out if path.with_suffix("").suffix in _SUFFIXES]
        if (
            (self._left_out and not self.files)
            or _num_bytes(texts) > _MOST_COMPRESSED * num_bytes
            or _num_bytes(self._left_out) > num_bytes
        ):
            raise UserError(f"{self.left_out()}; decompress them, or move them out of it")

    def parts(self) -> list[CorpusPart]:
        """The documents in parts, in order."""
        groups = _groups([_FileFacts.of(path, path.name) for path in self.files])
        return [
            _part_of(facts, f"{self.text_column}", partial(self._documents, [one.path for one in facts]))
            for facts in groups
        ]

    def documents(self) -> Iterator[Document]:
        return self._documents(self.files)

    def _documents(self, files: Iterable[Path]) -> Iterator[Document]:
        for path in files:
            for content in self._texts(path):
                if content:
                    yield Document(content, held_out=is_held_out(content))

    def first_texts(self) -> Iterator[bytes]:
        """The first text of every file, to check that each can be read without reading all of them."""
        return (content for path in self.files for content in itertools.islice(self._texts(path), 1))

    def _texts(self, path: Path) -> Iterator[bytes]:
        if path.suffix in (".jsonl", ".json"):
            return self._column(path, _json_rows(path))
        if path.suffix == ".parquet":
            return self._column(path, _parquet_rows(path))
        return _text_pieces(path)

    def _column(self, path: Path, rows: Iterable[dict[str, Any]]) -> Iterator[bytes]:
        column: str | None = None
        for number, row in enumerate(rows, start=1):
            column = column or text_column_of(row, named=self.text_column, dataset=str(path))
            yield text_of(row, column, where=f"{path}, row {number}").encode("utf-8", errors="replace")


Corpus = StdlibCorpus | FileCorpus


def is_held_out(content: bytes) -> bool:
    """Whether a document is for validation only. It depends on the content, so duplicates are treated alike."""
    return xxhash.xxh3_64_intdigest(content) < _HELD_OUT * 2**64


def _held_out_files(root: Path, files: list[Path]) -> frozenset[Path]:
    """Files with the lowest path hashes: a share of _STDLIB_HELD_OUT, and at least _STDLIB_HELD_OUT_BYTES."""
    held_out: set[Path] = set()
    num_bytes = 0
    for rank, path in sorted((_path_hash(root, path), path) for path in files):
        if rank >= _STDLIB_HELD_OUT * 2**64 and num_bytes >= _STDLIB_HELD_OUT_BYTES:
            break
        held_out.add(path)
        num_bytes += path.stat().st_size
    return frozenset(held_out)


def _path_hash(root: Path, path: Path) -> int:
    return xxhash.xxh3_64_intdigest(path.relative_to(root).as_posix().encode())


def _sorted_files(root: Path, suffixes: tuple[str, ...], without: Collection[str] = ()) -> list[Path]:
    """Files below `root` with these suffixes, except hidden ones and those in directories named in `without`."""
    paths = []
    for directory, inner, names in os.walk(root, onerror=_refuse):
        # Pruned before descending: site-packages has many times more files than the library.
        inner[:] = [name for name in inner if not name.startswith(".") and name not in without]
        paths += [Path(directory, name) for name in names if not name.startswith(".")]
    files = [path for path in paths if path.suffix in suffixes and path.is_file()]
    # Sorted as strings, because Path comparison ignores case on some systems.
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def _num_bytes(files: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in files)


def _refuse(error: OSError) -> None:
    raise UserError(f"cannot read {error.filename}: {error.strerror}") from error


@dataclass(frozen=True)
class _FileFacts:
    path: Path
    num_bytes: int
    identity: bytes
    """What tells whether the file has changed."""

    @classmethod
    def of(cls, path: Path, name: str) -> Self:
        try:
            status = path.stat()
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        facts = f"\0{status.st_size}\0{status.st_mtime_ns}\0{_sample_digest(path, status.st_size)}\0"
        return cls(path, status.st_size, os.fsencode(name) + facts.encode())


def _groups(files: Iterable[_FileFacts]) -> list[list[_FileFacts]]:
    """Joins small files to groups of about _PART_BYTES.

    Whether a group ends with a file depends on this file alone, so a file that is added, changed or removed changes its
    own group only.
    """
    groups: list[list[_FileFacts]] = [[]]
    for file in files:
        if file.num_bytes >= _PART_BYTES and groups[-1]:
            groups.append([])
        groups[-1].append(file)
        if xxhash.xxh3_64_intdigest(file.identity) < file.num_bytes / _PART_BYTES * 2**64:
            groups.append([])
    return groups if groups[-1] else groups[:-1]


def _part_of(
    files: list[_FileFacts], options: str, documents: Callable[[], Iterator[Document]]
) -> CorpusPart:
    """`options` says how the files are read."""
    digest = xxhash.xxh3_128()
    for file in files:
        digest.update(file.identity)
    num_bytes = sum(file.num_bytes for file in files)
    return CorpusPart(f"{digest.hexdigest()} {options}", num_bytes, documents)


def _sample_digest(path: Path, num_bytes: int) -> str:
    rest = max(0, num_bytes - _SAMPLE_BYTES)
    digest = xxhash.xxh3_128()
    try:
        with path.open("rb", buffering=0) as file:
            for start in sorted({0, rest // 2, rest}):
                file.seek(start)
                digest.update(file.read(_SAMPLE_BYTES))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    return digest.hexdigest()


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def _text_pieces(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while lines := file.readlines(_PIECE_BYTES):
                piece = b"".join(lines)
                if b"\0" in piece:
                    raise UserError(
                        f"{path} holds NUL bytes, so it is not text; name text, JSONL or Parquet files"
                    )
                yield piece
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def _json_rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _json_row(line, f"{path}, line {number}")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def _json_row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where} is not UTF-8 from byte {error.start + 1} on; save the file as UTF-8"
        ) from error
    except json.JSONDecodeError as error:
        raise UserError(
            f"{where} is not JSON ({error.msg} at column {error.colno}); JSONL has one whole JSON object a line"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} holds JSON that cannot be read: {error}") from error
    if not isinstance(row, dict):
        raise UserError(f"{where} is no JSON object; JSONL has one object a line")
    return row


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise UserError(f"reading {path} needs pyarrow; pip install 'diloco[data]'") from error
    try:
        with parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            strings = [field.name for field in schema if str(field.type) in ("string", "large_string")]
            if not strings:
                raise UserError(
                    f"{path} has no column with text, only {schema.names}; name a dataset that has one"
                )
            for batch in file.iter_batches(batch_size=1024, columns=strings):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a readable Parquet file: {error}") from error


_USUAL_NAMES = ("text", "content", "raw_content", "document", "body", "code", "sentence")


def text_column_of(row: Mapping[str, Any], *, named: str | None, dataset: str) -> str:
    """The column `named`, else one with a usual name, else the only one with strings; raises UserError otherwise."""
    strings = [name for name, value in row.items() if isinstance(value, str)]
    if named is not None:
        if named in strings or (named in row and row[named] is None):
            return named
        raise UserError(
            f"{dataset} has no text in a column {named!r}; its columns with text are {strings or 'none'}"
        )
    for name in _USUAL_NAMES:
        # The text of the first row may be null.
        if name in strings or (name in row and row[name] is None):
            return name
    if len(strings) == 1:
        return strings[0]
    if not strings:
        raise UserError(f"{dataset} has no column with text, only {list(row)}; name a dataset that has one")
    raise UserError(f"{dataset} has several columns with text, {strings}; choose one with --text-column")


def text_of(row: Mapping[str, Any], column: str, *, where: str) -> str:
    """The row's text, "" if it is null; raises UserError if it is not a string."""
    value = row.get(column)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{where}: column {column!r} holds {type(value).__name__}, not text")
    return value
