"""The TLS credentials of new identities."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from peers.net.identity import load, load_or_create
from peers.net.paths.tls import Credentials
from peers.protocol import libp2p_keys


def credentials(directory: Path, name: str) -> Credentials:
    """The credentials of an Ed25519 identity."""
    identity = load_or_create(directory / f"{name}.key")
    identity.release()
    return Credentials.of(identity)


def rsa_credentials(directory: Path, name: str) -> Credentials:
    """The credentials of an RSA identity, as Hivemind's own tools make it."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    der = key.private_bytes(Encoding.DER, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    path = directory / f"{name}.key"
    path.write_bytes(libp2p_keys._pack_key(0, der))
    return Credentials.of(load(path))
