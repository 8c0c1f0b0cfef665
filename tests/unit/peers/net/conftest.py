import pytest

from tests.support.in_process import Network


@pytest.fixture
def network():
    """Transports in this process. Tasks that they run end with the test."""
    return Network()
