"""One training over several nodes, by their own tools.

Start with job.py; node.py starts torchrun, batch.py writes jobs for Slurm and PBS, ray_cluster.py makes a Ray cluster.
"""
