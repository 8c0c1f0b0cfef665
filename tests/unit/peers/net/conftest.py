import pytest

from tests.support.in_process import Network


@pytest.fixture
def network():
    """Transports in this process: what they run ends with the test."""
    return Network()
