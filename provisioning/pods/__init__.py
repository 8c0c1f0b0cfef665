"""Pods in words: what is asked for, what is offered, what a provider lists. Pure data.

Start with spec.py, PodSpec and how one is read; pod.py has the offers, orders and pods that providers speak of.
"""

from provisioning.pods.pod import Offer
from provisioning.pods.spec import PodSpec

__all__ = ["Offer", "PodSpec"]
