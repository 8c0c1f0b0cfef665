"""Page-locked memory, with a stand-in for the CUDA runtime."""

from __future__ import annotations

import ctypes
import weakref

import pytest
import torch

from diloco.outer.page_locked import lock_pages


class Cuda:
    """Keeps the last error until it is read."""

    def __init__(self, answer: int) -> None:
        self.answer, self.last_error = answer, 0

    def cudaHostRegister(self, _address: int, _num_bytes: int, _flags: int) -> int:
        self.last_error = self.answer
        return self.answer

    def cudaGetLastError(self) -> int:
        error, self.last_error = self.last_error, 0
        return error


@pytest.mark.parametrize(("answer", "stays"), [(0, True), (2, False)])
def test_locked_memory_stays_and_a_refusal_leaves_no_error_behind(monkeypatch, answer, stays):
    cuda = Cuda(answer)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: cuda)
    memory = torch.zeros(8)
    remembered = weakref.ref(memory)
    lock_pages(memory)
    del memory
    assert (remembered() is not None) is stays
    assert cuda.last_error == 0
