"""Who a peer is: a libp2p key on disk. After a restart by the same command it has the same key, so it is the same peer.

New keys are Ed25519; RSA keys as Hivemind's tools write them are read as well.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from peers.errors import UserError
from peers.net.private_files import write_private
from peers.protocol import libp2p_keys
from peers.protocol.certificates import Signature
from peers.protocol.limits import RUN_ID

_MAX_SLOTS = 10_000


class _Lock:
    """An exclusive claim to `path`, by a lock file beside it. Raises BlockingIOError while another process has it,
    UserError where nothing can be locked.

    flock, not a pid in a file: the kernel releases it however the process ends. A bare descriptor, not a file object:
    the claim must not end because somebody dropped the last reference.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = -1
        try:
            self._descriptor = os.open(
                path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
            )
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.release()
            if isinstance(error, BlockingIOError):
                raise
            raise UserError(f"cannot lock the identity {path}: {error.strerror}") from error

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


@dataclass(frozen=True)
class Identity:
    """A private key, its file (which p2pd reads), and the lock that keeps it this process's own."""

    path: Path
    peer_id: str
    public_key: bytes
    """libp2p's protobuf PublicKey message."""
    _key: libp2p_keys.PrivateKey = field(repr=False)
    _lock: _Lock | None = field(default=None, repr=False)

    @property
    def private_key(self) -> libp2p_keys.PrivateKey:
        """For TLS, which has to sign by itself."""
        return self._key

    def sign(self, payload: bytes) -> Signature:
        return Signature(public_key=self.public_key, signature=libp2p_keys.sign(self._key, payload))

    def release(self) -> None:
        """Let another process of this machine take the identity. May be repeated."""
        if self._lock is not None:
            self._lock.release()


def claim_slot(state_dir: Path, run_id: str, world_rank: int | None, *, prefix: str = "") -> Identity:
    """This machine's identity for a world rank of a run, or for the first slot no living process holds.

    The key lies at `<state_dir>/<run_id>/<prefix><slot>.key`, made when missing. The slot stays claimed until
    `release` or the end of the process. Raises UserError when a living process holds that of `world_rank`,
    or for a bad key.
    """
    directory = state_dir / check_run_id(run_id)
    _make_directory(directory)
    for slot in [world_rank] if world_rank is not None else range(_MAX_SLOTS):
        with contextlib.suppress(BlockingIOError):
            return load_or_create(directory / f"{prefix}{slot}.key")
    if world_rank is None:
        raise UserError(f"all {_MAX_SLOTS} identities in {directory} are in use")
    raise UserError(
        f"world rank {world_rank} of run {run_id} already runs on this machine (its key is "
        f"{directory}/{world_rank}.key); stop it first, or give another --world-rank or --run-id"
    )


def is_one_more(identity: Identity) -> bool:
    """Whether another living process held the first slot when this identity was claimed as the first free one."""
    return identity.path.stem != "0"


def load_or_create(path: Path) -> Identity:
    """The identity at `path`, made when missing, locked by `<path>.lock`.

    Raises BlockingIOError while another living process holds it, UserError when the file is no private key.
    """
    _make_directory(path.parent)
    lock = _Lock(path)
    try:
        if not path.exists():
            write_private(path, libp2p_keys.new_private_key())
        return load(path, lock)
    except OSError as error:
        lock.release()
        raise UserError(f"cannot write a new identity to {path}: {error.strerror}") from error
    except BaseException:
        lock.release()
        raise


def load(path: Path, lock: _Lock | None = None) -> Identity:
    """The identity at `path`, a libp2p private key file. Raises UserError."""
    try:
        with path.open("rb") as file:
            content = file.read(libp2p_keys.MAX_KEY_BYTES + 1)
    except OSError as error:
        raise UserError(f"cannot read the identity {path}: {error.strerror}") from error
    try:
        key = libp2p_keys.private_key(content)
    except ValueError as error:
        raise UserError(
            f"{path} is not a libp2p private key (Ed25519 or RSA); name another file, or move it away "
            "and a new key is made"
        ) from error
    public_key = libp2p_keys.public_key(key)
    return Identity(path, libp2p_keys.peer_id_of(public_key), public_key, key, lock)


def check_run_id(run_id: str) -> str:
    """The run id, if it can name a directory. Raises UserError."""
    if not re.fullmatch(RUN_ID, run_id):
        raise UserError(
            f"{run_id!r} cannot name a run: use 1 to 64 letters, digits, '.', '_' and '-', first a letter "
            "or digit"
        )
    return run_id


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UserError(f"cannot make the directory {directory} for identities: {error.strerror}") from error
