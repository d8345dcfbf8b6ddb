import pytest

from tests.rpc.node import running_node


@pytest.fixture
async def node(tmp_path):
    """A node with no rule yet, on an ephemeral port."""
    async with running_node(tmp_path) as running:
        yield running
