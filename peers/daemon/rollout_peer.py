"""Runs one rollout peer. The order of its life:

identity -> DHT -> learner -> manifest -> generator -> policy -> rollouts

It works for one learner at a time (peers/protocol/rollouts.py says which), and takes another when that one goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from peers.admission.secrets import AdmissionSettings
from peers.admission.service import AdmissionService
from peers.core import joining
from peers.daemon.agreement import check_manifest, check_settings
from peers.daemon.config import DaemonConfig
from peers.daemon.generator import Generator
from peers.daemon.link import Accept, listen
from peers.daemon.supervisor import Supervisor, WorkerCommand
from peers.errors import LinkLost, NotWanted, PeersError, PeerUnreachable, ProtocolError, UserError
from peers.net.dht.node import Dht, announced
from peers.net.identity import Identity, claim_slot
from peers.net.rollouts import LearnerStream
from peers.net.socket_directory import SocketDirectory
from peers.protocol.mesh import Scalar
from peers.protocol.records import NO_RANK, PEERS_KEY, Announcement
from peers.protocol.refusal import Refused
from peers.protocol.rollouts import MAX_BLOBS, Completion, Policy, Rollout, learner_for, prompt_of, signed
from peers.tasks import cancelled, first_of
from peers.timing import LOOK_S, OFTEN_S, look_interval_s

WorkerFactory = Callable[[Mapping[str, Scalar], Path], WorkerCommand]
"""(manifest, link socket) -> the command that generates."""
SLOT_PREFIX = "rollout-"
"""Prefix of the names of its keys, so that a trainer that is started here later finds its own."""
AGAIN_S = 2 * LOOK_S
"""After this long, a learner that had no policy or was lost is asked again; a peer that has had no work yet asks sooner
if there is no other learner."""
TOLD_S = 2 * LOOK_S

log = logging.getLogger(__name__)


async def run_rollout_peer(config: DaemonConfig, *, worker: WorkerFactory, directory: Path) -> int:
    """Generate rollouts until no learner has been there for `timeout_waiting_for_peers`. Returns 0.

    `directory` holds policies on their way to the generator. Raises UserError for what the user can correct, PeersError
    where it gave up on the generator, or no policy has worked here for that long.
    """
    async with contextlib.AsyncExitStack() as stack:
        link_path = stack.enter_context(SocketDirectory()).path / "link.sock"
        accept = await stack.enter_async_context(listen(link_path))
        # Nobody calls a rollout peer, so it issues no tokens, whatever admission key it is given.
        settings = AdmissionSettings(swarm_secret_file=config.swarm_secret_file)
        # Errors in this file are reported before the peer connects to anything.
        settings.secret()
        identity = claim_slot(Path(config.state_dir), config.run_id, None, prefix=SLOT_PREFIX)
        stack.callback(identity.release)
        log.info("starting as %s, which generates rollouts", identity.peer_id)
        dht = await Dht.join(identity=identity, initial_peers=config.initial_peers, client_mode=True)
        stack.push_async_callback(dht.close)
        admission = AdmissionService(config.run_id, identity, dht, settings)
        await admission.enter()
        peer = RolloutPeer(config, identity, dht, admission, directory)
        return await peer.live(accept, link_path, worker)


class RolloutPeer:
    """Used from one event loop."""

    def __init__(
        self,
        config: DaemonConfig,
        identity: Identity,
        dht: Dht,
        admission: AdmissionService,
        directory: Path,
    ) -> None:
        self._config, self._identity, self._dht, self._admission = config, identity, dht, admission
        self._generator, self._directory = Generator(), directory
        self._manifest: dict[str, Scalar] = {}
        self._agreed = asyncio.Event()
        """Set once there is a manifest."""
        self._seen_at = time.monotonic()
        """When a learner that wants this peer's rollouts was last there. One whose policy does not work here does not
        count, unless this is the first such failure since a rollout was taken."""
        self._complaint = ""
        """The last such failure since then."""
        self._refusals: dict[str, str] = {}
        """By a learner's peer id: why it does not want this peer's rollouts, and what to do about it."""
        self._failed_at: dict[str, float] = {}
        self._fetched: list[Path] = []
        """Files that the generator has not loaded yet."""
        self._fetched_bytes = 0
        self._fetched_digest = ""
        """Digest of the weights that they lead to."""
        self._policy = asyncio.Event()
        self._step = 0
        self._num_generated = self._num_dropped = 0
        self._on_taken: Callable[[], None] = lambda: None
        """Called for each rollout that a learner takes."""
        self._told_at = float("-inf")
        self._said = ""

    async def live(self, accept: Accept, link_path: Path, worker: WorkerFactory) -> int:
        """Work until there is nothing to do any more. Returns 0."""

        async def generate() -> None:
            await self._agreed.wait()
            # In a thread: `worker` may read all of a model's weights.
            supervisor = Supervisor(await asyncio.to_thread(worker, self._manifest, link_path))
            self._on_taken = supervisor.restarts.committed
            await supervisor.run_to_its_end()

        with contextlib.closing(self._generator) as generator:
            parts = (self._admission.run(), self._dht.fail_with_p2pd(), self._work(), generate())
            await first_of(generator.serve(accept), *parts)
        return 0

    async def _work(self) -> None:
        """Work for one learner after the other, until none has been there for long.

        Raises UserError if all learners refuse this peer: at once if it has generated nothing yet; or if they have
        another version. Raises PeersError if there was none, or if their policies do not work here.
        """
        patience_s = self._config.timeout_waiting_for_peers
        while True:
            there, other_version = await self._learners(), self._admission.gate.other_version
            if other_version is not None and not (there or self._manifest):
                raise UserError(str(other_version))
            is_over = time.monotonic() - self._seen_at > patience_s
            is_refused = bool(there) and there.keys() <= self._refusals.keys()
            # A learner that starts anew may want a peer again that has generated before.
            if is_refused and (is_over or not self._num_generated):
                raise UserError(list(self._refusals.values())[-1])
            learner = self._chosen(there)
            if is_over and (learner is None or self._has_failed(learner)):
                break
            if learner is None:
                await asyncio.sleep(OFTEN_S)
                continue
            try:
                await self._work_for(learner)
            except (PeerUnreachable, ProtocolError) as error:
                self._note_failure(learner, error)
        if not self._manifest:
            raise PeersError(
                f"no peer of the run {self._config.run_id} took rollouts within {patience_s:g} s. Was one started with "
                "--mode grpo --rollout peers, and is this the run's --run-id?"
            )
        if there and self._complaint:
            raise PeersError(
                f"no rollout was taken within {patience_s:g} s; the last failure: {self._complaint}"
            )
        log.info("no learner is left")

    def _has_failed(self, learner: Announcement) -> bool:
        """Since a learner that wants this peer's rollouts was last there."""
        return self._failed_at.get(learner.peer_id, -math.inf) >= self._seen_at

    def _note_failure(self, learner: Announcement, error: PeersError) -> None:
        self._failed_at[learner.peer_id] = time.monotonic()
        text = f"cannot work for learner {learner.world_rank}: {error}"
        if isinstance(error, Refused):
            self._refusals[learner.peer_id] = error.why.advice(self._identity.peer_id)
        elif isinstance(error, NotWanted):
            self._refusals[learner.peer_id] = (
                f"{text}. Has this peer the learners' model and --grpo.reward, and their version of diloco?"
            )
        elif isinstance(error, ProtocolError):
            self._complaint = text
        log.log(logging.DEBUG if text == self._said else logging.INFO, "%s", text)
        self._said = text

    async def _learners(self) -> dict[str, Announcement]:
        """The peers that may train on this one's rollouts, by peer id."""
        run_id = self._config.run_id
        found = await announced(
            self._dht, PEERS_KEY(run_id), Announcement, run_id, self._admission.gate.check_record
        )
        return {
            peer_id: record
            for peer_id, record in found.items()
            if record.world_rank != NO_RANK and record.state != "leaving"
        }

    def _chosen(self, learners: Mapping[str, Announcement]) -> Announcement | None:
        """The learner that this peer is to work for now."""
        now, failed_at = time.monotonic(), {peer: self._failed_at.get(peer, -math.inf) for peer in learners}
        usable = {peer_id for peer_id, at in failed_at.items() if at < now - AGAIN_S}
        chosen = learner_for(self._config.run_id, self._identity.peer_id, usable)
        if chosen is None and learners and not self._manifest:
            # This peer has nothing else to do: it soon asks each of them again in turn.
            longest = min(failed_at, key=failed_at.__getitem__)
            chosen = longest if failed_at[longest] < now - OFTEN_S else None
        return learners[chosen] if chosen is not None else None

    async def _work_for(self, learner: Announcement) -> None:
        """Work until this learner is lost, or another is chosen. Raises PeerUnreachable, ProtocolError, UserError."""
        with await self._open(learner) as policies, await self._open(learner) as rollouts:
            self._agree(rollouts.welcome.manifest.fields)
            self._forget_fetched()
            log.info("working for learner %d", learner.world_rank)
            try:
                await first_of(
                    self._follow(policies),
                    self._generate(learner.peer_id, rollouts),
                    self._until_reassigned(learner.peer_id),
                )
                self._failed_at.pop(learner.peer_id, None)
            except NotWanted:
                raise
            except PeersError as error:
                # Perhaps this peer cannot use any policy: only the first failure shows that a learner is there.
                if not (self._complaint and isinstance(error, ProtocolError)):
                    self._seen_at = time.monotonic()
                raise

    def _agree(self, manifest: Mapping[str, Scalar]) -> None:
        """Take over the run's settings. Raises UserError if they contradict the user, ProtocolError if they are invalid
        or differ from those of earlier learners."""
        proposal, theirs = self._config.manifest, dict(manifest)
        check_manifest(theirs)
        if wrong := joining.misfits(proposal, theirs):
            raise ProtocolError(f"its manifest has other types: {', '.join(wrong)[:200]}")
        if self._manifest:
            if joining.manifest_digest(theirs) != joining.manifest_digest(self._manifest):
                raise ProtocolError("its manifest differs from that of the learners before it")
            return
        check_settings(proposal, theirs, self._config.named)
        self._manifest = theirs
        self._agreed.set()

    async def _until_reassigned(self, peer_id: str) -> None:
        there: Mapping[str, Announcement] = {}
        while True:
            await asyncio.sleep(_next_look_s(len(there), random.random()))
            there = await self._learners()
            learner = self._chosen(there)
            # The DHT may know of nobody for a moment; a learner that is gone breaks its streams. One that has failed
            # waits for a success with the present one: otherwise it could cut short each batch of rollouts.
            if learner is None or learner.peer_id == peer_id or self._has_failed(learner):
                continue
            try:
                # Check first: the other learner may take no rollouts, while the present one does.
                with await self._open(learner) as stream:
                    self._agree(stream.welcome.manifest.fields)
            except (PeerUnreachable, ProtocolError) as error:
                self._note_failure(learner, error)
            else:
                return

    async def _open(self, learner: Announcement) -> LearnerStream:
        return await LearnerStream.open(
            self._dht.transport, self._config.run_id, learner, self._admission.token
        )

    async def _follow(self, stream: LearnerStream) -> None:
        """Fetch each newer policy, while the generator works by an older one."""
        most_bytes = await self._most_bytes(stream)
        while True:
            held = self._fetched_digest or self._generator.held
            policy = await stream.newest(held)
            num_bytes = sum(name.num_bytes for name in policy.blobs)
            if num_bytes > most_bytes:
                raise ProtocolError("its policy is larger than the model")
            if policy.digest != held:
                # The files that wait have the limits of one policy together: no learner can fill the disk.
                if policy.base:
                    num_bytes += self._fetched_bytes
                num_files = len(policy.blobs) + (len(self._fetched) if policy.base else 0)
                if num_bytes <= most_bytes and num_files <= MAX_BLOBS:
                    await self._fetch(stream, policy)
            else:
                self._step = policy.step
                self._policy.set()
            await asyncio.sleep(OFTEN_S / 2)

    async def _most_bytes(self, stream: LearnerStream) -> int:
        """Most bytes of a policy's files, once the generator is here. The learner would take a silent peer for lost:
        this asks it meanwhile, since loading a large model takes long."""
        while True:
            await stream.newest("")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(OFTEN_S):
                    _, _, most_bytes = await self._generator.limits()
                    return most_bytes

    async def _fetch(self, stream: LearnerStream, policy: Policy) -> None:
        paths: list[Path] = []
        try:
            for name in policy.blobs:
                path = await stream.download(name, self._directory)
                if path is None:
                    # The learner has newer weights: ask again.
                    return
                paths.append(path)
            if not policy.base:
                self._drop_fetched(but=paths)
            self._fetched += paths
            self._fetched_bytes += sum(name.num_bytes for name in policy.blobs)
            self._fetched_digest, self._step = policy.digest, policy.step
            self._policy.set()
        finally:
            for path in set(paths) - set(self._fetched):
                path.unlink(missing_ok=True)

    async def _generate(self, learner: str, stream: LearnerStream) -> None:
        """Generate, and meanwhile hand over the rollouts generated before."""
        number, handing = stream.welcome.next_number, None
        try:
            while True:
                try:
                    await self._load()
                    num_examples, at_once, _ = await self._generator.limits()
                    examples = [
                        prompt_of(
                            self._config.run_id,
                            learner,
                            self._identity.peer_id,
                            number + index,
                            num_examples=num_examples,
                        )
                        for index in range(at_once)
                    ]
                    policy = self._generator.held
                    groups = await self._generator.generate(examples)
                except LinkLost as error:
                    log.warning("the generator is gone: %s", error)
                    self._forget_fetched()
                    continue
                if handing is not None:
                    await handing
                handing = asyncio.create_task(self._hand_over(stream, learner, policy, number, groups))
                number += len(groups)
        finally:
            if handing is not None:
                await cancelled([handing])

    async def _load(self) -> None:
        """Have the generator load the newest policy that has been fetched."""
        await self._policy.wait()
        paths, self._fetched, self._fetched_bytes = self._fetched, [], 0
        try:
            if paths:
                await self._generator.load(paths, self._fetched_digest)
        except ProtocolError:
            self._forget_fetched()
            raise

    def _forget_fetched(self) -> None:
        """Remove the fetched files, which are of no use now: ask again, from the weights that the generator has."""
        self._policy.clear()
        self._fetched_digest = ""
        self._drop_fetched()

    def _drop_fetched(self, *, but: Sequence[Path] = ()) -> None:
        for path in set(self._fetched) - set(but):
            path.unlink(missing_ok=True)
        self._fetched, self._fetched_bytes = [], 0

    async def _hand_over(
        self,
        stream: LearnerStream,
        learner: str,
        policy: str,
        first: int,
        groups: Sequence[tuple[Completion, ...]],
    ) -> None:
        for index, completions in enumerate(groups):
            rollout = Rollout(
                run_id=self._config.run_id,
                learner=learner,
                policy=policy,
                number=first + index,
                completions=completions,
            )
            dropped = await stream.hand_over(signed(rollout, self._identity))
            self._seen_at = time.monotonic()
            self._complaint = ""
            self._refusals.pop(learner, None)
            self._num_generated += 1
            self._num_dropped += bool(dropped)
            if not dropped:
                self._on_taken()
        if time.monotonic() - self._told_at > TOLD_S:
            self._told_at = time.monotonic()
            log.info(
                "generated %d rollouts, the last by the policy of step %d; %d of them came too late",
                self._num_generated,
                self._step,
                self._num_dropped,
            )


def _next_look_s(num_learners: int, drawn: float) -> float:
    """Until a peer that has work looks for its learner again; `drawn` is random, from 0 to 1.

    Rollout peers look on their own: no other peer tells them of a newcomer, or that a learner has gone.
    """
    usual_s = max(LOOK_S, look_interval_s(num_learners, is_early=False))
    return min(usual_s, 6 * LOOK_S) * (0.5 + drawn)
