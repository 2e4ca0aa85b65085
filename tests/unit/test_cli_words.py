"""How command lines are read and results are written, without a server."""

import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
import typer

from space import Conflict, HostFull, InvalidRequest, NotFound, OutcomeUnknown, Unauthenticated, Unavailable
from space.cli import show
from space.cli.cp import remote
from space.cli.failures import next_step, program_status, wants_json
from space.cli.programs import options_first
from space.cli.targets import pairs

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
        (NotFound("x"), "space ls"),
        (Unauthenticated("x"), "space keys create"),
        (HostFull("x"), "space rm"),
        (OutcomeUnknown("x", operation="op1"), "space ops op1 --wait"),
        (OutcomeUnknown("x"), "space ls"),
    ],
)
def test_an_error_comes_with_a_next_step(error: Exception, hint: str) -> None:
    assert hint in next_step(error)


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
