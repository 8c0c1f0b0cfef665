from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from peers.errors import ProtocolError
from peers.messages import MAX_MESSAGE_BYTES
from peers.onlookers.journal import (
    MAX_INCIDENTS,
    MAX_POINTS,
    MAX_ROUNDS,
    MAX_SHOWN_RANKS,
    Curve,
    Incident,
    Journal,
    Point,
    shown_failures,
)
from peers.onlookers.reports import MAX_CERTIFICATE_BYTES, MAX_SEEN, Certified, parse, to_message
from peers.protocol.records import MAX_RECORD_BYTES
from tests.support.certified import signed_genesis
from tests.support.sighted import entry, full_report


def travelled(message: dict[str, Any]) -> dict[str, Any]:
    return msgpack.unpackb(msgpack.packb(message))


def test_a_report_arrives_as_it_was_sent():
    report = full_report()
    assert parse(travelled(to_message(report))) == report


def test_a_certificate_is_shown_only_if_its_signers_have_signed_it(tmp_path):
    certificate = signed_genesis(tmp_path)
    report = full_report(certified=Certified(5.0, certificate))
    assert parse(travelled(to_message(report))) == report
    forged = dataclasses.replace(
        report,
        certified=Certified(5.0, replace(certificate, body=replace(certificate.body, anchor="b" * 64))),
    )
    with pytest.raises(ProtocolError, match="have not signed"):
        parse(travelled(to_message(forged)))
    for nonsense in (
        [5.0],
        [5.0, "text"],
        [-1.0, b""],
        [5.0, b"x"],
        [5.0, b"x" * (MAX_CERTIFICATE_BYTES + 1)],
        None,
    ):
        with pytest.raises(ProtocolError):
            parse({**travelled(to_message(report)), "certified": nonsense})


def test_what_a_later_version_adds_is_passed_over():
    message = travelled(to_message(full_report()))
    message["weather"] = "fine"
    message["figures"]["temperature"] = 20
    message["rounds"][0]["colour"] = "blue"
    message["standing"]["step"] = "dreaming"
    assert parse(message).standing.step == "idle"
    assert dataclasses.replace(parse(message), standing=full_report().standing) == full_report()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("kind",), "status"),
        (("status",), "text"),
        (("status",), b"x" * (MAX_RECORD_BYTES + 1)),
        (("figures",), []),
        (("figures", "loss"), float("nan")),
        (("figures", "loss"), "low"),
        (("figures", "hardware"), "x" * 65),
        (("figures", "hardware"), "\x1b[2J"),
        (("figures", "sent_bytes"), -1),
        (("figures", "num_rounds"), True),
        (("figures", "link_bytes_per_s"), float("inf")),
        (("standing", "missing"), [1 << 20]),
        (("standing", "waits_for"), "a\nb"),
        (("sees",), [["A", 1.0]] * (MAX_SEEN + 1)),
        (("sees",), [["A"]]),
        (("points",), [[1.0, 2, 3.0]]),
        (("points",), [[1.0, 2, 3.0, 4.0]] * (MAX_POINTS + 2)),
        (("rounds",), [{}]),
        (("rounds", 0, "contributors"), list(range(MAX_SHOWN_RANKS + 1))),
        (("rounds", 0, "parts", "reduce_s"), -1.0),
        (("rounds", 0, "failures"), ["x" * 161]),
        (("incidents",), [[1.0, "lost\x07"]]),
    ],
)
def test_a_report_that_is_not_in_order_is_refused(path, value):
    message = travelled(to_message(full_report()))
    place: Any = message
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(ProtocolError):
        parse(message)


@given(st.recursive(st.none() | st.integers() | st.text() | st.binary(), lambda s: st.lists(s), max_leaves=8))
def test_whatever_a_field_holds_it_is_refused_in_our_own_words(value):
    for name in ("figures", "standing", "sees", "points", "rounds", "incidents", "status"):
        message = {**travelled(to_message(full_report())), name: value}
        try:
            report = parse(message)
        except ProtocolError:
            continue
        assert travelled(to_message(report))[name] == value, "taken for what it is"


def test_the_longest_report_fits_into_a_message():
    ranks = tuple(range(1 << 19, (1 << 19) + MAX_SHOWN_RANKS))
    longest = full_report(
        status=b"s" * MAX_RECORD_BYTES,
        sees={f"12D3KooW{index:044d}": 1.7e9 + index for index in range(MAX_SEEN)},
        points=tuple(
            Point(time=1.7e9 + i, step=1 << 40, loss=1.2345678, tokens_per_s=1e6) for i in range(MAX_POINTS)
        ),
        rounds=tuple(
            entry(1000 + index, 1.7e9, contributors=ranks, failures=("x" * 160,) * 8)
            for index in range(MAX_ROUNDS)
        ),
        incidents=tuple(Incident(time=1.7e9, text="x" * 160) for _ in range(MAX_INCIDENTS)),
    )
    message = to_message(longest)
    assert parse(travelled(message)) == longest
    assert len(msgpack.packb(message)) < MAX_MESSAGE_BYTES / 4


def test_a_curve_keeps_its_whole_length_however_long_it_gets():
    curve = Curve()
    for second in range(5000):
        curve.add(Point(time=float(second), step=second, loss=1.0, tokens_per_s=1.0))
    times = [point.time for point in curve.points]
    assert MAX_POINTS / 2 < len(times) <= MAX_POINTS
    assert times[0] == 0.0 and times[-1] > 4950
    distances = {after - before for before, after in itertools.pairwise(times)}
    assert len(distances) == 1


def test_points_that_come_quicker_than_anybody_looks_are_left_out():
    curve = Curve()
    for tenth in range(100):
        curve.add(Point(time=tenth / 10, step=tenth, loss=None, tokens_per_s=1.0))
    assert [point.step for point in curve.points] == list(range(0, 100, 10))


def test_a_journal_counts_everything_and_remembers_the_last():
    journal = Journal()
    assert journal.upload_bytes_per_s == 0.0
    for epoch in range(1, 100):
        journal.committed(entry(epoch, float(epoch), num_failures=epoch % 2))
    assert (journal.num_rounds, journal.num_failures, journal.sent_bytes) == (99, 50, 99_000)
    assert [kept.epoch for kept in journal.rounds] == list(range(100 - MAX_ROUNDS, 100))
    assert (journal.upload_bytes_per_s, journal.download_bytes_per_s) == (2000.0, 4000.0)


def test_an_epoch_without_a_reduction_leaves_the_measured_speeds_as_they_are():
    journal = Journal()
    journal.committed(entry(1, 1.0))
    journal.committed(entry(2, 2.0, sent_bytes=0, received_bytes=0, parts={}))
    assert (journal.upload_bytes_per_s, journal.download_bytes_per_s) == (2000.0, 4000.0)


def test_failures_are_shown_short_and_without_what_a_terminal_would_obey():
    assert shown_failures(["lost\x1b[2J peer"] * 20) == ("lost?[2J peer",) * 8
