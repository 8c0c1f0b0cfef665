"""Simulates what a run costs in time and bytes: the real peer cores (peers.core) on simulated links, CPUs and clock.

    scenario   the input: peers, links, machines, model, schedule, failures
    links      max-min fair sharing of links (pure)
    traffic    transfers in progress over simulated time
    machine    the CPU time of each part of a round
    messages   messages between peers, with their sizes and delays
    reduction  one attempt's reduction: the bytes that it moves, and how it ends
    downloads  transfer of the outer state to peers that need it
    worker     the training loop of one peer, as far as it costs time
    peer       carries out the effects of one peer's core
    swarm      all peers, their failures and returns
    figures    the results

Everything is a deterministic function of the scenario and its seed. Each module's docstring says what it leaves out;
`diloco simulate` prints all assumptions (figures.ASSUMPTIONS).
"""
