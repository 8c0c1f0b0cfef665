"""Paths on a pod, relative to the home directory."""

from __future__ import annotations

PODS = "diloco-pods"
MARK = "DILOCO_POD"
"""The mark: an environment variable that all processes of a pod inherit. Its value is the pod's label."""
CODE, VENV, JOBS, SECRETS = "code", "venv", "jobs", "secrets.env"
PODS_RECORD = "pod.json"
"""The file that marks a pod's directory on the user's own machines (providers/hosts.py)."""
SWARM_SECRET, STATE, PEER_RUN = "swarm-secret", "state", "runs/peer"
RAY_TOKEN = "ray-token"
"""The token of the Ray cluster, the same on all its nodes: who has it may run anything there."""


def pod_directory(label: str) -> str:
    return f"{PODS}/{label}"


def temporary_directory(label: str) -> str:
    """For sockets, whose paths have at most 107 bytes. Removed together with the pod."""
    return f"/tmp/diloco-pod-{label.rpartition('-')[2]}"
