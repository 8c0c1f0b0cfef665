import pytest

from tests.support.in_process import Network


@pytest.fixture
def network():
    """A network of transports in this process, whose tasks end with the test."""
    return Network()
