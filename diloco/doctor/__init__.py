"""The checks of `diloco doctor` (diloco/cli/doctor.py), with one file for each part of the machine or its network.

Start with findings.py, the results; before_start.py has the checks that peers run themselves before they start.
"""
