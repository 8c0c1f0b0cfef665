"""Opens the store that --ckpt.path names."""

from __future__ import annotations

from pathlib import Path

from diloco.checkpoint.local import LocalStore
from diloco.checkpoint.remote import RemoteStore
from diloco.checkpoint.store import Store
from diloco.errors import UserError


def open_store(path: str, scratch: Path) -> Store:
    """The store of --ckpt.path; `scratch` is a local directory for files in transfer. Raises UserError."""
    if "://" not in path:
        return LocalStore(Path(path).expanduser())
    try:
        import fsspec

        filesystem, root = fsspec.core.url_to_fs(path)
    except ImportError as error:
        extra = "pip install 'diloco[s3]'" if path.startswith("s3") else "install the package that it names"
        raise UserError(f"{path} needs a package that is not here ({error}): {extra}") from error
    except (ValueError, OSError) as error:
        raise UserError(f"{path} is no place for checkpoints: {error}") from error
    return RemoteStore(path, filesystem, root, scratch)
