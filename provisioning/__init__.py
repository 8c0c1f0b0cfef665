"""Rents pods and runs programs on them, from the operator's machine. This package trains nothing and loads no torch.

Each folder imports only from those above it:

    pods         pod specs, offers, orders (rows), pods and listings: pure data
    machines     commands on a machine, local or over SSH: scripts, jobs, the set-up
    providers    the services that rent out pods, behind one protocol
    ledger       one SQLite file of all orders, written before every request
    renting      choosing offers, renting and giving back, and making ledger and providers agree
    swarm        the swarm on these pods, its status, logs and results
    experiments  sets of trainings over these pods
    launchers    one training over several nodes: torchrun, Slurm, PBS, Ray

The life of a pod: `diloco provision` turns flags into a PodSpec (pods/pod.py) and hands it to renting/renters.py, which
makes ledger and providers agree (reconcile.py), finds an offer (plan.py), writes spec and offer into the ledger as one
row (ledger/ledger.py), orders the pod (renter.py, providers/), and sets it up once it answers (machines/setup.py). Then
swarm/swarm.py starts the pod's peer, and swarm/keeper.py stores the spec, from which the watcher replaces the pod if it
dies. `diloco pods down` removes the stored spec and hands the pod's name to renters.py; renter.py repeats the request
to delete the pod until the provider says that it does not exist.
"""
