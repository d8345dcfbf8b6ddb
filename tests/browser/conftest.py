"""One browser for all tests of this package, and the nodes that it looks at."""

import pytest

from tests.browser.visit import Visit, chromium
from tests.system.process import Files


@pytest.fixture(scope="package")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture
def visit(browser):
    """Sends a visitor to an address; whoever comes must leave without having seen a fault."""
    visits = []

    def start(address, **options):
        visits.append(Visit(browser, address, **options))
        return visits[-1]

    yield start
    faults = [fault for visit in visits for fault in visit.faults]
    for visit in visits:
        visit.close()
    assert faults == []


@pytest.fixture
def node(tmp_path):
    """A node of its own, which believes whoever sits at this machine."""
    with Files(tmp_path).serving("--node-id", "n1") as node:
        yield node
