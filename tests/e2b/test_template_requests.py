"""What is wrong in requests for templates, and who may send files: seen on the wire."""

import hashlib
import io
import socket
import tarfile
import time
import uuid
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from space.e2b.keys import Tokens
from tests.client import Api, wait_until
from tests.e2b.conftest import Origin, e2b_key
from tests.installation import Installation

CLIENT = httpx.Client(timeout=60, trust_env=False)


def ask(origin: Origin, method: str, path: str, key: str | None = None, **options: Any) -> httpx.Response:
    headers = {"x-api-key": origin.api_key if key is None else key}
    return CLIENT.request(method, origin.url + path, headers=headers, **options)


def put(url: str, content: Any, **headers: str) -> httpx.Response:
    return CLIENT.put(url, content=content, headers=headers)


def archive() -> bytes:
    """A tar that nobody else sends."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        member = tarfile.TarInfo("file.txt")
        content = uuid.uuid4().bytes
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    return data.getvalue()


def hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def asked(origin: Origin, name: str = "asked", key: str | None = None) -> dict[str, Any]:
    answer = ask(origin, "POST", "/v3/templates", key, json={"name": name})
    assert answer.status_code == 202, answer.text
    return answer.json()


def link(origin: Origin, files_hash: str, name: str = "asked", key: str | None = None) -> dict[str, Any]:
    answer = ask(origin, "GET", f"/templates/{name}/files/{files_hash}", key)
    assert answer.status_code == 201, answer.text
    return answer.json()


def test_a_build_is_promised_an_id_and_waits_until_it_is_described(origin: Origin) -> None:
    promised = asked(origin, "asked")
    assert promised == {
        "templateID": "asked",
        "buildID": str(uuid.UUID(promised["buildID"])),
        "public": False,
        "names": ["asked"],
        "aliases": ["asked"],
        "tags": ["default"],
    }
    path = f"/templates/asked/builds/{promised['buildID']}/status"
    assert ask(origin, "GET", path).json() == {
        "templateID": "asked",
        "buildID": promised["buildID"],
        "status": "waiting",
        "logs": [],
        "logEntries": [],
    }


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"name": ""},
        {"name": "Upper"},
        {"name": "team/name"},
        {"name": ":x"},
        {"name": "name:"},
        {"name": "a:b:c"},
        {"name": "sha256:" + "0" * 64},
        {"name": "asked", "tags": ["no tag"]},
        {"name": "asked", "tags": ["t"] * 65},
        {"name": "asked", "cpuCount": 10_000},
        {"name": "asked", "cpuCount": "1"},
        {"name": "asked", "memoryMB": 1},
        {"name": "asked\0"},
    ],
    ids=lambda body: str(sorted(body.items()))[:60],
)
def test_a_template_that_cannot_be_is_refused_before_anything_is_sent(body: dict[str, Any], origin: Origin) -> None:
    answer = ask(origin, "POST", "/v3/templates", json=body)
    assert answer.status_code == 400
    assert set(answer.json()) == {"code", "message"}


def test_the_name_of_a_builtin_template_is_taken(origin: Origin) -> None:
    assert ask(origin, "POST", "/v3/templates", json={"name": "base"}).status_code == 409


COPY = {"type": "COPY", "args": ["a", "b", "", ""], "filesHash": "0" * 64}
FROM = {"fromTemplate": "base"}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "fromImage"),
        ({**FROM, "fromImage": "x:1"}, "fromImage"),
        ({"fromTemplate": "nothing-there"}, "nothing-there"),
        ({"fromImage": "x:1", "fromImageRegistry": {"type": "aws", "awsAccessKeyId": "hidden"}}, "AWS"),
        ({"fromImage": "x:1", "fromImageRegistry": {"type": "other", "password": "hidden"}}, "fromImageRegistry"),
        ({"fromImage": "x:1", "fromImageRegistry": {"type": "registry", "password": "hidden"}}, "username"),
        ({**FROM, "steps": [COPY]}, "not uploaded"),
        ({**FROM, "steps": [{**COPY, "filesHash": "x"}]}, "filesHash"),
        ({**FROM, "steps": [{"type": "COPY", "args": ["a", "b"]}]}, "filesHash"),
        ({**FROM, "steps": [{"type": "ADD", "args": []}]}, "type"),
        ({**FROM, "steps": [{"type": "RUN", "args": []}]}, "steps.0"),
        ({**FROM, "steps": [{"type": "RUN", "args": ["true", "no user"]}]}, "steps.0"),
        ({**FROM, "steps": [{"type": "RUN", "args": ["true"]}, {"type": "ENV", "args": ["A"]}]}, "steps.1"),
        ({**FROM, "steps": [{"type": "ENV", "args": ["A=B", "c"]}]}, "steps.0"),
        ({**FROM, "steps": [{"type": "USER", "args": [""]}]}, "steps.0"),
        ({**FROM, "steps": [{"type": "WORKDIR", "args": ["/a", "/b"]}]}, "steps.0"),
        ({**FROM, "steps": [{"type": "RUN", "args": ["true", "root"]}] * 86}, "three"),
    ],
    ids=lambda value: str(value)[:70],
)
def test_a_build_that_cannot_be_is_refused_and_says_why(body: dict[str, Any], named: str, origin: Origin) -> None:
    promised = asked(origin)
    answer = ask(origin, "POST", f"/v2/templates/asked/builds/{promised['buildID']}", json=body)
    assert answer.status_code == 400
    assert named in answer.json()["message"]
    assert "hidden" not in answer.text
    status = ask(origin, "GET", f"/templates/asked/builds/{promised['buildID']}/status").json()
    assert status["status"] == "waiting", "it can be described again"


def test_files_are_sent_to_a_url_that_needs_no_key_and_are_there_then(origin: Origin) -> None:
    asked(origin)
    data = archive()
    first = link(origin, hash_of(data))
    assert first["present"] is False
    assert put(first["url"], data).status_code == 200
    second = link(origin, hash_of(data))
    assert second["present"] is True
    assert put(second["url"], data).status_code == 200, "the same may be sent again"


def test_what_was_cut_off_or_has_no_length_is_not_there(origin: Origin) -> None:
    asked(origin)
    data = archive()
    url = link(origin, hash_of(data))["url"]
    assert put(url, iter([data])).status_code == 400, "a body of unknown length is refused"
    head, host = (
        f"PUT {urlsplit(url).path} HTTP/1.1\r\nhost: x\r\ncontent-length: {2 * len(data)}\r\n\r\n",
        urlsplit(url),
    )
    with socket.create_connection((host.hostname, host.port), timeout=30) as connection:
        connection.sendall(head.encode() + data)
    assert link(origin, hash_of(data))["present"] is False


def test_a_url_is_good_for_its_files_its_project_and_its_time(origin: Origin, installation: Installation) -> None:
    asked(origin)
    data, other = archive(), archive()
    url = link(origin, hash_of(data))["url"]
    token = url.rpartition("/")[2]
    expires, key_id, files_hash, mac = token.split(".")
    place = f"{origin.url}/templates/files/"
    for wrong in (
        f"{expires}.{key_id}.{hash_of(other)}.{mac}",
        f"{int(expires) + 1}.{key_id}.{files_hash}.{mac}",
        f"{expires}.{key_id}.{files_hash}.{'0' * 64}",
        f"{expires}.{key_id}.{files_hash}",
        "x",
    ):
        assert put(place + wrong, data).status_code == 401
    tokens = Tokens((installation.settings.api_dir / "e2b.key").read_bytes())
    assert put(place + tokens.upload(key_id, files_hash, int(time.time()) + 60), data).status_code == 200
    late = put(place + tokens.upload(key_id, files_hash, int(time.time()) - 1), data)
    assert (late.status_code, "expired" in late.json()["message"]) == (401, True)
    others = e2b_key(installation.other_key)
    asked(origin, key=others)
    assert link(origin, files_hash, key=others)["present"] is False, "what one project has sent is not another's"


def test_a_revoked_key_takes_its_urls_with_it(origin: Origin, api: Api) -> None:
    made = api.call("POST", "/v1/keys", json={"name": "short-lived"}).json()
    key = e2b_key(made["key"])
    asked(origin, key=key)
    data = archive()
    url = link(origin, hash_of(data), key=key)["url"]
    api.call("DELETE", f"/v1/keys/{made['id']}")
    assert put(url, data).status_code == 401


def test_an_archive_larger_than_may_be_is_refused_before_it_comes(origin: Origin) -> None:
    asked(origin)
    url = urlsplit(link(origin, hash_of(b"large"))["url"])
    with socket.create_connection((url.hostname, url.port), timeout=30) as connection:
        connection.sendall(f"PUT {url.path} HTTP/1.1\r\nhost: x\r\ncontent-length: {1 << 45}\r\n\r\n".encode())
        assert connection.recv(12) == b"HTTP/1.1 400"


UNKNOWN = str(uuid.UUID(int=0))


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/templates/aliases/nothing-there", 404),
        ("GET", "/templates/aliases/%20", 404),
        ("GET", "/templates/nothing-there", 404),
        ("GET", "/templates/nothing-there/tags", 404),
        ("DELETE", "/templates/nothing-there", 404),
        ("DELETE", "/templates/a%2Fb", 404),
        ("DELETE", "/templates/base", 403),
        ("GET", f"/templates/nothing-there/files/{'0' * 64}", 404),
        ("GET", "/templates/asked/files/XYZ", 400),
        ("GET", f"/templates/asked/builds/{UNKNOWN}/status", 404),
        ("GET", "/templates/asked/builds/x/status", 404),
        ("GET", "/v2/templates?limit=x", 400),
    ],
)
def test_what_is_not_there_is_told_as_e2b_does(method: str, path: str, status: int, origin: Origin) -> None:
    answer = ask(origin, method, path)
    assert (answer.status_code, answer.json()["code"]) == (status, status)


def test_one_projects_builds_are_not_anothers(origin: Origin, installation: Installation) -> None:
    promised = asked(origin)
    path = f"/templates/asked/builds/{promised['buildID']}"
    others = e2b_key(installation.other_key)
    assert ask(origin, "GET", f"{path}/status", others).status_code == 404
    assert ask(origin, "POST", f"/v2{path}", others, json=FROM).status_code == 404
    assert ask(origin, "GET", f"{path.replace('asked', 'other')}/status").status_code == 404
    assert ask(origin, "GET", f"{path}/status", "e2b_" + "0" * 64).status_code == 401


def test_a_build_that_has_begun_is_not_described_again(origin: Origin) -> None:
    path = f"/templates/asked/builds/{asked(origin)['buildID']}"
    steps = [{"type": "RUN", "args": ["true", "root"]}, {"type": "RUN", "args": ["exit 3"]}]
    assert ask(origin, "POST", f"/v2{path}", json={**FROM, "steps": steps}).status_code == 202
    again = [{"type": "ENV", "args": [name, "x"]} for name in "ABCDEFG"]
    assert ask(origin, "POST", f"/v2{path}", json={**FROM, "steps": again}).status_code == 409
    wait_until(lambda: ask(origin, "GET", f"{path}/status").json()["status"] == "error")
    assert ask(origin, "GET", f"{path}/status").json()["reason"]["step"] == "2"


@pytest.mark.parametrize(
    ("method", "body", "status"),
    [
        ("POST", {"target": "base:latest", "tags": ["mine"]}, 403),
        ("POST", {"target": "nothing-there:v1", "tags": ["mine"]}, 404),
        ("POST", {"target": ":x", "tags": ["mine"]}, 400),
        ("POST", {"target": "name:", "tags": ["mine"]}, 400),
        ("POST", {"target": "base:latest", "tags": []}, 400),
        ("POST", {"target": "base:latest", "tags": ["no tag"]}, 400),
        ("DELETE", {"name": "nothing-there", "tags": ["mine"]}, 404),
        ("DELETE", {"name": "base", "tags": ["latest"]}, 403),
        ("DELETE", {"name": "base:latest", "tags": ["latest"]}, 400),
    ],
)
def test_tags_that_cannot_be_are_refused(method: str, body: dict[str, Any], status: int, origin: Origin) -> None:
    assert ask(origin, method, "/templates/tags", json=body).status_code == status


def test_templates_are_listed_by_name_and_by_pages(origin: Origin) -> None:
    listed = ask(origin, "GET", "/templates").json()
    base = next(one for one in listed if one["templateID"] == "base")
    assert (base["public"], base["names"], base["buildStatus"]) == (True, ["base"], "ready")
    assert base["memoryMB"] >= 64
    names: list[str] = []
    token: str | None = ""
    while token is not None:
        page = ask(origin, "GET", f"/v2/templates?limit=1&nextToken={token}")
        names += [one["templateID"] for one in page.json()]
        token = page.headers.get("x-next-token")
    assert names == [one["templateID"] for one in listed]
    shown = ask(origin, "GET", "/templates/base").json()
    assert (shown["templateID"], shown["builds"]) == ("base", [])
    tags = ask(origin, "GET", "/templates/base/tags").json()
    assert [(one["tag"], one["buildID"]) for one in tags] == [("latest", base["buildID"])]
