"""Files through HTTP: exact bytes and names, any size, the guest's own rules."""

import hashlib
import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.client import Api, error_code
from tests.installation import Installation

MIB = 1024 * 1024


@pytest.mark.parametrize(
    "name", ["🤣.txt", "あ.txt", "a b+%20.txt", "new\nline.txt", "-rf", "quote'\".txt", "c:d?e#f&g=h"]
)
def test_any_name_goes_both_ways(api: Api, shared: str, name: str) -> None:
    """F1"""
    path = f"/home/user/names/{name}"
    api.write(shared, path, name.encode())
    assert api.read(shared, path) == name.encode()
    listed = api.call("GET", f"/v1/sandboxes/{shared}/files/list", params={"path": "/home/user/names"}).json()
    assert name in [entry["name"] for entry in listed["entries"]]


def _pattern(mib: int) -> Iterator[bytes]:
    block = bytes(range(256)) * 4096
    for _ in range(mib):
        yield block


@pytest.mark.parametrize("mib", [5, 33, 512, pytest.param(3072, marks=pytest.mark.long)])
def test_any_size_goes_both_ways_in_constant_memory(api: Api, installation: Installation, mib: int) -> None:
    """F3"""
    sandbox = api.create(resources={"disk_mib": 8192})
    try:
        with installation.flat("api", "node", mib=64):
            api.call("PUT", f"/v1/sandboxes/{sandbox}/files", params={"path": "/home/user/big"}, content=_pattern(mib))
            expected = hashlib.sha256()
            for block in _pattern(mib):
                expected.update(block)
            received, size = hashlib.sha256(), 0
            with api.http.stream("GET", f"/v1/sandboxes/{sandbox}/files", params={"path": "/home/user/big"}) as answer:
                assert answer.status_code == httpx.codes.OK
                for chunk in answer.iter_raw():
                    received.update(chunk)
                    size += len(chunk)
            assert size == mib * MIB
            assert received.hexdigest() == expected.hexdigest()
    finally:
        api.delete(sandbox)


def test_a_link_to_a_host_file_gives_the_guests_own_file(api: Api, shared: str) -> None:
    """F4"""
    mine = api.output(shared, ["cat", "/etc/passwd"])
    api.output(
        shared, "ln -sf /etc/passwd /home/user/link; ln -sfn / /home/user/root; ln -sf /etc/shadow /home/user/sh"
    )
    assert api.read(shared, "/home/user/link").decode() == mine
    assert api.read(shared, "/home/user/root/etc/passwd").decode() == mine
    assert mine != Path("/etc/passwd").read_text()
    shadow = api.http.get(f"/v1/sandboxes/{shared}/files", params={"path": "/home/user/sh"})
    assert shadow.status_code == httpx.codes.FORBIDDEN
    as_root = api.read(shared, "/home/user/sh", user="root").decode()
    assert as_root == api.output(shared, ["cat", "/etc/shadow"], user="root")


def test_links_to_sockets_and_devices_do_not_hang(api: Api, shared: str) -> None:
    """F4"""
    api.output(shared, "mkfifo /home/user/fifo; ln -sf /home/user/fifo /home/user/to-fifo")
    answer = api.http.get(f"/v1/sandboxes/{shared}/files", params={"path": "/home/user/to-fifo"}, timeout=20)
    assert answer.is_client_error
    assert error_code(answer)


def test_a_mode_is_what_was_asked_for(api: Api, shared: str) -> None:
    """F6"""
    for mode, shown in (("644", "-rw-r--r--"), ("0644", "-rw-r--r--"), ("755", "-rwxr-xr-x"), ("600", "-rw-------")):
        api.write(shared, "/home/user/mode", b"x", mode=mode)
        assert api.output(shared, ["stat", "-c", "%A", "/home/user/mode"]).strip() == shown
        stat = api.call("GET", f"/v1/sandboxes/{shared}/files/stat", params={"path": "/home/user/mode"}).json()
        assert int(str(stat["mode"]), 8) & 0o777 == int(mode, 8)


def test_a_full_disk_is_a_typed_error_and_suspend_needs_none_of_it(api: Api) -> None:
    """F10"""
    sandbox = api.create(resources={"disk_mib": 256})
    try:
        full = api.exec(sandbox, "dd if=/dev/urandom of=/home/user/fill bs=1M count=400")
        assert full["exit"]["code"] != 0
        written = int(api.output(sandbox, "stat -c %s /home/user/fill"))
        assert 200 * MIB < written <= 260 * MIB
        api.output(
            sandbox, "rm /home/user/fill; dd if=/dev/urandom of=/home/user/fill bs=1M count=245 2>/dev/null; sync"
        )
        refused = api.http.put(
            f"/v1/sandboxes/{sandbox}/files", params={"path": "/home/user/more"}, content=os.urandom(32 * MIB)
        )
        assert refused.status_code == httpx.codes.INSUFFICIENT_STORAGE
        assert error_code(refused) == "disk-full"
        api.verb(sandbox, "suspend")
        api.verb(sandbox, "wake")
        assert api.exec(sandbox, ["echo", "usable"])["stdout"] == "usable\n"
    finally:
        api.delete(sandbox)


