"""How command lines are read and results are written, without a server."""

import io
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta

import pytest
import typer

from space import (
    Conflict,
    HostFull,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    OutcomeUnknown,
    SpaceError,
    Unauthenticated,
    Unavailable,
)
from space.cli import show
from space.cli.cp import remote
from space.cli.failures import next_step, program_status, wants_json
from space.cli.programs import options_first
from space.cli.project import parse_limits
from space.cli.targets import pairs, told_when_slow

OPTIONS = {"--env": False, "-e": False, "--tty": True, "-t": True, "--cwd": False}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("-t demo sh -c x", "-t demo sh -c x"),
        ("demo -- sh -e x", "demo -- sh -e x"),
        ("demo -e A=1 -- sh -e x", "-e A=1 demo -- sh -e x"),
        ("demo --env=A=1 -t -- sh", "--env=A=1 -t demo -- sh"),
        ("-e A=1 demo --cwd /x -- sh -- y", "-e A=1 --cwd /x demo -- sh -- y"),
        ("demo -eA=1 -- sh", "-eA=1 demo -- sh"),
        ("demo git checkout -- -e", "demo git checkout -- -e"),
        ("demo sh -e -t", "demo sh -e -t"),
        ("demo", "demo"),
        ("", ""),
    ],
)
def test_the_programs_options_are_its_own(given: str, expected: str) -> None:
    assert options_first(given.split(), OPTIONS) == expected.split()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("demo:/x", ("demo", "/x")),
        ("demo:x:y", ("demo", "x:y")),
        ("./a:b", None),
        ("/a:b", None),
        ("file", None),
        ("-", None),
        (":x", None),
        ("demo:", None),
    ],
)
def test_a_path_in_a_sandbox_is_told_from_a_local_one(text: str, expected: tuple[str, str] | None) -> None:
    assert remote(text) == expected


def test_pairs_keep_everything_behind_the_first_equals_sign() -> None:
    assert pairs(["A=1", "B=x=y\nz", "C="], "--env") == {"A": "1", "B": "x=y\nz", "C": ""}
    for bad in ("A", "=1"):
        with pytest.raises(typer.BadParameter):
            pairs([bad], "--env")


def test_limits_are_numbers_or_none_at_all() -> None:
    assert parse_limits(["cpus=1.5", "sandboxes=8", "disk_mib=none"]) == {"cpus": 1.5, "sandboxes": 8, "disk_mib": None}
    for bad in ("cpus=many", "sandboxes=1.5", "speed=1"):
        with pytest.raises(typer.BadParameter):
            parse_limits([bad])


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, "-"), (5, "5 B"), (2048, "2.0 KiB"), (12 * 1024**2, "12.0 MiB"), (3 * 1024**3, "3.0 GiB")],
)
def test_sizes_are_short(count: int | None, text: str) -> None:
    assert show.size(count) == text


def test_what_comes_from_a_sandbox_cannot_move_the_cursor() -> None:
    assert show.one_line("a\x1b[2J\r\nb\x9b1mé") == "a�[2J��b�1mé"


@pytest.mark.parametrize(
    ("seconds", "text"), [(3, "3 s"), (125, "2 min"), (7300, "2 h"), (200_000, "2 d"), (-5, "0 s")]
)
def test_ages_are_short(seconds: int, text: str) -> None:
    assert show.ago(datetime.now(UTC) - timedelta(seconds=seconds)) == text


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (Unavailable("x", code="unreachable"), "space up"),
        (Conflict("x", code="wrong-state", state="suspended"), "space wake"),
        (NotFound("There is no such sandbox."), "space ls"),
        (NotFound("There is no snapshot 'x'."), "space snapshot ls"),
        (NotFound("There is no such volume."), "space volume ls"),
        (NotFound("x", code="no-such-route"), "SPACE_URL"),
        (InvalidRequest("x", code="invalid-url"), "http://"),
        (Unauthenticated("x"), "space keys create"),
        (HostFull("x"), "space rm"),
        (OutcomeUnknown("x", operation="op1"), "space ops op1 --wait"),
        (OutcomeUnknown("x"), "space ls"),
        (LimitExceeded("x", code="quota-exceeded"), "space project"),
    ],
)
def test_an_error_comes_with_a_next_step(error: SpaceError, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPACE_API_KEY", raising=False)
    assert hint in (next_step(error) or "")


def test_of_a_wrong_key_is_said_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPACE_API_KEY", "wrong")
    assert "unset it" in (next_step(Unauthenticated("x")) or "")


def test_what_the_message_says_already_is_not_said_twice() -> None:
    assert next_step(NotFound("There is no such template. This makes it: …", code="template-not-made")) is None


class Terminal(io.StringIO):
    """Standard error as a terminal, or as a file, that says when something was written."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal
        self.written = threading.Event()

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> int:
        self.written.set()
        return super().write(text)


def test_who_waits_long_at_a_terminal_is_told_what_for(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(is_terminal=True)
    monkeypatch.setattr(sys, "stderr", terminal)
    with told_when_slow("the sandbox is being made", after_s=0):
        assert terminal.written.wait(10)
    assert "the sandbox is being made" in terminal.getvalue()


def test_who_does_not_wait_long_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(is_terminal=True)
    monkeypatch.setattr(sys, "stderr", terminal)
    with told_when_slow("the sandbox is being made", after_s=60):
        started = [one for one in threading.enumerate() if isinstance(one, threading.Timer)]
    for one in started:
        one.join(10)
    assert started
    assert not terminal.getvalue()


def test_the_status_tells_platform_failures_from_the_programs_own() -> None:
    assert program_status(Unavailable("x")) == 125
    assert program_status(InvalidRequest("x", code="program-not-executable")) == 126
    assert program_status(InvalidRequest("x", code="program-not-found")) == 127


def test_json_behind_the_double_dash_is_the_programs() -> None:
    assert wants_json(["ls", "--json"])
    assert not wants_json(["exec", "demo", "--", "x", "--json"])


def test_help_loads_neither_the_sdk_nor_its_libraries() -> None:
    """What makes it start fast: deterministic, where a stopwatch would not be."""
    program = (
        "import sys; sys.argv = ['space', '--help']\n"
        "from space.cli import main\n"
        "try: main()\n"
        "except SystemExit as done: assert done.code == 0\n"
        "slow = {'httpx', 'websockets', 'rich', 'asyncio', 'pydantic', 'tenacity', 'space.sdk._sync'} & set(sys.modules)\n"
        "assert not slow, slow"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for command in [
        "up",
        "down",
        "doctor",
        "env",
        "run",
        "exec",
        "shell",
        "ps",
        "ls",
        "inspect",
        "pause",
        "resume",
        "suspend",
        "wake",
        "stop",
        "start",
        "rm",
        "cp",
        "logs",
        "ops",
        "keys",
        "bench",
        "create",
    ]:
        assert f"\n  {command} " in done.stdout
