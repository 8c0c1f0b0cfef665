from peers.net.back_off import BackOff


def test_a_path_that_fails_is_left_alone_each_time_for_longer_but_not_for_ever():
    direct, now, waits = BackOff(30.0, 600.0), 0.0, []
    for _ in range(8):
        direct.failed(now)
        assert not direct.is_over(now)
        waits.append(direct.until - now)
        now = direct.until
        assert direct.is_over(now)
    assert waits[0] == 30.0 and waits == sorted(waits) and waits[-1] == 600.0
    direct.succeeded()
    direct.failed(now)
    assert direct.until - now == 30.0


def test_one_failure_that_several_streams_notice_counts_once():
    direct = BackOff(30.0, 600.0)
    for now in range(10):
        direct.failed(float(now))
    assert direct.until == 30.0