def test_ranges_give_the_part_asked_for(api: Api, shared: str) -> None:
    api.write(shared, "/home/user/range", bytes(range(200)))
    url, params = f"/v1/sandboxes/{shared}/files", {"path": "/home/user/range"}
    part = api.http.get(url, params=params, headers={"Range": "bytes=10-19"})
    assert part.status_code == httpx.codes.PARTIAL_CONTENT
    assert part.content == bytes(range(10, 20))
    assert part.headers["content-range"] == "bytes 10-19/200"
    tail = api.http.get(url, params=params, headers={"Range": "bytes=-5"})
    assert tail.content == bytes(range(195, 200))
    beyond = api.http.get(url, params=params, headers={"Range": "bytes=500-"})
    assert beyond.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE


def test_files_of_proc_are_read_to_their_end(api: Api, shared: str) -> None:
    assert len(api.read(shared, "/proc/sys/kernel/random/boot_id").strip()) == 36


def test_directories_are_made_listed_moved_and_removed(api: Api, shared: str) -> None:
    base = f"/v1/sandboxes/{shared}/files"
    api.call("POST", f"{base}/mkdir", json={"path": "/home/user/tree/a/b"})
    api.write(shared, "/home/user/tree/a/b/file", b"1")
    api.call("POST", f"{base}/move", json={"source": "/home/user/tree/a", "destination": "/home/user/tree/c"})
    assert api.read(shared, "/home/user/tree/c/b/file") == b"1"
    listed = api.call("GET", f"{base}/list", params={"path": "/home/user/tree"}).json()["entries"]
    assert [(entry["name"], entry["type"]) for entry in listed] == [("c", "directory")]
    api.call("DELETE", base, params={"path": "/home/user/tree", "recursive": True})
    assert api.http.get(f"{base}/stat", params={"path": "/home/user/tree"}).status_code == httpx.codes.NOT_FOUND


def test_an_archive_goes_in_and_comes_out(api: Api, shared: str) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        info = tarfile.TarInfo("dir/inside.txt")
        info.size = 6
        tar.addfile(info, io.BytesIO(b"inside"))
    base = f"/v1/sandboxes/{shared}/files/archive"
    api.call("PUT", base, params={"path": "/home/user/archive"}, content=packed.getvalue())
    assert api.read(shared, "/home/user/archive/dir/inside.txt") == b"inside"
    answer = api.call("GET", base, params={"path": "/home/user/archive"})
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
        names = [member.name.removeprefix("./") for member in tar.getmembers()]
        assert any(name.endswith("dir/inside.txt") for name in names)


def test_files_belong_to_the_user_who_wrote_them(api: Api, shared: str) -> None:
    api.write(shared, "/home/user/owned/by/me", b"x")
    owner = api.output(shared, ["stat", "-c", "%U:%G", "/home/user/owned/by/me", "/home/user/owned"])
    assert owner == "user:user\nuser:user\n"
    refused = api.http.put(f"/v1/sandboxes/{shared}/files", params={"path": "/etc/mine"}, content=b"x")
    assert refused.status_code == httpx.codes.FORBIDDEN
    api.write(shared, "/etc/mine", b"x", user="root")
    assert api.output(shared, ["stat", "-c", "%U", "/etc/mine"]) == "root\n"


@pytest.mark.parametrize("path", ["/home/user/\x00x", "relative\x00", "/" + "x" * 5000, ""])
def test_a_bad_path_is_refused_by_name(api: Api, shared: str, path: str) -> None:
    answer = api.http.get(f"/v1/sandboxes/{shared}/files", params={"path": path})
    assert answer.status_code == httpx.codes.UNPROCESSABLE_ENTITY
    assert answer.json()["error"]["details"]["field"] == "path"


def test_a_path_that_is_not_utf8_is_refused_by_name(api: Api, shared: str) -> None:
    answer = api.http.get(f"/v1/sandboxes/{shared}/files?path=/home/user/%ff%fe")
    assert answer.status_code == httpx.codes.UNPROCESSABLE_ENTITY
    assert answer.json()["error"]["details"]["field"] == "path"
