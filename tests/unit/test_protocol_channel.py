"""Both ends of the channel, as conversations."""

import json
from typing import Any

import pytest

from space.protocol.channel import PENDING_BYTES_MAX, ChannelError, failure
from space.protocol.checks import MessageError
from space.protocol.events import (
    Ended,
    Event,
    Greeted,
    Happened,
    OutOfStep,
    Received,
    Replied,
    Requested,
    WasReset,
    Welcomed,
    Writable,
)
from space.protocol.frames import OFFSET, FrameType, encode
from space.protocol.guest import GuestChannel
from space.protocol.host import HostChannel
from space.protocol.messages import REQUESTS_MAX
from space.protocol.streams import WINDOW_BYTES, StreamError

COMMAND = {"id": "c1", "argv": ["true"], "streams": {"stdout": 11, "stderr": 12}}


def drain(channel: HostChannel | GuestChannel) -> bytes:
    out = bytearray()
    while buffers := channel.outgoing():
        data = b"".join(buffers)
        channel.written(len(data))
        out += data
    return bytes(out)


def events_of(channel: HostChannel | GuestChannel, data: bytes) -> list[Event]:
    channel.feed(data)
    found = []
    while (event := channel.next_event()) is not None:
        found.append(event)
        if isinstance(event, Greeted) and isinstance(channel, GuestChannel):
            channel.welcome("boot", 1, [])
    return found


def exchange(host: HostChannel, guest: GuestChannel) -> list[Event]:
    """Carry everything both ways until both are quiet, and return what happened."""
    found: list[Event] = []
    while True:
        down = drain(host)
        found += events_of(guest, down)
        up = drain(guest)
        found += events_of(host, up)
        if not down and not up:
            return found


@pytest.fixture
def ends() -> tuple[HostChannel, GuestChannel]:
    host, guest = HostChannel(), GuestChannel()
    host.hello()
    exchange(host, guest)
    assert host.welcomed
    return host, guest


def only(events: list[Event], kind: type[Event]) -> Any:
    found = [event for event in events if isinstance(event, kind)]
    assert len(found) == 1, events
    return found[0]


def test_the_guest_says_nothing_until_it_is_greeted():
    guest = GuestChannel()
    guest.event({"event": "oom", "id": "c1"})
    guest.open_send(1)
    guest.send(1, b"early")
    assert drain(guest) == b""


def test_a_request_is_checked_carried_and_answered(ends):
    host, guest = ends
    number = host.request("start", COMMAND)
    requested = only(exchange(host, guest), Requested)
    assert (requested.number, requested.op, requested.fields["argv"], requested.fields["env"]) == (
        number,
        "start",
        ["true"],
        {},
    )
    guest.reply(number, {"pid": 5})
    replied = only(exchange(host, guest), Replied)
    assert (replied.number, replied.op, replied.ok, replied.failure) == (number, "start", {"pid": 5}, None)


def test_a_refusal_carries_code_and_errno(ends):
    host, guest = ends
    number = host.request("stat", {"path": "/x"})
    exchange(host, guest)
    guest.refuse(number, failure("not-found", "no", 2))
    assert only(exchange(host, guest), Replied).failure == {"code": "not-found", "message": "no", "errno": 2}


def test_wrong_fields_are_refused_by_both_ends(ends):
    host, guest = ends
    with pytest.raises(MessageError, match="argv"):
        host.request("start", {"id": "c1", "streams": {}})
    raw = b"".join(encode(FrameType.REQUEST, 99, json.dumps({"op": "start", "id": 3}).encode()))
    assert events_of(guest, raw) == []
    host._requests[99] = "start"
    assert only(events_of(host, drain(guest)), Replied).failure["code"] == "invalid-request"


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"[]",
        b"\xff",
        b"{",
        b"[" * 100_000,
        b'{"op": 1}',
        b'{"op": "rm"}',
        b'{"op":"stat","path":"a\\u0000"}',
        b"1" * 5000,
    ],
)
def test_malformed_requests_are_answered_not_obeyed(ends, payload: bytes):
    host, guest = ends
    assert events_of(guest, b"".join(encode(FrameType.REQUEST, 99, payload))) == []
    host._requests[99] = "stat"
    assert only(events_of(host, drain(guest)), Replied).failure["code"] == "invalid-request"


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"[]",
        b'{"ok": 1}',
        b'{"error": {}}',
        b'{"ok":{"pid":-1}}',
        b'{"ok":{"pid":1e9}}',
        b'{"ok":{"pid":true}}',
        b"{}",
    ],
)
def test_a_malformed_reply_of_a_hostile_guest_is_a_failure(ends, payload: bytes):
    host, _guest = ends
    number = host.request("start", COMMAND)
    drain(host)
    assert (
        only(events_of(host, b"".join(encode(FrameType.REPLY, number, payload))), Replied).failure["code"]
        == "bad-message"
    )


