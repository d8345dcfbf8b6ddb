import pytest

from ratelimitd.node.serving import TRANSPORTS
from tests.rpc.abuse import LINES, Serving
from tests.rpc.node import running_node


@pytest.fixture(params=sorted(TRANSPORTS))
def transport(request):
    """Each transport in turn: callers must not observe a difference."""
    return request.param


@pytest.fixture
async def node(tmp_path, transport):
    """A node without rules on an ephemeral port."""
    async with running_node(tmp_path, transport=transport) as running:
        yield running


@pytest.fixture
async def plain(tmp_path):
    """A native server on TCP with a manual clock."""
    async with Serving(tmp_path) as found:
        yield found


@pytest.fixture(params=LINES)
async def serving(request, tmp_path):
    """The same on each kind of connection."""
    async with Serving(tmp_path, request.param) as found:
        yield found
