"""Frames: what is written is what is read, and what is cut off is never taken for a frame."""

import pytest

from space.protocol.frames import (
    FRAME_BYTES_MAX,
    HEADER,
    MAGIC,
    OVERHEAD_BYTES,
    PADDING,
    PAYLOAD_BYTES_MAX,
    TRAILER,
    Decoder,
    Frame,
    FrameError,
    FrameType,
    encode,
)

HELLO = b'{"version":1,"nonce":"n"}'


def wire(kind: FrameType, stream: int, payload: bytes) -> bytes:
    return b"".join(encode(kind, stream, payload))


def frames_of(decoder: Decoder, data: bytes) -> list[Frame]:
    decoder.feed(data)
    found = []
    while (frame := decoder.next_frame()) is not None:
        found.append(frame)
    return found


def test_a_frame_is_header_payload_and_trailer_as_documented():
    assert wire(FrameType.DATA, 0x01020304, b"abc") == b"SP\x06\x00\x01\x02\x03\x04\x00\x00\x00\x03abc\xa5ECP"


@pytest.mark.parametrize("size", [0, 1, 1024, 1025, PAYLOAD_BYTES_MAX])
def test_payloads_of_every_size_come_back(size: int):
    payload = bytes(i % 251 for i in range(size))
    assert frames_of(Decoder(FrameType.HELLO), wire(FrameType.DATA, 7, payload)) == [Frame(FrameType.DATA, 7, payload)]


def test_a_payload_that_is_too_large_is_refused_by_the_writer():
    with pytest.raises(FrameError):
        encode(FrameType.DATA, 1, bytes(PAYLOAD_BYTES_MAX + 1))


def test_single_bytes_make_the_same_frames():
    decoder, stream = Decoder(FrameType.HELLO), wire(FrameType.DATA, 1, b"x" * 300) + wire(FrameType.EOF, 1, bytes(8))
    found = [frame for i in range(len(stream)) for frame in frames_of(decoder, stream[i : i + 1])]
    assert found == [Frame(FrameType.DATA, 1, b"x" * 300), Frame(FrameType.EOF, 1, bytes(8))]


@pytest.mark.parametrize("kept", range(len(wire(FrameType.DATA, 1, b"y" * 40))))
def test_a_frame_cut_anywhere_is_dropped_and_the_greeting_after_the_padding_found(kept: int):
    cut = wire(FrameType.DATA, 1, b"y" * 40)[:kept]
    found = frames_of(Decoder(FrameType.HELLO), cut + PADDING + wire(FrameType.HELLO, 0, HELLO))
    assert found == [Frame(FrameType.HELLO, 0, HELLO)]


@pytest.mark.parametrize(
    "kept", [HEADER.size, HEADER.size + 1, PAYLOAD_BYTES_MAX // 2, PAYLOAD_BYTES_MAX + HEADER.size, FRAME_BYTES_MAX - 1]
)
def test_the_largest_frame_cut_anywhere_is_filled_by_the_padding(kept: int):
    cut = wire(FrameType.DATA, 1, b"z" * PAYLOAD_BYTES_MAX)[:kept]
    found = frames_of(Decoder(FrameType.HELLO), cut + PADDING + wire(FrameType.HELLO, 0, HELLO))
    assert found == [Frame(FrameType.HELLO, 0, HELLO)]


def test_a_greeting_inside_a_cut_frame_is_not_obeyed():
    """What a client uploads may contain anything, also the bytes of a greeting."""
    forged = wire(FrameType.HELLO, 0, b'{"version":1,"nonce":"forged"}')
    cut = wire(FrameType.DATA, 1, b"a" * 100 + forged + b"b" * 5000)[:-3000]
    found = frames_of(Decoder(FrameType.HELLO), cut + PADDING + wire(FrameType.HELLO, 0, HELLO))
    assert found == [Frame(FrameType.HELLO, 0, HELLO)]


def test_what_only_looks_like_a_greeting_does_not_hide_the_true_one():
    fake = HEADER.pack(MAGIC, FrameType.WELCOME, 0, 0, PAYLOAD_BYTES_MAX)
    found = frames_of(Decoder(FrameType.WELCOME, hunting=True), fake * 3 + PADDING + wire(FrameType.WELCOME, 0, HELLO))
    assert found == [Frame(FrameType.WELCOME, 0, HELLO)]


@pytest.mark.parametrize(
    "header",
    [
        (b"XX", 6, 0, 1, 0),
        (MAGIC, 0, 0, 1, 0),
        (MAGIC, 10, 0, 1, 0),
        (MAGIC, 6, 1, 1, 0),
        (MAGIC, 6, 0, 1, PAYLOAD_BYTES_MAX + 1),
        (MAGIC, 6, 0, 1, 2**32 - 1),
        (MAGIC, 7, 0, 1, 0),
        (MAGIC, 8, 0, 1, 0),
    ],
)
def test_a_malformed_header_starts_the_hunt(header: tuple[bytes, int, int, int, int]):
    decoder = Decoder(FrameType.HELLO)
    assert frames_of(decoder, HEADER.pack(*header) + TRAILER) == []
    assert decoder.hunting
    assert frames_of(decoder, wire(FrameType.DATA, 1, b"lost") + wire(FrameType.HELLO, 0, HELLO)) == [
        Frame(FrameType.HELLO, 0, HELLO)
    ]


def test_noise_does_not_accumulate():
    decoder = Decoder(FrameType.HELLO, hunting=True)
    for _ in range(50):
        assert frames_of(decoder, b"SPSP\x01SP" * 20_000) == []
    assert decoder.dropped_bytes > 50 * 7 * 20_000 - OVERHEAD_BYTES
