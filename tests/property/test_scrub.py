"""Scrubbing a stream is the same however it is cut, keeps its length, and leaves no secret in it."""

import itertools
import json
from urllib.parse import quote

from hypothesis import given, settings
from hypothesis import strategies as st

from space.egress.scrub import MASK_BYTES_MIN, Scrubber, masks_of
from space.model.grant import SecretValue

LIMITS = settings(deadline=None, max_examples=150, database=None, derandomize=True)

# Of few letters, so that masks begin, break off, repeat and overlap everywhere.
texts = st.lists(st.sampled_from((b"a", b"b", b"ab", b"aab", b"abab", b"c")), max_size=60).map(b"".join)
masks = st.lists(texts.map(lambda text: text[:12]).filter(bool), min_size=1, max_size=4)
values = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=6, max_size=24)


def cut(data: bytes, points: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(point % (len(data) + 1) for point in points)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


@LIMITS
@given(masks, texts, st.lists(st.integers(0, 2**30), max_size=30))
def test_however_a_stream_is_cut_the_same_comes_out(found: list[bytes], data: bytes, points: list[int]):
    at_once = Scrubber(found).whole(data)
    scrubber = Scrubber(found)
    told = b""
    fed = 0
    for chunk in cut(data, points):
        told += scrubber.feed(chunk)
        fed += len(chunk)
        assert fed - max(map(len, found)) < len(told) <= fed
    assert told + scrubber.end() == at_once


@LIMITS
@given(masks, texts)
def test_lengths_stay_and_nothing_but_masks_is_touched(found: list[bytes], data: bytes):
    out = Scrubber(found).whole(data)
    assert len(out) == len(data)
    assert all(mask not in out for mask in found)
    in_masks = {
        n for mask in found for at in range(len(data)) if data.startswith(mask, at) for n in range(at, at + len(mask))
    }
    assert all(out[n] == data[n] or (n in in_masks and out[n : n + 1] == b"*") for n in range(len(data)))


@LIMITS
@given(values, st.binary(max_size=40), st.lists(st.integers(0, 2**30), max_size=6))
def test_no_echo_of_a_value_survives(value: str, around: bytes, points: list[int]):
    echo = {"header": value, "url": quote(value, safe="")}
    data = around + json.dumps(echo).encode() + around + value.encode() + around
    scrubber = Scrubber(masks_of(SecretValue("text", {"value": value}), value))
    out = b"".join(scrubber.feed(chunk) for chunk in cut(data, points)) + scrubber.end()
    assert len(out) == len(data)
    assert value.encode() not in out or set(value) == {"*"}


@LIMITS
@given(values, st.binary(max_size=40), st.lists(st.integers(0, 2**30), max_size=6))
def test_told_promptly_nothing_waits_and_of_a_value_at_most_its_first_bytes_are_seen(
    value: str, around: bytes, points: list[int]
):
    data = around + value.encode() + around
    scrubber = Scrubber([value.encode()])
    out = b""
    for chunk in cut(data, points):
        out += scrubber.feed(chunk) + scrubber.prompt()
    out += scrubber.end()
    assert len(out) == len(data)
    at = len(around)
    assert out[at + MASK_BYTES_MIN - 1 : at + len(value)] == b"*" * (len(value) - MASK_BYTES_MIN + 1)
    short = Scrubber([value.encode()])
    assert short.feed(b"x" + value[:5].encode()) + short.prompt() == b"x" + value[:5].encode()
