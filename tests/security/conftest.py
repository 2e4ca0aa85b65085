"""What the tests of what leaves a sandbox share: one gateway, links for each test, and what servers outside saw."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from space.model.ids import new_id
from tests import installation
from tests.egress_host import SECRET, GatewayHost, Place, gateway_host
from tests.searching import files_with
from tests.upstreams import Outside

BROKEN = ("connection-failed", "Traceback", "never retrieved", "Exception in callback", '"level": "error"')
"""What the gateway writes when something happens that nobody has thought of."""


@pytest.fixture(scope="package")
def gateway() -> Iterator[GatewayHost]:
    """The gateway of all these tests. At their end it has met nothing unexpected and shown no secret."""
    if reason := installation.unfit():
        pytest.skip(reason)
    with gateway_host() as host:
        yield host
        written = host.log()
        broken = min((found for word in BROKEN if (found := written.find(word)) >= 0), default=None)
        assert broken is None, written[max(0, broken - 500) : broken + 4000]
        assert SECRET not in written
        assert SECRET not in host.call("GET", "/metrics").text
        host.stop()
        assert files_with(SECRET.encode(), [host.directory], without=("outside",)) == []


@pytest.fixture
def outside(gateway: GatewayHost) -> Outside:
    """The servers outside, which have seen nothing yet."""
    gateway.outside.forget()
    return gateway.outside


@pytest.fixture(scope="package")
def links(gateway: GatewayHost) -> list[Place]:
    """Two links, which every test has for sandboxes of its own."""
    return [gateway.place(), gateway.place()]


@pytest.fixture
def guest(links: list[Place], outside: Outside) -> Place:
    """A sandbox that may ask ``good.example`` for anything, and nobody else."""
    return _newcomer(links, 0, {"rules": [{"name": "good", "hosts": ["good.example"]}]}, "prj")


@pytest.fixture
def neighbour(links: list[Place], outside: Outside) -> Place:
    """Another sandbox, of another project; it may reach nothing yet."""
    return _newcomer(links, 1, "none", "prj2")


def _newcomer(links: list[Place], number: int, policy: Any, project: str) -> Place:
    before = links[number]
    links[number] = before.host.hand_over(before, new_id("sbx"))
    before.host.call("DELETE", f"/sandboxes/{before.sandbox}")
    links[number].attach(policy, project=project)
    return links[number]
