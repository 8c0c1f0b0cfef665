"""Token ids in files, read as one sequence."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from diloco.data import token_files
from diloco.data.held_out import windows_at
from diloco.data.token_files import TokenFiles
from diloco.errors import DilocoError

LENGTHS = (0, 7, 1, 0, 0, 12, 3, 0)


@pytest.fixture(params=[np.uint16, np.uint32])
def written(request, tmp_path):
    """An array, and the files that hold it."""
    ids = np.arange(1, sum(LENGTHS) + 1, dtype=request.param)
    pieces = np.split(ids, np.cumsum(LENGTHS)[:-1])
    paths = [tmp_path / f"{number}.bin" for number in range(len(pieces))]
    for path, piece in zip(paths, pieces, strict=True):
        piece.tofile(path)
    return ids, TokenFiles.of(paths, ids.dtype)


def test_every_slice_is_that_of_the_array(written):
    ids, files = written
    assert np.asarray(files).dtype == ids.dtype and np.asarray(files, dtype=np.int64).dtype == np.int64
    assert len(files) == len(ids)
    for start in range(-2, len(ids) + 2):
        for stop in range(-2, len(ids) + 2):
            assert np.array_equal(np.asarray(files[start:stop]), ids[start:stop])
            assert len(files[start:stop]) == len(ids[start:stop])
    assert np.array_equal(np.asarray(files[3:20][4:][:6]), ids[3:20][4:][:6])


def test_windows_of_files_are_those_of_the_array(written):
    ids, files = written
    numbers = np.array([4, 0, 3, 3])
    windows = windows_at(numbers, files, 4)
    assert windows.dtype == np.int64 and np.array_equal(windows, windows_at(numbers, ids, 4))
    assert windows_at(numbers[:0], files, 4).shape == (0, 5)


def test_few_files_can_be_read_after_they_have_been_deleted(written, tmp_path):
    ids, files = written
    for path in tmp_path.iterdir():
        path.unlink()
    assert np.array_equal(np.asarray(files), ids)


def test_of_many_files_one_that_is_gone_names_the_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "_MOST_MAPPED", 2)
    paths = [tmp_path / "cache" / f"part-{number}" / "train.bin" for number in range(3)]
    for path in paths:
        path.parent.mkdir(parents=True)
        np.ones(4, dtype=np.uint16).tofile(path)
    files = TokenFiles.of(paths, np.dtype(np.uint16))
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(DilocoError, match=f"part-1: No such file or directory; .* in {tmp_path / 'cache'}$"):
        np.asarray(files[4:5])


def test_only_so_many_files_are_open_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "_MOST_MAPPED", 2)
    paths = [tmp_path / f"{number}.bin" for number in range(9)]
    for number, path in enumerate(paths):
        np.full(4, number, dtype=np.uint16).tofile(path)
    files = TokenFiles.of(paths, np.dtype(np.uint16))
    assert files._files._mapped.cache_info().currsize == 0
    for number in (3, 8, 0, 5, 3):
        assert np.asarray(files[4 * number : 4 * number + 4]).tolist() == [number] * 4
        assert files._files._mapped.cache_info().currsize <= 2
