"""Output as lines: text is never cut within a character, and every byte can be had back."""

import base64
import itertools
import json

from hypothesis import given
from hypothesis import strategies as st

from space.errors import NotFound
from space.model.command import Exit, ExitKind
from space.node.ndjson import Lines
from space.node.readers import Chunk, Exited, Gap


def lines_of(chunks: list[bytes], stream: str = "stdout") -> list[dict]:
    lines, at, out = Lines(), 0, b""
    for chunk in chunks:
        out += lines.encode(Chunk(stream, at, chunk))
        at += len(chunk)
    out += lines.encode(Exited(Exit(ExitKind.EXITED, 0), {stream: at}, 0.5))
    return [json.loads(line) for line in out.splitlines()]


def bytes_of(line: dict) -> bytes:
    return line["data"].encode() if line["encoding"] == "utf-8" else base64.b64decode(line["data"])


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges) if end > start]


@given(text=st.text(), places=st.lists(st.integers(min_value=0, max_value=10_000), max_size=20))
def test_text_stays_text_wherever_it_is_cut(text, places):
    """E5"""
    *lines, end = lines_of(cut(text.encode(), places))
    assert all(line["encoding"] == "utf-8" for line in lines)
    assert "".join(line["data"] for line in lines) == text
    assert end["type"] == "exit"


@given(data=st.binary(max_size=300), places=st.lists(st.integers(min_value=0, max_value=10_000), max_size=20))
def test_any_bytes_can_be_had_back_at_their_offsets(data, places):
    *lines, end = lines_of(cut(data, places))
    at = 0
    for line in lines:
        assert line["offset"] == at
        at += len(bytes_of(line))
    assert b"".join(bytes_of(line) for line in lines) == data
    assert end["produced"] == {"stdout": len(data)}


def test_a_character_that_is_never_completed_comes_as_bytes_before_the_exit():
    first, second, end = lines_of([b"caf\xc3"])
    assert (first["data"], second["data"], second["encoding"], second["offset"]) == ("caf", "ww==", "base64", 3)
    assert (end["type"], end["duration_s"]) == ("exit", 0.5)


def test_an_error_comes_last_behind_what_was_held_back():
    lines = Lines()
    lines.encode(Chunk("stdout", 0, b"caf\xc3"))
    held, last = map(json.loads, lines.fail(NotFound("gone", code="sandbox-deleted")).splitlines())
    assert (held["offset"], held["data"]) == (3, "ww==")
    assert last == {
        "type": "error",
        "error": {"code": "sandbox-deleted", "message": "gone", "kind": "NotFound", "details": {}},
    }


def test_streams_do_not_complete_each_other():
    lines = Lines()
    out = lines.encode(Chunk("stdout", 0, b"\xc3")) + lines.encode(Chunk("stderr", 0, b"\xa9"))
    assert json.loads(out)["encoding"] == "base64"
    assert json.loads(lines.encode(Chunk("stdout", 1, b"\xa9")))["data"] == "é"


def test_a_gap_ends_what_was_held_back():
    lines = Lines()
    assert lines.encode(Chunk("stdout", 0, b"\xc3")) == b""
    held, gap = (json.loads(line) for line in lines.encode(Gap("stdout", 1, 9)).splitlines())
    assert (held["data"], held["encoding"]) == ("ww==", "base64")
    assert gap == {"type": "gap", "stream": "stdout", "from": 1, "to": 9}
