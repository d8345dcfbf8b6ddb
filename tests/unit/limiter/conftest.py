"""Fixtures for tests of the limiter."""

import pytest

from tests.unit.limiter.nodes import EVERYWHERE, ORDERS, Node


@pytest.fixture
def node():
    return Node(ORDERS, EVERYWHERE)
