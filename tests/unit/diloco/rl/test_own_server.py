"""The messages about a server that cannot start or was killed."""

from __future__ import annotations

import pytest

from diloco.errors import UserError
from diloco.rl import own_server
from diloco.rl.own_server import check_has_vllm, in_words


def test_a_python_that_hangs_is_named_by_its_flag(tmp_path, monkeypatch):
    monkeypatch.setattr(own_server, "_PROBE_TIMEOUT_S", 0.5)
    hangs = tmp_path / "python"
    hangs.write_text("#!/bin/sh\nexec sleep 60\n")
    hangs.chmod(0o755)
    with pytest.raises(
        UserError, match=rf"--grpo\.vllm-python {hangs} has not answered within 0\.5 s; name a"
    ):
        check_has_vllm(str(hangs), {})


def test_a_server_that_was_killed_is_not_told_as_a_number():
    assert "SIGKILL" in in_words(137) and "memory" in in_words(137)
    assert in_words(3) == "it ended with 3"
