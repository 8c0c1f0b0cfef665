"""The verdict on a real swarm names each fault within ten seconds, one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos.coordinator import Coordinator
from diloco.train.metrics import Metrics
from diloco.train.progress import Progress
from peers.monitor.observer import Observer, observing
from peers.protocol.maddrs import parse_maddr
from tests.support.namespaces import hub, inside, why_not
from tests.support.preparations import clock_off
from tests.support.swarm import LightSwarm, wait_until

RUN = "verdict"
NAMED_WITHIN_S = 10.0
STARTS_WITHIN_S = 60.0


class LinkedSwarm(LightSwarm):
    """A swarm whose daemons' links are at paths that the test knows."""

    def link_of(self, rank: int) -> Path:
        return self.directory / f"link{rank}"

    def config_of(self, rank: int, directory: Path, worker: dict[str, Any]) -> dict[str, Any]:
        self.link_of(rank).unlink(missing_ok=True)
        return super().config_of(rank, directory, worker) | {"link_path": str(self.link_of(rank))}


@pytest.fixture
def light(coordinator: Coordinator, tmp_path: Path) -> Iterator[LinkedSwarm]:
    made = LinkedSwarm(tmp_path, [coordinator.start()], RUN, max_steps=10**6, step_s=0.1, tells_loss=True)
    yield made
    made.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], check=True)
    yield disk
    subprocess.run(["umount", disk], check=True)


def fill(disk: Path) -> Path:
    """Fill the disk to the last byte. Returns the file that fills it."""
    filler = disk / "filler"
    with pytest.raises(OSError, match="No space left"), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1024))
    return filler


def shape(namespace: str, rate: str) -> None:
    """Limit the upload rate of a spoke's machine."""
    limit = ("tbf", "rate", rate, "burst", "64kb", "latency", "400ms")
    command = ["ip", "netns", "exec", namespace, "tc", "qdisc", "add", "dev", "up0", "root", *limit]
    subprocess.run(command, check=True)


async def named(observer: Observer, words: str, timeout_s: float = NAMED_WITHIN_S) -> float:
    """Wait until a finding contains these words. Returns how many seconds that took."""
    began = time.monotonic()
    while True:
        verdict = observer.swarm()["verdict"]
        if any(words in text for text in (verdict["text"], *verdict["more"])):
            return time.monotonic() - began
        took_s = time.monotonic() - began
        assert took_s < timeout_s, f"{words!r} was not said in {timeout_s:g} s: {verdict}"
        await observer.changed(timeout_s - took_s)


async def reached(observer: Observer, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + STARTS_WITHIN_S
    while not condition():
        swarm = observer.swarm()
        assert time.monotonic() < deadline, (swarm["verdict"], swarm["events"])
        await observer.changed(1.0)


async def happened(observer: Observer, what: str) -> None:
    await reached(observer, lambda: any(event["what"] == what for event in observer.swarm()["events"]))


def answers(observer: Observer, rank: int) -> bool:
    return any(peer["answers"] for peer in observer.swarm()["peers"] if peer["world_rank"] == rank)


def has_round_since(observer: Observer, unix_s: float) -> bool:
    """Whether both peers have finished a round that began after `unix_s`."""
    return any(
        len(round_["peers"]) == 2
        and all(entry["time"] - entry["round_s"] >= unix_s for entry in round_["peers"])
        for round_ in observer.swarm()["rounds"]
    )


async def mended(observer: Observer) -> None:
    """Wait until the verdict is at most a warning, which epochs this short always cause."""
    await reached(observer, lambda: observer.swarm()["verdict"]["level"] in ("good", "warning"))


@pytest.mark.exhaustive
async def test_whatever_goes_wrong_is_named_within_ten_seconds(light):
    light.galaxy_size = 3
    light.preparations[2] = partial(clock_off, -8.0)
    for rank in range(3):
        light.start(rank)
    wait_until(lambda: all(peer.epoch >= 1 for peer in light.peers.values()), "epoch 1")
    async with observing(RUN, light.initial_peers, timeout_s=20) as observer:
        await named(observer, "peer 2's clock is 8 s behind")

        await asyncio.to_thread(light.peers[2].kill)
        await named(observer, "peer 2 was lost")
        del light.preparations[2]
        light.start(2)
        await happened(observer, "peer 2 is back")
        await mended(observer)

        worker = light.peers[1].worker_pid
        os.kill(worker, signal.SIGSTOP)
        try:
            await named(observer, "peer 1 has stood still")
        finally:
            os.kill(worker, signal.SIGCONT)
        await mended(observer)

        await asyncio.to_thread(light.peers[2].kill)
        num_before = len(light.peers[2].records("ready"))
        again = light.start(2, push=float("inf"))
        await asyncio.to_thread(
            wait_until, lambda: len(again.records("ready")) > num_before, "an epoch's steps"
        )
        await reached(observer, lambda: answers(observer, 2))
        await named(observer, "peer 2: its loss is not a number any more; is the learning rate too high?")


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_slow_link_and_a_full_disk_are_named_within_ten_seconds(tmp_path, small_disk):
    with hub(2) as lan:
        swarm = LinkedSwarm(
            tmp_path, [], RUN, numel=500_000, local_steps=20, max_steps=10**6, step_s=0.1, tells_loss=True
        )
        swarm.extra = {"host_maddrs": ["/ip4/0.0.0.0/tcp/0"]}
        swarm.namespaces = {0: lan.middle, 1: lan.spokes[0]}
        try:
            first = swarm.start(0)
            wait_until(lambda: first.address, "an address")
            there = replace(parse_maddr(first.address), kind="ip4", host=lan.addresses[lan.spokes[0]])
            swarm.initial_peers = [str(there)]
            second = swarm.start(1)
            wait_until(lambda: second.epoch >= 2, "two epochs of the second peer")
            with inside(lan.middle):
                asyncio.run(watch_link_and_disk(swarm, lan.spokes[0], small_disk))
        finally:
            swarm.close()


async def watch_link_and_disk(swarm: LinkedSwarm, spoke: str, disk: Path) -> None:
    async with observing(RUN, [swarm.peers[0].address], timeout_s=20) as observer:
        await mended(observer)
        with (
            contextlib.closing(Progress(swarm.link_of(0))) as progress,
            Metrics(disk / "metrics.jsonl", on_trouble=progress.is_in_trouble) as metrics,
        ):
            filler = fill(disk)
            metrics.write("step", step=1)
            await named(observer, f"peer 0: cannot write to {disk}/metrics.jsonl (No space left on device)")
            filler.unlink()
            metrics.write("step", step=2)
            await mended(observer)

        await reached(observer, lambda: "links carry" not in said(observer))
        await asyncio.to_thread(shape, spoke, "8mbit")
        shaped_at = time.time()
        await reached(observer, lambda: has_round_since(observer, shaped_at))
        await named(observer, "links carry")
        advice = r"averaging takes \d+% of the time: try --hv.compression"
        await reached(observer, lambda: re.search(advice, said(observer)) is not None)
        # The bandwidth is the second highest of five reductions, so it falls only after some of them.
        await reached(observer, lambda: carried(said(observer)) < 9)


def carried(text: str) -> float:
    """The bandwidth of the links in Mbit/s, as the verdict gives it."""
    found = re.search(r"links carry ([\d.]+)Mbit/s", text)
    return float(found[1]) if found else math.inf


def said(observer: Observer) -> str:
    """The verdict and its further findings, one a line."""
    verdict = observer.swarm()["verdict"]
    return "\n".join((verdict["text"], *verdict["more"]))
