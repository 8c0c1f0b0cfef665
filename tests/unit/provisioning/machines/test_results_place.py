"""A place that cannot keep results is refused before anything is rented."""

from __future__ import annotations

import asyncio

import fsspec
import pytest

from diloco.cli.app import USER_ERROR, exit_code
from provisioning.errors import UserError
from provisioning.machines.local import LocalMachine
from provisioning.machines.paths import PODS
from provisioning.machines.results import NOTHING, check_place, fetch_results


def test_a_place_that_takes_results_is_left_as_it_was(tmp_path):
    check_place(str(tmp_path / "new/run"))
    check_place(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    check_place(f"memory://{tmp_path.name}/run")
    assert fsspec.filesystem("memory").find(f"/{tmp_path.name}") == []


def test_a_place_that_takes_none_is_named_with_what_is_missing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"No results can be written to .*/file/run: NotADirectoryError"):
        check_place(str(tmp_path / "file/run"))
    with pytest.raises(UserError, match=r"foo://x/y is no place for results: .*foo"):
        check_place("foo://x/y")

    def without_s3fs(url: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", without_s3fs)
    with pytest.raises(UserError, match=r"Install s3fs to access S3\): pip install 'diloco\[s3\]'"):
        check_place("s3://bucket/run")


def test_a_place_that_refuses_to_be_written_to_is_none(tmp_path, monkeypatch):
    def refused(*_: object, **__: object) -> None:
        raise PermissionError("403")

    monkeypatch.setattr(fsspec.filesystem("memory"), "pipe_file", refused)
    with pytest.raises(UserError, match="PermissionError: 403"):
        check_place(f"memory://{tmp_path.name}/run")


@pytest.mark.parametrize("command", ["provision --pods 1", "experiments run lr_sweep --provider local"])
def test_nothing_is_planned_or_rented_where_results_cannot_go(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert exit_code([*command.split(), "--yes", "--run-dir", "foo://x/y"]) == USER_ERROR
    said = capsys.readouterr()
    assert "foo://x/y is no place for results" in said.err and "create" not in said.out
    assert not (tmp_path / "state/diloco/local").exists()


def test_pods_fetch_says_so_before_it_asks_a_pod(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "runs").write_text("a file in the place of the directory")
    assert exit_code(["pods", "fetch"]) == USER_ERROR
    assert "No results can be written to" in capsys.readouterr().err
    assert exit_code(["pods", "fetch", "--fetch", "none"]) == 0


async def test_a_pod_has_no_results_only_where_some_were_looked_for(tmp_path):
    (tmp_path / PODS / "label").mkdir(parents=True)

    async def said(*words: str) -> str:
        into, transfers = str(tmp_path / "into"), asyncio.Semaphore()
        return await fetch_results(LocalMachine(tmp_path), "label", words, into, transfers)

    assert await said(NOTHING) == "nothing of it is fetched"
    assert await said("logs", "model") == "it has no logs or model"
