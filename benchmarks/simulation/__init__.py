"""Whether `diloco simulate` tells the truth: against runs of the product in the laboratory, and against published ones.

    python -m benchmarks.simulation [--quick] [--json FILE] [--parts lab published scale]

lab         4 peers of the product behind links of three bandwidths, rounds that block and rounds that overlap with
            training: seconds from commit to commit and seconds of a round, predicted over measured. What processors
            take is measured beforehand, behind faster links; the runs that are predicted have no part in it. As root.
published   What others have reported, predicted from what they say of their models, peers and links, with what is
            assumed beside it (published.py). No figure of theirs goes in but where that is said.
scale       What 256 simulated peers take of this machine's processor.
"""
