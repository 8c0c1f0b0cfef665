"""The operator's machine: renting pods and running things on them. It trains nothing, and loads no torch.

Each folder imports only from those above it:

    pods         what is asked for and what is offered, and which offer serves
    machines     what can be done on a machine, here or over SSH: scripts, jobs, the set-up
    providers    where pods come from, all behind one protocol
    ledger       what this machine has rented: one SQLite file, written before every request
    renting      making ledger and providers agree: plan, rent, give back
    swarm        a fleet of pods, a swarm on it, its status, logs and results: start at swarm/fleet.py
    experiments  sets of trainings over a fleet
    launchers    one training over several nodes: torchrun, Slurm, PBS, Ray
"""
