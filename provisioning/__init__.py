"""Rents pods and runs programs on them, from the operator's machine. This package trains nothing and loads no torch.

Each folder imports only from those above it:

    pods         pod specs, offers, orders and listings: pure data
    machines     commands on a machine, local or over SSH: scripts, jobs, the set-up
    providers    the services that rent out pods, behind one protocol
    ledger       one SQLite file of all orders, written before every request
    renting      choosing offers, renting and giving back, and making ledger and providers agree
    swarm        the fleet of pods, the swarm on it, its status, logs and results
    experiments  sets of trainings over a fleet
    launchers    one training over several nodes: torchrun, Slurm, PBS, Ray

The life of a pod: `diloco provision` turns flags into a PodSpec (pods/spec.py), finds an offer for it
(renting/plan.py), writes both into the ledger as a row (renting/renters.py, ledger/ledger.py), orders the pod
(renting/renter.py, providers/), and passes the row to swarm/fleet.py. `diloco pods down` calls renters.py and
renter.py, which delete the pod and wait until the provider says that it does not exist.
"""
