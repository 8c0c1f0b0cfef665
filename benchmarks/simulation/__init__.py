"""The accuracy of `diloco simulate`, compared with runs in the laboratory and with published results.

    python -m benchmarks.simulation [--quick] [--json FILE] [--parts lab published scale thousand]

lab         4 real peers behind links of three bandwidths, with rounds that block and rounds that overlap with training:
            time between commits and duration of a round, predicted over measured. CPU times are calibrated by a
            separate run behind faster links. Needs root.
published   Results that others have reported, predicted from their descriptions of models, peers and links, and from
            stated assumptions (published.py). Their results are not used as input except where that is stated.
scale       The CPU time to simulate 256 peers on this machine.
thousand    1000 unlike peers train 10B weights and fail once a day each (thousand.py). Only if named: half an hour.

Not covered: reductions along a grid, from 16 peers on. The simulator is optimistic there: it predicts 13.7 s for a
round that takes 19.5 s with the 24 peers of `benchmarks.wan --cases many`, whose processors are busy throughout.
"""
