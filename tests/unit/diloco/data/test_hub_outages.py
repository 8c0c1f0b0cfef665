"""What becomes of a worker whose dataset cannot be opened, because of the hub or of the network."""

import json
import ssl
from types import SimpleNamespace

import huggingface_hub
import pytest
from datasets.exceptions import DatasetNotFoundError
from huggingface_hub import errors as hub

from diloco import outages
from diloco.data import batches
from diloco.data.streaming import open_hub_dataset
from diloco.data.tokenizer import load_tokenizer
from diloco.errors import DilocoError, UserError
from diloco.launch.worker import exit_code
from diloco.options.trainer import TrainConfig


class ConnectError(Exception):
    """As in the hub's HTTP library: derived from Exception alone."""


def refusal(status, kind=hub.HfHubHTTPError):
    response = SimpleNamespace(status_code=status, headers={}, request=None)
    return kind(f"status {status}", response=response)


@pytest.mark.parametrize(
    "error",
    [
        ConnectError("no route to host"),
        TimeoutError("timed out"),
        ssl.SSLCertVerificationError("self-signed certificate"),
        json.JSONDecodeError("Expecting value", "<html>", 0),
        hub.LocalEntryNotFoundError("not in the cache, and the hub cannot be reached"),
        refusal(429),
        refusal(503),
    ],
    ids=repr,
)
def test_a_worker_that_cannot_reach_the_hub_is_started_again(error, monkeypatch, capsys):
    assert code_after(error, monkeypatch) == 1
    assert "cannot be loaded from Hugging Face at present" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        refusal(401, hub.RepositoryNotFoundError),
        refusal(403, hub.GatedRepoError),
        refusal(403),
        hub.HFValidationError("no name for a dataset"),
        DatasetNotFoundError("Dataset 'far/away' is a gated dataset on the Hub."),
        ValueError("BuilderConfig 'fr' not found."),
        hub.OfflineModeIsEnabled("HF_HUB_OFFLINE is set"),
    ],
    ids=repr,
)
def test_a_worker_whose_dataset_the_hub_refuses_has_to_be_helped(error, monkeypatch, capsys):
    assert code_after(error, monkeypatch) == 2
    assert "name `stdlib`" in capsys.readouterr().err


def code_after(error, monkeypatch):
    def raising(*_args, **_kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", raising)
    return exit_code(lambda: open_hub_dataset("far/away"))


def test_a_worker_waits_ten_minutes_for_the_hub_and_the_check_before_the_start_does_not(monkeypatch, capsys):
    config, outage = TrainConfig(dataset_name_or_path="far/away"), DilocoError("no route to host")
    errors, pauses_s = [outage] * 20, []

    def opened(*_args, **_kwargs):
        if errors:
            raise errors.pop()
        return SimpleNamespace(num_files=64)

    monkeypatch.setattr(batches, "open_hub_dataset", opened)
    clock = SimpleNamespace(sleep=pauses_s.append, monotonic=lambda: sum(pauses_s))
    monkeypatch.setattr(outages, "time", clock)
    tokenizer = load_tokenizer("2m")
    assert batches.open_data(config, tokenizer).num_files == 64
    assert sum(pauses_s) == 600
    for errors in ([outage] * 21, [UserError("no such dataset")]):
        expected = errors[0]
        with pytest.raises(DilocoError) as refused:
            batches.open_data(config, tokenizer)
        assert refused.value is expected and not errors
    errors = [outage]
    batches.check_data(config)
    assert "note: no route to host; the training waits up to 10 minutes for it" in capsys.readouterr().err
    errors = [UserError("no such dataset")]
    with pytest.raises(UserError, match="no such dataset"):
        batches.check_data(config)
