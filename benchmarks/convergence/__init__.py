"""Held-out loss of every way of averaging, compared with synchronous data parallel training on the same tokens.

    python -m benchmarks.convergence [--quick] [--json FILE] [--plot FILE] [--arms NAME ...] [--seeds N ...]

Four peers train a byte-level model of 1.06 million parameters on the standard library's sources, with 20 tokens per
parameter, 8192 tokens per step, H = 30. (`--preset 80k` is the study of the published figures: 4M tokens, H = 6.)
Learning rates are tuned on one seed, on the same grid for AdamW and Muon: data parallel's rate, and the inner rate,
outer rate and momentum of DiLoCo in fp32, which all other arms use. Then each arm runs on five seeds. Arms of one seed
share initial weights, data, its order and its division among peers, so differences are paired, and their standard error
is over seeds. If one peer is slower, the others do not wait for it, and fewer tokens are trained in total.

The product's own code does the inner step (diloco.train.inner: optimizer, clipping, schedule by nominal steps), the
samples (diloco.data), the layout and the merge after overlap (diloco.outer), the schedule of fragments
(peers.core.schedule), weights and clipping of members (peers.core.weights), the reduction with its codecs and error
feedback in both directions (peers.reduce.all_reduce, over socket pairs), the outer step (peers.state.outer_optimizer),
and the held-out loss (diloco.train.evaluation).

Processes, discovery and network are simulated: one process trains the four replicas in turns, without failures.
A test checks that a short run, with int4 and overlap, is bit-identical to a swarm of daemons (tests/e2e).

Data parallel is one replica that trains the four peers' batches as one batch: their mean gradient, up to rounding.
Curves and results are of the anchor, the weights that all peers share; at the end every fragment is averaged once more.

On a GPU (`--device cuda`) runs are side by side: their peers' models are batched (side_by_side), and all that follows
the inner step is the same code. A test checks that their losses equal those of runs one at a time.

Finished runs, and the state of unfinished ones, are kept in `--dir`; the same command resumes from there.
"""
