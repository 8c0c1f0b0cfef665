from __future__ import annotations

import subprocess
import sys

import pytest

from peers.threads import AUTOGROUP

SCRIPT = "from peers.threads import AUTOGROUP, give_way; give_way(5); print(AUTOGROUP.read_text())"


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel does not share out time by session")
@pytest.mark.parametrize(("leads", "niceness"), [(True, "nice 5"), (False, "nice 0")])
def test_a_process_that_leads_its_session_gives_way_and_no_other_does(leads, niceness):
    command = [sys.executable, "-c", SCRIPT]
    if not leads:
        command = ["sh", "-c", '"$@"; true', "sh", *command]
    said = subprocess.run(command, start_new_session=True, capture_output=True, text=True, check=True)
    assert said.stdout.strip().endswith(niceness)
