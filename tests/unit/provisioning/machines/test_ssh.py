from __future__ import annotations

from pathlib import Path

import pytest

from provisioning.machines.ssh import Address


@pytest.mark.parametrize(("port", "where"), [(22, "192.0.2.7"), (2222, "[192.0.2.7]:2222")])
def test_a_pinned_key_is_written_as_ssh_looks_for_it(port, where):
    address = Address(
        host="192.0.2.7", port=port, user="ada", key_path=Path("k"), host_key="ssh-ed25519 AAAA"
    )
    assert address.known_hosts == f"{where} ssh-ed25519 AAAA\n"
