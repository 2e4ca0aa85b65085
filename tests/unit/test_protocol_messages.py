"""Messages: whatever is received is checked field by field, and bounded."""

from typing import Any

import pytest

from space.protocol.checks import MessageError
from space.protocol.frames import PAYLOAD_BYTES_MAX
from space.protocol.messages import (
    check_event,
    check_reply,
    check_request,
    check_welcome,
    decode_json,
    encode_json,
    streams_of,
)

START = {"id": "c", "argv": ["a"], "streams": {"stdout": 1, "stderr": 2}}


def test_defaults_are_filled_in():
    fields = check_request("file-read", {"path": "/x", "stream": 3})
    assert fields == {"path": "/x", "user": None, "owner": None, "stream": 3, "offset": 0, "length": None}


def test_text_that_is_not_utf8_travels_unchanged():
    path = b"/caf\xe9\xff".decode("utf-8", "surrogateescape")
    fields = check_request("stat", decode_json(encode_json({"path": path})))
    assert fields["path"].encode("utf-8", "surrogateescape") == b"/caf\xe9\xff"


@pytest.mark.parametrize("value", ["\0", "a\0b", "\ud800", "", "x" * 4097, "あ" * 1366, 5, None, [], True])
def test_paths_that_no_kernel_takes_are_refused(value: Any):
    with pytest.raises(MessageError, match="path"):
        check_request("stat", {"path": value})


def test_environment_values_keep_newlines_and_equals_signs():
    env = {"A": "one\ntwo", "B": "a=b", "C": "", "D": "$HOME `x`"}
    assert check_request("start", {**START, "env": env})["env"] == env


@pytest.mark.parametrize("env", [{"A=B": "x"}, {"": "x"}, {"A": "\0"}, {"A": 1}, [], {"A\0": "x"}])
def test_environments_that_cannot_be_are_refused(env: Any):
    with pytest.raises(MessageError, match="env"):
        check_request("start", {**START, "env": env})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("argv", []),
        ("argv", ["a"] * 20_000),
        ("argv", "ls"),
        ("timeout_s", 0),
        ("timeout_s", -1),
        ("timeout_s", float("nan")),
        ("timeout_s", float("inf")),
        ("timeout_s", True),
        ("tty", {"rows": 0}),
        ("tty", {"rows": 70000}),
        ("streams", {"stdout": 0}),
        ("streams", {"stdout": 2**32}),
        ("streams", {"out": 1}),
        ("id", ""),
        ("nonsense", 1),
    ],
)
def test_fields_out_of_range_are_named(field: str, value: Any):
    with pytest.raises(MessageError, match=field):
        check_request("start", {**START, field: value})


def test_a_message_that_does_not_fit_is_refused_before_it_is_sent():
    with pytest.raises(MessageError):
        encode_json({"text": "x" * PAYLOAD_BYTES_MAX})


@pytest.mark.parametrize("payload", [b"", b"nul", b"[1]", b'"x"', b"[" * 200_000, b"9" * 10_000, b"\x80", b'{"a":1}x'])
def test_what_is_no_object_is_refused(payload: bytes):
    with pytest.raises(MessageError):
        decode_json(payload)


def test_replies_are_cut_down_to_what_is_known():
    assert check_reply("start", {"ok": {"pid": 3, "more": "x" * 1000}}) == ({"pid": 3}, None)
    assert check_reply("forget", {"ok": {"more": 1}}) == ({}, None)


@pytest.mark.parametrize(
    "error",
    [
        {},
        {"code": ""},
        {"code": "x" * 65},
        {"code": 5},
        {"code": "c", "errno": "E"},
        [],
        None,
        {"code": "c", "message": "m" * 5000},
    ],
)
def test_failures_of_a_hostile_guest_are_checked(error: Any):
    with pytest.raises(MessageError):
        check_reply("start", {"error": error})


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"event": "boom"},
        {"event": ["exit"]},
        {"event": "exit", "id": "c", "kind": "vanished", "produced": {}},
        {"event": "exit", "id": "c", "kind": "exited", "code": 256, "produced": {}},
    ],
)
def test_events_of_a_hostile_guest_are_checked(event: dict[str, Any]):
    with pytest.raises(MessageError):
        check_event(event)


def test_a_welcome_names_at_most_so_many_commands():
    command = {"id": "c", "state": "running", "streams": {}}
    welcome = {"version": 1, "nonce": "n", "boot_id": "b", "pid": 1, "commands": [command] * 513}
    with pytest.raises(MessageError, match="commands"):
        check_welcome(welcome)


def test_the_streams_of_a_request_are_found():
    assert sorted(streams_of(check_request("start", START))) == [1, 2]
    assert streams_of(check_request("watch", {"path": "/", "stream": 9})) == [9]
    assert streams_of(check_request("list", {})) == []
