"""The pages of a node, as somebody without scripts uses them; a module says which node."""

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
