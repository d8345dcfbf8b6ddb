"""What tests of the limiter share."""

import pytest

from tests.unit.limiter.nodes import EVERYWHERE, ORDERS, Node


@pytest.fixture
def node():
    return Node(ORDERS, EVERYWHERE)
