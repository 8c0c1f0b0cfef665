"""The laboratory, a context manager: links that can be changed, cut and measured while programs run behind them.

with Lab([Link(up_mbps=1000, down_mbps=1000, delay_ms=2.5)] * 4) as lab:
    process = lab.popen(0, ["python", "-m", "http.server"])
    lab.set_link(0, Link(up_mbps=250, down_mbps=250, delay_ms=2.5))
    lab.isolate(0)

The kernel forwards the packets and the switch only decides when, so a byte costs no more CPU time than on loopback.
Rates, queues and counters are in IP bytes on the wire (MTU 1500, so TCP's payload is at most 1448/1500 of them), but
segments of up to 64 KB are forwarded as one packet, as with segmentation offload; with packet loss, one by one. Links
share their rate fairly among peers and let acknowledgements pass (switch/link.h). TCP is the kernel's: CUBIC by
default, with autotuned buffers of up to 16 MB, and without slow start after idle periods, so that open connections use
the full link. Raw TCP from all peers to all then takes the time that follows from the rates
(benchmarks/lab/raw_tcp.py). Namespaces have no names, so they disappear with their processes, which the switch kills
when the laboratory ends, even if it is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import IO, Literal

from benchmarks.lab.build import LabError, compiler, switch_program

MTU = 1500
DEVICE = "wan0"
_ANSWER_TIMEOUT_S = 10.0
_END_TIMEOUT_S = 10.0

Rule = Literal["pass", "refuse", "drop"]
"""What the switch does with packets from one peer to another. `refuse` drops what opens a connection, like a NAT."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """The access link of a peer."""

    up_mbps: float
    """Upload rate in Mbit/s."""
    down_mbps: float
    """Download rate in Mbit/s."""
    delay_ms: float
    """One-way delay to the core: the round trip between two peers takes twice the sum of their delays."""
    queue_ms: float = 50.0
    """Length of the queue in each direction, as the time that it takes to drain at the full rate."""
    loss: float = 0.0
    """Fraction of the sent packets that are lost, in addition to those that a full queue drops."""

    @property
    def up_bytes_per_s(self) -> float:
        return self.up_mbps * 1e6 / 8

    @property
    def down_bytes_per_s(self) -> float:
        return self.down_mbps * 1e6 / 8


@dataclass(frozen=True, kw_only=True)
class Counters:
    """Traffic on one peer's link since the laboratory was started."""

    sent_bytes: int
    """By the interface's counter."""
    received_bytes: int
    up_wire_bytes: int
    """Bytes on the link, including the headers of every segment, without dropped packets."""
    down_wire_bytes: int
    up_drops: int
    """Packets dropped by a full queue."""
    down_drops: int
    lost: int

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(
            **{field.name: getattr(self, field.name) - getattr(earlier, field.name) for field in fields(self)}
        )


def unavailable() -> str | None:
    """Why the laboratory cannot run on this machine; None if it can."""
    if os.geteuid() != 0:
        return "the network laboratory needs root"
    for program, package in (("nsenter", "util-linux"), ("ip", "iproute2")):
        if shutil.which(program) is None:
            return f"the network laboratory needs the command {program}: install {package}"
    if compiler() is None:
        return "the network laboratory needs a C compiler"
    return None


