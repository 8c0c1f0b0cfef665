"""How good the model gets: every way of averaging against synchronous data parallel training, same tokens each.

    python -m benchmarks.convergence [--quick] [--json FILE] [--plot FILE] [--arms NAME ...] [--seeds N ...]

Four peers train a byte-level model of 1.06 million parameters on the standard library's sources, 20 tokens for each
parameter, 8192 tokens a step, H = 30. (`--preset 80k` is the study of the published figures: 4M tokens, H = 6.) Rates
are tuned on one seed, under AdamW and under Muon, for data parallel (inner) and for DiLoCo in fp32 (inner, then outer);
all other arms take the latter's. Then five seeds each: a seed's arms share initial weights, data, its order and who
trains what, so differences are paired, and their standard error is over seeds. Where one peer is slower, the others do
not wait for it, and so much less is trained in all.

Real, that is, the product's own code: the inner step (diloco.train.inner: optimizer, clipping, schedule by nominal
steps), the samples (diloco.data), the layout and the merge of what overlapped (diloco.outer), when a fragment
leaves and comes back (peers.core.schedule), weights and clipping of members (peers.core.weights), the reduction with
its codecs and error feedback in both directions (peers.reduce.all_reduce, over socket pairs), the outer step
(peers.state.outer_optimizer), the held-out loss (diloco.train.evaluation).

Simulated: processes, discovery and network. One process trains the four replicas in turns; nobody dies.
A test holds one short run, with int4 and overlap, to the very bits of a swarm of daemons (tests/e2e).

Data parallel is one replica that trains the four peers' batches as one: the mean gradient, up to rounding. Curves and
results are those of the anchor, the weights all peers share; the run's end averages every fragment once more.

Runs that have finished, and the state of those that have not, lie in `--dir`; the same command goes on from there.
"""
