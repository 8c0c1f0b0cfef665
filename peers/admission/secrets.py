"""The swarm secret and the admission key: their format, their files, and the proof that a peer has the secret.

    swarm secret      diloco1.<public half of the admission key>.<32 random bytes>         for every peer
    admission key     diloco-admission1.<private key>.<the same 32 random bytes>           for issuers of tokens

One line of text each, base64 without padding. Both are read from files or the environment only, and appear in no
message, log or `repr`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from peers.errors import UserError
from peers.net.private_files import write_private

SECRET_ENV = "DILOCO_SWARM_SECRET"
_PART_BYTES = 32
_MAX_FILE_BYTES = 4096
_SECRET, _KEY = "diloco1", "diloco-admission1"
_PROVED = b"diloco admission\0"


@dataclass(frozen=True)
class SwarmSecret:
    """What a peer needs to be admitted, and to verify that others were."""

    public_key: bytes
    _random: bytes = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> SwarmSecret:
        """Raises ValueError, whose message does not contain the text."""
        return cls(*_parts(text, _SECRET))

    def to_text(self) -> str:
        """The secret itself: for its file only."""
        return _text(_SECRET, self.public_key, self._random)

    def proof(self, run_id: str, peer_id: str, issuer_id: str, nonce: bytes) -> bytes:
        """Proof, for this issuer and nonce only, that this peer has the secret. It reveals nothing of the secret."""
        parts = (run_id.encode(), peer_id.encode(), issuer_id.encode(), nonce)
        said = _PROVED + b"".join(len(part).to_bytes(4, "little") + part for part in parts)
        return hmac.digest(self._random, said, hashlib.sha256)

    def is_proved_by(self, proof: bytes, run_id: str, peer_id: str, issuer_id: str, nonce: bytes) -> bool:
        return hmac.compare_digest(proof, self.proof(run_id, peer_id, issuer_id, nonce))


@dataclass(frozen=True)
class AdmissionKey:
    """The key that signs tokens and ban lists."""

    private_key: Ed25519PrivateKey = field(repr=False)
    _random: bytes = field(repr=False)

    @classmethod
    def new(cls) -> AdmissionKey:
        return cls(Ed25519PrivateKey.generate(), secrets.token_bytes(_PART_BYTES))

    @classmethod
    def parse(cls, text: str) -> AdmissionKey:
        """Raises ValueError, whose message does not contain the text."""
        seed, random = _parts(text, _KEY)
        return cls(Ed25519PrivateKey.from_private_bytes(seed), random)

    def to_text(self) -> str:
        """The key itself: for its file only."""
        return _text(_KEY, self.private_key.private_bytes_raw(), self._random)

    @property
    def secret(self) -> SwarmSecret:
        public = self.private_key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        return SwarmSecret(public, self._random)


def load_secret(path: str | None, environment: Mapping[str, str]) -> SwarmSecret | None:
    """The secret in the file, else the one in the environment, else None. Raises UserError."""
    if path:
        origin, text = f"the swarm secret file {_shown(path)}", _read(path, "swarm secret")
    else:
        origin, text = SECRET_ENV, environment.get(SECRET_ENV, "")
        if not text:
            return None
    try:
        return SwarmSecret.parse(text)
    except ValueError as error:
        raise UserError(
            f"{origin} holds no swarm secret ({error}); it is the one line, beginning with {_SECRET}., in the file "
            "that `diloco dht start` names"
        ) from error


def load_key(path: str | Path) -> AdmissionKey:
    """The admission key in a file. Raises UserError."""
    text = _read(str(path), "admission key")
    try:
        return AdmissionKey.parse(text)
    except ValueError as error:
        raise UserError(
            f"{_shown(str(path))} holds no admission key ({error}); the coordinator's is in its state directory, as "
            "<run_id>.admission-key"
        ) from error


def load_or_create_key(key_path: Path, secret_path: Path) -> AdmissionKey:
    """The admission key at `key_path`, made when missing, and its secret at `secret_path`. Raises UserError."""
    try:
        key_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not key_path.exists():
            write_private(key_path, AdmissionKey.new().to_text().encode() + b"\n")
        key = load_key(key_path)
        wanted = key.secret.to_text().encode() + b"\n"
        if not secret_path.exists() or secret_path.read_bytes() != wanted:
            write_private(secret_path, wanted)
        return key
    except OSError as error:
        raise UserError(f"cannot write the admission key to {key_path.parent}: {error.strerror}") from error


def replace_secret(key_path: Path, secret_path: Path) -> None:
    """Give the admission key in a file a new swarm secret: peers that have only the old one get no more tokens. Raises
    UserError."""
    key = AdmissionKey(load_key(key_path).private_key, secrets.token_bytes(_PART_BYTES))
    try:
        write_private(key_path, key.to_text().encode() + b"\n")
        write_private(secret_path, key.secret.to_text().encode() + b"\n")
    except OSError as error:
        raise UserError(f"cannot write the new swarm secret to {secret_path}: {error.strerror}") from error


def _read(path: str, what: str) -> str:
    if path.strip().startswith((f"{_SECRET}.", f"{_KEY}.")):
        raise UserError(
            f"the {what} itself was given where the name of its file belongs; others can read what is on a command "
            "line. Put it into a file that only you can read"
        )
    try:
        with Path(path).expanduser().open("rb") as file:
            return file.read(_MAX_FILE_BYTES).decode("ascii", "replace")
    except OSError as error:
        raise UserError(f"cannot read the {what} file {path}: {error.strerror}") from error


def _shown(path: str) -> str:
    return str(Path(path).expanduser())


def _text(kind: str, *parts: bytes) -> str:
    return ".".join((kind, *(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)))


def _parts(text: str, kind: str) -> tuple[bytes, bytes]:
    """Raises ValueError."""
    words = text.strip().split(".")
    if words[0] != kind or len(words) != 3:
        raise ValueError(f"it is not {kind}.….…")
    try:
        first, second = (base64.b64decode(word + "=" * (-len(word) % 4), b"-_", True) for word in words[1:])
    except (binascii.Error, ValueError):
        raise ValueError("it is not base64") from None
    if (len(first), len(second)) != (_PART_BYTES, _PART_BYTES):
        raise ValueError("a part is too long or too short")
    return first, second


DEFAULT_LIFETIME_DAYS = 30.0
"""Far longer than a coordinator is usually gone: a swarm that goes on without it must not lose its peers."""


@dataclass(frozen=True, kw_only=True)
class AdmissionSettings:
    """The settings of admission; without any, the swarm is open. They name files, so that no secret is on a command
    line."""

    swarm_secret_file: str | None = None
    """None: the secret is taken from DILOCO_SWARM_SECRET."""
    admission_key_file: str | None = None
    """Makes this process an issuer of tokens."""
    allowlist_file: str | None = None
    """One peer id a line; only these are given tokens. Read at every request, as the key is."""
    token_days: float = DEFAULT_LIFETIME_DAYS
    use_environment: bool = True
    """False: ignore DILOCO_SWARM_SECRET, which a coordinator's shell may have set for a peer beside it."""

    def secret(self) -> SwarmSecret | None:
        """The swarm secret, from a file or the environment; None in an open swarm. Raises UserError."""
        secret = load_secret(self.swarm_secret_file, os.environ if self.use_environment else {})
        if self.admission_key_file is None:
            return secret
        own = load_key(self.admission_key_file).secret
        if secret is not None and secret.public_key != own.public_key:
            raise UserError("the swarm secret and the admission key are of different runs; give either alone")
        return own
