"""A run with a swarm secret: a coordinator in a thread, light peers, and what the admission key can sign."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.admission.bans import ChangedBans, change_bans
from peers.admission.secrets import AdmissionKey, load_key
from peers.daemon.coordinator import CoordinatorConfig, serve
from peers.protocol.tokens import Token
from tests.support.swarm import LightSwarm

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


@dataclass(frozen=True)
class Closed:
    """The address of a run's coordinator, and where its secrets are."""

    run_id: str
    address: str
    config: CoordinatorConfig

    @property
    def secret_file(self) -> str:
        return str(self.config.swarm_secret_path)

    @property
    def key(self) -> AdmissionKey:
        return load_key(self.config.admission_key_path)

    def token(self, peer_id: str, *, lasts_s: float = 600.0, key: AdmissionKey | None = None) -> bytes:
        """An admission token that the coordinator (or the holder of `key`) could have issued a minute ago."""
        now = time.time()
        token = Token(run_id=self.run_id, peer_id=peer_id, not_before=now - 60, expires=now + lasts_s)
        return token.encode((key or self.key).private_key)

    def change_bans(self, **changes: Any) -> ChangedBans:
        kept_at = self.config.admission_key_path.with_suffix(".bans")
        return asyncio.run(
            change_bans(self.run_id, [self.address], self.key, kept_at, timeout_s=20, **changes)
        )

    def swarm(self, directory: Path, **worker: Any) -> LightSwarm:
        """A light swarm whose peers all get the file of the swarm secret."""
        directory.mkdir(exist_ok=True)
        light = LightSwarm(directory, [self.address], self.run_id, **worker)
        light.extra = {"swarm_secret_file": self.secret_file}
        return light


@contextmanager
def closed_run(state_dir: Path, run_id: str, **options: Any) -> Iterator[Closed]:
    """A coordinator with admission, for as long as the context lasts."""
    config = CoordinatorConfig(
        **{"state_dir": state_dir, "run_id": run_id, "host_maddrs": LOOPBACK, "admission": True, **options}
    )
    ready, lines, running = threading.Event(), [], []

    def say(line: str) -> None:
        lines.append(line)
        ready.set()

    async def coordinate() -> None:
        running.append((asyncio.get_running_loop(), asyncio.current_task()))
        try:
            await serve(config, say)
        except asyncio.CancelledError:
            return

    thread = threading.Thread(target=lambda: asyncio.run(coordinate()))
    thread.start()
    try:
        assert ready.wait(30), "the coordinator did not start"
        yield Closed(run_id, lines[0].removeprefix("--initial-peers "), config)
    finally:
        loop, task = running[0]
        loop.call_soon_threadsafe(task.cancel)
        thread.join(20)
