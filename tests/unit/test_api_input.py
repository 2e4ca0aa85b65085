"""What a caller may send: wrong input is a typed 4xx that names the field, and never more than that."""

import contextlib
import io
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import pytest_asyncio

from space import logs
from space.errors import MachineLost
from space.model.ids import new_id
from tests.control_host import Host, code, hosting
from tests.gateway_host import gateway_at

UNPROCESSABLE = httpx.codes.UNPROCESSABLE_ENTITY


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def host(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Host]:
    """One for all: what is refused leaves nothing behind."""
    async with hosting(tmp_path_factory.mktemp("host")) as host:
        yield host


WRONG_CREATES: list[tuple[Any, str]] = [
    ({}, "template"),
    ({"template": 5}, "template"),
    ({"template": "no-such"}, "template"),
    ({"template": "base:no-such-tag"}, "template"),
    ({"template": "../../etc"}, "template"),
    ({"template": "sha256:" + "0" * 64}, "template"),
    ({"template": "base", "resources": {"cpus": 0}}, "resources.cpus"),
    ({"template": "base", "resources": {"cpus": "1"}}, "resources.cpus"),
    ({"template": "base", "resources": {"cpus": True}}, "resources.cpus"),
    ({"template": "base", "resources": {"cpus": 1e9}}, "resources.cpus"),
    ({"template": "base", "resources": {"memory_mib": 1}}, "resources.memory_mib"),
    ({"template": "base", "resources": {"memory_mib": 10**30}}, "resources.memory_mib"),
    ({"template": "base", "resources": {"memory_mib": 512.5}}, "resources.memory_mib"),
    ({"template": "base", "resources": {"disk_mib": -5}}, "resources.disk_mib"),
    ({"template": "base", "resources": {"pids": 10**6}}, "resources.pids"),
    ({"template": "base", "resources": {"gpus": 1}}, "resources.gpus"),
    ({"template": "base", "resources": []}, "resources"),
    ({"template": "base", "timeout_s": -1}, "timeout_s"),
    ({"template": "base", "timeout_s": "soon"}, "timeout_s"),
    ({"template": "base", "timeout_s": 1e300}, "timeout_s"),
    ({"template": "base", "on_timeout": "explode"}, "on_timeout"),
    ({"template": "base", "on_idle": "explode"}, "on_idle"),
    ({"template": "base", "wake_on_request": "yes"}, "wake_on_request"),
    ({"template": "base", "env": {"A": "nul\0"}}, "env.A"),
    ({"template": "base", "env": {"A=B": "x"}}, "env.A=B"),
    ({"template": "base", "env": {"": "x"}}, "env"),
    ({"template": "base", "env": {"A": 5}}, "env.A"),
    ({"template": "base", "env": {"A": "x" * (128 * 1024)}}, "env"),
    ({"template": "base", "env": {f"A{n}": "" for n in range(2049)}}, "env"),
    ({"template": "base", "metadata": {"k": 5}}, "metadata.k"),
    ({"template": "base", "metadata": {"k": "x" * 1025}}, "metadata.k"),
    ({"template": "base", "metadata": {"k": "nul\0"}}, "metadata.k"),
    ({"template": "base", "metadata": {"k" * 129: "x"}}, "metadata.kkk"),
    ({"template": "base", "metadata": {str(n): "x" for n in range(65)}}, "metadata"),
    ({"template": "base", "name": "bad\nname"}, "name"),
    ({"template": "base", "name": "ends\n"}, "name"),
    ({"template": "base", "name": ""}, "name"),
    ({"template": "base", "name": "x" * 64}, "name"),
    ({"template": "base", "driver": "no-such"}, "driver"),
    ({"template": "base", "surprise": True}, "surprise"),
    ([], "body"),
    ("text", "body"),
    (None, "body"),
]


@pytest.mark.parametrize(("body", "field"), WRONG_CREATES)
async def test_a_wrong_field_of_create_is_named(host: Host, body: Any, field: str) -> None:
    calls = len(host.node.calls)
    answer = await host.http.post("/v1/sandboxes", json=body)
    assert answer.status_code == UNPROCESSABLE, answer.text
    assert code(answer) in {"invalid-request", "unknown-template"}
    assert answer.json()["error"]["details"]["field"].startswith(field), answer.text
    assert len(host.node.calls) == calls


