"""The command lines of the DHT and the peers on pods: addresses, ports and flags. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from provisioning.errors import UserError
from provisioning.machines.paths import PEER_RUN, STATE, SWARM_SECRET
from provisioning.pods.pod import PORTS, Pod

DHT_JOB, PEER_JOB = "dht", "peer"
ADDRESS_FLAG = "--initial-peers "
_OWN_FLAGS = (
    *("initial-peers", "galaxy-size", "run-id", "run-dir", "host-maddrs", "announce-maddrs", "data-port"),
    *("announce-data-maddrs", "swarm-secret-file", "peers-here"),
)


def dht_argv(python: str, pod: Pod, *, run_id: str, listens_on: str) -> list[str]:
    inside, outside = _ports(pod)[0]
    argv = [python, "-m", "diloco", "dht", "start", "--admission", "--run-id", run_id, "--state-dir", STATE]
    return [*argv, *_maddrs("--host-maddrs", "--announce-maddrs", listens_on, pod.host, inside, outside)]


def peer_argv(
    python: str,
    pod: Pod,
    *,
    run_id: str,
    listens_on: str,
    address: str,
    num_peers: int,
    num_peers_here: int,
    flags: Sequence[str],
) -> list[str]:
    """`address`: of the DHT. `num_peers_here`: number of peers on the pod's machine. `flags`: further flags."""
    (inside, outside), (data_inside, data_outside) = _ports(pod)[1:3]
    argv = [python, "-m", "diloco", "peer", "--initial-peers", address, "--run-id", run_id]
    argv += ["--galaxy-size", str(num_peers), "--swarm-secret-file", SWARM_SECRET, "--run-dir", PEER_RUN]
    argv += ["--peers-here", str(num_peers_here)] if num_peers_here > 1 else []
    argv += _maddrs("--host-maddrs", "--announce-maddrs", listens_on, pod.host, inside, outside)
    argv += ["--hv.data-port", str(data_inside)]
    if pod.host != listens_on:
        argv += ["--hv.announce-data-maddrs", f"/ip4/{pod.host}/tcp/{data_outside}"]
    return [*argv, *flags]


def coordinator_file(run_id: str, what: str) -> str:
    """The path of the coordinator's file, `what`: swarm-secret or admission-key; relative to the pod's directory."""
    return f"{STATE}/coordinator/{run_id}.{what}"


def address_in(log: str) -> str | None:
    """The address that `diloco dht start` has printed; None: none yet."""
    lines = (line for line in log.splitlines() if line.startswith(ADDRESS_FLAG))
    found = [words[0] for line in lines if (words := line.removeprefix(ADDRESS_FLAG).split())]
    return found[-1] if found else None


def check_flags(flags: Sequence[str]) -> None:
    """Raises UserError if a flag is one that diloco itself sets for every peer."""
    for word in flags:
        if _is_own(word):
            raise UserError(f"{word} is given to each peer by `diloco provision` itself; leave it out.")


def _is_own(word: str) -> bool:
    name = word.partition("=")[0].replace("_", "-").removeprefix("--").removeprefix("hv.")
    return word.startswith("--") and name in _OWN_FLAGS


def _ports(pod: Pod) -> tuple[tuple[int, int], ...]:
    if len(pod.ports) < len(PORTS):
        raise UserError(
            f"{pod.id} opens {len(pod.ports)} TCP ports besides SSH, but a peer and the DHT need {len(PORTS)}; ask for "
            "an image or a machine that opens more."
        )
    if not re.fullmatch(r"[0-9.]+", pod.host):
        raise UserError(f"{pod.id} is at {pod.host!r}, which is no IPv4 address.")
    return pod.ports


def _maddrs(listen: str, announce: str, listens_on: str, host: str, inside: int, outside: int) -> list[str]:
    words = [listen, f"/ip4/{listens_on}/tcp/{inside}"]
    return words if host == listens_on else [*words, announce, f"/ip4/{host}/tcp/{outside}"]
