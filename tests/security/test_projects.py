"""Nothing of one project is visible, guessable or reachable from another."""

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

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
        yield {"sandbox": sandbox, "operation": body["operation"]["id"], **command}
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
]


@pytest.mark.parametrize(("method", "path", "body"), CALLS)
def test_another_projects_id_looks_exactly_like_an_unknown_one(
    other_api: Api, theirs: dict, method: str, path: str, body: object
) -> None:
    def ask(ids: dict[str, str]) -> httpx.Response:
        return other_api.http.request(method, path.format(**ids), json=body if body is not None else None)

    ids = {"sandbox": theirs["sandbox"], "operation": theirs["operation"], "command": theirs["command"]["id"]}
    unknown = {name: value[:3] + "a" * (len(value) - 3) for name, value in ids.items()}
    unknown["operation"] = ids["operation"][:2] + "a" * 16
    real, made_up = ask(ids), ask(unknown)
    assert real.status_code == made_up.status_code == httpx.codes.NOT_FOUND

    def shape(answer: httpx.Response, used: dict[str, str]) -> str:
        text = answer.text.replace(answer.json()["error"]["request_id"], "")
        for value in used.values():
            text = text.replace(value, "ID")
        return text

    assert shape(real, ids) == shape(made_up, unknown)


def test_lists_show_only_ones_own(other_api: Api, theirs: dict) -> None:
    for path in ("/v1/sandboxes", "/v1/operations"):
        text = other_api.call("GET", path).text
        assert theirs["sandbox"] not in text
        assert theirs["operation"] not in text


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
