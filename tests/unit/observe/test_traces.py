import sys

import pytest

from ratelimitd.errors import StartupError
from ratelimitd.observe.traces import open_tracer


def test_without_an_endpoint_there_is_none():
    assert open_tracer("", node_id="n1", ratio=1.0) is None


def test_without_the_library_the_start_ends_with_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "ratelimitd.observe.otel", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.context", None)
    with pytest.raises(StartupError, match=r"pip install 'ratelimitd\[otel\]'"):
        open_tracer("http://127.0.0.1:1", node_id="n1", ratio=1.0)


async def test_with_an_endpoint_it_sends_there():
    tracer = open_tracer("http://127.0.0.1:1", node_id="n1", ratio=0.0)
    assert tracer is not None
    assert tracer.begin("a") is None
    await tracer.close()
