"""The pure parts of what E2B's clients are served by: which plane, signatures, frames, forms, lists, policies."""

import gzip
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import pytest

from space.e2b import connect, entries, errors, keys, listing, logs, network, routing, uploads, watching
from space.e2b.bodies import Network
from space.e2b.routing import Target, target_of
from space.errors import Conflict, HostFull, InvalidRequest, LimitExceeded, Unauthenticated, Unavailable
from space.model.ids import new_id
from space.model.operation import Operation, OperationState
from space.model.sandbox import Failure

BOUNDARY = "multipart/form-data; boundary=xyz"


@pytest.mark.parametrize(
    ("headers", "path", "query", "expected"),
    [
        ({}, "/v2/sandboxes", {}, None),
        ({"host": "api.sbx.test"}, "/sandboxes", {}, None),
        ({"host": "127.0.0.1:8703"}, "/files", {}, None),
        ({"host": "49983-sbxa.sbx.test"}, "/files", {}, Target("sbxa", 49983)),
        ({"host": "8000-SBXA.sbx.test:8443"}, "/", {}, Target("sbxa", 8000)),
        ({"host": "70000-sbxa.sbx.test"}, "/", {}, Target("sbxa", 0)),
        ({"host": "49983-sbxa.t", "e2b-sandbox-id": "sbxb"}, "/", {}, Target("sbxa", 49983)),
        ({"e2b-sandbox-id": "sbxa"}, "/health", {}, Target("sbxa", 49983)),
        ({"e2b-sandbox-id": "sbxa-client", "e2b-sandbox-port": "49999"}, "/", {}, Target("sbxa", 49999)),
        ({"e2b-sandbox-id": "../etc", "e2b-sandbox-port": "x"}, "/", {}, Target("", 0)),
        ({}, "/files", {"signature": "v1_x"}, Target(None, 49983)),
        ({}, "/other", {"signature": "v1_x"}, None),
    ],
)
def test_host_then_header_then_signature_decide_which_plane(
    headers: dict[str, str], path: str, query: dict[str, str], expected: Target | None
) -> None:
    assert target_of(headers, path, query) == expected


def test_a_key_in_e2bs_form_is_the_same_bytes_and_others_stay_as_they_are() -> None:
    assert keys.api_key("e2b_" + "00" * 32) == "sk_" + "A" * 43
    for other in ("sk_x", "e2b_00", "e2b_" + "g" * 64, ""):
        assert keys.api_key(other) == other


def test_tokens_differ_by_sandbox_use_and_installation() -> None:
    one, other = keys.Tokens(b"a" * 32), keys.Tokens(b"b" * 32)
    first, second = new_id("sbx"), new_id("sbx")
    assert len({one.access(first), one.access(second), one.traffic(first), other.access(first)}) == 4
    assert keys.Tokens(b"a" * 32).access(first) == one.access(first)
    one.check_access(first, one.access(first))
    for wrong in (None, "", one.access(second), one.traffic(first), "\udcff"):
        with pytest.raises(Unauthenticated):
            one.check_access(first, wrong)


def test_signatures_are_what_the_client_makes() -> None:
    from e2b.sandbox.signature import get_signature

    for path, operation, user in (("/a b", "read", "user"), ("ü/é", "write", None)):
        made = get_signature(path, operation, user, "token", 60)
        expiration = str(made["expiration"])
        assert keys.signature(path, operation, user or "", "token", expiration) == made["signature"]
        assert keys.signature(path, operation, user or "", "token", None) != made["signature"]


def test_a_signature_is_missing_then_wrong_then_late() -> None:
    late = str(int(datetime.now(UTC).timestamp()) - 10)
    for given, expiration, words in (
        (None, late, "missing signature query parameter"),
        ("v1_y", late, "invalid signature"),
        ("v1_x", late, "signature is already expired"),
        ("v1_x", "soon", "signature is already expired"),
    ):
        with pytest.raises(Unauthenticated, match=words):
            keys.check_signature(given, "v1_x", expiration)
    keys.check_signature("v1_x", "v1_x", None)


def test_a_stream_of_frames_is_the_same_however_it_is_cut() -> None:
    whole = connect.message({"a": "ü"}) + connect.message({}) + connect.end()
    for size in range(1, len(whole)):
        frames = connect.Frames()
        found = [one for at in range(0, len(whole), size) for one in frames.feed(whole[at : at + size])]
        assert found == [{"a": "ü"}, {}]
    with pytest.raises(InvalidRequest, match="at most"):
        list(connect.Frames().feed(struct.pack(">BI", 0, 1 << 31)))


def test_errors_have_the_status_that_the_clients_know_and_say_whether_to_ask_again() -> None:
    assert errors.answer(errors.gone("sbxa"))[:2] == (
        502,
        {"code": 502, "message": "The sandbox was not found", "sandboxId": "sbxa"},
    )
    assert errors.answer(HostFull())[2]["should-retry"] == "false"
    assert errors.answer(Unavailable())[2]["should-retry"] == "true"
    assert errors.rpc(Conflict("x", code="wrong-state"))["message"] == "The sandbox was not found"
    assert errors.rpc(InvalidRequest("invalid username: 'x'", field="user"))["code"] == "unauthenticated"


async def _chunks(data: bytes, size: int) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_a_form_is_taken_apart_however_it_is_cut(size: int) -> None:
    body = (
        b'--xyz\r\nContent-Disposition: form-data; name="file"; filename="/a/dir;x=/b%22c.txt"\r\n\r\none\r\n--not\r\n'
        b'--xyz\r\nContent-Disposition: form-data; name=file; filename="d\\\\e\xc3\xbc%0A"\r\nX: y\r\n\r\n\r\n--xyz--\r\n'
    )
    form = uploads.Form(BOUNDARY, _chunks(body, size))
    found = []
    while (head := await form.next()) is not None:
        found.append((head.field, head.filename, b"".join([piece async for piece in form.data()])))
    assert found == [("file", '/a/dir;x=/b"c.txt', b"one\r\n--not"), ("file", "d\\eü\n", b"")]


