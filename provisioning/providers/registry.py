"""Providers by name; each is loaded when it is asked for."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from provisioning.errors import UserError
from provisioning.providers.protocol import Provider

NAMES = ("local", "ssh", "lium", "lambda", "runpod", "vast")


@dataclass(frozen=True, kw_only=True)
class Access:
    """What providers are opened with."""

    state_dir: Path
    """Where the local provider keeps its pods, and our SSH key lies."""
    environment: Mapping[str, str]
    """Keys of the providers."""
    inventory: Path | None = None
    """The machines of the ssh provider."""

    @property
    def ssh_key(self) -> Path:
        return self.state_dir / "ssh" / "id_ed25519"


def open_provider(name: str, access: Access) -> Provider:
    """Raises UserError for a name that is none, and for what the provider lacks."""
    if name == "local":
        from provisioning.providers.local import LocalProvider

        return LocalProvider(access.state_dir / "local")
    for package in ("asyncssh", "httpx"):
        if name in NAMES and importlib.util.find_spec(package) is None:
            raise UserError(f"--provider {name} needs the package {package}: pip install 'diloco[pods]'.")
    if name == "ssh":
        from provisioning.providers.ssh import SshProvider

        return SshProvider(access.inventory)
    if name == "lium":
        from provisioning.providers.lium import LiumProvider

        return LiumProvider(access.environment, access.ssh_key)
    if name == "lambda":
        from provisioning.providers.lambda_cloud import LambdaProvider

        return LambdaProvider(access.environment, access.ssh_key)
    if name == "runpod":
        from provisioning.providers.runpod import RunPodProvider

        return RunPodProvider(access.environment, access.ssh_key)
    if name == "vast":
        from provisioning.providers.vast import VastProvider

        return VastProvider(access.environment, access.ssh_key)
    close = difflib.get_close_matches(name, NAMES, n=1)
    hint = f' Did you mean "{close[0]}"?' if close else ""
    raise UserError(f'--provider "{name}" is not one of {", ".join(NAMES)}.{hint}')


def needs_key(name: str) -> bool:
    """Whether pods of this provider are reached by our own SSH key."""
    return name not in ("local", "ssh")
