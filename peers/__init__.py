"""The daemon process: the swarm, the round, the outer state. Contains no model code.

    rounds           the round, as a pure state machine; averaging carries out what it decides
    reduce           the weighted all-reduce; codecs says what values look like on the wire
    outer_optimizer  the outer step, on the state in outer_state
    membership       who is there, and the decisions that follow from that alone; mesh and presence tell it
    paths            the transport that all of them use
    link             between a daemon and its workers
    daemon           one peer as a process

Beside them lie the parts they are made of: round/, reduction/, state/, network/, ranks/, access/ and onlookers/.
"""
