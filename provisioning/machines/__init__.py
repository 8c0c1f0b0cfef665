"""What can be done on one machine, whichever it is, and what every pod is given.

Start with machine.py, the protocol that local.py and ssh.py fulfil; jobs.py runs programs that outlive the connection,
setup.py brings code, environment and secrets.
"""
