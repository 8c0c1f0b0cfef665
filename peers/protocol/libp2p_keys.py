"""libp2p's keys and peer ids as bytes, as in p2pd's key files and in multiaddresses.

A peer id is the base58 multihash of the public key (https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md).
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_der_private_key,
    load_der_public_key,
)

MAX_KEY_BYTES = 8192
PrivateKey = Ed25519PrivateKey | RSAPrivateKey

_RSA, _ED25519 = 0, 1
_RSA_BITS = range(2048, 4097)
# The usual exponent. With one as long as the modulus, verifying a signature would take a hundred times as long.
_RSA_EXPONENT = 65537
_SEED_BYTES = 32
_MAX_INLINE_MULTIHASH_BYTES = 42
_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


def verify(peer_id: str, public_key: bytes, payload: bytes, signature: bytes) -> bool:
    """Whether `payload` was signed by the peer with this id. False for anything malformed; never raises."""
    if len(public_key) > MAX_KEY_BYTES or peer_id_of(public_key) != peer_id:
        return False
    try:
        key_type, data = _unpack_key(public_key)
        if key_type == _ED25519:
            Ed25519PublicKey.from_public_bytes(data).verify(signature, payload)
            return True
        key = load_der_public_key(data)
        if key_type != _RSA or not isinstance(key, RSAPublicKey) or not _is_usual(key):
            return False
        key.verify(signature, payload, PKCS1v15(), hashes.SHA256())
        return True
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False


def sign(key: PrivateKey, payload: bytes) -> bytes:
    if isinstance(key, Ed25519PrivateKey):
        return key.sign(payload)
    return key.sign(payload, PKCS1v15(), hashes.SHA256())


def new_private_key() -> bytes:
    """The content of a new Ed25519 key file."""
    key = Ed25519PrivateKey.generate()
    seed = key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
    return _pack_key(_ED25519, seed + key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw))


def private_key(content: bytes) -> PrivateKey:
    """The key in the content of a key file. Raises ValueError."""
    if len(content) > MAX_KEY_BYTES:
        raise ValueError("too long")
    key_type, data = _unpack_key(content)
    if key_type == _ED25519:
        return Ed25519PrivateKey.from_private_bytes(data[:_SEED_BYTES])
    try:
        key = load_der_private_key(data, password=None)
    except (TypeError, UnsupportedAlgorithm) as error:
        raise ValueError(str(error)) from error
    if key_type != _RSA or not isinstance(key, RSAPrivateKey) or not _is_usual(key.public_key()):
        raise ValueError("neither Ed25519 nor RSA of 2048 to 4096 bits and exponent 65537")
    return key


def public_key(key: PrivateKey) -> bytes:
    """libp2p's protobuf PublicKey message."""
    return public_key_message(key.public_key())


def public_key_message(key: object) -> bytes:
    """The PublicKey message of any key object. Raises ValueError for a kind of key that no peer has."""
    if isinstance(key, Ed25519PublicKey):
        return _pack_key(_ED25519, key.public_bytes(Encoding.Raw, PublicFormat.Raw))
    if isinstance(key, RSAPublicKey) and _is_usual(key):
        return _pack_key(_RSA, key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))
    raise ValueError("neither Ed25519 nor RSA of 2048 to 4096 bits and exponent 65537")


@lru_cache(maxsize=1024)
def peer_id_of(public_key: bytes) -> str:
    """The base58 peer id of a protobuf PublicKey. Short keys are contained in it, longer ones are hashed."""
    if len(public_key) <= _MAX_INLINE_MULTIHASH_BYTES:
        return base58_encode(bytes([0x00, len(public_key)]) + public_key)
    return base58_encode(b"\x12\x20" + hashlib.sha256(public_key).digest())


def base58_encode(data: bytes) -> str:
    number, text = int.from_bytes(data, "big"), ""
    while number:
        number, digit = divmod(number, 58)
        text = _BASE58[digit] + text
    return "1" * (len(data) - len(data.lstrip(b"\0"))) + text


def base58_decode(text: str) -> bytes:
    """Raises ValueError for characters outside the alphabet."""
    number = 0
    for character in text:
        number = number * 58 + _BASE58.index(character)
    zeros = len(text) - len(text.lstrip("1"))
    return b"\0" * zeros + number.to_bytes((number.bit_length() + 7) // 8, "big")


def varint(number: int) -> bytes:
    """A protobuf integer that is not negative."""
    head = b""
    while number > 0x7F:
        head += bytes([number & 0x7F | 0x80])
        number >>= 7
    return head + bytes([number])


def _is_usual(key: RSAPublicKey) -> bool:
    return key.key_size in _RSA_BITS and key.public_numbers().e == _RSA_EXPONENT


def _pack_key(key_type: int, data: bytes) -> bytes:
    """libp2p's `message Key {1: type, 2: data}`, public or private."""
    return bytes([0x08, key_type, 0x12]) + varint(len(data)) + data


def _unpack_key(message: bytes) -> tuple[int, bytes]:
    """Raises ValueError unless this is exactly what `_pack_key` makes: one key, one peer id."""
    length = 0
    for index, byte in enumerate(message[3:6]):
        length |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            break
    data = message[len(message) - length :] if length else b""
    if len(message) < 4 or _pack_key(message[1], data) != message:
        raise ValueError("not a libp2p key message")
    return message[1], data
