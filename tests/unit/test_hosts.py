"""Names of hosts: one form for each, and no address however it is written."""

import socket

import pytest

from space.model.hosts import covers, host_matches, normalise_host, normalise_pattern


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("good.example", "good.example"),
        ("GOOD.Example", "good.example"),
        ("good.example.", "good.example"),
        ("_dmarc.good.example", "_dmarc.good.example"),
        ("a_b.good.example", "a_b.good.example"),
        ("xn--bcher-kva.example", "xn--bcher-kva.example"),
        ("XN--BCHER-KVA.example", "xn--bcher-kva.example"),
        ("1.2.3.4.example", "1.2.3.4.example"),
        ("3com.example", "3com.example"),
        ("localhost", "localhost"),
        ("0xgood.example", "0xgood.example"),
        ("a.0xg", "a.0xg"),
        ("r3---sn-x.example", "r3---sn-x.example"),
        (f"{'a' * 63}.example", f"{'a' * 63}.example"),
        (".".join(["a"] * 127), ".".join(["a"] * 127)),
    ],
)
def test_a_name_has_one_form(written: str, meant: str):
    assert normalise_host(written) == meant
    assert normalise_host(meant) == meant


@pytest.mark.parametrize(
    "written",
    [
        "1.2.3.4",
        "1.2.3.4.",
        "127.1",
        "127.0.1",
        "2130706433",
        "017700000001",
        "0177.0.0.1",
        "0x7f000001",
        "0x7F.0.0.1",
        "0X7f.1",
        "0x7f.0x0.0x0.0x1",
        "0",
        "0x",
        "00.0x00.0.0",
        "1.2.3.4.5",
        "good.1",
        "good.0x1f",
        "good.example.08",
        "256.256.256.256",
        "999999999999",
        "::1",
        "[::1]",
        "::ffff:127.0.0.1",
        "[::ffff:7f00:1]",
        "64:ff9b::7f00:1",
        "fe80::1%eth0",
        "①②⑦.⓪.⓪.①",
        "127。0。0。1",
        "\u0661\u0662\u0667.\u0660.\u0660.\u0661",
    ],
)
def test_an_address_is_no_name_in_any_form(written: str):
    assert normalise_host(written) is None
    assert normalise_pattern(written) is None
    assert normalise_pattern(f"*.{written}") is None


@pytest.mark.parametrize("written", ["127.1", "2130706433", "0x7f000001", "0177.0.0.1", "1.2.3", "0X7f.1", "0"])
def test_whatever_the_systems_resolver_takes_for_a_number_is_none_of_our_names(written: str):
    assert socket.inet_aton(written)
    assert normalise_host(written) is None


@pytest.mark.parametrize(
    "written",
    [
        "",
        ".",
        "..",
        ".good.example",
        "good..example",
        "good.example..",
        "-good.example",
        "good-.example",
        "good.-example",
        "go od.example",
        " good.example",
        "good.example ",
        "good.example\n",
        "good.example\0",
        "good.example\0.evil.example",
        "good.example:443",
        "good.example/",
        "good.example/path",
        "good.example#",
        "good.example@evil.example",
        "user@good.example",
        "http://good.example",
        "good%2eexample",
        "good.example%00",
        "good,evil.example",
        "*.good.example",
        "*",
        "bücher.example",
        "good。example",
        "\uff47ood.example",  # a full-width letter
        "\u212aelvin.example",  # the Kelvin sign, which is "k" in lower case
        "\u017fafe.example",  # the long s, which is "S" in upper case
        "go\u200bod.example",
        "go\u00adod.example",
        f"{'a' * 64}.example",
        ".".join(["a"] * 128),
        "a" * 100_000,
        "a." * 100_000,
    ],
)
def test_what_is_no_name_is_none(written: str):
    assert normalise_host(written) is None


@pytest.mark.parametrize(
    ("written", "meant"),
    [("*", "*"), ("*.Good.Example.", "*.good.example"), ("Good.Example", "good.example"), ("*.example", "*.example")],
)
def test_a_pattern_has_one_form(written: str, meant: str):
    assert normalise_pattern(written) == meant
    assert normalise_pattern(meant) == meant


@pytest.mark.parametrize(
    "written",
    [
        "**",
        "*.",
        "*.*",
        "*.*.example",
        "a.*.example",
        "*a.example",
        "a*.example",
        "good.*",
        "",
        "*..example",
        "*.bücher.example",
    ],
)
def test_a_star_stands_only_in_front(written: str):
    assert normalise_pattern(written) is None


@pytest.mark.parametrize(
    ("pattern", "host", "matches"),
    [
        ("good.example", "good.example", True),
        ("good.example", "a.good.example", False),
        ("good.example", "good.example.evil.example", False),
        ("*.good.example", "a.good.example", True),
        ("*.good.example", "a.b.c.good.example", True),
        ("*.good.example", "good.example", False),
        ("*.good.example", "evilgood.example", False),
        ("*.good.example", "a.good.example.evil.example", False),
        ("*", "anything.example", True),
        ("*", "localhost", True),
    ],
)
def test_a_pattern_covers_what_it_says_and_nothing_that_looks_like_it(pattern: str, host: str, matches: bool):
    assert host_matches(pattern, host) is matches
    assert covers((pattern,), host) is matches
    assert covers(("other.example", pattern), host) is matches
