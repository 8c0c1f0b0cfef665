from __future__ import annotations

from types import SimpleNamespace

from diloco.cli.launch_ray import _python
from provisioning.ledger.ledger import Ledger
from provisioning.renting.renters import PYTHON


def test_ray_runs_the_python_that_the_pods_were_set_up_with(tmp_path):
    ledger = Ledger(tmp_path / "pods.sqlite")
    renter = SimpleNamespace(provider=SimpleNamespace(python=lambda: None))
    assert _python(ledger, renter) == "venv/bin/python"
    ledger.remember(PYTHON, "/opt/env/bin/python")
    assert _python(ledger, renter) == "/opt/env/bin/python"
    ledger.close()
