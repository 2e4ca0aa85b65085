"""The node's knowledge of drivers is the broker's, asked for when it is needed."""

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from space.broker.setup import unmount
from space.drivers.base import Need
from space.errors import Conflict, InvalidRequest, SpaceError, Unavailable
from space.node import drivers
from space.node.broker import BrokerClient
from space.node.drivers import Drivers
from space.testing import FakeDriver
from tests import installation
from tests.brokers import Site, serving, settings_in


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    settings = settings_in(tmp_path / "data", tmp_path / "run")
    async with serving(settings, {"fake": FakeDriver(tmp_path / "fake")}) as (one, _):
        yield one


async def test_the_broker_says_which_drivers_there_are_and_which_is_chosen(site: Site) -> None:
    known = Drivers(site.client, None)
    (only,) = (await known.told())["drivers"]
    expected = {"name": "fake", "usable": True, "reason": "", "builds": True, "keeps_hardware": False}
    assert only == {**expected, "volumes": False}
    assert await known.default() == "fake"


async def test_a_driver_that_the_settings_name_is_not_asked_about(tmp_path: Path) -> None:
    nobody = BrokerClient(tmp_path / "absent.sock")
    assert await Drivers(nobody, "qemu").default() == "qemu"


class OfBlocks(FakeDriver):
    """One whose machines only a guest's kernel can read the disks of."""

    name = "blocks"
    capabilities = dataclasses.replace(FakeDriver.capabilities, needs=frozenset({Need.BLOCKS}))


@pytest.mark.skipif(bool(installation.unfit()), reason="needs root")
async def test_templates_are_made_on_a_driver_that_can_whatever_the_default_is(tmp_path: Path) -> None:
    settings = settings_in(tmp_path / "data", tmp_path / "run").model_copy(update={"driver": "blocks"})
    both = {"fake": FakeDriver(tmp_path / "fake"), "blocks": OfBlocks(tmp_path / "blocks")}
    try:
        async with serving(settings, both) as (site, _):
            known = Drivers(site.client, "blocks")
            assert await known.default() == "blocks"
            assert await known.for_builds(None) == "fake"
            with pytest.raises(Conflict, match="gvisor") as caught:
                await known.for_builds("blocks")
    finally:
        await unmount(settings)
    assert caught.value.code == "not-supported"


async def test_what_was_known_holds_while_the_broker_is_silent(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers, "RECALL_S", -1.0)
    monkeypatch.setattr(drivers, "ASK_S", 0.05)
    known = Drivers(site.client, None)
    before = await known.told()
    await site.client.close()
    site.settings.broker_socket.unlink()
    assert await known.told() == before
    with pytest.raises(SpaceError):
        await Drivers(site.client, None).told()


async def test_a_host_where_no_driver_works_says_so(tmp_path: Path) -> None:
    settings = settings_in(tmp_path / "data", tmp_path / "run")
    async with serving(settings, {}) as (site, _):
        with pytest.raises(Unavailable, match="space doctor") as caught:
            await Drivers(site.client, None).default()
    assert caught.value.code == "no-driver"


async def test_the_broker_names_the_drivers_that_it_has(site: Site) -> None:
    site.driver = "qemu"
    with pytest.raises(InvalidRequest) as caught:
        await site.boot()
    assert caught.value.details == {"field": "driver", "drivers": ["fake"]}
