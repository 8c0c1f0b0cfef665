"""A wide-area network on one machine: a namespace per peer and a switch between them that we wrote (switch/)."""

from benchmarks.lab.lab import Counters, Lab, LabError, Link, Rule, unavailable

__all__ = ["Counters", "Lab", "LabError", "Link", "Rule", "unavailable"]
