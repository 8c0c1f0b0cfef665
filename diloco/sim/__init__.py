"""The virtual runtime of peers.core: the daemon's own machine, on a virtual clock, links and disks.

    clock, network    events in order of time; messages with delay, loss, duplication, reordering and cuts
    keys              signatures that only their owner can make
    values            a state, as the pieces of training that are in it
    worker            trains, hands over, goes on
    reduction         how the reduction of an attempt ends, at each member
    download          how a state comes from its donors
    runtime           carries out the effects of one Peer
    swarm             all peers, and the faults that tests name
    faults, liars     schedules drawn from a seed; one member that lies
    truth, invariants what really happened, and what has to hold after every event
    schedules, replay one seed from its beginning to its verdict, with a trace

A run is determined by its seed. No decision of the product is made here.
"""
