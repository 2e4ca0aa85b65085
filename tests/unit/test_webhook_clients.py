"""Webhooks as the SDK and the command line show them."""

import json
from collections.abc import Iterator

import pytest
from starlette.responses import Response

from space import Client
from tests.command_line import space
from tests.scripted_server import ScriptedServer

HOOK = {
    "id": "whk1",
    "url": "https://receiver.example/",
    "events": ["sandbox.failed"],
    "description": "pager",
    "failures": 2,
    "failing_since": "2026-01-02T03:04:05Z",
    "next_attempt_at": "2026-01-02T03:04:50Z",
    "given_up": 1,
    "disabled": None,
    "created_at": "2026-01-02T03:04:05Z",
}
ATTEMPT = {
    "id": "dlv1",
    "message_id": "msg_whk1_7",
    "type": "sandbox.failed",
    "attempt": 2,
    "outcome": "failed",
    "reason": "status",
    "status": 500,
    "seconds": 0.25,
    "created_at": "2026-01-02T03:04:05Z",
}


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as running:
        running.on("POST /v1/webhooks", {**HOOK, "secret": "whsec_new"})
        running.on("GET /v1/webhooks", {"items": [HOOK], "next_cursor": None})
        running.on("GET /v1/webhooks/whk1", HOOK)
        running.on("DELETE /v1/webhooks/whk1", Response(status_code=204))
        running.on("GET /v1/webhooks/whk1/deliveries", {"items": [ATTEMPT], "next_cursor": None})
        yield running


def test_the_sdk_makes_shows_and_deletes_webhooks(server: ScriptedServer) -> None:
    with Client(server.url, "sk_test") as client:
        made = client.webhooks.create("https://receiver.example/", events=["sandbox.failed"])
        assert made.secret == "whsec_new"
        assert "whsec_new" not in repr(made)
        [listed] = client.webhooks.list()
        assert (listed.id, listed.failures, listed.given_up, listed.disabled) == ("whk1", 2, 1, None)
        assert listed.next_attempt_at is not None
        assert client.webhooks.get("whk1").events == ("sandbox.failed",)
        [attempt] = client.webhooks.deliveries("whk1")
        assert (attempt.outcome, attempt.status, attempt.attempt) == ("failed", 500, 2)
        client.webhooks.delete("whk1")


def test_the_command_line_shows_a_secret_once_and_why_deliveries_fail(server: ScriptedServer) -> None:
    made = space(server, "webhook", "create", "https://receiver.example/", "--event", "sandbox.failed")
    assert made.stdout == b"whsec_new\n"
    listed = space(server, "webhook", "ls").stdout
    assert b"whk1" in listed
    assert b"failing (2)" in listed
    assert b"whsec" not in listed
    shown = space(server, "webhook", "inspect", "whk1").stdout
    assert b"500" in shown
    assert b"pager" in shown
    assert json.loads(space(server, "webhook", "inspect", "whk1", "--json").stdout)["deliveries"] == [ATTEMPT]
    assert space(server, "webhook", "rm", "whk1").returncode == 0


def test_a_test_that_does_not_arrive_is_a_failure_of_the_command(server: ScriptedServer) -> None:
    server.on("POST /v1/webhooks/whk1/test", ATTEMPT)
    failed = space(server, "webhook", "test", "whk1")
    assert (failed.returncode, failed.stdout) == (1, b"failed 500\n")
    server.on("POST /v1/webhooks/whk1/test", {**ATTEMPT, "outcome": "delivered", "reason": None, "status": 204})
    arrived = space(server, "webhook", "test", "whk1")
    assert (arrived.returncode, arrived.stdout) == (0, b"delivered 204\n")
