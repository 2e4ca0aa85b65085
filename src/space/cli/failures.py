"""What went wrong, and what to do next, on standard error."""

import json
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

_BY_CODE = {
    "unreachable": "Is SPACE running? `space up` starts it, `space doctor` says what is missing.",
    "unavailable": "A part of SPACE is starting or down: try again, or look at `space doctor`.",
    "connection-lost": "Try again; `space doctor` helps when it stays like this.",
    "ambiguous-name": "Use the id; `space ls` shows it.",
}
_BY_CLASS: tuple[tuple[type[SpaceError], str], ...] = (
    (Unauthenticated, "Use a key that is valid: `space keys create` makes one, scripts/up restores yours."),
    (NotFound, "`space ls` lists the sandboxes, `space ps SANDBOX` their commands."),
    (HostFull, "Make room with `space rm` or `space suspend`, or try later."),
    (OutcomeUnknown, "Look first whether it happened: `space ls`, `space ops`."),
)
_ASLEEP = {"paused", "suspended", "stopped", "failed"}


def next_step(error: SpaceError) -> str | None:
    """Return what would help, where that can be said."""
    if error.code == "no-credentials":
        return None  # The message says it.
    if error.details.get("state") in _ASLEEP:
        return "`space wake SANDBOX` makes it run again."
    if error.details.get("operation"):
        return f"`space ops {error.details['operation']} --wait` waits for it."
    by_class = next((step for cls, step in _BY_CLASS if isinstance(error, cls)), None)
    return _BY_CODE.get(str(error.code), by_class)


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
