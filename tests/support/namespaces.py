"""Network namespaces for a test: machines that reach each other only over the links made between them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_CLONE_NEWNET = 0x40000000


def why_not() -> str:
    """Why network namespaces cannot be made here; empty: they can."""
    if os.geteuid() != 0:
        return "needs root"
    if shutil.which("ip") is None:
        return "needs the ip command (iproute2)"
    name = f"diloco-probe-{os.getpid()}"
    if _ip("netns", "add", name, check=False):
        return "this kernel gives no network namespaces"
    _ip("netns", "del", name)
    return ""


@dataclass
class Hub:
    """One machine in the middle, and others behind it."""

    middle: str
    spokes: list[str]
    addresses: dict[str, str] = field(default_factory=dict)
    """The middle's address as each spoke sees it."""

    @staticmethod
    def address_of(index: int) -> str:
        """The address of a spoke as the middle sees it."""
        return f"10.91.{index + 1}.2"


@contextlib.contextmanager
def hub(num_spokes: int, *, forwards: bool = False) -> Iterator[Hub]:
    """Spokes send everything to the middle, which drops packets for other machines unless `forwards`."""
    prefix = f"diloco-{os.getpid()}"
    made = Hub(f"{prefix}-m", [f"{prefix}-{index}" for index in range(num_spokes)])
    try:
        for name in (made.middle, *made.spokes):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("netns", "exec", made.middle, "sh", "-c", f"echo {int(forwards)} > /proc/sys/net/ipv4/ip_forward")
        for index, spoke in enumerate(made.spokes):
            subnet = f"10.91.{index + 1}"
            inner, outer = f"spoke{index}", "up0"
            _ip("-n", made.middle, "link", "add", inner, "type", "veth", "peer", outer, "netns", spoke)
            for name, link, host in ((made.middle, inner, 1), (spoke, outer, 2)):
                _ip("-n", name, "addr", "add", f"{subnet}.{host}/24", "dev", link)
                _ip("-n", name, "link", "set", link, "up")
            _ip("-n", spoke, "route", "add", "default", "via", f"{subnet}.1")
            made.addresses[spoke] = f"{subnet}.1"
        yield made
    finally:
        for name in (made.middle, *made.spokes):
            _ip("netns", "del", name, check=False)


def path_of(name: str) -> Path:
    return Path(f"/run/netns/{name}")


def enter(namespace: Path) -> None:
    """Move this thread, and all that it starts from now on, into this network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with namespace.open() as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


@contextlib.contextmanager
def inside(name: str) -> Iterator[None]:
    """Within the context, this thread and all that it starts are in this network namespace."""
    with Path("/proc/thread-self/ns/net").open() as before:
        enter(path_of(name))
        try:
            yield
        finally:
            enter(Path(f"/proc/thread-self/fd/{before.fileno()}"))


def _ip(*arguments: str, check: bool = True) -> int:
    return subprocess.run(["ip", *arguments], check=check, capture_output=not check).returncode
