"""Files through a node with a real agent."""

import json
import os
import socket
import subprocess

import pytest

from space.api.routes import ROUTES
from tests.node_host import (
    MIB,
    open_files,
    random_bytes,
    wait_until,
)


def files(sandbox: str, what: str = "") -> str:
    return f"/v1/sandboxes/{sandbox}/files{what}"


@pytest.mark.parametrize("name", ["🤣.txt", "あ.txt", "a b+%20.txt", "line\nbreak", "-rf", "plain"])
def test_any_name_goes_up_and_comes_down(host, box, tmp_path, name):
    """F1"""
    path = f"{tmp_path}/{name}"
    assert host.local.put(files(box), params={"path": path}, content=name.encode()).status_code == 201
    assert host.local.get(files(box), params={"path": path}).content == name.encode()
    listed = host.local.get(files(box, "/list"), params={"path": str(tmp_path)}).json()["entries"]
    assert [entry["name"] for entry in listed] == [name]
    assert (tmp_path / name).read_bytes() == name.encode()


@pytest.mark.parametrize("mebibytes", [5, 33])
def test_large_files_go_both_ways_in_constant_memory(host, box, tmp_path, mebibytes):
    """F3"""
    block = random_bytes(MIB)
    before = host.memory_kib()
    params = {"path": f"{tmp_path}/large"}
    assert host.local.put(files(box), params=params, content=(block for _ in range(mebibytes))).status_code == 201
    with host.local.stream("GET", files(box), params=params) as answer:
        assert answer.headers["content-length"] == str(mebibytes * MIB)
        assert b"".join(answer.iter_raw()) == block * mebibytes
    assert host.memory_kib() - before < 16 * 1024


def test_files_are_answered_as_the_published_document_says(host, box, tmp_path):
    def asked(method, what, **options):
        answer = host.local.request(method, files(box, what), **options)
        row = next(r for r in ROUTES if (r.method, r.path) == (method, f"/v1/sandboxes/{{sandbox_id}}/files{what}"))
        assert answer.status_code in {row.status, *row.also}, answer.text
        assert set(options.get("params", ())) <= set(row.query)
        if row.answer is None:
            assert answer.content == b""
        elif isinstance(row.answer, str):
            assert answer.headers["content-type"] == row.answer
        else:
            row.answer.model_validate_json(answer.content, strict=True)
            assert set(answer.json()) == set(row.answer.model_fields)
        return answer

    there, moved = {"path": f"{tmp_path}/d/f"}, {"path": f"{tmp_path}/d/g"}
    for status in (201, 200):
        assert asked("POST", "/mkdir", json={"path": f"{tmp_path}/d"}).status_code == status
        assert asked("PUT", "", params={**there, "mode": "600"}, content=b"x").status_code == status
    asked("POST", "/move", json={"source": there["path"], "destination": moved["path"]})
    asked("GET", "", params=moved)
    asked("PUT", "", params={**there, "exclusive": "true"}, content=b"x")
    asked("GET", "/stat", params={**moved, "follow": "true"})
    asked("GET", "/list", params={"path": f"{tmp_path}/d", "depth": "2"})
    tar = asked("GET", "/archive", params={"path": f"{tmp_path}/d"}).content
    asked("PUT", "/archive", params={"path": f"{tmp_path}/e"}, content=tar)
    asked("DELETE", "", params={"path": f"{tmp_path}/d", "recursive": "true"})


def test_a_mode_is_octal(host, box, tmp_path):
    """F6"""
    for text in ("644", "0600", "755"):
        params = {"path": f"{tmp_path}/f{text}", "mode": text}
        assert host.local.put(files(box), params=params, content=b"x").is_success
        assert (tmp_path / f"f{text}").stat().st_mode & 0o7777 == int(text, 8)
        shown = host.local.get(files(box, "/stat"), params=params).json()
        assert (shown["mode"], shown["type"], shown["size"]) == (f"{int(text, 8):04o}", "file", 1)