async def test_a_form_that_is_cut_off_is_never_taken_for_a_whole_file() -> None:
    body = b'--xyz\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nhalf'
    form = uploads.Form(BOUNDARY, _chunks(body, 10))
    assert (await form.next()) is not None
    with pytest.raises(InvalidRequest, match="ends within"):
        await _all(form.data())
    for wrong in ("text/plain", "multipart/form-data", "multipart/form-data; boundary="):
        with pytest.raises(InvalidRequest):
            uploads.Form(wrong, _chunks(b"", 1))


async def _all(pieces: AsyncIterator[bytes]) -> list[bytes]:
    return [piece async for piece in pieces]


async def test_gzip_is_unpacked_in_bounded_pieces_and_must_be_whole() -> None:
    data = bytes(8 << 20)
    pieces = [piece async for piece in uploads.unzipped(_chunks(gzip.compress(data), 4096))]
    assert b"".join(pieces) == data
    assert max(map(len, pieces)) <= uploads.PIECE_BYTES
    for wrong in (gzip.compress(data)[:-1], b"not gzip at all"):
        with pytest.raises(InvalidRequest):
            await _all(uploads.unzipped(_chunks(wrong, 4096)))


async def test_small_chunks_become_one() -> None:
    assert [piece async for piece in uploads.in_pieces(_chunks(bytes(1000), 1))] == [bytes(1000)]


@dataclass
class Placed:
    created_at: datetime
    id: str


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_pages_hold_everything_once_also_when_things_go_meanwhile(order: str) -> None:
    began = datetime(2026, 1, 1, tzinfo=UTC)
    everything = [Placed(began + timedelta(microseconds=n // 2), f"x{n}") for n in range(9)]
    query: dict[str, str] = {"limit": "2", "order": order}
    seen: list[str] = []
    while True:
        part, token = listing.page(query, listing.ordered(query, everything))
        seen += [one.id for one in part]
        everything = [one for one in everything if one.id != seen[-1]]
        if token is None:
            break
        query["nextToken"] = token
    assert seen == sorted(seen, reverse=order == "desc")
    assert len(seen) == 9


def test_filters_that_are_none_are_refused() -> None:
    with pytest.raises(InvalidRequest):
        listing.states({"state": "gone"})
    with pytest.raises(InvalidRequest):
        listing.ordered({"order": "up"}, [])
    for query in ({"limit": "0"}, {"limit": "x"}, {"nextToken": "x"}):
        with pytest.raises(InvalidRequest):
            listing.page(query, [])
    assert listing.metadata({"metadata": "a%2520b=c%2526d"}) == {"a b": "c&d"}


def test_what_is_allowed_out_comes_before_what_is_denied() -> None:
    assert network.policy(None, allow=None) == "public-internet"
    assert network.policy(None, allow=False) == "none"
    both = Network(allowOut=["a.test", "192.0.2.1"], denyOut=["0.0.0.0/0", "192.0.2.0/24"])
    policy = network.policy(both, allow=None)
    assert isinstance(policy, dict)
    assert policy["preset"] == "none"
    assert [rule["name"] for rule in policy["networks"]] == ["allow-out", "deny-out"]
    assert policy["rules"][0]["hosts"] == ["a.test"]
    for wrong in (Network(denyOut=["a.test"]), Network(allowOut=["a.test"])):
        with pytest.raises(InvalidRequest):
            network.policy(wrong, allow=None)


def test_permissions_are_written_as_ls_writes_them() -> None:
    assert entries.permissions(0o754, directory=True) == "drwxr-xr--"
    assert entries.permissions(0o640, directory=False) == "-rw-r-----"


def test_a_failed_operation_is_an_error_in_the_log_that_says_why() -> None:
    asked, ended = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, 0, 0, 1, 500_000, tzinfo=UTC)
    failed = Operation("op", "prj", "sbx", "wake", OperationState.FAILED, asked, None, ended, Failure("x", "Too bad."))
    fields = {"operation": "op", "kind": "wake"}
    assert logs.entry(failed) == {
        "timestamp": "2026-01-01T00:00:01.500000Z",
        "message": "wake: failed: Too bad.",
        "level": "error",
        "fields": {**fields, "state": "failed"},
    }
    running = replace(failed, state=OperationState.RUNNING, finished_at=None, error=None)
    assert logs.entry(running) == {
        "timestamp": "2026-01-01T00:00:00Z",
        "message": "wake: running",
        "level": "info",
        "fields": {**fields, "state": "running"},
    }


def test_ids_with_a_tail_are_cut() -> None:
    assert routing.id_of("sbxa-b-c") == "sbxa"
    assert routing.id_of("SBX") == ""


def test_a_watch_that_cannot_see_everything_says_so_after_what_it_saw() -> None:
    """F8"""
    event = watching.event_of({"event": "create", "path": "a"})
    assert event == {"name": "a", "type": "EVENT_TYPE_CREATE"}
    assert watching.event_of({"event": "gone", "path": ""}) is None
    for told, words in (("limit", "nothing in 'a/b' is seen"), ("overflow", "some of it is lost")):
        with pytest.raises(LimitExceeded, match=words) as refused:
            watching.event_of({"event": told, "path": "a/b"})
        assert errors.rpc(refused.value)["code"] == "resource_exhausted"
