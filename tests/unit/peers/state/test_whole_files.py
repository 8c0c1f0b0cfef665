from __future__ import annotations

import pytest
import torch
from blake3 import blake3
from safetensors import safe_open

from peers.state.whole_files import problem_with, record_of, write_bytes, write_tensors
from tests.support.full_disk import full_disk

TENSORS = {
    "weights": torch.randn(3, 5),
    "transposed": torch.randn(4, 6).T,
    "step": torch.tensor(7.0),
    "half": torch.randn(3).to(torch.bfloat16),
    "state": torch.arange(5, dtype=torch.uint8),
    "count": torch.tensor([1, 2]),
    "none": torch.empty(0, 4),
    "flags": torch.tensor([True, False]),
}


def test_tensors_come_back_as_safetensors_reads_them(tmp_path):
    record = write_tensors(tmp_path / "t.safetensors", TENSORS, {"place": "here"})
    with safe_open(tmp_path / "t.safetensors", framework="pt") as file:
        assert file.metadata() == {"place": "here"}
        assert set(file.keys()) == TENSORS.keys()
        for name, tensor in TENSORS.items():
            found = file.get_tensor(name)
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(found, tensor), name
    assert record == record_of(tmp_path / "t.safetensors")
    assert record.digest == blake3((tmp_path / "t.safetensors").read_bytes()).hexdigest()


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    write_bytes(path, b"before")
    with full_disk(), pytest.raises(OSError, match=r"file'$"):
        write_bytes(path, b"longer than ten bytes")
    assert path.read_bytes() == b"before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 2_500_000])
def test_any_size_is_written(tmp_path, size):
    content = bytes(torch.randint(256, (size,), dtype=torch.uint8).numpy())
    record = write_bytes(tmp_path / "file", content)
    assert (tmp_path / "file").read_bytes() == content
    assert record == record_of(tmp_path / "file")


def test_what_is_wrong_with_a_file_is_said(tmp_path):
    path = tmp_path / "file"
    record = write_bytes(path, b"content")
    assert problem_with(path, record) is None
    path.write_bytes(b"contenT")
    assert problem_with(path, record) == "does not hold what was saved"
    path.write_bytes(b"cont")
    assert problem_with(path, record) == "has 4 bytes and not 7"
    path.unlink()
    assert problem_with(path, record) == "is missing"
    path.mkdir()
    assert problem_with(path, record) is not None
