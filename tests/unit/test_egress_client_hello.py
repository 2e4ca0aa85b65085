"""What a TLS client says first is read as it is meant, whoever cut it into pieces, and nothing else is taken for it."""

from __future__ import annotations

import random
import ssl
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from space.egress.client_hello import HELLO_BYTES_MAX, ClientHello, HelloReader, NotAHello, parse_client_hello


def real(name: str | None = "good.example", alpn: tuple[str, ...] = ("h2", "http/1.1")) -> bytes:
    """Return what Python's own TLS says first."""
    context = ssl.create_default_context()
    context.check_hostname = name is not None
    if alpn:
        context.set_alpn_protocols(list(alpn))
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    connection = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        connection.do_handshake()
    return outgoing.read()


REAL = real()


def test_a_real_one_is_read() -> None:
    assert parse_client_hello(REAL) == ClientHello("good.example", ("h2", "http/1.1"), encrypted=False)
    assert parse_client_hello(real(None, ())) == ClientHello(None, (), encrypted=False)


def test_a_real_one_is_waited_for_until_it_is_whole() -> None:
    assert {parse_client_hello(REAL[:size]) for size in range(len(REAL))} == {None}


def test_what_comes_behind_it_changes_nothing() -> None:
    assert parse_client_hello(REAL + b"anything") == parse_client_hello(REAL)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100, 511])
def test_one_in_many_records_is_the_same(size: int) -> None:
    message = REAL[5:]
    parts = [message[at : at + size] for at in range(0, len(message), size)]
    data = b"".join(REAL[:3] + len(part).to_bytes(2) + part for part in parts)
    assert parse_client_hello(data) == parse_client_hello(REAL)


def test_an_encrypted_one_inside_is_noticed() -> None:
    length = int.from_bytes(REAL[3:5])
    for kind in (0xFE0D, 0xFFCE):
        more = kind.to_bytes(2) + b"\x00\x04abcd"
        body = bytearray(REAL[9:])
        at = 2 + 32 + 1 + body[34]
        at += 2 + int.from_bytes(body[at : at + 2])
        at += 1 + body[at]
        extensions = bytes(body[at + 2 :]) + more
        whole = bytes(body[:at]) + len(extensions).to_bytes(2) + extensions
        message = b"\x01" + len(whole).to_bytes(3) + whole
        assert length + len(more) == len(message)
        found = parse_client_hello(REAL[:3] + len(message).to_bytes(2) + message)
        assert found == ClientHello("good.example", ("h2", "http/1.1"), encrypted=True)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        b"\x16\x03\x01\x00\x00",
        b"\x16\x02\x00" + REAL[3:],
        b"\x17" + REAL[1:],
        REAL[:5] + b"\x02" + REAL[6:],
        REAL[:6] + b"\xff\xff\xff" + REAL[9:],
        REAL[:3] + b"\xff\xff" + REAL[5:],
    ],
)
def test_something_else_is_not_waited_for(data: bytes) -> None:
    with pytest.raises(NotAHello):
        parse_client_hello(data)


def test_one_that_never_ends_is_given_up() -> None:
    """In records of one byte, or in one that says it is as large as may be."""
    tiny = REAL[:3] + b"\x00\x01"
    message = b"\x01\x00\x3f\xff"
    many = b"".join(tiny + bytes([byte]) for byte in message) + (tiny + b"a") * HELLO_BYTES_MAX
    with pytest.raises(NotAHello):
        parse_client_hello(many[: HELLO_BYTES_MAX + 1])


def test_one_that_comes_byte_by_byte_is_read_once() -> None:
    message = b"\x01\x00\x3f\xff" + bytes(HELLO_BYTES_MAX // 6 - 4)
    data = b"".join(REAL[:3] + b"\x00\x01" + bytes([byte]) for byte in message)
    reader, began = HelloReader(), time.process_time()
    for end in range(1, len(data) + 1):
        assert reader.read(data[:end]) is None
    assert time.process_time() - began < 1


@pytest.mark.parametrize("size", [1, 7, 100])
def test_one_in_many_records_that_come_bit_by_bit_is_the_same(size: int) -> None:
    body = REAL[5:]
    data = b"".join(
        REAL[:3] + len(part).to_bytes(2) + part for part in (body[at : at + size] for at in range(0, len(body), size))
    )
    reader = HelloReader()
    assert [reader.read(data[:end]) for end in range(len(data))] == [None] * len(data)
    assert reader.read(data) == parse_client_hello(REAL)


@given(st.binary(max_size=2000))
def test_no_bytes_whatever_do_anything_but_be_refused_or_waited_for(data: bytes) -> None:
    try:
        found = parse_client_hello(b"\x16\x03\x01" + data)
    except NotAHello:
        return
    assert found is None or isinstance(found, ClientHello)


@given(st.integers(min_value=0), st.integers(min_value=1, max_value=8))
def test_a_real_one_that_was_tampered_with_is_read_refused_or_waited_for(seed: int, count: int) -> None:
    chance = random.Random(seed)
    data = bytearray(REAL)
    for _ in range(count):
        data[chance.randrange(len(data))] = chance.randrange(256)
    try:
        found = parse_client_hello(bytes(data))
    except NotAHello:
        return
    assert found is None or found.server_name is None or found.server_name.isascii()
