"""Volumes through HTTP, the whole way: shared, kept, of their own size, one project's, and shut in."""

from collections.abc import Iterator

import httpx
import pytest

from space.model.ids import new_id
from tests.client import Api, error_code
from tests.installation import Installation, gvisor_alone

pytestmark = gvisor_alone("its machines alone mount volumes")


@pytest.fixture(scope="module")
def made(installation: Installation) -> Iterator[tuple[str, str, str]]:
    """A volume, and two sandboxes that mount it."""
    with Api(installation.url, installation.key) as api:
        name = new_id("vol")
        api.call("POST", "/v1/volumes", json={"name": name, "size_mib": 32})
        one = api.create(volumes=[{"name": name, "path": "/data"}])
        other = api.create(volumes=[{"name": name, "path": "/home/user/shared"}])
        yield name, one, other
        for sandbox in (one, other):
            api.delete(sandbox)
        api.call("DELETE", f"/v1/volumes/{name}")
        assert api.http.get(f"/v1/volumes/{name}").status_code == httpx.codes.NOT_FOUND
        volumes = installation.settings.broker_dir / "disks/volumes"
        assert list(volumes.iterdir()) == []


def test_what_one_sandbox_writes_another_reads_over_suspend_and_wake(api: Api, made: tuple[str, str, str]) -> None:
    _, one, other = made
    api.write(one, "/data/note", b"from the first")
    assert api.output(other, "cat shared/note; id -un") == "from the firstuser\n"
    api.verb(one, "suspend")
    api.output(other, "echo ' and the second' >> shared/note && mkdir shared/new && touch shared/new/file")
    api.verb(one, "wake")
    assert api.output(one, "cat /data/note; ls /data/new") == "from the first and the second\nfile\n"
    api.output(one, "rm -r /data/*")
    assert api.output(other, "ls shared") == ""


def test_a_fork_mounts_what_its_source_does(api: Api, made: tuple[str, str, str]) -> None:
    _, one, other = made
    answer = api.call("POST", f"/v1/sandboxes/{one}/fork", json={"count": 1}, headers={"Prefer": "wait=60"}).json()
    fork = answer["sandboxes"][0]
    try:
        assert fork["volumes"] == api.get(one)["volumes"]
        api.output(fork["id"], "echo fork > /data/by")
        assert api.output(other, "cat shared/by; rm shared/by") == "fork\n"
    finally:
        api.delete(fork["id"])


def test_a_full_volume_is_no_full_host(api: Api, made: tuple[str, str, str]) -> None:
    _, one, other = made
    full = api.exec(one, "dd if=/dev/zero of=/data/big bs=1M count=100; stat -c %s /data/big; rm /data/big")
    assert "No space left on device" in full["stderr"] or "quota exceeded" in full["stderr"].lower()
    assert int(full["stdout"]) <= 36 << 20
    assert (
        api.output(other, "dd if=/dev/zero of=own bs=1M count=64 2>/dev/null; stat -c %s own; rm own")
        == f"{64 << 20}\n"
    )


def test_a_link_in_a_volume_cannot_reach_the_host(
    api: Api, installation: Installation, made: tuple[str, str, str]
) -> None:
    _, one, other = made
    secret = installation.settings.data_dir / "owner"
    api.output(one, f"ln -s {secret} /data/absolute; ln -s ../../../../../..{secret} /data/up; ln -s / /data/root")
    for name in ("absolute", "up"):
        answer = api.http.get(f"/v1/sandboxes/{other}/files", params={"path": f"/home/user/shared/{name}"})
        assert (answer.status_code, error_code(answer)) == (httpx.codes.NOT_FOUND, "file-not-found")
    api.output(one, "echo one > /tmp/mark")
    assert api.output(other, "echo other > /tmp/mark; cat shared/root/tmp/mark") == "other\n"
    api.output(one, "rm /data/absolute /data/up /data/root")


def test_a_volume_in_use_is_not_deleted(api: Api, made: tuple[str, str, str]) -> None:
    refused = api.http.delete(f"/v1/volumes/{made[0]}")
    assert (refused.status_code, error_code(refused)) == (httpx.codes.CONFLICT, "volume-in-use")
    assert api.call("GET", f"/v1/volumes/{made[0]}").json()["sandboxes"] == 2


def test_a_volume_that_would_lie_on_a_file_is_refused_by_its_reason(api: Api, made: tuple[str, str, str]) -> None:
    body = {"template": "base", "volumes": [{"name": made[0], "path": "/etc/passwd"}]}
    refused = api.http.post("/v1/sandboxes", json=body, headers={"Prefer": "wait=60"})
    assert (refused.status_code, error_code(refused)) == (httpx.codes.CONFLICT, "volume-not-mounted")
    api.delete(refused.json()["error"]["details"]["sandbox_id"])


def test_another_project_cannot_see_or_mount_a_volume(other_api: Api, made: tuple[str, str, str]) -> None:
    assert other_api.call("GET", "/v1/volumes").json()["items"] == []
    assert other_api.http.get(f"/v1/volumes/{made[0]}").status_code == httpx.codes.NOT_FOUND
    assert other_api.http.delete(f"/v1/volumes/{made[0]}").status_code == httpx.codes.NOT_FOUND
    body = {"template": "base", "volumes": [{"name": made[0], "path": "/data"}]}
    refused = other_api.http.post("/v1/sandboxes", json=body)
    assert error_code(refused) == "unknown-volume"
