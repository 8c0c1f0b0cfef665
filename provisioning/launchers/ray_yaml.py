"""A YAML file for `ray up`, for users who prefer Ray's own cluster launcher."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from provisioning.launchers.ray_cluster import DASHBOARD_PORT, PORT, token_env
from provisioning.machines.paths import CODE, MARK, PODS
from provisioning.pods.pod import label_prefix


@dataclass(frozen=True, kw_only=True)
class RayHost:
    """One machine of the cluster."""

    inside: str
    """Address for the other machines."""
    outside: str
    """Address for the operator."""
    ssh_port: int = 22


def cluster_yaml(
    hosts: Sequence[RayHost], *, owner: str, user: str, key: Path, python: str, cpus: int | None
) -> str:
    """The text of the file. The first host is the head. `python`: absolute, or relative to a pod's directory."""
    import yaml

    start = f"{_python(owner, python)} -m ray.scripts.scripts start --disable-usage-stats"
    start += f" --num-cpus={cpus}" if cpus else ""
    head = [
        start,
        f"--head --port={PORT} --dashboard-host=127.0.0.1 --dashboard-port={DASHBOARD_PORT}",
        f"--node-ip-address={hosts[0].inside} --autoscaling-config=~/ray_bootstrap_config.yaml",
    ]
    provider: dict[str, Any] = {
        "type": "local",
        "head_ip": hosts[0].inside,
        "worker_ips": [host.inside for host in hosts[1:]],
    }
    if hosts[0].outside != hosts[0].inside:
        provider["external_head_ip"] = hosts[0].outside
    values = {
        "cluster_name": f"diloco-{owner}",
        "provider": provider,
        "auth": {"ssh_user": user, "ssh_private_key": str(key.expanduser())},
        "min_workers": len(hosts) - 1,
        "max_workers": len(hosts) - 1,
        # Ray's autoscaler v2 starts no workers on machines that are listed by address.
        "head_start_ray_commands": [f"export RAY_enable_autoscaler_v2=0; {' '.join(head)}"],
        "worker_start_ray_commands": [f"{start} --address=$RAY_HEAD_IP:{PORT}"],
    }
    return (
        _port_remark(hosts) + _token_remark(owner) + str(yaml.safe_dump(values, sort_keys=False, width=1000))
    )


def _python(owner: str, python: str) -> str:
    """The shell command for Python. It finds the pod's directory by a pattern, since it is the same for all workers.

    It sets the pod's mark, so that Ray's processes are ended with the pod, and the cluster's token.
    """
    pod = f"cd ~/{PODS}/{label_prefix(owner)}*/ && export {MARK}=$(basename $PWD) PYTHONPATH=$PWD/{CODE}"
    token = " ".join(f"{name}={value}" for name, value in token_env("$PWD").items())
    return f"{pod} {token} && {shlex.quote(python)}"


def _token_remark(owner: str) -> str:
    env = token_env(f"$(echo ~/{PODS}/{label_prefix(owner)}*)")
    words = " ".join(f"{name}={value}" for name, value in env.items())
    return f"# The cluster demands its token. Ray's commands on the head need: export {words}\n"


def _port_remark(hosts: Sequence[RayHost]) -> str:
    odd = [host for host in hosts if host.ssh_port != 22]
    if not odd:
        return ""
    lines = ["# `ray up` has no setting for SSH ports; put these lines into ~/.ssh/config:"]
    for host in odd:
        lines += [f"# Host {host.outside}", f"#     Port {host.ssh_port}"]
    return "\n".join(lines) + "\n"
