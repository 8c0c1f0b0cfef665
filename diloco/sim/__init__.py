"""The virtual runtime of peers.core: the daemon's own state machine, on a virtual clock, links and disks.

    clock, network    events in order of time; messages with delay, loss, duplication, reordering and cuts
    keys              signatures that only their owner can make
    values            a state, as the set of training pieces that it contains
    worker            what workers of both runtimes share, and one that trains and hands over pieces
    reduction         how the reduction of an attempt ends, at each member
    download          how a state is fetched from its donors
    runtime           carries out the effects of one Peer; the simulation of costs (cost/) uses it, too
    peer              one peer's process, with its state, worker and machine
    swarm             all peers, what they share, and the faults that tests name
    faults            random faults, drawn from a seed
    liars, forgers    Byzantine members
    truth, invariants what really happened, and what must hold after every event
    schedules, replay one seed from its start to its verdict, with a trace

A run is determined by its seed. No decision of the product is made here.
"""
