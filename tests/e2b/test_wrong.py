"""What cannot succeed ends as E2B's clients expect: in their exceptions, and on the wire."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox
from e2b.sandbox.signature import get_signature

from tests.e2b.conftest import Origin, framed, frames, run_node, session, token

SCRIPTS = Path(__file__).parent / "scripts"
UNKNOWN = "sbx" + "a" * 16
GONE = "SandboxNotRunningException"
ENDS = {
    "unknown connect": "SandboxNotFoundException",
    "unknown kill": "returned False",
    "unknown info": "SandboxNotFoundException",
    "unknown timeout": "SandboxNotFoundException",
    "unknown key": "AuthenticationException",
    "unknown template": "SandboxException",
    "unknown user": "AuthenticationException",
    "unknown user's file": "AuthenticationException",
    "unknown cwd": "InvalidArgumentException",
    "unknown file": "FileNotFoundException",
    "unknown directory": "FileNotFoundException",
    "a directory's bytes": "InvalidArgumentException",
    "too long": "TimeoutException",
    "a name denied": "SandboxException",
    "paused running": "returned False",
    "paused run": GONE,
    "paused file": GONE,
    "paused list": GONE,
    "paused watch": GONE,
    "killed running": "returned False",
    "killed kill": "returned False",
    "killed connect": "SandboxNotFoundException",
    "killed run": GONE,
    "killed file": GONE,
    "killed write": GONE,
}
STREAMS = ("paused run", "paused watch", "killed run")
"""What JavaScript's client asks by a stream. Of such it says that the sandbox is not found, of others that it ended."""


@pytest.mark.parametrize("which", ["newest", "older"])
def test_what_is_wrong_ends_in_the_python_clients_exceptions(
    which: str, origin: Origin, clients: Path, tmp_path: Path
) -> None:
    """502 and not 404 for what is paused or killed, 404 for what is unknown, 401 for whom nobody knows."""
    python = sys.executable if which == "newest" else clients / "older/bin/python"
    older = {name: end.replace(GONE, "TimeoutException") for name, end in ENDS.items()}
    assert session([python, SCRIPTS / "wrong.py"], origin, tmp_path) == (ENDS if which == "newest" else older)


def test_what_is_wrong_ends_in_the_javascript_clients_errors(origin: Origin, clients: Path, tmp_path: Path) -> None:
    expected = {name: end.replace("Exception", "Error").replace("False", "false") for name, end in ENDS.items()}
    for name, end in ENDS.items():
        if end == GONE:
            expected[name] = "SandboxNotFoundError" if name in STREAMS else "TimeoutError"
    assert run_node(SCRIPTS / "wrong.mjs", origin, clients, tmp_path) == expected


@pytest.fixture(scope="module")
def sandboxes(origin: Origin, box: Sandbox) -> Iterator[dict[str, tuple[str, str]]]:
    """Sandboxes of every kind by what they are: the id, and the token that is, or was, right."""
    paused, killed = (Sandbox.create(timeout=120, **origin.options) for _ in range(2))
    paused.pause()
    killed.kill()
    yield {
        "live": (box.sandbox_id, token(box)),
        "paused": (paused.sandbox_id, token(paused)),
        "killed": (killed.sandbox_id, token(killed)),
        "unknown": (UNKNOWN, token(box)),
        "malformed": ("../" + "a" * 80, token(box)),
    }
    paused.kill()


RPC, STREAM, FILE, PORT, HEALTH = "rpc", "stream", "file", "port", "health"
NOT_FOUND = "The sandbox was not found"
REFUSED = "A valid X-Access-Token is needed"
GONE_ROWS = [
    (which, kind, "right", 502, NOT_FOUND)
    for which in ("paused", "killed", "unknown", "malformed")
    for kind in (RPC, STREAM, FILE, PORT, HEALTH)
]
TOKEN_ROWS = [
    ("live", RPC, "none", 401, REFUSED),
    ("live", RPC, "wrong", 401, REFUSED),
    ("live", STREAM, "wrong", 200, REFUSED),
    ("live", FILE, "wrong", 401, REFUSED),
    ("live", FILE, "none", 401, "missing signature query parameter"),
    ("live", FILE, "signed", 200, "root:"),
    ("live", FILE, "signed late", 401, "signature is already expired"),
    ("live", FILE, "signed by another", 401, "invalid signature"),
    ("paused", RPC, "wrong", 401, REFUSED),
    ("paused", FILE, "signed", 502, NOT_FOUND),
    ("killed", RPC, "wrong", 502, NOT_FOUND),
    ("killed", FILE, "signed", 502, NOT_FOUND),
    ("live", HEALTH, "none", 204, ""),
    ("live", PORT, "none", 502, "The sandbox is running but port is not open"),
]


@pytest.mark.parametrize(
    ("which", "kind", "credential", "status", "words"),
    [pytest.param(*row, id="-".join(row[:3]).replace(" ", "-")) for row in GONE_ROWS + TOKEN_ROWS],
)
def test_on_the_wire_each_wrong_request_has_its_status_and_words(
    sandboxes: dict[str, tuple[str, str]],
    origin: Origin,
    which: str,
    kind: str,
    credential: str,
    status: int,
    words: str,
) -> None:
    """502 and not 404 for a sandbox that is gone, before anything is said of tokens; 401 with two keys for signatures."""
    sandbox_id, right = sandboxes[which]
    port = "39998" if kind == PORT else "49983"
    headers = {"e2b-sandbox-id": sandbox_id, "e2b-sandbox-port": port}
    headers |= {"x-access-token": right} if credential == "right" else {}
    headers |= {"x-access-token": "0" * 64} if credential == "wrong" else {}
    query = {"path": "/etc/passwd"} if kind == FILE else {}
    if credential.startswith("signed"):
        by = "0" * 64 if credential.endswith("another") else right
        made = get_signature("/etc/passwd", "read", "", by, -60 if credential.endswith("late") else 60)
        query |= {"signature": made["signature"], "signature_expiration": str(made["expiration"])}
    with httpx.Client(base_url=origin.url, headers=headers, params=query, timeout=30, trust_env=False) as client:
        if kind == RPC:
            answer = client.post("/process.Process/List", json={}, headers={"connect-protocol-version": "1"})
        elif kind == STREAM:
            stream = {"content-type": "application/connect+json", "connect-protocol-version": "1"}
            body = framed({"process": {"cmd": "true"}})
            answer = client.post("/process.Process/Start", content=body, headers=stream)
        else:
            answer = client.get({FILE: "/files", HEALTH: "/health"}.get(kind, "/"))
    assert answer.status_code == status
    assert re.search(words, answer.text)
    if status in {401, 502} and kind != RPC:
        assert answer.json()["code"] == status
    if status == 401 and kind == FILE:
        assert set(answer.json()) == {"code", "message"}
    if status == 200 and kind == STREAM:
        assert [(flags, told["error"]["code"]) for flags, told in frames(answer.content)] == [(2, "unauthenticated")]
