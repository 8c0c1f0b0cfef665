"""One training over several nodes, by torchrun, Slurm, PBS or Ray.

Start with job.py. node.py runs torchrun, batch.py writes job scripts for Slurm and PBS, ray_cluster.py starts a Ray
cluster, and ray_yaml.py writes a file for `ray up`.
"""
