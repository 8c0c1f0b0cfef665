from __future__ import annotations

import itertools
import math
from typing import Any

import msgpack
import pytest
from msgspec.msgpack import Decoder
from msgspec.structs import replace

from peers.errors import ProtocolError
from peers.monitor.journal import Curve, Journal, shown_failures
from peers.monitor.observer import check_certified
from peers.net.channel import MAX_MESSAGE_BYTES
from peers.protocol.records import MAX_RECORD_BYTES
from peers.protocol.reports import (
    MAX_CERTIFICATE_BYTES,
    MAX_INCIDENTS,
    MAX_POINTS,
    MAX_ROUNDS,
    MAX_SEEN,
    MAX_SHOWN_RANKS,
    Certified,
    Incident,
    Parts,
    Point,
    Report,
)
from peers.protocol.wire import decode, encode
from tests.support.certified import signed_genesis
from tests.support.sighted import entry, full_report


def fields_of(report: Report) -> dict[str, Any]:
    """The report's fields as they are sent."""
    return msgpack.unpackb(encode(report))


def read(message: Any) -> Report:
    report = decode(Decoder(Report), msgpack.packb(message), MAX_MESSAGE_BYTES)
    check_certified(report)
    return report


def test_a_report_arrives_as_it_was_sent():
    report = full_report()
    assert read(fields_of(report)) == report


def test_a_certificate_is_shown_only_if_its_signers_have_signed_it(tmp_path):
    certificate = signed_genesis(tmp_path)
    report = full_report(certified=Certified(time=5.0, certificate=certificate))
    message = fields_of(report)
    assert read(message) == report
    forged = replace(certificate, body=replace(certificate.body, anchor="b" * 64))
    with pytest.raises(ProtocolError, match="have not signed"):
        read(fields_of(full_report(certified=Certified(time=5.0, certificate=forged))))
    for nonsense in (
        {"time": 5.0},
        {"time": 5.0, "certificate": "text"},
        {"time": 5.0, "certificate": b"x"},
        {"time": 5.0, "certificate": {}},
        {**message["certified"], "time": -1.0},
        {**message["certified"], "time": math.nan},
        {"certificate": message["certified"]["certificate"]},
        [5.0, encode(certificate)],
        [],
    ):
        with pytest.raises(ProtocolError):
            read({**message, "certified": nonsense})


def test_a_certificate_of_a_great_many_members_is_not_shown(tmp_path):
    certificate = signed_genesis(tmp_path)
    plan = certificate.plan
    many = replace(plan, roster=plan.roster * (MAX_CERTIFICATE_BYTES // 512))
    large = replace(certificate, body=replace(certificate.body, plan=many))
    with pytest.raises(ProtocolError, match="bytes in a report"):
        read(fields_of(full_report(certified=Certified(time=5.0, certificate=large))))


def test_what_a_later_version_adds_is_passed_over():
    message = fields_of(full_report())
    message["weather"] = "fine"
    message["figures"]["temperature"] = 20
    message["rounds"][0]["colour"] = "blue"
    message["rounds"][0]["parts"]["rest_s"] = 1.0
    message["standing"]["step"] = "dreaming"
    assert read(message).standing.known_step == "idle"
    assert replace(read(message), standing=full_report().standing) == full_report()


def test_the_longest_report_fits_into_a_message():
    ranks = tuple(range(1 << 19, (1 << 19) + MAX_SHOWN_RANKS))
    longest = full_report(
        status=b"s" * MAX_RECORD_BYTES,
        sees=tuple(f"12D3KooW{index:044d}" for index in range(MAX_SEEN)),
        points=tuple(
            Point(time=1.7e9 + i, step=1 << 40, loss=1.2345678, tokens_per_s=1e6) for i in range(MAX_POINTS)
        ),
        rounds=tuple(
            entry(1000 + index, 1.7e9, contributors=ranks, failures=("x" * 160,) * 8)
            for index in range(MAX_ROUNDS)
        ),
        incidents=tuple(Incident(time=1.7e9, text="x" * 160) for _ in range(MAX_INCIDENTS)),
    )
    assert read(fields_of(longest)) == longest
    assert len(encode(longest)) < MAX_MESSAGE_BYTES / 4


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
    journal.committed(entry(2, 2.0, sent_bytes=0, received_bytes=0, parts=Parts()))
    assert (journal.upload_bytes_per_s, journal.download_bytes_per_s) == (2000.0, 4000.0)


def test_failures_are_shown_short_and_without_what_a_terminal_would_obey():
    assert shown_failures(["lost\x1b[2J peer"] * 20) == ("lost?[2J peer",) * 8
