"""Stdout and stderr where people read them: output that cannot be written is lost, and the work goes on."""

from __future__ import annotations

import contextlib
import io
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def lose_unwritable(*names: str) -> None:
    """From now on these streams, "stdout" and "stderr", raise no error but BrokenPipeError: nobody reads them any more.

    Bytes for which the disk has no room are lost. Characters that the locale's encoding lacks become "?".
    """
    for name in names:
        stream = getattr(sys, name)
        # Not a stream that stands in for that of this process.
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            with contextlib.suppress(OSError):
                stream.flush()
            buffer = io.BufferedWriter(_LossyFile(stream.fileno(), "wb", closefd=False))
            setattr(sys, name, io.TextIOWrapper(buffer, stream.encoding, "replace", line_buffering=True))


class _LossyFile(io.FileIO):
    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError:
            return memoryview(data).nbytes
