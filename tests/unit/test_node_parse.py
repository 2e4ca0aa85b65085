"""Bad input gets a typed error that names the field; good input arrives unchanged."""

import pytest

from space.errors import InvalidRequest, RequestError
from space.node import parse


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"x"', b"\xff", b'{"a":NaN}', b"[" * 100_000, b"null"])
def test_a_body_that_is_no_json_object_is_malformed(raw):
    with pytest.raises(RequestError) as caught:
        parse.parse_object(raw)
    assert caught.value.code == "malformed-json"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "argv"),
        ({"argv": ["a"], "command": "a"}, "argv"),
        ({"argv": []}, "argv"),
        ({"argv": [""]}, "argv"),
        ({"argv": "ls"}, "argv"),
        ({"argv": ["a", 1]}, "argv"),
        ({"argv": ["a\0b"]}, "argv"),
        ({"argv": ["\ud800"]}, "argv"),
        ({"argv": ["x" * 300_000]}, "argv"),
        ({"command": ""}, "command"),
        ({"command": 5}, "command"),
        ({"command": "a", "cwd": "a\0"}, "cwd"),
        ({"command": "a", "cwd": "/" + "x" * 5000}, "cwd"),
        ({"command": "a", "env": []}, "env"),
        ({"command": "a", "env": {"A=B": "c"}}, "env"),
        ({"command": "a", "env": {"": "c"}}, "env"),
        ({"command": "a", "env": {"A": 1}}, "env.A"),
        ({"command": "a", "env": {"A": "x\0"}}, "env.A"),
        ({"command": "a", "user": "a b"}, "user"),
        ({"command": "a", "user": "-x"}, "user"),
        ({"command": "a", "user": 1000}, "user"),
        ({"command": "a", "stdin": "yes"}, "stdin"),
        ({"command": "a", "tty": True}, "tty"),
        ({"command": "a", "tty": {"rows": 0}}, "tty.rows"),
        ({"command": "a", "tty": {"cols": 1.5}}, "tty.cols"),
        ({"command": "a", "tty": {"colour": 1}}, "tty.colour"),
        ({"command": "a", "timeout_s": 0}, "timeout_s"),
        ({"command": "a", "timeout_s": True}, "timeout_s"),
        ({"command": "a", "timeout_s": 1e300}, "timeout_s"),
        ({"command": "a", "timeout_s": 10**4000}, "timeout_s"),
        ({"command": "a", "timeout_s": float("nan")}, "timeout_s"),
        ({"command": "a", "output_mib": 0}, "output_mib"),
        ({"command": "a", "output_mib": 10**9}, "output_mib"),
        ({"command": "a", "shell": "bash"}, "shell"),
    ],
)
def test_a_command_that_is_not_valid_names_the_field(body, field):
    with pytest.raises(InvalidRequest) as caught:
        parse.parse_command(body)
    assert caught.value.details["field"] == field


def test_a_command_arrives_as_it_was_sent():
    spec = parse.parse_command(
        {"argv": ["printf", "%s", "a\nb"], "env": {"A": "x\ny$HOME", "B": "\udc80"}, "tty": {"rows": 5, "cols": 7}}
    )
    assert spec.argv == ("printf", "%s", "a\nb")
    assert spec.env == {"A": "x\ny$HOME", "B": "\udc80"}
    assert spec.tty is not None
    assert (spec.tty.rows, spec.tty.cols, spec.stdin) == (5, 7, True)


def test_shell_text_runs_in_the_shell():
    assert parse.parse_command({"command": "echo $A"}).argv == ("/bin/sh", "-c", "echo $A")


def test_exec_takes_text_for_stdin_and_no_terminal():
    spec, stdin = parse.parse_exec({"command": "cat", "stdin_text": "é"})
    assert (spec.stdin, stdin) == (True, "é".encode())
    for field in ("tty", "stdin"):
        with pytest.raises(InvalidRequest) as caught:
            parse.parse_exec({"command": "cat", field: True})
        assert caught.value.details["field"] == field


@pytest.mark.parametrize("query", [b"path=%ff", b"path=%00", b"path=", b"", b"path=" + b"x" * 4097])
def test_a_path_that_is_no_path_is_named(query):
    with pytest.raises(InvalidRequest) as caught:
        parse.parse_path(parse.parse_query(query))
    assert caught.value.details["field"] == "path"


@pytest.mark.parametrize(
    ("query", "path"),
    [
        (b"path=%F0%9F%A4%A3.txt", "\N{ROLLING ON THE FLOOR LAUGHING}.txt"),
        (b"path=a+b%2B%2520.txt", "a b+%20.txt"),
        (b"path=%E3%81%82.txt&x=1", "\N{HIRAGANA LETTER A}.txt"),
        (b"path=a%0Ab", "a\nb"),
    ],
)
def test_paths_keep_every_character(query, path):
    """F1"""
    assert parse.parse_path(parse.parse_query(query)) == path


@pytest.mark.parametrize(("text", "bits"), [("644", 0o644), ("0644", 0o644), ("0755", 0o755), ("4755", 0o4755)])
def test_modes_are_octal(text, bits):
    """F6"""
    assert parse.parse_mode(text) == bits


@pytest.mark.parametrize("text", ["493", "0o644", "rw-r--r--", "8888", "64", "", "99999", "-644"])
def test_what_is_not_three_or_four_octal_digits_is_no_mode(text):
    """F6"""
    with pytest.raises(InvalidRequest):
        parse.parse_mode(text)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, None),
        ("bytes=0-", (0, 100)),
        ("bytes=10-19", (10, 10)),
        ("bytes=90-200", (90, 10)),
        ("bytes=-5", (95, 5)),
        ("bytes=-500", (0, 100)),
        ("bytes=0-1,5-6", None),
        ("bytes=9-3", None),
        ("lines=1-2", None),
        ("bytes=-", None),
    ],
)
def test_single_ranges_are_honoured_and_others_ignored(header, expected):
    assert parse.parse_range(header, 100) == expected


@pytest.mark.parametrize("header", ["bytes=100-", "bytes=100-200", "bytes=-0"])
def test_a_range_beyond_the_file_is_416(header):
    with pytest.raises(RequestError) as caught:
        parse.parse_range(header, 100)
    assert caught.value.code == "range-not-satisfiable"


@pytest.mark.parametrize(("value", "number"), [("TERM", 15), ("SIGKILL", 9), ("int", 2), (9, 9), ("15", 15), (64, 64)])
def test_signals_by_name_or_number(value, number):
    assert parse.parse_signal(value) == number


@pytest.mark.parametrize("value", [0, 65, "NOPE", "", None, True, 1.5, "SIG_IGN", "999"])
def test_unknown_signals_are_refused(value):
    with pytest.raises(InvalidRequest) as caught:
        parse.parse_signal(value)
    assert caught.value.details["field"] == "signal"
