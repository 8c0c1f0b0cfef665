"""The operator's machine: renting pods and running things on them. It trains nothing, and loads no torch.

Each folder imports only from those above it:

    pods         what is asked for and what is offered
    machines     what can be done on a machine, here or over SSH: scripts, jobs, the set-up
    providers    where pods come from, all behind one protocol
    ledger       what this machine has rented: one SQLite file, written before every request
    renting      which offer serves, and making ledger and providers agree: plan, rent, give back
    swarm        a fleet of pods, a swarm on it, its status, logs and results
    experiments  sets of trainings over a fleet
    launchers    one training over several nodes: torchrun, Slurm, PBS, Ray

The way of one pod: `diloco provision` makes a PodSpec of flags (pods/spec.py), finds an offer for it (renting/plan.py),
writes both down as a row (renting/renters.py, ledger/ledger.py), orders it (renting/renter.py, providers/), and hands
the row to swarm/fleet.py. `diloco pods down` goes back through renters.py and renter.py, until the provider has said
that there is no such pod.
"""
