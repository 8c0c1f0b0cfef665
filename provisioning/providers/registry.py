"""All providers by name. Their modules are imported on first use."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from provisioning.errors import UserError

if TYPE_CHECKING:
    from provisioning.providers.protocol import Provider

# By name: the module in this folder, and its class. The command line's help needs the names only, so none is imported.
_OWN = {"local": ("local", "LocalProvider"), "ssh": ("ssh", "SshProvider")}
_CLOUDS = {
    "lium": ("lium", "LiumProvider"),
    "lambda": ("lambda_cloud", "LambdaProvider"),
    "runpod": ("runpod", "RunPodProvider"),
    "vast": ("vast", "VastProvider"),
}
_PLACES = {**_OWN, **_CLOUDS}
NAMES, CLOUDS = tuple(_PLACES), tuple(_CLOUDS)
LISTED = f"local (pods on this machine), ssh (your own machines), {', '.join(CLOUDS)}"
"""All providers, for help texts."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """The arguments for opening providers."""

    state_dir: Path
    """Directory of the local provider's pods and of diloco's SSH key."""
    environment: Mapping[str, str]
    """Environment variables, with the providers' API keys."""
    inventory: Path | None = None
    """File of the ssh provider's machines."""

    @property
    def ssh_key(self) -> Path:
        return self.state_dir / "ssh" / "id_ed25519"


def open_provider(name: str, access: Access) -> Provider:
    """Raises UserError if the name is unknown, or if a package or key is missing."""
    if name not in NAMES:
        close = difflib.get_close_matches(name, NAMES, n=1)
        hint = f' Did you mean "{close[0]}"?' if close else ""
        raise UserError(f'--provider "{name}" is not one of {", ".join(NAMES)}.{hint}')
    for package in ("asyncssh", "httpx") if name != "local" else ():
        if importlib.util.find_spec(package) is None:
            raise UserError(f"--provider {name} needs the package {package}: pip install 'diloco[pods]'.")
    module, kind = _PLACES[name]
    make: Callable[..., Provider] = getattr(importlib.import_module(f"provisioning.providers.{module}"), kind)
    if name == "local":
        return make(access.state_dir / "local")
    return make(access.inventory) if name == "ssh" else make(access.environment, access.ssh_key)