@pytest.mark.parametrize(
    "raw",
    [b"{", b"", b"\xff\xfe", b'{"a":' * 5000, b"[" * 100_000, b'{"template": "base", "timeout_s": NaN}', b"{]}"],
)
async def test_malformed_json_is_a_typed_refusal(host: Host, raw: bytes) -> None:
    for headers in ({"Content-Type": "application/json"}, {"Idempotency-Key": "k"}):
        answer = await host.http.post("/v1/sandboxes", content=raw, headers=headers)
        assert answer.status_code in {httpx.codes.BAD_REQUEST, UNPROCESSABLE}, answer.text
        assert code(answer) in {"malformed-json", "invalid-request"}


@pytest.mark.parametrize(
    "body",
    [
        b'{"template": "base", "name": "\\ud800"}',
        b'{"template": "base", "metadata": {"\\ud800": "x"}}',
        b'{"template": "base", "metadata": {"k": "\\udfff"}}',
        b'{"template": "base", "env": {"k": "\\udfff"}}',
        b'{"template": "base", "env": {"\\udfff": "k"}}',
        b'{"template": "base", "\\udfff": "k"}',
        b'{"template": "\\udfff"}',
    ],
)
async def test_half_a_character_is_refused_not_stumbled_over(host: Host, body: bytes) -> None:
    for headers in ({}, {"Idempotency-Key": "k"}):
        answer = await host.http.post("/v1/sandboxes", content=body, headers=headers)
        assert answer.status_code == UNPROCESSABLE, answer.text
        code(answer)


async def test_curl_needs_no_content_type(host: Host) -> None:
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = await host.http.post("/v1/sandboxes", content=b'{"template": "base"}', headers=headers)
    assert answer.status_code == httpx.codes.ACCEPTED, answer.text


async def test_environment_and_metadata_are_kept_to_the_byte(host: Host) -> None:
    env = {"MULTI": "a\nb\r\n\tc", "UNICODE": "ü🤣", "DOLLAR": "$HOME `x` \\", "EMPTY": "", " odd name ": "x"}
    metadata = {"k": "line\nbreak", "ключ": "значение"}
    sandbox = await host.create(env=env, metadata=metadata)
    assert host.node.wanted[sandbox]["env"] == env
    assert (await host.http.get(f"/v1/sandboxes/{sandbox}")).json()["metadata"] == metadata


@pytest.mark.parametrize(
    "shape",
    [
        '{{"template": "base", {}}}',
        '{{"template": "base", "metadata": {{{}}}}}',
        '{{"template": "base", "env": {{{}}}}}',
    ],
)
async def test_a_hundred_thousand_wrong_members_are_one_problem(host: Host, shape: str) -> None:
    raw = shape.format(",".join(f'"k{n}":1' for n in range(75_000))).encode()
    tracemalloc.start()
    try:
        answer = await host.http.post("/v1/sandboxes", content=raw)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert answer.status_code == UNPROCESSABLE, answer.text
    assert len(answer.json()["error"]["details"]["problems"]) == 1
    assert peak < 40 * len(raw)


async def test_a_body_that_the_api_parses_itself_is_at_most_a_mebibyte(host: Host) -> None:
    body = b'{"template": "base", "name": "' + b"x" * (1 << 20) + b'"}'
    for method, path in (("POST", "/v1/sandboxes"), ("PATCH", "/v1/sandboxes/sbx"), ("POST", "/v1/keys")):
        answer = await host.http.request(method, path, content=body)
        assert answer.status_code == httpx.codes.REQUEST_ENTITY_TOO_LARGE, answer.text
        assert answer.json()["error"]["details"]["limit_bytes"] == 1 << 20


@pytest.mark.parametrize("declared", [True, False])
async def test_an_oversized_body_is_refused(tmp_path: Path, declared: bool) -> None:
    async with hosting(tmp_path, body_mib_max=1) as host:
        sandbox = await host.create()
        body = b'{"template": "base", "name": "' + b"x" * (1 << 20) + b'"}'

        async def chunks() -> AsyncIterator[bytes]:
            for at in range(0, len(body), 65536):
                yield body[at : at + 65536]

        for path in ("/v1/sandboxes", f"/v1/sandboxes/{sandbox}/exec", f"/v1/sandboxes/{sandbox}/commands"):
            answer = await host.http.post(path, content=body if declared else chunks())
            assert answer.status_code == httpx.codes.REQUEST_ENTITY_TOO_LARGE, answer.text
            assert code(answer) == "body-too-large"
        assert host.node.passed == []


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("cursor=garbage", "cursor"),
        ("cursor=W10", "cursor"),
        ("cursor=WzEsMl0", "cursor"),
        ("cursor=" + "x" * 400, "cursor"),
        ("limit=0", "limit"),
        ("limit=201", "limit"),
        ("limit=abc", "limit"),
        ("state=odd", "state"),
        ("metadata.=x", "metadata"),
        ("metadata.a=1&metadata.a=2", "metadata"),
        ("metadata.a=%00", "metadata"),
        ("metadata.%00=x", "metadata"),
        ("&".join(f"metadata.{n}=x" for n in range(17)), "metadata"),
    ],
)
async def test_a_bad_list_query_is_named(host: Host, query: str, field: str) -> None:
    answer = await host.http.get(f"/v1/sandboxes?{query}")
    assert answer.status_code == UNPROCESSABLE, answer.text
    assert code(answer) == "invalid-request"
    assert field in answer.json()["error"]["details"]["field"]


