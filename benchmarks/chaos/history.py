"""The history of a run of a light swarm: checks of its guarantees, and its figures."""

from __future__ import annotations

import json
import math
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.chaos.plan import KINDS
from benchmarks.chaos.swarm import Life

Record = dict[str, Any]


@dataclass(frozen=True)
class Struck:
    """A fault that was injected, with its time in Unix seconds."""

    kind: str
    ranks: tuple[int, ...]
    at: float
    until: float = -math.inf
    """When it is over; before `at` for a fault that does not last."""


class History:
    """The history of one run, read from the files in its peers' directories."""

    def __init__(self, directory: Path, lives: Sequence[Life], faults: Sequence[Struck] = ()) -> None:
        self.lives, self.faults = lives, faults
        self.commits: list[Record] = []
        """Every peer's record of every commit, in order of time."""
        self.worker: dict[int, list[Record]] = {}
        for path in sorted(directory.glob("peer*")):
            rank = int(path.name.removeprefix("peer"))
            self.commits += _lines(path / "commits.jsonl")
            self.worker[rank] = _lines(path / "history.jsonl")
        self.commits.sort(key=lambda record: record["time"])
        self._by_head: dict[str, list[Record]] = defaultdict(list)
        for record in self.commits:
            self._by_head[record["head"]].append(record)

    # Guarantees

    def faults_found(self) -> list[str]:
        """One sentence for each violation of a guarantee."""
        return [
            *self._unequal_digests(),
            *self._duplicate_ranks(),
            *self._steps_back(),
            *self._wrong_token_counts(),
            *self._broken_chains(),
        ]

    def _unequal_digests(self) -> Iterator[str]:
        for head, records in self._by_head.items():
            if len({(r["anchor_digest"], r["momentum_digest"], r["committed_tokens"]) for r in records}) > 1:
                yield f"the state {head[:12]} of epoch {records[0]['epoch']} is not the same everywhere"
        shown = defaultdict(set)
        for record in self._worker_records("epoch"):
            shown[record["head"]].add(record["anchor_digest"])
        for head, digests in shown.items():
            made = {record["anchor_digest"] for record in self._by_head.get(head, ())}
            if len(digests | made) > 1:
                yield f"workers were told other anchors of {head[:12]} than daemons have: {digests | made}"

    def _duplicate_ranks(self) -> Iterator[str]:
        for head, records in self._by_head.items():
            if len({record["rank"] for record in records}) < len(records):
                yield f"a rank has committed {head[:12]} twice, or two peers are of one rank"
        for record in self._worker_records("epoch"):
            if len(set(record["contributors"])) < len(record["contributors"]):
                yield f"epoch {record['epoch']} has the contributors {record['contributors']}"

    def _steps_back(self) -> Iterator[str]:
        """Among its commits on the final chain, no process goes back to an earlier one."""
        place = {record["head"]: number for number, record in enumerate(self.chain)}
        lives: dict[int, list[Record]] = defaultdict(list)
        for record in self.commits:
            lives[record["pid"]].append(record)
        for records in lives.values():
            for before, after in pairwise(r for r in records if r["head"] in place):
                if place[after["head"]] <= place[before["head"]]:
                    yield f"peer {after['rank']} went from {_described(before)} to {_described(after)}"

    def _wrong_token_counts(self) -> Iterator[str]:
        """The tokens of a commit are the sum of what its contributors had handed over."""
        for head, records in self._by_head.items():
            members = self._contributors_of(head)
            if members is None:
                continue
            handed = [self._handed_over(rank, records[0]["time"]) for rank in members]
            if sum(handed) != records[0]["tokens"]:
                yield f"{_described(records[0])} counts {records[0]['tokens']} tokens, of {members} are {handed}"

    def _broken_chains(self) -> Iterator[str]:
        """The final chain goes back to epoch 1, and its tokens are the sum over its commits."""
        chain = self.chain
        if not chain or chain[0]["epoch"] != 1:
            yield f"the state at the end goes back to epoch {chain[0]['epoch'] if chain else None} only"
        elif sum(record["tokens"] for record in chain) != chain[-1]["committed_tokens"]:
            yield f"{chain[-1]['committed_tokens']} tokens at the end are not the sum of all commits"

    # Figures

    @property
    def chain(self) -> list[Record]:
        """The final chain: one record for each commit that leads to the final state of most peers, in order.

        Each record is that of the first peer that made the commit.
        """
        last = {record["rank"]: record["head"] for record in self.commits}

        def counts(way: list[Record]) -> tuple[int, int]:
            # At the end a peer may be a commit behind the others; its head is then part of their chain.
            heads = {record["head"] for record in way}
            return sum(head in heads for head in last.values()), len(way)

        return max((self._chain_to(head) for head in set(last.values())), key=counts, default=[])

    def _chain_to(self, head: str) -> list[Record]:
        way: list[Record] = []
        while made := self._by_head.get(head):
            way.append(made[0])
            head = made[0]["parent"]
        return way[::-1]

    @property
    def num_forks(self) -> int:
        """Number of states that have several different successors."""
        children = defaultdict(set)
        for head, records in self._by_head.items():
            children[records[0]["parent"]].add(head)
        return sum(len(found) > 1 for found in children.values())

    @property
    def lost_tokens(self) -> int:
        """Tokens of commits that are not on the final chain, because their side of a fork was abandoned."""
        kept = {record["head"] for record in self.chain}
        return sum(records[0]["tokens"] for head, records in self._by_head.items() if head not in kept)

    def tokens_per_live_second(self, *, from_training: bool = True) -> float:
        """Committed tokens per peer-second of being alive, between the first commit and the last.

        A peer is alive from its worker's first step, or with `from_training=False` from its process's start, to its
        end, except while it is frozen.
        """
        chain = self.chain
        begin, end = chain[0]["time"], chain[-1]["time"]
        seconds = sum(self._lived_s(life, begin, end, from_training) for life in self.lives)
        return float((chain[-1]["committed_tokens"] - chain[0]["committed_tokens"]) / seconds)

    def epoch_s(self) -> float:
        """The median time between commits."""
        times = [record["time"] for record in self.chain]
        gaps = sorted(after - before for before, after in pairwise(times))
        return gaps[len(gaps) // 2]

    def recoveries_s(self, epoch_s: float, *, alone: bool = False) -> list[float]:
        """For every death, the time between the others' commits around it, minus `epoch_s`, at least 0.

        `alone`: only deaths beside which no other fault struck or lasted between these commits.
        """
        return [
            max(0.0, after - before - epoch_s)
            for before, death, after in self._deaths()
            if not alone
            or all(f is death or f.at > after or max(f.at, f.until) < before for f in self.faults)
        ]

    def waits_after_deaths_s(self) -> list[float]:
        """For every death, the time until the next commit of another peer."""
        return [after - death.at for _, death, after in self._deaths()]

    def rejoins_s(self) -> list[float]:
        """Times from a start of a peer to its worker's first step."""
        return [at - life.started_at for life in self.lives if (at := self._trains_at(life)) is not None]

    def _deaths(self) -> Iterator[tuple[float, Struck, float]]:
        """For every death: the time of the others' last commit before it, the death, the time of their next commit."""
        for fault in self.faults:
            if fault.kind not in KINDS or not KINDS[fault.kind].is_death:
                continue
            times = sorted(
                min(others)
                for records in self._by_head.values()
                if (others := [r["time"] for r in records if r["rank"] not in fault.ranks])
            )
            following = bisect(times, fault.at)
            if 0 < following < len(times):
                yield times[following - 1], fault, times[following]

    def _lived_s(self, life: Life, begin: float, end: float, from_training: bool) -> float:
        started = self._trains_at(life) if from_training else life.started_at
        if started is None:
            return 0.0
        spans = [(started, life.ended_at or end)]
        asleep = sum(_overlap(span, (max(begin, started), end)) for span in life.frozen)
        return max(0.0, sum(_overlap(span, (begin, end)) for span in spans) - asleep)

    def _trains_at(self, life: Life) -> float | None:
        return next(
            (
                record["time"]
                for record in self.worker.get(life.rank, ())
                if record["kind"] == "start"
                and life.started_at < record["time"] < (life.ended_at or float("inf"))
            ),
            None,
        )

    def _worker_records(self, kind: str) -> Iterator[Record]:
        for records in self.worker.values():
            yield from (record for record in records if record["kind"] == kind)

    def _contributors_of(self, head: str) -> list[int] | None:
        """Contributors of a commit, as a worker recorded them; None if no worker lived long enough to record it."""
        made = {record["rank"] for record in self._by_head[head]}
        for rank in made:
            for record in self.worker[rank]:
                if record["kind"] == "epoch" and record["head"] == head and record["contributors"]:
                    return list(record["contributors"])
        return None

    def _handed_over(self, rank: int, before: float) -> int:
        """Tokens of the last work that this rank's worker handed over before this time."""
        ready = (r for r in self.worker.get(rank, ()) if r["kind"] == "ready" and r["time"] <= before)
        return int(max(ready, key=lambda record: record["time"], default={"tokens": 0})["tokens"])


def _described(record: Record) -> str:
    return f"{record['head'][:12]} of epoch {record['epoch']}"


def _overlap(one: tuple[float, float], other: tuple[float, float]) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


def _lines(path: Path) -> list[Record]:
    """The complete lines of a JSONL file; a death may have cut off the last one."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def quantile(values: Iterable[float], share: float) -> float:
    """The value below which this share of all values is."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
