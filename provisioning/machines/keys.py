"""Our own SSH key, and other files on the operator's machine that only their owner may read: whole or absent."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from provisioning.errors import UserError


def public_key(path: Path) -> str:
    """The OpenSSH line of the key at `path`, which is made when it is missing. Raises UserError."""
    import asyncssh

    if not path.exists():
        key = asyncssh.generate_private_key("ssh-ed25519", comment="diloco")
        write_private(path, key.export_private_key())
        write_private(path.with_name(f"{path.name}.pub"), key.export_public_key())
    check_private(path)
    try:
        key = asyncssh.read_private_key(path)
    except (asyncssh.KeyImportError, OSError) as error:
        raise UserError(f"{path} is no SSH key that can be used: {error}.") from error
    return key.export_public_key().decode().strip()


def key_at(path: Path) -> Path:
    """The path of a private key as a user writes it. Raises UserError where it is missing or open to others."""
    expanded = Path(os.path.expandvars(path)).expanduser()
    check_private(expanded)
    return expanded


def write_private(path: Path, content: bytes) -> None:
    """Put `content` at `path`, mode 0600. Raises UserError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # mkstemp makes it 0600; the rename makes it whole or absent.
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
    """Raises UserError for a key file that is missing, or that others can read."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise UserError(f"The key file {path} cannot be read: {error.strerror}.") from error
    if mode & 0o077:
        raise UserError(
            f"Others can read the key file {path} (mode {mode & 0o777:o}); type `chmod 600 {path}`, and make a new key "
            "if somebody may have."
        )
