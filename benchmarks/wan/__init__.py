"""The duration of a round on realistic networks, compared with raw TCP in the same laboratory and run.

    python -m benchmarks.wan [--quick] [--json FILE] [--cases NAME ...] [--codecs NAME ...]

Peers are started by `diloco peer` behind links of benchmarks/lab, with a training loop that changes every weight and
waits until the round may begin, so that rounds of raw TCP and ours alternate. `round` is the time from the group to the
new weights that the commit records, the maximum over peers; `reduce` is the part in which bytes are transferred. Raw
TCP is benchmarks/lab/raw_tcp.py with the bytes of fp32, alternating with fp32. A line is printed for each finished
round; each finished case is added to the JSON file.

gigabit        4 peers, 1 Gbit/s, 10 ms, 256 MB
broadband      4 peers, 100 Mbit/s, 40 ms, 64 MB
uneven         4 peers, 200 Mbit/s, 10 ms, one of them at a quarter of that, 64 MB, against the optimum for those links
many           24 peers, 20 Mbit/s, 20 ms, 16 MB; then one is killed in mid-reduction
nat            2 peers behind NAT without a path between them and a public one, 100 Mbit/s, 40 ms, 32 MB; then the
               public one is killed
memory         4 peers, two sizes of model: the daemon's peak memory beyond its imports and the tensors it must hold
join           a third peer joins two with a large state: while they are idle, and while they commit
"""
