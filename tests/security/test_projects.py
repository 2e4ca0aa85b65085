"""Nothing of one project is visible, guessable or reachable from another."""

import contextlib
import io
import tarfile

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from space.api.streaming import PROJECT_STREAMS_MAX
from tests.client import Api
from tests.installation import Installation


@pytest.fixture(scope="module")
def theirs(installation: Installation):
    """A sandbox, a command and an operation of the first project."""
    with Api(installation.url, installation.key) as api:
        body = api.call("POST", "/v1/sandboxes", json={"template": "base"}, headers={"Prefer": "wait=60"}).json()
        sandbox = body["sandbox"]["id"]
        api.write(sandbox, "/home/user/secret", b"theirs")
        command = api.command(sandbox, ["sleep", "100"])
        source = {"name": "theirs", "tag": "secret", "source": {"kind": "template", "template": "base"}}
        built = api.call("POST", "/v1/templates/builds", json=source, headers={"Prefer": "wait=90"}).json()
        upload = api.call("POST", "/v1/uploads", json={"size": 6}).json()["id"]
        api.call("PUT", f"/v1/uploads/{upload}", params={"offset": 0}, content=b"theirs")
        yield {
            "sandbox": sandbox,
            "operation": body["operation"]["id"],
            "build": built["id"],
            "digest": built["digest"],
            "upload": upload,
            **command,
        }
        api.call("DELETE", f"/v1/uploads/{upload}")
        api.call("DELETE", f"/v1/templates/{built['digest']}")
        api.delete(sandbox)


CALLS = [
    ("GET", "/v1/sandboxes/{sandbox}", None),
    ("PATCH", "/v1/sandboxes/{sandbox}", {"name": "mine"}),
    ("DELETE", "/v1/sandboxes/{sandbox}", None),
    *[
        ("POST", f"/v1/sandboxes/{{sandbox}}/{verb}", None)
        for verb in ("pause", "resume", "suspend", "wake", "stop", "start")
    ],
    ("POST", "/v1/sandboxes/{sandbox}/exec", {"argv": ["true"]}),
    ("POST", "/v1/sandboxes/{sandbox}/commands", {"argv": ["true"]}),
    ("GET", "/v1/sandboxes/{sandbox}/commands", None),
    ("POST", "/v1/sandboxes/{sandbox}/access", None),
    ("GET", "/v1/sandboxes/{sandbox}/files?path=/home/user/secret", None),
    ("PUT", "/v1/sandboxes/{sandbox}/files?path=/home/user/secret", {}),
    ("DELETE", "/v1/sandboxes/{sandbox}/files?path=/home/user/secret", None),
    ("GET", "/v1/sandboxes/{sandbox}/files/list?path=/", None),
    ("GET", "/v1/sandboxes/{sandbox}/files/stat?path=/", None),
    ("GET", "/v1/sandboxes/{sandbox}/metrics", None),
    ("GET", "/v1/operations/{operation}", None),
    ("GET", "/v1/commands/{command}", None),
    ("GET", "/v1/commands/{command}/output", None),
    ("POST", "/v1/commands/{command}/signal", {"signal": "KILL"}),
    ("POST", "/v1/commands/{command}/stdin", None),
    ("GET", "/v1/builds/{build}", None),
    ("GET", "/v1/builds/{build}/log", None),
    ("POST", "/v1/builds/{build}/cancel", None),
    ("GET", "/v1/uploads/{upload}", None),
    ("PUT", "/v1/uploads/{upload}?offset=6", {}),
    ("DELETE", "/v1/uploads/{upload}", None),
    ("GET", "/v1/templates/{digest}", None),
    ("DELETE", "/v1/templates/{digest}", None),
    ("POST", "/v1/templates/{digest}/warm", {}),
    ("GET", "/v1/templates/{name}", None),
    ("GET", "/v1/templates/{name}:secret", None),
    ("DELETE", "/v1/templates/{name}:secret", None),
    ("DELETE", "/v1/templates/{name}/tags/secret", None),
    ("GET", "/v1/templates/{name}/history", None),
]


@pytest.mark.parametrize(("method", "path", "body"), CALLS)
def test_another_projects_id_looks_exactly_like_an_unknown_one(
    other_api: Api, theirs: dict, method: str, path: str, body: object
) -> None:
    def ask(ids: dict[str, str]) -> httpx.Response:
        return other_api.http.request(method, path.format(**ids), json=body if body is not None else None)

    ids = {name: theirs[name] for name in ("sandbox", "operation", "build", "upload", "digest")}
    ids |= {"command": theirs["command"]["id"], "name": "theirs"}
    unknown = {name: value[:3] + "a" * (len(value) - 3) for name, value in ids.items()}
    unknown["operation"] = ids["operation"][:2] + "a" * 16
    unknown |= {"digest": "sha256:" + "a" * 64, "name": "nobodys"}
    real, made_up = ask(ids), ask(unknown)
    assert real.status_code == made_up.status_code == httpx.codes.NOT_FOUND

    def shape(answer: httpx.Response, used: dict[str, str]) -> str:
        text = answer.text.replace(answer.json()["error"]["request_id"], "")
        for value in used.values():
            text = text.replace(value, "ID")
        return text

    assert shape(real, ids) == shape(made_up, unknown)


def test_lists_show_only_ones_own(other_api: Api, theirs: dict) -> None:
    for path in (
        "/v1/sandboxes",
        "/v1/operations",
        "/v1/builds",
        "/v1/templates",
        "/v1/templates?untagged=true",
        "/v1/templates/audit",
    ):
        text = other_api.call("GET", path).text
        for kind in ("sandbox", "operation", "build", "digest", "upload"):
            assert theirs[kind] not in text