def test_a_range_is_a_part_of_the_file(host, box, tmp_path):
    (tmp_path / "f").write_bytes(bytes(range(200)))
    params = {"path": f"{tmp_path}/f"}
    for header, expected in (
        ("bytes=10-19", range(10, 20)),
        ("bytes=190-", range(190, 200)),
        ("bytes=-3", range(197, 200)),
    ):
        answer = host.local.get(files(box), params=params, headers={"range": header})
        assert (answer.status_code, answer.content) == (206, bytes(expected))
        assert answer.headers["content-range"] == f"bytes {expected[0]}-{expected[-1]}/200"
    answer = host.local.get(files(box), params=params, headers={"range": "bytes=200-"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (416, "range-not-satisfiable")


def test_files_of_proc_are_read_whole_although_they_claim_no_size(host, box):
    assert b"Linux" in host.local.get(files(box), params={"path": "/proc/version"}).content


def test_errors_of_files_are_typed(host, box, tmp_path):
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "child").touch()
    there, none = f"{tmp_path}/dir", f"{tmp_path}/none"
    cases = [
        (host.local.get(files(box), params={"path": none}), 404, "file-not-found"),
        (host.local.get(files(box, "/stat"), params={"path": none}), 404, "file-not-found"),
        (host.local.get(files(box, "/list"), params={"path": none}), 404, "file-not-found"),
        (host.local.delete(files(box), params={"path": none}), 404, "file-not-found"),
        (host.local.get(files(box), params={"path": there}), 409, "is-a-directory"),
        (host.local.put(files(box), params={"path": there}, content=b"x"), 409, "is-a-directory"),
        (host.local.put(files(box), params={"path": f"{there}/child/x"}, content=b"x"), 409, "not-a-directory"),
        (host.local.delete(files(box), params={"path": there}), 409, "directory-not-empty"),
        (host.local.get(files(box), params={"path": f"{tmp_path}/{'x' * 300}"}), 422, "invalid-request"),
    ]
    for answer, status, code in cases:
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.request.url


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_is_told_at_once_and_leaves_no_half_file(host, box, tmp_path):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(tmp_path)], check=True)
    try:
        chunks = (b"x" * 65536 for _ in range(64))
        answer = host.local.put(files(box), params={"path": f"{tmp_path}/big"}, content=chunks)
        assert (answer.status_code, answer.json()["error"]["code"]) == (507, "disk-full")
        wait_until(lambda: not list(tmp_path.iterdir()), "the half file to be removed")
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_permissions_are_those_of_the_user(host, box, tmp_path):
    (tmp_path / "secret").write_bytes(b"x")
    (tmp_path / "secret").chmod(0o600)
    answer = host.local.get(files(box), params={"path": f"{tmp_path}/secret", "user": "nobody"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "permission-denied")


def test_directories_are_made_moved_and_removed(host, box, tmp_path):
    deep = f"{tmp_path}/a/b/c"
    assert host.local.post(files(box, "/mkdir"), json={"path": deep, "mode": "0750"}).status_code == 201
    assert host.local.post(files(box, "/mkdir"), json={"path": deep}).status_code == 200
    assert (tmp_path / "a/b/c").stat().st_mode & 0o777 == 0o750
    body = {"source": f"{tmp_path}/a/b", "destination": f"{tmp_path}/moved"}
    assert host.local.post(files(box, "/move"), json=body).status_code == 204
    assert (tmp_path / "moved" / "c").is_dir()
    params = {"path": f"{tmp_path}/moved", "recursive": "true"}
    assert host.local.delete(files(box), params=params).status_code == 204
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_archives_go_both_ways(host, box, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "あ").write_bytes(b"inside")
    archive = host.local.get(files(box, "/archive"), params={"path": str(source)})
    assert archive.headers["content-type"] == "application/x-tar"
    answer = host.local.put(files(box, "/archive"), params={"path": str(target)}, content=archive.content)
    assert answer.status_code == 200, answer.text
    assert next(target.rglob("あ")).read_bytes() == b"inside"


def test_a_watch_tells_what_happens(host, box, tmp_path):
    params = {"path": str(tmp_path), "recursive": "true"}
    with host.local.stream("GET", files(box, "/watch"), params=params) as events:
        lines = events.iter_lines()
        assert next(lines) == ": watching"
        (tmp_path / "new").touch()
        seen = []
        for line in lines:
            seen.append(line)
            if line.startswith("data:") and json.loads(line[5:])["path"] == "new":
                break
    assert "event: create" in seen


def test_a_download_whose_client_goes_leaves_nothingrunning(host, box, tmp_path):
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2**33)
    with host.local.stream("GET", files(box), params={"path": f"{tmp_path}/huge"}) as answer:
        next(answer.iter_raw())
    wait_until(lambda: not open_files(host, box, "huge"), "the file to be closed")


def test_an_upload_whose_client_goes_is_not_taken_for_whole(host, box, tmp_path):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(host.socket)
        head = f"PUT {files(box)}?path={tmp_path}/half HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n"
        client.sendall(head.encode() + b"x" * 500_000)
    wait_until(lambda: not open_files(host, box, "half"), "the file to be closed")
    assert host.exec(box, command="echo still here")["stdout"] == "still here\n"
