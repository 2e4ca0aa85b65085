"""The attach subprotocol as a transcript, without a connection."""

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from space import HostError, InvalidRequest, MachineLost, Output
from space.sdk.attach import STDIN_FRAME_BYTES, STDIN_WINDOW_BYTES, Attachment


def out(offset: int, data: bytes, stream: int = 1) -> bytes:
    return struct.pack(">BQ", stream, offset) + data


def text(**message: object) -> str:
    return json.dumps(message)


def started(attachment: Attachment, stdin: int = 0, following: int | None = None) -> None:
    attachment.receive(
        text(type="started", command="cmd", stdin=stdin, stdin_next=stdin if following is None else following)
    )


def sent(attachment: Attachment) -> list[tuple[int, bytes] | str]:
    frames: list[tuple[int, bytes] | str] = []
    while (frame := attachment.next_frame()) is not None:
        frames.append(frame if isinstance(frame, str) else (struct.unpack(">BQ", frame[:9])[1], frame[9:]))
    return frames


def test_output_is_counted_and_a_new_connection_goes_on_from_there() -> None:
    attachment = Attachment()
    assert attachment.query() == {}
    assert attachment.receive(out(0, b"abc")) == Output("stdout", 0, b"abc")
    assert attachment.receive(out(0, b"e", stream=2)) == Output("stderr", 0, b"e")
    assert attachment.query() == {"stdout_from": "3", "stderr_from": "1"}


def test_bytes_that_come_twice_are_given_once() -> None:
    attachment = Attachment()
    attachment.receive(out(0, b"abc"))
    assert attachment.receive(out(1, b"bcde")) == Output("stdout", 3, b"de")
    assert attachment.receive(out(0, b"abc")) is None


def test_bytes_that_are_missing_are_an_error_and_never_skipped() -> None:
    with pytest.raises(HostError, match="goes on at 5 instead of 0"):
        Attachment().receive(out(5, b"x"))


def test_a_gap_is_told_and_the_stream_goes_on_behind_it() -> None:
    attachment = Attachment()
    attachment.receive(out(0, b"ab"))
    gap = attachment.receive(text(type="gap", stream="stdout", **{"from": 2, "to": 10}))
    assert (gap.stream, gap.start, gap.end, gap.data) == ("stdout", 2, 10, b"")
    assert attachment.receive(out(10, b"k")) == Output("stdout", 10, b"k")


def test_a_character_cut_in_two_is_whole_in_the_text() -> None:
    """E5"""
    attachment = Attachment()
    assert attachment.receive(out(0, b"caf\xc3")).text == "caf"
    assert attachment.receive(out(4, b"\xa9")).text == "é"


@given(st.text(), st.data())
def test_text_is_exact_however_the_bytes_are_cut(content: str, data: st.DataObject) -> None:
    """E5"""
    attachment, raw, got, at = Attachment(), content.encode(), "", 0
    while at < len(raw):
        size = data.draw(st.integers(1, len(raw) - at))
        got += attachment.receive(out(at, raw[at : at + size])).text
        at += size
    assert got == content


def test_the_exit_is_known_only_from_its_own_frame() -> None:
    attachment = Attachment()
    attachment.receive(out(0, b"x"))
    assert attachment.exit is None
    ended = {"kind": "signaled", "code": None, "signal": 9}
    attachment.receive(text(type="exit", exit=ended, produced={"stdout": 1, "stderr": 0}))
    assert (attachment.exit.kind, attachment.exit.signal, attachment.exit.status) == ("signaled", 9, 137)


def test_an_error_of_the_server_is_raised_as_its_class() -> None:
    with pytest.raises(MachineLost) as caught:
        Attachment().receive(text(type="error", error={"code": "oom-killed", "message": "gone", "details": {"a": 1}}))
    assert (caught.value.code, caught.value.details) == ("oom-killed", {"a": 1})


def test_an_error_under_a_code_of_its_own_is_raised_as_the_class_that_the_server_names() -> None:
    described = {"code": "program-not-found", "message": "no", "kind": "InvalidRequest", "details": {"field": "argv"}}
    with pytest.raises(InvalidRequest) as caught:
        Attachment().receive(text(type="error", error=described))
    assert caught.value.code == "program-not-found"


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x01",
        out(0, b"x", stream=0),
        out(0, b"x", stream=9),
        "",
        "[]",
        "{}",
        text(type="exit"),
        text(type="gap", stream="stdin", to=1),
    ],
)
def test_a_frame_that_is_none_is_an_error_of_the_host(frame: bytes | str) -> None:
    with pytest.raises(HostError) as caught:
        Attachment().receive(frame)
    assert caught.value.code == "protocol"


def test_a_message_of_a_later_version_is_passed_over() -> None:
    assert Attachment().receive(text(type="weather", sun=True)) is None


def test_nothing_is_sent_before_the_greeting() -> None:
    attachment = Attachment()
    attachment.feed(b"abc")
    assert sent(attachment) == []
    started(attachment)
    assert sent(attachment) == [(0, b"abc")]
    assert sent(attachment) == []


def test_stdin_that_was_not_made_safe_is_sent_again_on_the_next_connection() -> None:
    attachment = Attachment()
    started(attachment)
    attachment.feed(b"abcdef")
    attachment.close_stdin()
    assert sent(attachment) == [(0, b"abcdef"), text(type="stdin-eof")]
    attachment.receive(text(type="ack", stdin=2))
    attachment.disconnected()
    assert sent(attachment) == []
    started(attachment, stdin=4)
    assert sent(attachment) == [(4, b"ef"), text(type="stdin-eof")]
    attachment.receive(text(type="ack", stdin=6))
    assert attachment.stdin_pending == 0


def test_whoever_attaches_later_writes_behind_what_was_written_before() -> None:
    attachment = Attachment()
    attachment.feed(b"mine")
    started(attachment, stdin=60, following=100)
    assert sent(attachment) == [(100, b"mine")]
    attachment.receive(text(type="ack", stdin=80))
    assert attachment.stdin_pending == 4
    attachment.receive(text(type="ack", stdin=102))
    attachment.disconnected()
    started(attachment, stdin=102, following=104)
    assert sent(attachment) == [(102, b"ne")]


def test_the_window_closes_and_opens_with_what_is_safe() -> None:
    attachment = Attachment()
    started(attachment)
    assert attachment.stdin_room == STDIN_WINDOW_BYTES
    attachment.feed(bytes(STDIN_WINDOW_BYTES))
    assert attachment.stdin_room == 0
    frames = sent(attachment)
    assert [len(data) for _, data in frames] == [STDIN_FRAME_BYTES] * (STDIN_WINDOW_BYTES // STDIN_FRAME_BYTES)
    attachment.receive(text(type="ack", stdin=100))
    assert attachment.stdin_room == 100


def test_safe_beyond_what_was_written_is_a_lie() -> None:
    attachment = Attachment()
    started(attachment)
    with pytest.raises(HostError):
        attachment.receive(text(type="ack", stdin=1))


def test_writing_after_close_or_after_the_end_is_a_typed_error() -> None:
    """E12"""
    attachment = Attachment()
    attachment.close_stdin()
    with pytest.raises(InvalidRequest) as caught:
        attachment.feed(b"x")
    assert caught.value.code == "stdin-closed"
    attachment = Attachment()
    attachment.receive(text(type="exit", exit={"kind": "exited", "code": 0}, produced={}))
    with pytest.raises(InvalidRequest) as caught:
        attachment.feed(b"x")
    assert caught.value.code == "command-ended"
