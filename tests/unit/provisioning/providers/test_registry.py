"""Every provider in the registry is tested and documented."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from provisioning.pods.pod import OWN_MACHINES
from provisioning.providers import registry
from tests.support.clouds import CLOUDS

ROOT = Path(__file__).parents[4]


def test_every_cloud_has_an_emulator_and_so_conforms_or_fails():
    assert set(registry.NAMES) - OWN_MACHINES == set(registry.CLOUDS) == set(CLOUDS)


def test_every_provider_is_in_the_table_of_the_guide_with_the_variable_of_its_key():
    rows = dict(
        re.findall(r"^\| `(\w+)` \|(.*)\|$", (ROOT / "docs/tutorials/gpu-pods.md").read_text(), re.MULTILINE)
    )
    assert set(registry.NAMES) <= set(rows)
    assert [name for name, cloud in CLOUDS.items() if cloud.provider.key_env not in rows[name]] == []
    readme = (ROOT / "README.md").read_text().lower()
    assert [name for name in registry.CLOUDS if name not in readme] == []


def test_the_list_of_providers_is_read_without_loading_one():
    script = "import sys, provisioning.providers.registry\nprint([m for m in sys.modules if m in %r])"
    heavy = ("httpx", "asyncssh", "msgspec", "asyncio", "lium")
    answer = subprocess.run(
        [sys.executable, "-c", script % (heavy,)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert answer.stdout == "[]\n"
