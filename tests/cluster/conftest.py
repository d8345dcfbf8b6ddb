"""Nodes, their store and the proxies between them, shared by tests and healed after each."""

import pytest

from tests.cluster.shared import Shared


@pytest.fixture(scope="session")
def one_cluster(tmp_path_factory):
    with Shared(tmp_path_factory.mktemp("shared")) as shared:
        yield shared


@pytest.fixture
def cluster(one_cluster):
    yield one_cluster
    one_cluster.heal()
