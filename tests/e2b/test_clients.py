"""The same session with three clients that nobody here wrote: Python's of today and of a year before, with ``await`` and
without, and JavaScript's.
"""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2b.conftest import Origin, run_node, session

SCRIPTS = Path(__file__).parent / "scripts"
NEWEST, OLDER, NPM = "2.63.0", "2.45.1", "2.51.0"
CUT_BY = {NEWEST: "SandboxNotRunningException", OLDER: "TimeoutException", NPM: "TimeoutError"}
"""What each client says of a stream whose sandbox is killed."""
SEEN: dict[str, Any] = {
    "output": "blue\nuser\n/home/user\n",
    "exit": [3, "to stderr\n"],
    "listed": True,
    "killed": [True, False],
    "gone": "gone\n",
    "stdin": "got typed\n",
    "events": [["create", "new.txt"], ["chmod", "new.txt"], ["write", "new.txt"]],
    "read": "content",
    "entries": ["/home/user/new.txt"],
    "moved": "/home/user/sub/dir/moved.txt",
    "made": [True, False, True],
    "missing": True,
    "signed": "content",
    "expired": [401, {"code": 401, "message": "signature is already expired"}],
    "terminal": True,
    "found": 1,
    "paused": False,
    "resumed": "1\n",
    "end": [True, False, False],
}


def check(seen: dict[str, Any], client: str) -> None:
    """Whether a session with that client saw what it does of E2B, whichever way its sandbox was reached."""
    by, words = seen.pop("cut")
    assert seen.pop("client") == client
    assert seen == SEEN
    assert by == CUT_BY[client]
    assert "was killed or reached its end of life" in words, "a stream of a killed sandbox is reset, not closed"


@pytest.mark.parametrize("which", ["newest", "older"])
@pytest.mark.parametrize("script", ["session", "session_async"])
def test_a_session_with_the_python_client_sees_what_e2b_shows(
    script: str, which: str, origin: Origin, clients: Path, tmp_path: Path
) -> None:
    python = sys.executable if which == "newest" else clients / "older/bin/python"
    seen = session([python, SCRIPTS / f"{script}.py"], origin, tmp_path)
    check(seen, NEWEST if which == "newest" else OLDER)


def test_a_session_with_the_javascript_client_sees_what_e2b_shows(
    origin: Origin, clients: Path, tmp_path: Path
) -> None:
    check(run_node(SCRIPTS / "session.mjs", origin, clients, tmp_path), NPM)
