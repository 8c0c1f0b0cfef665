"""Emulates a wide-area network on one machine: a network namespace per peer, and a switch between them.

Start with lab.py; build.py compiles the switch (switch/), raw_tcp.py is a reference program to run in it.
"""

from benchmarks.lab.lab import Counters, Lab, LabError, Link, Rule, unavailable

__all__ = ["Counters", "Lab", "LabError", "Link", "Rule", "unavailable"]
