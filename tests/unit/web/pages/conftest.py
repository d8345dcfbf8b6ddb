"""The pages of a node, used without scripts; each module defines its node."""

import pytest
import pytest_asyncio

from ratelimitd.testing import ManualClock
from tests.page_visitor import PageVisitor


@pytest.fixture
def clock():
    return ManualClock()


@pytest_asyncio.fixture
async def visitor(node):
    async with PageVisitor(node.http_address) as found:
        yield found
