"""The coordinator's ledger under any order of requests, evictions, restarts and deaths between two statements."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import core, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from peers.admission.ledger import RankLedger
from peers.protocol.admission import Taken

_IS_SEARCH = core.global_force_seed is not None
peer_ids = st.sampled_from(["ada", "bert", "cleo", "dora"])
ranks = st.integers(0, 4)


class LedgerUnderRequests(RuleBasedStateMachine):
    """`holders` maps each rank to the peer that must hold it in the ledger."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory(prefix="ledger-")
        self.holders: dict[int, str] = {}
        self.open()

    def open(self) -> None:
        self.ledger = RankLedger(Path(self.directory.name, "run.sqlite"))

    @rule(
        peer_id=peer_ids,
        wanted=st.none() | ranks,
        avoid=st.frozensets(ranks, max_size=2),
        present=st.frozensets(peer_ids),
    )
    def a_rank_is_asked_for(
        self, peer_id: str, wanted: int | None, avoid: frozenset[int], present: frozenset[str]
    ) -> None:
        answer = self._assign(peer_id, wanted, None, avoid, present - {peer_id})
        if isinstance(answer, Taken) and wanted is None:
            assert answer.holder not in present
            self._assign(peer_id, wanted, answer.holder, avoid, present - {peer_id})

    @rule(peer_id=peer_ids, wanted=ranks)
    def a_holder_that_does_not_answer_is_evicted(self, peer_id: str, wanted: int) -> None:
        self._assign(peer_id, wanted, self.holders.get(wanted))

    @rule()
    def the_coordinator_is_started_again(self) -> None:
        self.ledger.close()
        self.open()

    @rule(peer_id=peer_ids)
    def the_coordinator_dies_between_two_statements(self, peer_id: str) -> None:
        self.ledger._db.execute("BEGIN IMMEDIATE")
        self.ledger._db.execute("DELETE FROM holders WHERE peer_id = ?", (peer_id,))
        self.the_coordinator_is_started_again()

    @invariant()
    def it_says_what_it_has_granted(self) -> None:
        assert {rank: self.ledger.holder(rank) for rank in range(12)} == {
            rank: self.holders.get(rank) for rank in range(12)
        }
        assert dict(self.ledger._db.execute("SELECT world_rank, peer_id FROM holders")) == self.holders
        assert len(self.holders) == len(set(self.holders.values()))

    def teardown(self) -> None:
        self.ledger.close()
        self.directory.cleanup()

    def _assign(
        self,
        peer_id: str,
        wanted: int | None,
        evict: str | None,
        avoid: frozenset[int] = frozenset(),
        present: frozenset[str] = frozenset(),
    ) -> int | Taken:
        before = {holder: rank for rank, holder in self.holders.items()}
        answer = self.ledger.assign(peer_id, wanted, evict=evict, avoid=avoid, present=present)
        if isinstance(answer, Taken):
            assert answer.holder in self.holders.values() and answer.holder not in (peer_id, evict)
            assert wanted is None or answer.holder == self.holders[wanted]
            return answer
        rank, mine = answer, before.get(peer_id)
        if wanted is not None:
            assert rank == wanted
        elif mine is not None and mine not in avoid:
            assert rank == mine
        else:
            assert rank not in avoid
        assert self.holders.get(rank) in (None, peer_id, evict)
        self.holders = {r: holder for r, holder in self.holders.items() if holder != peer_id} | {
            rank: peer_id
        }
        return answer


LedgerUnderRequests.TestCase.settings = settings(
    max_examples=2000 if _IS_SEARCH else 40,
    stateful_step_count=20,
    deadline=None,
    derandomize=not _IS_SEARCH,
    database=None,
)
TestLedgerUnderRequests = LedgerUnderRequests.TestCase
