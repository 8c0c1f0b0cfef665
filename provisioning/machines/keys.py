"""diloco's SSH key, and other private files on the operator's machine. All are written atomically."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from provisioning.errors import UserError


def public_key(path: Path) -> str:
    """The OpenSSH public key of the key at `path`; a missing key is created. Raises UserError if it is unusable."""
    import asyncssh

    if not path.exists():
        key = asyncssh.generate_private_key("ssh-ed25519", comment="diloco")
        write_private(path, key.export_private_key())
        write_private(path.with_name(f"{path.name}.pub"), key.export_public_key())
    check_private(path)
    try:
        key = asyncssh.read_private_key(path)
    except (asyncssh.KeyImportError, OSError) as error:
        raise UserError(f"{path} is not a usable SSH key: {error}.") from error
    return key.export_public_key().decode().strip()


def key_at(path: Path) -> Path:
    """The path with ~ and variables expanded. Raises UserError if the key is missing, or others can read it."""
    expanded = Path(os.path.expandvars(path)).expanduser()
    check_private(expanded)
    return expanded


def write_private(path: Path, content: bytes) -> None:
    """Write a file with mode 0600, atomically. Raises UserError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # mkstemp creates it with mode 0600.
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from error


def check_private(path: Path) -> None:
    """Raises UserError if the key file is missing, or if others can read it."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise UserError(f"The key file {path} cannot be read: {error.strerror}.") from error
    if mode & 0o077:
        raise UserError(
            f"Others can read the key file {path} (mode {mode & 0o777:o}); type `chmod 600 {path}`, and make a new key "
            "if somebody may have read it."
        )
