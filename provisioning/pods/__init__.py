"""Pods in words: what is asked for, what is offered, what a provider lists. Pure data and pure choices.

Start with pod.py; files.py reads PodSpecs from flags and files, choice.py gives each spec an offer.
"""

from provisioning.pods.pod import Offer, PodSpec

__all__ = ["Offer", "PodSpec"]