@pytest.mark.parametrize("path", ["/v1/operations", "/v1/keys", "/v1/templates"])
async def test_every_list_refuses_a_bad_cursor(host: Host, path: str) -> None:
    for cursor in ("garbage", "W10", "WzEsMl0", "bnVsbA"):
        answer = await host.http.get(f"{path}?cursor={cursor}")
        assert answer.status_code == UNPROCESSABLE, answer.text


@pytest.mark.parametrize("wait", ["-1", "301", "inf", "nan", "x"])
async def test_a_bad_wait_is_named(host: Host, wait: str) -> None:
    answer = await host.http.get(f"/v1/operations/op{'a' * 16}?wait_s={wait}")
    assert answer.status_code == UNPROCESSABLE, answer.text
    assert answer.json()["error"]["details"]["field"] == "wait_s"


@pytest.mark.parametrize(
    "prefer", ["wait", "wait=x", "respond-async", "wait=-5", "", "wait=nan", ";;,,=", "wait=1e999"]
)
async def test_a_preference_that_makes_no_sense_is_ignored(host: Host, prefer: str) -> None:
    answer = await host.http.post("/v1/sandboxes", json={"template": "base"}, headers={"Prefer": prefer})
    assert answer.is_success, answer.text


@pytest.mark.parametrize("key", ["", "x" * 256, "with space", "ünicode".encode()])
async def test_a_bad_idempotency_key_is_named(host: Host, key: Any) -> None:
    answer = await host.http.post("/v1/sandboxes", json={"template": "base"}, headers={"Idempotency-Key": key})
    assert answer.status_code == UNPROCESSABLE, answer.text
    assert answer.json()["error"]["details"]["field"] == "idempotency-key"


UNKNOWN = ["sbxaaaaaaaaaaaaaaaa", "x", "%00", "sbx" + "a" * 500, "%ff%fe", "sbx%0aaaaaaaaaaaaaaaa", "🤣"]


@pytest.mark.parametrize("unknown", UNKNOWN)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/sandboxes/{}"),
        ("DELETE", "/v1/sandboxes/{}"),
        ("POST", "/v1/sandboxes/{}/wake"),
        ("POST", "/v1/sandboxes/{}/access"),
        ("GET", "/v1/sandboxes/{}/metrics"),
        ("POST", "/v1/sandboxes/{}/exec"),
        ("POST", "/v1/sandboxes/{}/commands"),
        ("GET", "/v1/sandboxes/{}/commands"),
        ("GET", "/v1/sandboxes/{}/files?path=/etc/passwd"),
        ("PUT", "/v1/sandboxes/{}/files?path=/etc/passwd"),
        ("GET", "/v1/operations/{}"),
        ("GET", "/v1/commands/{}"),
        ("GET", "/v1/commands/{}/output"),
        ("POST", "/v1/commands/{}/signal"),
        ("POST", "/v1/commands/{}/access"),
        ("DELETE", "/v1/keys/{}"),
        ("GET", "/v1/templates/{}"),
    ],
)
async def test_an_unknown_id_is_not_found(host: Host, method: str, path: str, unknown: str) -> None:
    answer = await host.http.request(method, path.format(unknown))
    assert answer.status_code == httpx.codes.NOT_FOUND, answer.text
    assert code(answer) == "not-found"


async def test_patch_refuses_what_create_refuses(host: Host) -> None:
    sandbox = await host.create()
    for body, field in (
        ({"name": "a\nb"}, "name"),
        ({"template": "base"}, "template"),
        ({"state": "running"}, "state"),
        ({"metadata": {"k": 1}}, "metadata.k"),
        ({"metadata": None}, "metadata"),
        ({"on_timeout": None}, "on_timeout"),
        ({"timeout_s": 0}, "timeout_s"),
    ):
        answer = await host.http.patch(f"/v1/sandboxes/{sandbox}", json=body)
        assert answer.status_code == UNPROCESSABLE, (body, answer.text)
        assert answer.json()["error"]["details"]["field"] == field


