"""What `diloco doctor` (diloco/cli/doctor.py) looks at, one part of a machine and of its way to a swarm each."""
