"""What `diloco doctor` (diloco/cli/doctor.py) examines: one file for each part of a machine or of its way to a swarm.

Start with findings.py, what an examination yields; before_start.py has the checks that peers make themselves.
"""