def test_replies_to_what_was_not_asked_are_ignored(ends):
    host, _ = ends
    assert events_of(host, b"".join(encode(FrameType.REPLY, 7, b'{"ok":{}}'))) == []


def test_requests_without_an_answer_are_bounded_at_the_host(ends):
    host, _ = ends
    for _ in range(REQUESTS_MAX):
        host.request("list")
    with pytest.raises(ChannelError):
        host.request("list")


def test_a_sender_stops_at_the_window_and_goes_on_when_acknowledged(ends):
    host, guest = ends
    guest.open_send(11)
    host.open_receive(11)
    assert guest.room(11) == WINDOW_BYTES
    guest.send(11, bytes(WINDOW_BYTES))
    assert guest.room(11) == 0
    with pytest.raises(StreamError):
        guest.send(11, b"x")
    assert sum(len(event.data) for event in exchange(host, guest) if isinstance(event, Received)) == WINDOW_BYTES
    host.ack(11, WINDOW_BYTES // 2)
    assert only(exchange(host, guest), Writable).acked == WINDOW_BYTES // 2
    assert guest.room(11) == WINDOW_BYTES // 2


def test_a_guest_that_sends_more_than_the_window_has_its_stream_reset(ends):
    host, guest = ends
    host.open_receive(11)
    data = b"".join(b"".join(encode(FrameType.DATA, 11, bytes(256 * 1024))) for _ in range(5))
    assert only(events_of(host, data), WasReset).failure["code"] == "protocol-error"
    assert not host.receives(11)
    guest.open_send(11)
    assert isinstance(exchange(host, guest)[-1], WasReset)


@pytest.mark.parametrize(
    "frame",
    [
        (FrameType.EOF, 11, OFFSET.pack(10)),
        (FrameType.EVENT, 11, b'{"event":"stream-at","stream":11,"offset":5}'),
        (FrameType.EOF, 11, OFFSET.pack(2**64 - 1)),
    ],
)
def test_a_stream_that_skips_bytes_is_reset_not_accepted(ends, frame: tuple[FrameType, int, bytes]):
    host, _ = ends
    host.open_receive(11, durable=True)
    assert only(events_of(host, b"".join(encode(*frame))), WasReset).failure["code"] == "protocol-error"


def test_an_acknowledgement_of_what_was_never_sent_is_an_error_of_the_other_side(ends):
    _host, guest = ends
    guest.open_send(11, durable=True)
    guest.send(11, b"abc")
    assert (
        only(events_of(guest, b"".join(encode(FrameType.ACK, 11, OFFSET.pack(4)))), WasReset).failure["code"]
        == "protocol-error"
    )


def test_an_event_waits_for_the_ends_of_its_streams(ends):
    host, guest = ends
    host.open_receive(11, durable=True)
    guest.open_send(11, durable=True)
    guest.event({"event": "exit", "id": "c1", "kind": "exited", "code": 0, "produced": {"stdout": 3}}, after=[11])
    guest.send(11, b"abc")
    assert [type(event) for event in exchange(host, guest)] == [Received]
    guest.end(11)
    assert [type(event) for event in exchange(host, guest)] == [Ended, Happened]


def test_a_transfer_is_forgotten_by_both_ends_when_all_of_it_is_safe(ends):
    host, guest = ends
    host.open_send(11)
    guest.open_receive(11)
    host.send(11, b"abc")
    host.end(11)
    exchange(host, guest)
    guest.ack(11, 3)
    exchange(host, guest)
    assert not host.sends(11)
    assert not guest.receives(11)


def test_a_new_hello_ends_transfers_and_requests_and_keeps_commands(ends):
    host, guest = ends
    number = host.request("stat", {"path": "/"})
    for durable, stream in ((True, 11), (False, 12)):
        guest.open_send(stream, durable=durable)
        host.open_receive(stream, durable=durable)
        guest.send(stream, b"0123456789")
    events = exchange(host, guest)
    assert len(events) == 3
    host.hello()
    events = exchange(host, guest)
    assert [(event.number, event.failure["code"]) for event in events if isinstance(event, Replied)] == [
        (number, "outcome-unknown")
    ]
    assert [event.number for event in events if isinstance(event, WasReset)] == [12, 12]
    assert not [event for event in events if isinstance(event, Received)], (
        "what is received already must not come again"
    )
    guest.reply(number, {})
    guest.send(11, b"more")
    received = only(exchange(host, guest), Received)
    assert (received.offset, received.data) == (10, b"more")


def test_a_fresh_host_adopts_a_command_where_its_own_record_ends():
    guest = GuestChannel()
    first = HostChannel()
    first.hello()
    exchange(first, guest)
    first.open_receive(11, durable=True)
    guest.open_send(11, durable=True)
    guest.send(11, b"0123456789")
    exchange(first, guest)
    second = HostChannel()
    second.hello()
    guest.feed(drain(second))
    greeted = guest.next_event()
    assert isinstance(greeted, Greeted)
    acked, produced, ended = guest.place(11)
    place = {"number": 11, "acked": acked, "produced": produced, "ended": ended}
    guest.welcome("boot", 1, [{"id": "c1", "pid": 2, "state": "running", "exit": None, "streams": {"stdout": place}}])
    second.feed(drain(guest))
    welcomed = second.next_event()
    assert isinstance(welcomed, Welcomed)
    second.open_receive(11, durable=True, offset=4)
    second.feed(drain(guest))
    received = second.next_event()
    assert isinstance(received, Received)
    assert (received.offset, received.data) == (4, b"456789")
    assert second.new_number() == 12


def test_the_host_believes_only_the_answer_to_its_own_greeting(ends):
    host, _ = ends
    host.hello()
    forged = {"version": 1, "nonce": "guess", "boot_id": "b", "pid": 1, "number": 0, "commands": []}
    assert events_of(host, b"".join(encode(FrameType.WELCOME, 0, json.dumps(forged).encode()))) == []
    assert not host.welcomed


def test_a_guest_out_of_step_is_reported_once_and_heard_no_more(ends):
    host, guest = ends
    guest.event({"event": "oom", "id": "c1"})
    assert [type(event) for event in events_of(host, b"garbage" * 10 + drain(guest))] == [OutOfStep]
    host.hello()
    exchange(host, guest)
    assert host.welcomed


def test_after_falling_silent_the_reply_is_the_last_frame(ends):
    host, guest = ends
    guest.open_send(11, durable=True)
    host.open_receive(11, durable=True)
    number = host.request("quiesce")
    exchange(host, guest)
    guest.send(11, b"later")
    guest.fall_silent(number)
    guest.event({"event": "oom", "id": "c1"})
    assert [type(event) for event in exchange(host, guest)] == [Replied]
    guest.send(11, b" still")
    assert drain(guest) == b""
    host.hello()
    assert b"".join(event.data for event in exchange(host, guest) if isinstance(event, Received)) == b"later still"


def test_both_halves_of_a_terminals_stream_share_its_number(ends):
    host, guest = ends
    for channel in ends:
        channel.open_send(11, durable=True)
        channel.open_receive(11, durable=True)
    host.send(11, b"in")
    guest.send(11, b"out")
    assert {event.data for event in exchange(host, guest) if isinstance(event, Received)} == {b"in", b"out"}


def test_what_waits_to_be_written_is_bounded(ends):
    _, guest = ends
    for number in range(1, 40):
        guest.open_send(number)
        guest.send(number, bytes(WINDOW_BYTES))
    guest.outgoing()
    assert guest._pending_bytes <= PENDING_BYTES_MAX + 300_000


def test_a_busy_stream_does_not_starve_another(ends):
    host, guest = ends
    for number in (11, 12):
        guest.open_send(number)
        host.open_receive(number)
    guest.send(11, bytes(WINDOW_BYTES))
    guest.send(12, b"small")
    order = [event.number for event in exchange(host, guest) if isinstance(event, Received)]
    assert order.index(12) <= 2


def test_a_stream_of_single_bytes_does_not_cost_an_object_for_each(ends):
    _, guest = ends
    guest.open_send(11, durable=True)
    for _ in range(20_000):
        guest.send(11, b"x")
        guest.written(sum(map(len, guest.outgoing())))
    half = guest._sends[11]
    assert len(half._unacked) + len(half._unsent) < 10


def test_streams_that_are_silent_take_no_turns():
    host, guest = HostChannel(), GuestChannel()
    host.hello()
    exchange(host, guest)
    for number in range(1, 1001):
        host.open_send(number)
        guest.open_receive(number)
    host.send(500, b"only this one")
    assert len(host._turns) == 1
    assert [event.number for event in exchange(host, guest) if isinstance(event, Received)] == [500]
    assert not host._turns
