from peers.presence import ANNOUNCE_INTERVAL_S, EARLY_INTERVAL_S, RECORD_TTL_S, announce_interval_s, rest_s


def test_few_peers_announce_news_at_once_and_many_in_turn():
    assert rest_s(2) == rest_s(8) == 0.0
    assert announce_interval_s(5, is_early=True) == EARLY_INTERVAL_S
    assert announce_interval_s(5, is_early=False) == ANNOUNCE_INTERVAL_S
    # However many there are, they put about as much on the DHT as sixteen do.
    assert 32 / rest_s(32) == 64 / rest_s(64) == 16 / rest_s(16)


def test_a_record_is_renewed_long_before_it_expires_however_many_there_are():
    for num_peers in (1, 50, 1000, 10**6):
        renewed_after_s = rest_s(num_peers) + announce_interval_s(num_peers, is_early=False)
        assert renewed_after_s <= RECORD_TTL_S / 2
