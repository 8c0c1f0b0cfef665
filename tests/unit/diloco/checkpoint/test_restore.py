"""What a peer does if the place of its checkpoints fails: an outage passes, a refusal does not."""

from __future__ import annotations

import contextlib
import errno
from types import SimpleNamespace

import fsspec
import pytest

from diloco import outages
from diloco.checkpoint.restore import Finder, OwnCheckpoints, fetched
from diloco.checkpoint.store import RemoteStore, Store, open_store
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
    OSError(errno.EINVAL, "The specified bucket is not valid"),
    NotADirectoryError(errno.ENOTDIR, "Not a directory"),
]
CASES = [(error, DilocoError) for error in OUTAGES] + [(error, UserError) for error in REFUSALS]


def failing(error):
    def fail(*_args, **_kwargs):
        raise error

    return fail


@pytest.fixture
def pauses_s(monkeypatch):
    """What was waited, in seconds; nothing waits in fact."""
    pauses_s = []
    clock = SimpleNamespace(sleep=pauses_s.append, monotonic=lambda: sum(pauses_s))
    monkeypatch.setattr(outages, "time", clock)
    return pauses_s


class NoCredentialsError(Exception):
    """As botocore's: derived from no error of the system."""


def failing_at_first(errors, then):
    """As `then`, once these errors have been raised."""
    left = list(errors)

    def fail(*args, **kwargs):
        if left:
            raise left.pop()
        return then(*args, **kwargs)

    return fail


@pytest.mark.parametrize(("error", "kind"), CASES, ids=lambda case: str(case))
def test_a_store_that_is_away_at_the_start_may_be_back_at_the_next(
    tmp_path, monkeypatch, pauses_s, error, kind
):
    config = CkptConfig(path=str(tmp_path), interval=5)
    own = OwnCheckpoints(config, tmp_path)
    monkeypatch.setattr(Store, "register", failing(error))
    with pytest.raises(DilocoError, match=rf"--ckpt\.path {tmp_path} cannot be") as raised:
        own.resumed(World(), 0, contextlib.ExitStack(), lambda _: None, needs_outer=True, run_is_alive=False)
    assert type(raised.value) is kind
    assert sum(pauses_s) == (0 if kind is UserError else 600)


@pytest.mark.parametrize(("error", "kind"), CASES, ids=lambda case: str(case))
def test_a_store_that_is_away_at_a_resume_may_be_back_at_the_next(
    tmp_path, monkeypatch, pauses_s, error, kind
):
    monkeypatch.setattr(Finder, "next", failing(error))
    config = CkptConfig(path=str(tmp_path), resume="auto")
    with pytest.raises(DilocoError, match=r"--ckpt\.resume auto") as raised:
        fetched(config, World(), 0, tmp_path, contextlib.ExitStack())
    assert type(raised.value) is kind


@pytest.mark.parametrize(("error", "kind"), CASES, ids=lambda case: str(case))
def test_a_place_that_is_away_when_it_is_opened_may_be_back_at_the_next(tmp_path, monkeypatch, error, kind):
    monkeypatch.setattr(fsspec.core, "url_to_fs", failing(error))
    with pytest.raises(DilocoError, match="sftp://far/away") as raised:
        open_store("sftp://far/away", tmp_path)
    assert type(raised.value) is kind


def test_a_worker_waits_while_its_store_is_away(tmp_path, monkeypatch, pauses_s):
    files, root = fsspec.core.url_to_fs(f"memory://{tmp_path.name}")
    outage, url = [ConnectionRefusedError("connection refused")] * 3, "sftp://far/away"
    monkeypatch.setattr(fsspec.core, "url_to_fs", failing_at_first(outage, lambda _url: (files, root)))
    monkeypatch.setattr(RemoteStore, "register", failing_at_first(outage, RemoteStore.register))
    monkeypatch.setattr(Finder, "next", failing_at_first(outage, Finder.next))
    own = OwnCheckpoints(CkptConfig(path=url, interval=5, resume="auto"), tmp_path)
    stack = contextlib.ExitStack()
    place = {"needs_outer": True, "run_is_alive": False}
    assert own.resumed(World(), 0, stack, lambda _: None, **place) is None
    assert list(own.store.savers()) == [0]
    assert pauses_s == [30.0] * 9


def test_a_worker_gives_a_store_up_that_is_away_for_more_than_ten_minutes(tmp_path, monkeypatch, pauses_s):
    monkeypatch.setattr(fsspec.core, "url_to_fs", failing(ConnectionRefusedError("connection refused")))
    with pytest.raises(DilocoError, match="sftp://far/away cannot be reached: connection refused"):
        OwnCheckpoints(CkptConfig(path="sftp://far/away", interval=5), tmp_path)
    assert sum(pauses_s) == 600


def test_missing_credentials_are_no_outage(tmp_path, monkeypatch, pauses_s):
    own = OwnCheckpoints(CkptConfig(path=f"memory://{tmp_path.name}", interval=5), tmp_path)
    monkeypatch.setattr(own.store._files, "pipe_file", failing(NoCredentialsError("Unable to locate")))
    with pytest.raises(UserError, match="cannot be written to: NoCredentialsError: Unable to locate"):
        own.resumed(World(), 0, contextlib.ExitStack(), lambda _: None, needs_outer=True, run_is_alive=False)
    assert not pauses_s
