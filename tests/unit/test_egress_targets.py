"""Hosts and targets of requests have one reading each, or are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from space.egress.denials import BadRequest
from space.egress.targets import TARGET_CHARS_MAX, Authority, parse_authority, parse_target

GOOD = Authority("good.example", 80)


@pytest.mark.parametrize(
    ("value", "scheme", "expected"),
    [
        (b"good.example", "http", GOOD),
        (b"GOOD.Example", "http", GOOD),
        (b"good.example.", "http", GOOD),
        (b"good.example:80", "http", GOOD),
        (b"good.example:443", "http", Authority("good.example", 443)),
        (b"good.example", "https", Authority("good.example", 443)),
        (b"xn--mnchen-3ya.example", "https", Authority("xn--mnchen-3ya.example", 443)),
        (b"a_b.example:65535", "https", Authority("a_b.example", 65535)),
    ],
)
def test_a_host_has_one_form(value: bytes, scheme: str, expected: Authority) -> None:
    assert parse_authority(value, scheme) == expected


@pytest.mark.parametrize(
    "value",
    [
        *(b"", b".", b":80", b"good.example:", b"good.example:0", b"good.example:65536", b"good.example:1e3"),
        *(b"good.example:-1", b"good.example: 80", b"good.example:80:80", b"a@good.example", b"good.example/", b"a b"),
        *(b"good.example\x00", b"127.0.0.1", b"2130706433", b"0x7f.1", b"127.1", b"[::1]", b"::1", b"1.2.3.4."),
        *("g\xf6\xf6d.example".encode(), "g\xf6\xf6d.example".encode("latin-1"), b"good.example:\xd9\xa1", b"*"),
        *(b"%67ood.example", b"-a.example", b"a-.example", b"a..b", b"a" * 64 + b".example", b"a." * 127 + b"example"),
    ],
)
def test_what_is_no_host_is_refused(value: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_authority(value, "http")
    assert caught.value.reason == "bad-host"


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (b"/", "/"),
        (b"/a?b=c", "/a?b=c"),
        (b"//evil.example/", "//evil.example/"),
        (b"/a?b?c", "/a?b?c"),
        (b"http://good.example", "/"),
        (b"http://good.example?", "/?"),
        (b"HTTP://GOOD.example:80/a?b", "/a?b"),
        (b"http://good.example//a", "//a"),
    ],
)
def test_a_target_becomes_a_path(target: bytes, expected: str) -> None:
    assert parse_target(target, "GET", "http", GOOD) == expected


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (b"", "bad-target"),
        (b"a", "bad-target"),
        (b"*", "bad-target"),
        (b"/a#b", "bad-target"),
        (b"/a\\b", "bad-target"),
        (b"/a b", "bad-target"),
        (b"/a\x00", "bad-target"),
        (b"/a\r\nb", "bad-target"),
        (b"/\xc3\xb6", "bad-target"),
        (b"/" + b"a" * TARGET_CHARS_MAX, "bad-target"),
        (b"ftp://good.example/", "bad-target"),
        (b"https://good.example/", "authority-mismatch"),
        (b"http://evil.example/", "authority-mismatch"),
        (b"http://good.example:81/", "authority-mismatch"),
        (b"http://a@good.example/", "bad-host"),
        (b"http://good.example@evil.example/", "bad-host"),
        (b"http://[::1]/", "bad-host"),
        (b"http:///", "bad-host"),
        (b"http://good.example[", "bad-target"),
    ],
)
def test_what_is_no_target_is_refused(target: bytes, reason: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_target(target, "GET", "http", GOOD)
    assert caught.value.reason == reason


def test_a_star_is_for_options_alone() -> None:
    assert parse_target(b"*", "OPTIONS", "http", GOOD) == "*"


@given(st.binary(max_size=200), st.sampled_from(["", "/", "http://good.example", "http://"]))
def test_no_target_whatever_has_spaces_controls_or_another_host(data: bytes, before: str) -> None:
    try:
        found = parse_target(before.encode() + data, "GET", "http", GOOD)
    except BadRequest:
        return
    assert found.startswith("/")
    assert all("!" <= character <= "~" for character in found)
