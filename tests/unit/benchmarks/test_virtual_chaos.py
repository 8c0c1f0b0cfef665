from __future__ import annotations

from statistics import mean

from benchmarks.chaos.plan import draw
from benchmarks.chaos.virtual import run


def test_most_of_what_peers_train_under_faults_is_committed():
    shares = []
    for seed in (0, 1):
        calm = run(seed, num_peers=6, seconds=60, faults=())
        faults = draw(seed, seconds=600, num_peers=6, mean_s=10.0)
        struck = run(seed, num_peers=6, seconds=600, faults=faults)
        shares.append(struck.tokens_per_live_s / calm.tokens_per_live_s)
        # No peer may be held up for long by another peer's faults.
        assert struck.waiting < 0.16
    assert mean(shares) > 0.93
