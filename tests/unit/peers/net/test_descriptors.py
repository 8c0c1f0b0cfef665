from __future__ import annotations

import subprocess
import sys

import pytest

from peers.net.dht.descriptors import LEAST

RAISE = """
import resource, sys
soft, hard = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
from peers.net.dht.descriptors import raise_limit
from peers.errors import UserError
try:
    print(raise_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
except UserError as error:
    print(error)
"""


def raised(soft: int, hard: int) -> str:
    command = [sys.executable, "-c", RAISE, str(soft), str(hard)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize(("soft", "hard"), [(64, 1000), (1000, 1000)])
def test_the_limit_is_raised_as_far_as_it_may_be(soft, hard):
    assert raised(soft, hard) == f"{hard} {hard}"


def test_a_limit_that_is_too_low_is_the_users_to_mend():
    assert f"a peer needs {LEAST} at least" in raised(64, LEAST - 1)