class Lab:
    """One namespace per link; peers are numbered from 0."""

    def __init__(
        self, links: Sequence[Link], *, congestion: str = "cubic", buffer_bytes: int = 16 << 20
    ) -> None:
        """Raises LabError if the machine does not support it."""
        if (reason := unavailable()) is not None:
            raise LabError(reason)
        self.links = list(links)
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._switch = subprocess.Popen(
            [str(switch_program()), str(len(links)), str(MTU), congestion, str(buffer_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # In a session of its own, so that Ctrl-C does not end the switch before `close`.
            start_new_session=True,
        )
        try:
            ready, core, *peers = self._answer().split()
            if ready != "ready" or len(peers) != len(links):
                raise LabError(f"the switch said {ready}")
            self._namespaces = [f"/proc/{self._switch.pid}/fd/{descriptor}" for descriptor in peers]
            self._make_devices(f"/proc/{self._switch.pid}/fd/{core}")
            for peer, link in enumerate(links):
                self.set_link(peer, link)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Process id of the switch."""
        return self._switch.pid

    @staticmethod
    def address(peer: int) -> str:
        return f"10.88.{peer}.2"

    def prefix(self, peer: int) -> list[str]:
        """Words to put in front of a command to run it behind the peer's link."""
        return ["nsenter", f"--net={self._namespaces[peer]}", "--"]

    def popen(
        self,
        peer: int,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: int | IO[bytes] = subprocess.DEVNULL,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a program behind the peer's link, in a session of its own. It is killed when the laboratory ends."""
        process = subprocess.Popen(
            [*self.prefix(peer), *argv],
            env=env,
            cwd=cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def set_link(self, peer: int, link: Link) -> None:
        """Change a link, starting with the next packet."""
        if link.loss and self.links[peer].loss == 0:
            raise LabError("losses have to be asked for from the beginning, since packets then go one by one")
        queues = [int(rate * link.queue_ms * 1e-3) for rate in (link.up_bytes_per_s, link.down_bytes_per_s)]
        self._tell(
            f"link {peer} {link.up_bytes_per_s:.0f} {link.down_bytes_per_s:.0f} {link.delay_ms * 1e6:.0f} "
            f"{queues[0]} {queues[1]} {link.loss * 1e6:.0f}"
        )
        self.links[peer] = link

    def set_rule(self, sender: int, receiver: int, rule: Rule) -> None:
        """Set the rule of one direction. Packets in flight still arrive."""
        self._tell(f"rule {sender} {receiver} {rule}")

    def isolate(self, peer: int) -> None:
        """Silently drop all packets to and from this peer."""
        self._set_rules(peer, "drop")

    def rejoin(self, peer: int) -> None:
        self._set_rules(peer, "pass")

    def put_behind_nat(self, peer: int) -> None:
        """Block connections to this peer; those that it opens work in both directions. No address translation."""
        for other in self._others(peer):
            self.set_rule(other, peer, "refuse")

    def counters(self, peer: int) -> Counters:
        return Counters(**json.loads(self._ask("stats"))[peer])

    def switch_cpu_s(self) -> float:
        """CPU time of the switch, user and system."""
        values = Path(f"/proc/{self._switch.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End the switch and all programs in the laboratory. Repeating it is safe."""
        assert self._switch.stdin is not None and self._switch.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._switch.stdin.close()
        try:
            self._switch.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._switch.kill()
            self._switch.wait()
        self._switch.stdout.close()
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                # The switch has killed all processes except one that had not entered its namespace yet.
                os.kill(process.pid, signal.SIGKILL)
            process.wait()

    def _make_devices(self, core: str) -> None:
        """Create a veth pair for each peer: p<number> in the core, and wan0 with the default route in its namespace."""
        one_by_one = any(link.loss for link in self.links)
        in_core = []
        for peer, namespace in enumerate(self._namespaces):
            in_core += [
                f"link add p{peer} mtu {MTU} type veth peer name {DEVICE} mtu {MTU} netns {namespace}",
                f"address add 10.88.{peer}.1/24 dev p{peer}",
                f"link set p{peer} up",
            ]
        _run_ip(core, in_core)
        for peer, namespace in enumerate(self._namespaces):
            in_peer = [
                "link set lo up",
                f"address add {self.address(peer)}/24 dev {DEVICE}",
                f"link set {DEVICE} up" + (" gso_max_segs 1" if one_by_one else ""),
                f"route add default via 10.88.{peer}.1",
            ]
            _run_ip(namespace, in_peer)

    def _set_rules(self, peer: int, rule: Rule) -> None:
        for other in self._others(peer):
            self.set_rule(other, peer, rule)
            self.set_rule(peer, other, rule)

    def _others(self, peer: int) -> Iterator[int]:
        return (other for other in range(len(self.links)) if other != peer)

    def _tell(self, command: str) -> None:
        if (answer := self._ask(command)) != "ok":
            raise LabError(f"the switch answered {answer!r} to {command!r}")

    def _ask(self, command: str) -> str:
        assert self._switch.stdin is not None
        with self._lock:
            try:
                self._switch.stdin.write(command.encode() + b"\n")
                self._switch.stdin.flush()
            except (BrokenPipeError, ValueError) as error:
                raise LabError(f"the switch is gone (exit code {self._switch.poll()})") from error
            return self._answer()

    def _answer(self) -> str:
        assert self._switch.stdout is not None
        deadline = time.monotonic() + _ANSWER_TIMEOUT_S
        line = b""
        while not line.endswith(b"\n"):
            left_s = max(0.0, deadline - time.monotonic())
            if not select.select([self._switch.stdout], [], [], left_s)[0]:
                raise LabError(f"the switch was silent for {_ANSWER_TIMEOUT_S:g} s")
            piece = os.read(self._switch.stdout.fileno(), 65536)
            if not piece:
                raise LabError(f"the switch is gone (exit code {self._switch.wait()})")
            line += piece
        return line.decode().strip()


def _run_ip(namespace: str, commands: Sequence[str]) -> None:
    done = subprocess.run(
        ["nsenter", f"--net={namespace}", "--", "ip", "-batch", "-"],
        input="\n".join(commands),
        capture_output=True,
        text=True,
        timeout=_ANSWER_TIMEOUT_S,
    )
    if done.returncode != 0:
        raise LabError(f"ip refused: {done.stderr.strip()}")
