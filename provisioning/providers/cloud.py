"""Base class of all clouds: a pod is a machine over SSH, which accepts diloco's own key."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from provisioning.errors import UserError
from provisioning.machines.keys import public_key
from provisioning.machines.machine import Machine
from provisioning.machines.ssh import Address, SshMachine, shown_host_key
from provisioning.pods.pod import Pod
from provisioning.providers.protocol import Provider


class Cloud(Provider):
    """Implements the part of Provider that concerns machines and SSH keys."""

    listens_on = "0.0.0.0"

    key_env: str
    """Environment variable of the API key."""
    keys_at: str
    """Web page where users create API keys."""
    url: str
    """URL of its API. An environment variable overrides it: `base_url_env`."""

    def __init__(self, environment: Mapping[str, str], ssh_key: Path) -> None:
        """Raises UserError if the API key is missing or invalid."""
        self._ssh_key = ssh_key
        self._key = _api_key(environment, self.key_env, self.keys_at)
        self._url = environment.get(self.base_url_env(), self.url).rstrip("/")

    @classmethod
    def base_url_env(cls) -> str:
        return cls.key_env.replace("API_KEY", "BASE_URL")

    async def machine(self, pod: Pod, host_key: str) -> Machine:
        return SshMachine(
            Address(
                host=pod.host, port=pod.ssh_port, user=pod.user, key_path=self._ssh_key, host_key=host_key
            )
        )

    async def host_key(self, pod: Pod) -> str:
        # Clouds do not publish host keys: the ledger pins the first one seen.
        return await shown_host_key(pod.host, pod.ssh_port)

    def public_key(self) -> str:
        """The OpenSSH public key that pods must accept; a missing key is created. Raises UserError."""
        return public_key(self._ssh_key)

    def check_tools(self) -> None:
        """Raises UserError if a program or the SSH key is missing on this machine."""
        check_programs()
        self.public_key()


def check_programs() -> None:
    """Raises UserError if rsync or ssh is not installed on this machine."""
    for program in ("rsync", "ssh"):
        if shutil.which(program) is None:
            raise UserError(f"{program} is not on this machine, and pods need it; install it first.")


def _api_key(environment: Mapping[str, str], name: str, url: str) -> str:
    """The API key in variable `name`; users get one at `url`. Raises UserError, without the key, if it is invalid."""
    # Files with Windows line ends leave a carriage return at the end.
    key = environment.get(name, "").strip()
    if not key:
        raise UserError(f"{name} is not set; make a key at {url} and export it.")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise UserError(f"{name} contains characters that no API key has; copy it again from {url}.")
    return key
