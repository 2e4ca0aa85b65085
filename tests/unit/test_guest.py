"""The client with which tests look at what leaves a sandbox sees what is there."""

import socket

import pytest

from tests.guest import Closed, Talk


def test_two_answers_are_two() -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\naHTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n")
    theirs.close()
    with Talk(ours) as talk:
        assert [talk.answer().status, talk.answer().status] == [200, 403]
        assert talk.is_closed()


def test_a_connection_that_is_silent_is_not_closed() -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(0.01)
    with Talk(ours) as talk, theirs, pytest.raises(TimeoutError):
        talk.is_closed()


@pytest.mark.parametrize("data", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"])
def test_an_answer_that_breaks_off_is_none(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(data)
    theirs.close()
    with Talk(ours) as talk, pytest.raises(Closed):
        talk.answer()
