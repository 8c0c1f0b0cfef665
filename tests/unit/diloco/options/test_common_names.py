"""For flag names of other programs, and mistyped ones, ours is suggested."""

from __future__ import annotations

import pytest

from diloco.options.common_names import _FIELD_BY_OTHER_NAME, suggested_name
from diloco.options.trainer import TrainConfig, flat_values

KNOWN = set(flat_values(TrainConfig()))


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        ("learning_rate", "lr"),
        ("batch_size", "total_batch_size"),
        ("epochs", "total_steps"),
        ("model", "path_model"),
        ("dataset", "dataset_name_or_path"),
        ("hv.codec", "hv.compression"),
        ("peer", "hv.initial_peers"),
        ("resume", "ckpt.resume"),
        ("percision", "precision"),
        ("local_step", "hv.local_steps"),
        ("zebra", None),
    ],
)
def test_a_name_of_another_program_leads_to_ours(typed, ours):
    assert suggested_name(typed, KNOWN) == ours


def test_no_name_is_both_ours_and_anothers():
    assert not _FIELD_BY_OTHER_NAME.keys() & {name for name in KNOWN if "." not in name}


def test_what_a_verb_does_not_have_is_not_suggested():
    assert suggested_name("learning_rate", {"initial_peers", "run_id"}) is None
    assert suggested_name("peer", {"initial_peers", "run_id"}) == "initial_peers"
    assert suggested_name("peer", {"initial_peers", "peers"}) == "peers"
