"""Files on the operator's machine that only their owner may read: whole or absent."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from provisioning.errors import UserError


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