def test_another_projects_template_upload_or_snapshot_is_nothing_to_begin_with(other_api: Api, theirs: dict) -> None:
    for reference in (theirs["digest"], "theirs:secret"):
        refused = other_api.http.post("/v1/sandboxes", json={"template": reference})
        assert refused.json()["error"]["code"] == "unknown-template"
    for source, problem in (
        ({"kind": "template", "template": theirs["digest"]}, "unknown-template"),
        ({"kind": "template", "template": "theirs:secret"}, "unknown-template"),
        ({"kind": "rootfs", "upload": theirs["upload"]}, "unknown-upload"),
        ({"kind": "dockerfile", "upload": theirs["upload"]}, "unknown-upload"),
    ):
        refused = other_api.http.post("/v1/templates/builds", json={"name": "mine", "source": source})
        assert refused.json()["error"]["code"] == problem
    pointing = other_api.http.put("/v1/templates/mine/tags/latest", json={"digest": theirs["digest"]})
    assert pointing.status_code == httpx.codes.NOT_FOUND


def test_a_dockerfile_cannot_begin_with_another_projects_template(other_api: Api, theirs: dict) -> None:
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as archive:
        text = b"FROM space:theirs:secret\n"
        member = tarfile.TarInfo("Dockerfile")
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text))
    data = context.getvalue()
    upload = other_api.call("POST", "/v1/uploads", json={"size": len(data)}).json()["id"]
    other_api.call("PUT", f"/v1/uploads/{upload}", params={"offset": 0}, content=data)
    body = {"name": "mine", "source": {"kind": "dockerfile", "upload": upload}}
    refused = other_api.http.post("/v1/templates/builds", json=body, headers={"Prefer": "wait=60"})
    assert refused.is_client_error
    assert other_api.http.get("/v1/templates/mine").status_code == httpx.codes.NOT_FOUND
    other_api.call("DELETE", f"/v1/uploads/{upload}")
    assert theirs["digest"] not in refused.text


def test_a_token_of_one_sandbox_opens_no_other(installation: Installation, other_api: Api, theirs: dict) -> None:
    mine = other_api.create()
    try:
        access = other_api.call("POST", f"/v1/sandboxes/{mine}/access").json()
        headers = {"Authorization": f"Bearer {access['token']}"}
        own = httpx.get(f"{access['url']}/v1/sandboxes/{mine}/files?path=/etc/hostname", headers=headers)
        assert own.is_success
        foreign = httpx.get(
            f"{access['url']}/v1/sandboxes/{theirs['sandbox']}/files?path=/etc/hostname", headers=headers
        )
        assert foreign.status_code == httpx.codes.NOT_FOUND
        command = httpx.get(f"{access['url']}/v1/commands/{theirs['command']['id']}", headers=headers)
        assert command.status_code == httpx.codes.NOT_FOUND
        as_key = httpx.get(f"{installation.url}/v1/sandboxes", headers=headers)
        assert as_key.status_code == httpx.codes.UNAUTHORIZED
    finally:
        other_api.delete(mine)


def test_an_attach_needs_the_token_of_that_command(theirs: dict, other_api: Api) -> None:
    url = theirs["attach"]["url"]
    mine = other_api.create()
    try:
        token = other_api.command(mine, ["true"])["attach"]["token"]
        for wrong in (None, "garbage", token):
            headers = {"Authorization": f"Bearer {wrong}"} if wrong else {}
            with (
                pytest.raises(InvalidStatus) as refused,
                connect(url, additional_headers=headers, subprotocols=["space.command.v1"]),
            ):
                pass
            assert refused.value.response.status_code in {401, 403, 404}
    finally:
        other_api.delete(mine)


def test_the_data_plane_refuses_api_keys_and_nothing(installation: Installation, theirs: dict) -> None:
    path = f"{installation.data_plane_url}/v1/sandboxes/{theirs['sandbox']}/files?path=/etc/passwd"
    for headers in ({}, {"Authorization": f"Bearer {installation.key}"}, {"Authorization": "Bearer x.y.z"}):
        assert httpx.get(path, headers=headers).status_code == httpx.codes.UNAUTHORIZED
    for internal in ("/machines", f"/machines/{theirs['sandbox']}", "/machines/events", "/token-key"):
        answer = httpx.get(f"{installation.data_plane_url}{internal}")
        assert answer.status_code in {httpx.codes.NOT_FOUND, httpx.codes.UNAUTHORIZED}


def test_one_projects_event_streams_leave_room_for_anothers(api: Api, other_api: Api) -> None:
    limits = httpx.Limits(max_connections=PROJECT_STREAMS_MAX + 1, max_keepalive_connections=0)
    with (
        httpx.Client(base_url=api.url, headers=api.http.headers, timeout=30, limits=limits) as many,
        contextlib.ExitStack() as opened,
    ):
        following = []
        for _ in range(PROJECT_STREAMS_MAX):
            stream = opened.enter_context(many.stream("GET", "/v1/events"))
            assert stream.status_code == httpx.codes.OK
            following.append(stream.iter_lines())  # one that is let go of ends its stream
            next(following[-1])
        refused = many.get("/v1/events")
        assert refused.status_code == httpx.codes.TOO_MANY_REQUESTS
        with other_api.http.stream("GET", "/v1/events") as stream:
            assert stream.status_code == httpx.codes.OK
