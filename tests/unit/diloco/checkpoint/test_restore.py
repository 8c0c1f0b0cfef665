"""What a peer does if the place of its checkpoints fails: an outage passes, a refusal does not."""

from __future__ import annotations

import contextlib
import errno

import pytest

from diloco.checkpoint.restore import Finder, OwnCheckpoints, fetched
from diloco.checkpoint.store import Store
from diloco.errors import DilocoError, UserError
from diloco.options.flags import CkptConfig
from diloco.outer.world import World

OUTAGES = [
    OSError("EndpointConnectionError: could not connect to the endpoint URL"),
    ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
    TimeoutError("timed out"),
    OSError(errno.EBUSY, "SlowDown"),
    OSError(errno.EIO, "Input/output error"),
]
REFUSALS = [
    PermissionError("Access Denied"),
    FileNotFoundError("The specified bucket does not exist"),
    OSError(errno.EROFS, "Read-only file system"),
    OSError(errno.ENOSPC, "No space left on device"),
    NotADirectoryError(errno.ENOTDIR, "Not a directory"),
]
CASES = [(error, DilocoError) for error in OUTAGES] + [(error, UserError) for error in REFUSALS]


def failing(error):
    def fail(*_args, **_kwargs):
        raise error

    return fail


@pytest.mark.parametrize(("error", "kind"), CASES, ids=lambda case: str(case))
def test_a_store_that_is_away_at_the_start_may_be_back_at_the_next(tmp_path, monkeypatch, error, kind):
    config = CkptConfig(path=str(tmp_path), interval=5)
    own = OwnCheckpoints(config, tmp_path)
    monkeypatch.setattr(Store, "register", failing(error))
    with pytest.raises(DilocoError, match=rf"--ckpt\.path {tmp_path} cannot be") as raised:
        own.resumed(World(), 0, contextlib.ExitStack(), lambda _: None, needs_outer=True, run_is_alive=False)
    assert type(raised.value) is kind


@pytest.mark.parametrize(("error", "kind"), CASES, ids=lambda case: str(case))
def test_a_store_that_is_away_at_a_resume_may_be_back_at_the_next(tmp_path, monkeypatch, error, kind):
    monkeypatch.setattr(Finder, "next", failing(error))
    config = CkptConfig(path=str(tmp_path), resume="auto")
    with pytest.raises(DilocoError, match=r"--ckpt\.resume auto") as raised:
        fetched(config, World(), 0, tmp_path, contextlib.ExitStack())
    assert type(raised.value) is kind
