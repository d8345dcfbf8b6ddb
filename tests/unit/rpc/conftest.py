"""Fixtures of the tests of calls and of the event loop."""

import asyncio

import pytest
import uvloop

from tests.native_caller import Caller


@pytest.fixture
def caller():
    return Caller()


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def running(request):
    """Run a scenario in each event loop in turn."""

    def run(scenario):
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(scenario())

    return run
