"""Checks the identity and the ports of a peer, and that p2pd starts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from diloco.doctor.findings import Finding, failed, passed
from diloco.options.flags import HvConfig
from peers.errors import PeersError, UserError
from peers.net.identity import Identity, load_or_create
from peers.protocol.maddrs import Maddr, check_listenable, parse_maddr

_REINSTALL = "pip install --force-reinstall --no-deps hivemind==1.1.12"
SPARE_KEY = "doctor.key"
"""Name of the key that a machine uses on which no peer has run."""
_ANY_PORT = "--host-maddrs /ip4/0.0.0.0/tcp/0 --hv.data-port 0  # any free ones"


@contextlib.contextmanager
def identity_of_peer(hv: HvConfig, state_dir: Path, spare: Path) -> Iterator[Identity]:
    """The stored identity of this peer, unless there is none or the peer is running; else a new one in `spare`.

    Raises UserError for an invalid key.
    """
    identity = None
    path = state_dir / hv.run_id / f"{hv.world_rank or 0}.key"
    if path.exists():
        with contextlib.suppress(BlockingIOError):
            identity = load_or_create(path)
    identity = identity or load_or_create(spare / SPARE_KEY)
    try:
        yield identity
    finally:
        identity.release()


def check_ports(hv: HvConfig) -> Finding:
    """Check that a peer could listen on the configured ports."""
    from peers.net.paths.network import data_hosts

    data = [str(Maddr(maddr.kind, maddr.host, hv.data_port, None)) for maddr in data_hosts(hv.host_maddrs)]
    metrics = [f"/ip4/127.0.0.1/tcp/{hv.metrics_port}"] if hv.metrics_port else []
    try:
        check_listenable((*hv.host_maddrs, *(data if hv.transport != "libp2p" else ()), *metrics))
    except UserError as error:
        return failed("ports", str(error), _ANY_PORT)
    named = [
        str(port) for port in (*(parse_maddr(text).port for text in hv.host_maddrs), hv.data_port) if port
    ]
    return passed("ports", f"{' and '.join(named)} are free" if named else "any free ones")


async def check_p2pd(hv: HvConfig, identity: Identity) -> Finding:
    """Check that p2pd starts and listens."""
    from peers.net.libp2p.p2pd import P2pd

    began = time.monotonic()
    try:
        p2pd = await P2pd.start(
            identity_path=identity.path, host_maddrs=hv.host_maddrs, announce_maddrs=hv.announce_maddrs
        )
    except (PeersError, OSError) as error:
        return failed("p2pd", str(error), _REINSTALL)
    took_s = time.monotonic() - began
    await p2pd.stop()
    return passed("p2pd", f"starts in {took_s:.1f} s")
