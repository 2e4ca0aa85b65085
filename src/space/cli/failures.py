"""What went wrong, and what to do next, on standard error."""

import json
import os
import re
import sys
from typing import NoReturn

from space.cli.show import one_line
from space.errors import HostFull, NotFound, OutcomeUnknown, SpaceError, Unauthenticated

ERROR = 1
USAGE = 2
PLATFORM = 125
"""`run` and `exec`: SPACE failed, not the program (as docker has it)."""
NOT_EXECUTABLE = 126
NOT_FOUND = 127
STATUS_INTERRUPTED = 130
"""As a program that Ctrl-C has ended."""

_NOT_THE_API = (
    "Does SPACE_URL lead to SPACE's api (port 8700, unless `api_port` says otherwise)? `unset SPACE_URL` forgets it."
)
_BY_CODE: dict[str, str | None] = {
    "unreachable": "Is SPACE running? `space up` starts it, `space doctor` says what is missing.",
    "unavailable": "A part of SPACE is starting or down: try again, or look at `space doctor`.",
    "connection-lost": "Try again; `space doctor` helps when it stays like this.",
    "no-such-route": _NOT_THE_API,
    "unexpected-answer": _NOT_THE_API,
    "invalid-url": "SPACE_URL says where the api is, as in http://127.0.0.1:8700.",
    "disk-full": "Delete something there, or make a sandbox with more: `space create --disk MIB`.",
    "no-credentials": None,  # the message says it
    "template-not-made": None,
    "ambiguous-name": "Use the id; `space ls` shows it.",
    "step-failed": "The log above says why; `space template logs BUILD` shows it again.",
    "registry-unauthorised": "--registry-user, with --registry-password-stdin or -file, says who pulls.",
    "registry-untrusted-certificate": "--ca-cert names a file with the authority's certificates.",
    "builds-max": "`space template builds` shows them, `space template cancel BUILD` ends one.",
    "quota-exceeded": "`space project` shows what there is; make room with `space rm`, or let an admin raise it.",
}
_BY_CLASS: tuple[tuple[type[SpaceError], str], ...] = (
    (HostFull, "Make room with `space rm` or `space suspend`, or try later."),
    (OutcomeUnknown, "Look first whether it happened: `space ls`, `space ops`."),
)
_LISTED_BY = {
    "sandbox": "space ls",
    "operation": "space ops",
    "command": "space ps SANDBOX",
    "build": "space template builds",
    "key": "space keys ls",
    "grant": "space grant ls SANDBOX",
    **{noun: f"space {noun} ls" for noun in ("template", "snapshot", "volume", "policy", "secret", "webhook")},
}
_ASLEEP = {"paused", "suspended", "stopped", "failed"}


def next_step(error: SpaceError) -> str | None:
    """Return what would help, where that can be said."""
    if error.details.get("state") in _ASLEEP:
        return "`space wake SANDBOX` makes it run again."
    if error.details.get("operation"):
        return f"`space ops {error.details['operation']} --wait` waits for it."
    if error.code in _BY_CODE:
        return _BY_CODE[error.code]
    if isinstance(error, NotFound):
        listed = _LISTED_BY.get(_missing(error.message))
        return None if listed is None else f"`{listed}` lists those there are."
    if isinstance(error, Unauthenticated):
        return _other_key(in_environment=bool(os.environ.get("SPACE_API_KEY")))
    return next((step for cls, step in _BY_CLASS if isinstance(error, cls)), None)


def _missing(message: str) -> str:
    """Return the noun of ``There is no (such) NOUN …``; nothing when that is not what the message says."""
    found = re.match(r"There is no (?:such )?(\w+)\b", message)
    return found[1] if found else ""


def _other_key(*, in_environment: bool) -> str:
    if in_environment:
        return "SPACE_API_KEY is set, and goes before the key that scripts/up keeps for you: unset it, or correct it."
    return "Use a key that is valid: `space keys create` makes one, scripts/up restores yours."


def tell(error: SpaceError) -> None:
    """Write the error, as JSON when the command line asks for JSON."""
    if wants_json(sys.argv[1:]):
        described = {"code": error.code, "message": error.message, "details": error.details}
        print(json.dumps({"error": described}), file=sys.stderr)
        return
    print(f"space: {one_line(error.message)}", file=sys.stderr)
    if step := next_step(error):
        print(f"       {one_line(step)}", file=sys.stderr)


def fail(error: SpaceError, status: int = ERROR) -> NoReturn:
    """Write the error and end this process."""
    tell(error)
    sys.exit(status)


def program_status(error: SpaceError) -> int:
    """Return the status of `run` and `exec` for a program that could not be run at all."""
    by_code = {"program-not-found": NOT_FOUND, "program-not-executable": NOT_EXECUTABLE}
    return by_code.get(str(error.code), PLATFORM)


def wants_json(arguments: list[str]) -> bool:
    """Whether ``--json`` is among our own arguments."""
    ours = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in ours
