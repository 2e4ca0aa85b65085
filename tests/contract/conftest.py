"""A node for the contract tests of the node: one for a module, or a fresh one for a test that breaks it. And a store."""

from collections.abc import Iterator

import pytest

from tests.node_host import NodeHost, node_host
from tests.stores import postgres_server, project, store, url

__all__ = ["box", "fresh", "host", "postgres_server", "project", "store", "url"]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeHost]:
    with node_host(tmp_path_factory.mktemp("node")) as one:
        yield one


@pytest.fixture(scope="module")
def box(host: NodeHost) -> str:
    """A sandbox for all tests of a module, which leave it as they found it."""
    return host.boot()


@pytest.fixture
def fresh(tmp_path) -> Iterator[NodeHost]:
    with node_host(tmp_path) as one:
        yield one
