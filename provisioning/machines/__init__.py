"""Running programs on one machine, and setting up pods.

Start with machine.py, the protocol that local.py and ssh.py implement. jobs.py runs programs that outlive the
connection; setup.py sends code, environment and secrets; results.py fetches results.
"""
