"""The daemon process: the swarm, the round, the outer state. Contains no model code.

    core             the peer, as a pure state machine: every decision; protocol says what peers tell each other
    reduce           the weighted all-reduce; codecs says what values look like on the wire
    outer_optimizer  the outer step, on the state in outer_state
    presence         who is there: found by the DHT, kept through the mesh
    paths            the transport that all of them use
    link             between a daemon and its workers
    daemon           one peer as a process, which carries out what core decides

Beside them lie the parts they are made of: reduction/, state/, network/, ranks/, access/ and onlookers/.
"""
