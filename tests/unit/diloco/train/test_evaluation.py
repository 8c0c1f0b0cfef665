"""The evaluation before training."""

from __future__ import annotations

import pytest

from diloco import train_fsdp
from tests.support.training import of_kind, tiny_config, train


@pytest.mark.parametrize(("longest_s", "evaluated_at"), [(60.0, [(0,), (6,)]), (0.0, [(6,)])])
def test_a_slow_machine_goes_without_the_evaluation_before_training(
    tmp_path, monkeypatch, capsys, longest_s, evaluated_at
):
    monkeypatch.setattr(train_fsdp, "LONGEST_FIRST_EVALUATION_S", longest_s)
    records = train(tiny_config(tmp_path), tmp_path / "run")
    assert of_kind("eval", records, "step") == evaluated_at
    is_left_out = longest_s == 0
    assert ("not evaluated before training: that would take about" in capsys.readouterr().out) == is_left_out
