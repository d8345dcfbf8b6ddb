"""Nodes, their store and the proxies between them, shared by the tests of a module and healed for each."""

import pytest

from tests.cluster.shared import Shared


@pytest.fixture(scope="module")
def one_cluster(tmp_path_factory):
    with Shared(tmp_path_factory.mktemp("shared")) as shared:
        yield shared


@pytest.fixture
def cluster(one_cluster):
    yield one_cluster
    one_cluster.heal()
