"""Answers of the API as exceptions."""

import json

import pytest

import space
from space import (
    Conflict,
    Forbidden,
    GuestError,
    HostError,
    HostFull,
    InvalidRequest,
    LimitExceeded,
    MachineLost,
    NotFound,
    OutcomeUnknown,
    SpaceError,
    Unauthenticated,
    Unavailable,
)
from space.sdk.errors import from_answer


def answer(code: str, **details: object) -> bytes:
    return json.dumps({"error": {"code": code, "message": "m", "details": details, "request_id": "r"}}).encode()


def test_every_class_comes_back_by_its_own_code_whatever_the_status() -> None:
    for name in space.__all__:
        cls = getattr(space, name)
        if isinstance(cls, type) and issubclass(cls, SpaceError):
            assert type(from_answer(500, answer(cls.code))) is cls


@pytest.mark.parametrize(
    ("status", "cls"),
    [
        (400, InvalidRequest),
        (401, Unauthenticated),
        (403, Forbidden),
        (404, NotFound),
        (409, Conflict),
        (413, InvalidRequest),
        (416, InvalidRequest),
        (422, InvalidRequest),
        (429, LimitExceeded),
        (503, Unavailable),
        (504, OutcomeUnknown),
    ],
)
def test_a_particular_code_gets_the_class_of_its_status(status: int, cls: type[SpaceError]) -> None:
    error = from_answer(status, answer("something-new", field="x"))
    assert type(error) is cls
    assert error.code == "something-new"
    assert error.details == {"field": "x", "request_id": "r"}


def test_a_refusal_of_the_guest_is_a_guest_error() -> None:
    error = from_answer(404, answer("file-not-found", errno=2))
    assert type(error) is GuestError
    assert error.details["errno"] == 2


def test_the_kind_beside_a_particular_code_says_more_than_the_status() -> None:
    body = json.loads(answer("disk-store-full"))
    body["error"]["kind"] = "HostFull"
    assert type(from_answer(503, json.dumps(body).encode())) is HostFull
    body["error"] |= {"kind": "NotFound", "details": {"errno": "ENOENT"}}
    assert type(from_answer(404, json.dumps(body).encode())) is GuestError


def test_a_machine_that_is_gone_is_a_lost_machine() -> None:
    assert type(from_answer(503, answer("oom-killed"))) is MachineLost


@pytest.mark.parametrize("body", [b"", b"<html>Bad gateway</html>", b"{}", b"[1]", b'{"error": "x"}', b"\xff\xfe"])
def test_an_answer_that_is_not_ours_is_still_a_typed_error(body: bytes) -> None:
    error = from_answer(500, body)
    assert isinstance(error, HostError)
    assert error.details["status"] == 500


def test_details_cannot_overwrite_what_is_ours() -> None:
    error = from_answer(409, answer("x").replace(b"{}", b'{"message": "spoof", "code": "spoof"}'))
    assert (error.code, error.message) == ("x", "m")
