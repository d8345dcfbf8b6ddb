import pytest

from ratelimitd.cli.dev.servers import Children


@pytest.fixture
async def children(tmp_path):
    children = Children(tmp_path)
    yield children
    await children.stop()
