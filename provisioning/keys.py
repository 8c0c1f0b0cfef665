"""Our own SSH key, by which rented pods let us in."""

from __future__ import annotations

import os
from pathlib import Path

from provisioning.errors import UserError
from provisioning.private_files import check_private, write_private


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
