from peers.net.paths.choice import FIRST_BACK_OFF_S, LONGEST_BACK_OFF_S, Pair
from peers.protocol.records import Path

MB = 1 << 20


def test_direct_is_tried_off_the_rounds_way_before_any_round_waits_for_it():
    pair = Pair()
    assert pair.may_go_direct(0.0) and not pair.is_ready_for_direct(0.0)
    pair.direct_stood()
    assert pair.is_ready_for_direct(0.0)


def test_a_direct_path_that_fails_is_left_alone_each_time_for_longer_but_not_for_ever():
    pair, now = Pair(), 0.0
    waits = []
    for _ in range(8):
        pair.direct_failed(now)
        assert not pair.may_go_direct(now)
        waits.append(pair.direct.until - now)
        now = pair.direct.until
        assert pair.may_go_direct(now)
    assert waits[0] == FIRST_BACK_OFF_S and waits == sorted(waits) and waits[-1] == LONGEST_BACK_OFF_S
    pair.direct_stood()
    pair.direct_failed(now)
    assert pair.direct.until - now == FIRST_BACK_OFF_S


def test_after_a_failure_direct_has_to_prove_itself_again():
    pair = Pair()
    pair.direct_stood()
    pair.direct_failed(0.0)
    assert not pair.is_ready_for_direct(FIRST_BACK_OFF_S)


def measured(direct, libp2p, now=0.0):
    pair = Pair()
    for path, rates in ((Path.LIBP2P, libp2p), (Path.DIRECT, direct)):
        for rate in rates:
            pair.measured(path, 64 * MB, 64 / rate, now)
    return pair


def test_direct_gives_way_only_when_it_is_measured_much_slower():
    assert measured(direct=[100, 110, 90], libp2p=[]).may_go_direct(1.0)
    assert measured(direct=[80, 90, 60], libp2p=[100]).may_go_direct(1.0)
    assert measured(direct=[10, 10], libp2p=[100]).may_go_direct(1.0)
    assert measured(direct=[10, 100, 10], libp2p=[100]).may_go_direct(1.0)
    slower = measured(direct=[10, 60, 20], libp2p=[100])
    assert not slower.may_go_direct(1.0)
    assert slower.may_go_direct(LONGEST_BACK_OFF_S + 1)


def test_rounds_that_a_newcomer_slows_down_are_not_held_against_the_path():
    pair = Pair()
    pair.measured(Path.LIBP2P, 64 * MB, 1.0, 0.0, frozenset("ab"))
    pair.measured(Path.DIRECT, 64 * MB, 0.5, 0.0, frozenset("ab"))
    for _ in range(5):
        pair.measured(Path.DIRECT, 64 * MB, 10.0, 0.0, frozenset("abc"))
    assert pair.may_go_direct(1.0)
    pair.measured(Path.LIBP2P, 64 * MB, 1.0, 0.0, frozenset("abc"))
    assert not pair.may_go_direct(1.0)


def test_rounds_of_few_bytes_say_nothing_about_a_path():
    pair = measured(direct=[], libp2p=[100])
    for _ in range(5):
        pair.measured(Path.DIRECT, 1 * MB, 1.0, 0.0)
    assert pair.may_go_direct(1.0)
    assert pair.rate == 100 * MB
    assert Pair().rate == 0.0


def test_a_peer_that_does_not_answer_is_doubted_for_longer_each_time_until_something_stands():
    pair, now = Pair(), 100.0
    pair.missed(now)
    # The same silence, noticed once more.
    pair.missed(now + 1)
    assert pair.is_doubted(now + FIRST_BACK_OFF_S - 1) and not pair.is_doubted(now + FIRST_BACK_OFF_S)
    now += FIRST_BACK_OFF_S
    pair.missed(now)
    assert pair.is_doubted(now + 2 * FIRST_BACK_OFF_S - 1)
    pair.direct_stood()
    assert not pair.is_doubted(now)
