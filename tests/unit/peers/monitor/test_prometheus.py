from __future__ import annotations

import asyncio
import json
import re
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from peers.errors import UserError
from peers.monitor import prometheus
from peers.monitor.observations import Observations
from peers.monitor.prometheus import FAMILIES, MAX_PEERS, MAX_RANK, metrics_served, swarm_metrics
from peers.monitor.summary import summary_of
from peers.timing import ANSWER_S
from tests.support.announcements import announced
from tests.support.sighted import entry, full_report

GRAFANA = Path(__file__).parents[4] / "diloco" / "dashboard" / "grafana.json"
LINE = re.compile(r'(diloco_[a-z_]+)\{((?:[a-z_]+="(?:[^"\\]|\\.)*",?)*)\} (\S+)')


def swarm(*ranks: int, run_id: str = "run") -> dict[str, Any]:
    observations = Observations()
    for rank in ranks:
        observations.reported(
            announced(f"P{rank}", world_rank=rank, tokens_per_s=2.5, epoch=3),
            full_report(rounds=(entry(3, 5.0),)),
            0.0,
        )
    return summary_of(run_id, observations, now=0.0, unix_now=time.time())


def values(text: bytes) -> dict[tuple[str, str], float]:
    """The values by metric and labels. Fails if a line is neither a comment nor a sample."""
    found = {}
    for line in text.decode().splitlines():
        if line.startswith("# "):
            continue
        match = LINE.fullmatch(line)
        assert match, line
        found[match[1], match[2]] = float(match[3])
    return found


def test_a_swarm_has_every_metric_of_every_peer():
    found = values(swarm_metrics(swarm(0, 1)))
    assert {name for name, _ in found} == {family.name for family in FAMILIES}
    assert found["diloco_peers", 'run_id="run"'] == 2
    labels = 'run_id="run",world_rank="1"'
    assert found["diloco_tokens_per_second", labels] == 2.5
    assert found["diloco_loss", labels] == 2.5
    assert found["diloco_state", 'run_id="run",state="training",world_rank="1"'] == 1
    assert found["diloco_state", 'run_id="run",state="lost",world_rank="1"'] == 0
    assert found["diloco_round_part_seconds", 'part="vote",run_id="run",world_rank="1"'] == 0.03


def test_every_metric_has_its_type_before_its_samples():
    lines = swarm_metrics(swarm(0)).decode().splitlines()
    for family in FAMILIES:
        (at,) = [i for i, line in enumerate(lines) if line.startswith(f"{family.name}{{")][:1]
        assert lines[at - 2 : at] == [
            f"# HELP {family.name} {family.says}",
            f"# TYPE {family.name} {family.kind}",
        ]


def test_labels_are_bounded_whatever_strangers_announce():
    text = swarm_metrics(swarm(-1, *range(MAX_PEERS + 20), MAX_RANK, MAX_RANK + 5))
    ranks = {match for _, labels in values(text) for match in re.findall(r'world_rank="([^"]+)"', labels)}
    assert ranks == {str(rank) for rank in range(MAX_PEERS)}
    names = {name for _, labels in values(text) for name in re.findall(r'([a-z_]+)="', labels)}
    assert names == {"run_id", "world_rank", "state", "part"}
    assert b"P3" not in text


def test_what_is_not_known_is_left_out():
    observations = Observations()
    observations.announced(announced("A", world_rank=0), 0.0)
    summary = summary_of("run", observations, now=0.0, unix_now=time.time())
    names = {name for name, _ in values(swarm_metrics(summary))}
    assert "diloco_epoch" in names and "diloco_loss" not in names and "diloco_round_seconds" not in names


def test_the_grafana_dashboard_asks_only_for_metrics_labels_and_states_that_exist():
    dashboard = json.loads(GRAFANA.read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked += [v["query"]["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    names = {name for text in asked for name in re.findall(r"diloco_\w+", text)}
    assert names == {family.name for family in FAMILIES}
    labels = {name for text in asked for name in re.findall(r"[{,]\s*(\w+)=", text)}
    assert labels <= {"run_id", "world_rank", "state", "part"}
    kinds = {family.name: family.kind for family in FAMILIES}
    for text in asked:
        for function, name in re.findall(r"(rate|increase)\((diloco_\w+)", text):
            assert kinds[name] == "counter", f"{function} of a gauge: {text}"
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))


def get(port: int, path: str = "/metrics", method: str = "GET") -> tuple[int, bytes]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


async def test_a_daemons_metrics_are_served_on_loopback():
    shown = swarm(0, 1, run_id='a"b')
    async with metrics_served(0, lambda: shown, lambda: 1) as port:
        status, text = await asyncio.to_thread(get, port)
        assert status == 200 and "# TYPE diloco_rounds_total counter" in text.decode()
        found = values(text)
        assert found["diloco_peers", 'run_id="a\\"b"'] == 2
        # A daemon serves the figures of its own peer alone.
        assert {labels for name, labels in found if name == "diloco_epoch"} == {
            'run_id="a\\"b",world_rank="1"'
        }
        assert (await asyncio.to_thread(get, port, "/metrics", "POST"))[0] == 405
        with pytest.raises(UserError, match=f"--hv.metrics-port {port}: .*in use"):
            async with metrics_served(port, lambda: shown, lambda: 1):
                pass
    with pytest.raises(urllib.error.URLError):
        await asyncio.to_thread(get, port)


async def test_who_says_nothing_keeps_nobody_from_the_metrics():
    async with metrics_served(0, lambda: swarm(0), lambda: 0) as port:
        mute = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
        assert (await asyncio.to_thread(get, port))[0] == 200
        for _, writer in mute:
            writer.close()


async def test_connections_beyond_the_most_are_closed_at_once(monkeypatch):
    monkeypatch.setattr(prometheus._Handler, "timeout", None)
    async with metrics_served(0, lambda: swarm(0), lambda: 0) as port, asyncio.timeout(ANSWER_S):
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(prometheus.MAX_CONNECTIONS)]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read() == b""
        for _, one in [*held, (reader, writer)]:
            one.close()


async def test_a_connection_ends_at_its_deadline_whatever_arrives_on_it(monkeypatch):
    monkeypatch.setattr(prometheus._Handler, "timeout", None)
    monkeypatch.setattr(prometheus, "_CONNECTION_S", 0.0)
    async with metrics_served(0, lambda: swarm(0), lambda: 0) as port, asyncio.timeout(ANSWER_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /metrics HTTP/1.1\r\n")
        assert await reader.read() == b""
        writer.close()
