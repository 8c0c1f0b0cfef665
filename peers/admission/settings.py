"""What a process is told about admission: where the secret, the key and the allowlist are."""

from __future__ import annotations

import os
from dataclasses import dataclass

from peers.admission.secrets import SwarmSecret, load_key, load_secret
from peers.errors import UserError

DEFAULT_LIFETIME_DAYS = 30.0
"""Far longer than a coordinator is usually gone: a swarm that goes on without it must not lose its peers."""


@dataclass(frozen=True, kw_only=True)
class AdmissionSettings:
    """What a process was started with; nothing means an open swarm. Paths only, so that no secret shows in a command
    line.
    """

    swarm_secret_file: str | None = None
    """None: the secret is taken from DILOCO_SWARM_SECRET."""
    admission_key_file: str | None = None
    """Makes this process an issuer of tokens."""
    allowlist_file: str | None = None
    """One peer id a line; only these are given tokens. Read at every request, as the key is."""
    token_days: float = DEFAULT_LIFETIME_DAYS
    use_environment: bool = True
    """False: ignore DILOCO_SWARM_SECRET, which a coordinator's shell may have set for a peer beside it."""

    def secret(self) -> SwarmSecret | None:
        """The swarm secret, from wherever it is to be had. Raises UserError."""
        secret = load_secret(self.swarm_secret_file, os.environ if self.use_environment else {})
        if self.admission_key_file is None:
            return secret
        own = load_key(self.admission_key_file).secret
        if secret is not None and secret.public_key != own.public_key:
            raise UserError("the swarm secret and the admission key are of different runs; give either alone")
        return own
