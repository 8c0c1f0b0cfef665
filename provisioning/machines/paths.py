"""Where things lie on a pod, relative to the home directory there."""

from __future__ import annotations

PODS = "diloco-pods"
MARK = "DILOCO_POD"
"""Environment variable that every process of a pod inherits; its value is the pod's label."""
CODE, VENV, JOBS, SECRETS = "code", "venv", "jobs", "secrets.env"
PODS_RECORD = "pod.json"
"""By which a pod on a machine of ours is known there."""
SWARM_SECRET, STATE, PEER_RUN = "swarm-secret", "state", "runs/peer"


def pod_directory(label: str) -> str:
    return f"{PODS}/{label}"


def temporary_directory(label: str) -> str:
    """Of a pod, for what needs short paths: sockets, whose paths may have 107 bytes. Goes with the pod."""
    return f"/tmp/diloco-pod-{label.rpartition('-')[2]}"
