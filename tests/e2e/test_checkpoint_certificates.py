"""The error for a user who resumes from a checkpoint whose certificate does not prove that a swarm made it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from diloco.checkpoint.mark import read_mark, write_mark
from peers.protocol.certificates import Certificate, decode_certificate, verify_signature
from peers.protocol.wire import encode
from peers.state.header import HEADER_FILE
from peers.state.whole_files import record_of
from tests.support.commands import DILOCO, check_gone, text_of_boxes, training_flags

LOOPBACK = ("--host-maddrs", "/ip4/127.0.0.1/tcp/0")
FLAGS = {"hv.local-steps": 4, "max-steps": 8, "ckpt.interval": 4}
Header = dict[str, Any]


@pytest.mark.exhaustive
def test_a_checkpoint_is_resumed_only_with_a_certificate_that_fits_and_is_signed(start, model, tmp_path):
    saved = tmp_path / "saved"

    def peer(name: str, **more: Any) -> Any:
        flags = training_flags(model, **{**FLAGS, "run-dir": tmp_path / name, **more})
        return start(*DILOCO, "peer", "--world-rank", 0, *LOOPBACK, *flags)

    assert peer("first", **{"ckpt.path": saved}).wait() == 0
    whole = saved / "model_step_4"
    certificate = certificate_in(json.loads(next(whole.rglob(HEADER_FILE)).read_text()))
    assert certificate.plan.epoch == 1 and certificate.is_signed(verify_signature)
    for name, (spoil, words) in SPOILT.items():
        directory = tmp_path / name / "model_step_4"
        shutil.copytree(whole, directory)
        alter(directory, spoil)
        command = peer(f"{name}-again", **{"ckpt.path": tmp_path / f"{name}-later", "ckpt.resume": directory})
        assert command.wait() == 2, command.stdout + command.stderr
        check_gone(command)
        (box,) = text_of_boxes(command.stderr)
        assert all(word in box for word in words), box
    again = peer("again", **{"ckpt.path": tmp_path / "later", "ckpt.resume": whole})
    assert again.wait() == 0, again.stderr
    assert "step 5  epoch 1" in again.stdout


def alter(directory: Path, spoil: Callable[[Header], None]) -> None:
    """Change a checkpoint's header and write a matching mark, as an attacker could."""
    (path,) = directory.rglob(HEADER_FILE)
    header = json.loads(path.read_text())
    spoil(header)
    path.write_text(json.dumps(header))
    mark = read_mark(path.parent)
    write_mark(path.parent, replace(mark, files={**mark.files, HEADER_FILE: record_of(path)}))


def certificate_in(header: Header) -> Certificate:
    return decode_certificate(bytes.fromhex(header["certificate"]))


def put(header: Header, certificate: Certificate) -> None:
    header["certificate"] = encode(certificate).hex()


def by_another_key(header: Header) -> None:
    certificate = certificate_in(header)
    (mine,) = certificate.signatures
    forged = msgspec.structs.replace(mine, signature=mine.signature[::-1])
    put(header, msgspec.structs.replace(certificate, signatures=(forged,)))


def of_other_weights(header: Header) -> None:
    certificate = certificate_in(header)
    body = msgspec.structs.replace(certificate.body, anchor="a" * 64)
    put(header, msgspec.structs.replace(certificate, body=body))


def of_an_earlier_version(header: Header) -> None:
    del header["certificate"]


SPOILT: dict[str, tuple[Callable[[Header], None], tuple[str, ...]]] = {
    "forged": (by_another_key, ("is not signed by all of those whose work", "Resume from another one")),
    "other": (of_other_weights, ("is not the one of the commit", "Resume from an older one")),
    "old": (of_an_earlier_version, ("has no certificate", "diloco export", "--path-model")),
}
