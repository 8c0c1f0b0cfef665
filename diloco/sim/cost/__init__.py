"""What a run costs in time and bytes: the product's own peers on links, processors and a clock that are simulated.

    scenario   what is simulated: peers, links, machines, model, schedule, failures
    links      what links carry: max-min fair rates, pure
    traffic    bytes under way on links, in time
    machine    what processors take for their part of a round
    messages   messages between peers, with their sizes and delays
    reduction  one attempt's reduction: which bytes it moves, how it ends
    downloads  how a state comes to who needs it
    worker     the training loop of one peer
    peer       carries out what the core of one peer decides (peers.core)
    swarm      all peers, their losses and returns
    figures    what came out

Everything is deterministic by the scenario's seed. What is assumed where something is not simulated is said in the
module that leaves it out, and `diloco simulate` lists it (figures.ASSUMPTIONS).
"""
