"""Wrong requests get a typed 4xx that names what is wrong; nothing a caller does is a 500."""

import httpx
import pytest

from tests.client import Api, error_code
from tests.installation import Installation

UNPROCESSABLE = httpx.codes.UNPROCESSABLE_ENTITY


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "template"),
        ({"template": "no-such-template"}, "template"),
        ({"template": "base", "resources": {"cpus": 0}}, "resources.cpus"),
        ({"template": "base", "resources": {"cpus": 1e9}}, "resources.cpus"),
        ({"template": "base", "resources": {"memory_mib": 1}}, "resources.memory_mib"),
        ({"template": "base", "resources": {"memory_mib": 10**9}}, "resources.memory_mib"),
        ({"template": "base", "resources": {"disk_mib": -5}}, "resources.disk_mib"),
        ({"template": "base", "resources": {"pids": 0}}, "resources.pids"),
        ({"template": "base", "resources": {"gpus": 1}}, "resources.gpus"),
        ({"template": "base", "timeout_s": -1}, "timeout_s"),
        ({"template": "base", "on_timeout": "explode"}, "on_timeout"),
        ({"template": "base", "env": {"A": "nul\u0000"}}, "env.A"),
        ({"template": "base", "env": {"A=B": "x"}}, "env"),
        ({"template": "base", "metadata": {"k": 5}}, "metadata.k"),
        ({"template": "base", "name": "bad\nname"}, "name"),
        ({"template": "base", "driver": "no-such-driver"}, "driver"),
        ({"template": "base", "surprise": True}, "surprise"),
    ],
)
def test_a_wrong_field_of_create_is_named(api: Api, body: object, field: str) -> None:
    answer = api.http.post("/v1/sandboxes", json=body)
    assert answer.status_code == UNPROCESSABLE, answer.text
    error_code(answer)
    assert str(answer.json()["error"]["details"]["field"]).startswith(field)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "argv"),
        ({"argv": []}, "argv"),
        ({"argv": "true"}, "argv"),
        ({"argv": ["a\u0000b"]}, "argv"),
        ({"command": "true", "argv": ["true"]}, "argv"),
        ({"argv": ["true"], "timeout_s": "soon"}, "timeout_s"),
        ({"argv": ["true"], "env": {"X": 1}}, "env"),
        ({"argv": ["true"], "cwd": 5}, "cwd"),
        ({"argv": ["true"], "surprise": 1}, "surprise"),
    ],
)
def test_a_wrong_field_of_exec_is_named(api: Api, shared: str, body: object, field: str) -> None:
    answer = api.http.post(f"/v1/sandboxes/{shared}/exec", json=body)
    assert answer.status_code == UNPROCESSABLE, answer.text
    assert field in str(answer.json()["error"]["details"]["field"])


@pytest.mark.parametrize("path", ["/v1/sandboxes", "/v1/sandboxes/{shared}/exec", "/v1/sandboxes/{shared}/commands"])
def test_malformed_json_is_a_typed_refusal(api: Api, shared: str, path: str) -> None:
    for body in (b"{", b"[1]", b'"text"', b"\xff\xfe", b'{"a":' * 5000):
        answer = api.http.post(path.format(shared=shared), content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code in {httpx.codes.BAD_REQUEST, UNPROCESSABLE}, (body[:20], answer.text)
        error_code(answer)


def test_an_oversized_body_is_refused_before_it_is_read(api: Api, shared: str) -> None:
    body = b'{"argv": ["true"], "stdin_text": "' + b"x" * (8 * 1024 * 1024) + b'"}'
    for path in ("/v1/sandboxes", f"/v1/sandboxes/{shared}/exec"):
        answer = api.http.post(path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == httpx.codes.REQUEST_ENTITY_TOO_LARGE
        error_code(answer)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/sandboxes/{}",
        "/v1/sandboxes/{}/files?path=/etc/passwd",
        "/v1/sandboxes/{}/commands",
        "/v1/operations/{}",
        "/v1/commands/{}",
        "/v1/commands/{}/output",
    ],
)
@pytest.mark.parametrize("unknown", ["sbxaaaaaaaaaaaaaaaa", "x", "..%2f..", "%00", "sbx" + "a" * 500])
def test_an_unknown_id_is_not_found(api: Api, path: str, unknown: str) -> None:
    answer = api.http.get(path.format(unknown))
    assert answer.status_code == httpx.codes.NOT_FOUND, answer.text
    assert error_code(answer) == "not-found"


def test_a_bad_cursor_and_limit_are_named(api: Api) -> None:
    for query, field in (
        ("cursor=garbage", "cursor"),
        ("limit=0", "limit"),
        ("limit=abc", "limit"),
        ("state=odd", "state"),
    ):
        answer = api.http.get(f"/v1/sandboxes?{query}")
        assert answer.status_code == UNPROCESSABLE, (query, answer.text)
        assert field in str(answer.json()["error"]["details"]["field"])


def test_no_key_a_wrong_key_and_a_revoked_key_are_unauthenticated_at_once(api: Api, installation: Installation) -> None:
    for headers in (
        {},
        {"Authorization": "Bearer sk_wrong"},
        {"Authorization": "Basic abc"},
        {"Authorization": "Bearer"},
    ):
        answer = httpx.get(f"{installation.url}/v1/sandboxes", headers=headers)
        assert answer.status_code == httpx.codes.UNAUTHORIZED
        assert error_code(answer) == "unauthenticated"
    made = api.call("POST", "/v1/keys", json={"name": "short-lived"}).json()
    with Api(installation.url, made["key"]) as fresh:
        fresh.call("GET", "/v1/sandboxes")
        api.call("DELETE", f"/v1/keys/{made['id']}")
        assert fresh.http.get("/v1/sandboxes").status_code == httpx.codes.UNAUTHORIZED


def test_an_unknown_path_and_a_wrong_method_have_our_error_shape(api: Api) -> None:
    unknown = api.http.get("/v1/nothing-here")
    assert unknown.status_code == httpx.codes.NOT_FOUND
    error_code(unknown)
    wrong = api.http.put("/v1/sandboxes")
    assert wrong.status_code == httpx.codes.METHOD_NOT_ALLOWED
    error_code(wrong)


def test_every_answer_carries_its_request_id(api: Api) -> None:
    answer = api.http.get("/v1/sandboxes/unknown")
    assert answer.headers["x-request-id"] == answer.json()["error"]["request_id"]
