"""What a round costs on the networks that peers really have, against raw TCP in the same laboratory and run.

    python -m benchmarks.wan [--quick] [--json FILE] [--plot FILE] [--cases NAME ...] [--codecs NAME ...] [--rivals]

Peers are the product, started by its commands behind links of benchmarks/lab, with a training loop that changes every
weight and waits until the round may begin, so that rounds of raw TCP and ours take turns. `round` is what the commit
says its round took, from the group to the new weights, the longest of all peers; `reduce` the part in which the bytes
go over the network. Raw TCP is benchmarks/lab/raw_tcp.py with the fp32 bytes, in turns with fp32. Each finished round
is told at once, and each finished case is written to the file, beside the cases that are in it already.

gigabit        4 peers, 1 Gbit/s, 10 ms, 256 MB
broadband      4 peers, 100 Mbit/s, 40 ms, 64 MB
uneven         4 peers, 200 Mbit/s, 10 ms, one of them at a quarter of that, 64 MB, against the optimum for those links
nat            2 peers behind NAT without a path between them and a public one, 100 Mbit/s, 40 ms, 32 MB; then the
               public one is killed
memory         4 peers, two sizes of model: the daemon's peak beyond its imports and what it has to hold
"""
