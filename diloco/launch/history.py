"""What the report and the plot of a run need of one peer's records, in little memory however long it trains."""

from __future__ import annotations

from collections.abc import Iterable

from diloco.train.metrics_file import Record

MAX_STEPS = 4096
"""The most records of steps that are kept, evenly over the whole training; even."""
NUM_STEPS = "num_steps"
"""In a record of a step: how many steps it stands for, if more than one."""
_MAXIMUM = "logp_difference_max"
"""Of the steps that a record stands for, the largest is kept."""
_KINDS = ("step", "epoch", "eval", "event")
_OF_EPOCH = (
    *("kind", "time", "epoch", "anchor_digest", "contributors", "num_peers", "sent_bytes"),
    *("blocked_s", "wait_s", "round_s", "reduce_s"),
)


class History:
    """`records` are in the order of writing; the last step is always among them."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.records: list[Record] = []
        self._every = 1
        """How many steps a record stands for."""
        self._num_kept = 0
        self._num_since = 0
        """Steps since the last one that is kept."""
        self._last: int | None = None
        """The place of the last step among the records, if it is not kept once another one follows."""
        self.add(records)

    def add(self, records: Iterable[Record]) -> None:
        for record in records:
            kind = record.get("kind")
            if kind == "step":
                self._add_step(record)
            elif kind == "epoch":
                self.records.append({name: record[name] for name in _OF_EPOCH if name in record})
            elif kind in _KINDS:
                self.records.append(record)

    def _add_step(self, record: Record) -> None:
        if self._last is not None:
            record = _standing_for(self.records.pop(self._last), record)
        self._num_since += 1
        is_kept = self._num_since == self._every
        self._last = None if is_kept else len(self.records)
        self.records.append({**record, NUM_STEPS: self._num_since})
        if is_kept:
            self._num_since = 0
            self._num_kept += 1
        if self._num_kept >= MAX_STEPS:
            self._thin_out()

    def _thin_out(self) -> None:
        """Keep every second step. The last record is one of a step, and is kept."""
        self._every *= 2
        self._num_kept //= 2
        kept, first = list[Record](), None
        for record in self.records:
            if record.get("kind") != "step":
                kept.append(record)
                continue
            if first is None:
                first = record
            else:
                kept.append({**_standing_for(first, record), NUM_STEPS: self._every})
                first = None
        self.records = kept


def _standing_for(dropped: Record, kept: Record) -> Record:
    """The record that is kept, with the larger maximum of the two."""
    known = [record[_MAXIMUM] for record in (dropped, kept) if record.get(_MAXIMUM) is not None]
    return {**kept, _MAXIMUM: max(known)} if known else kept
