"""Many trainings over the pods of a fleet.

Start with sets.py, what is trained where; runs.py runs it, trainers.py knows our trainers' flags.
"""

from provisioning.experiments.sets import ExperimentConfig, ExperimentSet, Placed

__all__ = ["ExperimentConfig", "ExperimentSet", "Placed"]
