"""The daemon process: the swarm, the round, the outer state. Contains no model code.

Each folder imports only from those above it:

    protocol    what crosses the network: messages with their limits, certificates, signed records
    reduce      the weighted all-reduce: shares, frames, codecs, kernels
    state       the outer state, the outer step, and their files
    core        the peer as a pure machine: every decision
    net         identity, DHT, paths between peers, the mesh, the transfer of states
    admission   secrets, tokens, ban lists; the coordinator's ledger of world ranks
    monitor     what people and programs are told
    daemon      a peer, and the coordinator, as a process: start at daemon/main.py
"""