async def test_an_unknown_path_and_a_wrong_method_have_our_shape(host: Host) -> None:
    for path in ("/v1/nothing", "/", "/v1/sandboxes/", "//v1/sandboxes"):
        answer = await host.http.get(path)
        assert answer.status_code == httpx.codes.NOT_FOUND, path
        assert code(answer) == "not-found"
    wrong = await host.http.put("/v1/sandboxes")
    assert wrong.status_code == httpx.codes.METHOD_NOT_ALLOWED
    assert code(wrong) == "method-not-allowed"
    assert wrong.headers["allow"]


async def test_a_callers_request_id_is_kept_when_it_is_harmless(host: Host) -> None:
    kept = await host.http.get("/healthz", headers={"X-Request-Id": "abc-1.2_3"})
    assert kept.headers["x-request-id"] == "abc-1.2_3"
    for odd in ("with space", "x" * 65, '"quoted"'):
        other = await host.http.get("/healthz", headers={"X-Request-Id": odd})
        assert other.headers["x-request-id"].startswith("req")


async def test_what_breaks_inside_is_a_500_with_a_request_id_and_nothing_more(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = io.StringIO()
    logs.configure("info", log)

    async def broken(*_args: object, **_more: object) -> None:
        raise ValueError("secret-in-a-message")

    monkeypatch.setattr("space.control.sandboxes.page", broken)
    answer = await host.http.get("/v1/sandboxes?metadata.k=secret-in-a-query")
    assert answer.status_code == httpx.codes.INTERNAL_SERVER_ERROR
    assert code(answer) == "internal"
    logged = log.getvalue()
    assert "request-broke" in logged
    assert answer.headers["x-request-id"] in logged
    assert host.key not in logged
    assert "secret" not in answer.text + logged


async def test_an_answer_that_a_sandbox_cuts_off_is_no_failure_of_space(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = io.StringIO()
    logs.configure("info", log)

    @contextlib.asynccontextmanager
    async def told(*_: object) -> AsyncIterator[AsyncIterator[bytes]]:
        async def lines() -> AsyncIterator[bytes]:
            yield b"{}\n"
            raise MachineLost

        yield lines()

    async def running(*_: object) -> SimpleNamespace:
        return SimpleNamespace(id=new_id("sbx"))

    async def failures() -> str:
        figures = (await host.http.get("/metrics")).text
        return next(line for line in figures.splitlines() if line.startswith("space_api_failures_total"))

    before = await failures()
    monkeypatch.setattr("space.api.interpreter.execute", told)
    monkeypatch.setattr("space.api.contexts.get_running", running)
    await host.http.post(f"/v1/sandboxes/{new_id('sbx')}/contexts/default/execute", json={"code": "1"})
    assert await failures() == before
    assert ("answer-cut-off" in log.getvalue(), "request-broke" in log.getvalue()) == (True, False)


async def test_docs_and_the_openapi_document_need_nothing_from_elsewhere(host: Host) -> None:
    async with host.client(None) as nobody:
        document = (await nobody.get("/openapi.json")).json()
        assert document["openapi"].startswith("3.1")
        page = await nobody.get("/docs")
        assert page.headers["content-type"].startswith("text/html")
        for path in document["paths"]:
            assert path in page.text
        assert "http:" not in page.text
        assert "https:" not in page.text
        assert "<script" not in page.text


async def test_health_readiness_and_figures(host: Host) -> None:
    async with host.client(None) as nobody:
        assert (await nobody.get("/healthz")).text == "ok\n"
        parts = {"store": "ok", "node": "ok", "gateway": "gateway-unavailable"}
        assert (await nobody.get("/readyz")).json() == {"ready": False, "parts": parts}
        async with gateway_at(host.settings.gateway_socket):
            ready = await nobody.get("/readyz")
        assert (ready.status_code, ready.json()) == (200, {"ready": True, "parts": {**parts, "gateway": "ok"}})
        assert (await nobody.get("/metrics")).status_code == httpx.codes.UNAUTHORIZED
    sandbox = await host.create()
    figures = (await host.http.get("/metrics")).text
    assert 'space_sandboxes{state="running"}' in figures
    assert "space_api_request_seconds_bucket" in figures
    assert sandbox not in figures
