"""A swarm on a simulated clock and simulated links, whose rounds are the product's own.

    scenario      what is simulated: peers, links, machines, model, schedule, failures
    clock         events in order of time
    links         what links carry: max-min fair rates, pure
    traffic       bytes under way on links, in time
    machine       what processors take for their part of a round
    letters       control messages with their sizes and delays
    board         who stands where, as the others' rounds see it
    reduction     one attempt's reduction: which bytes it moves, how it ends
    downloads     how a state comes to who needs it
    state         what a peer holds and brings
    worker        the training loop of one peer
    round_driver  feeds peers.rounds.Round with events, as peers/averaging.py does
    daemon        carries out what rounds decide
    swarm         all peers, their deaths and returns
    figures       what came out

Everything is deterministic by the scenario's seed. What is assumed where something is not simulated is said in the
module that leaves it out, and `diloco simulate` lists it (figures.ASSUMPTIONS).
"""
