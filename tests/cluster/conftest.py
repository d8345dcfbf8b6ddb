"""Nodes, their store and what is between them, for the tests of one module, whole again for each."""

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
