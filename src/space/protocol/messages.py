"""What host and guest say to each other: the JSON of every frame that is not bytes of a stream.

The tables below are the one place that knows the fields. ``encode_json``/``decode_json`` are the way in and out;
``check_request``, ``check_reply``, ``check_event`` and ``check_welcome`` return checked dictionaries with every default
filled in, or raise ``MessageError``. Their static types are the ``TypedDict`` classes at the end.
"""

from __future__ import annotations

import json

from space.protocol.checks import (
    REQUIRED,
    MessageError,
    boolean,
    choice,
    hexadecimal,
    integer,
    items,
    mapping,
    number,
    optional,
    shape,
    text,
    variable,
)
from space.protocol.frames import NUMBER_MAX, OFFSET_MAX, PAYLOAD_BYTES_MAX

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NotRequired, TypedDict

VERSION = 1
PATH_BYTES_MAX = 4096
ARGUMENTS_MAX = 16384
ENVIRONMENT_MAX = 4096
TEXT_BYTES_MAX = 128 * 1024
METADATA_MAX = 64
METADATA_BYTES_MAX = 4096
COMMANDS_MAX = 256
"""Commands a guest keeps a record of at one time, running or ended but not yet forgotten; all fit into WELCOME."""
HOOKS_MAX = 64
"""Hooks run at one event, and told of in the answer."""
REQUESTS_MAX = 1024
"""Requests without an answer at one time."""

_id = text(64)
_path = text(PATH_BYTES_MAX)
_user = text(256)
_stream = integer(1, NUMBER_MAX)
_offset = integer(0, OFFSET_MAX)
_mode = integer(0, 0o7777)
_size = integer(1, 65535)
_env = mapping(variable, text(TEXT_BYTES_MAX, empty=True), ENVIRONMENT_MAX)
_nanoseconds = integer(0, 2**63 - 1)
_tty = shape({"rows": (_size, 24), "cols": (_size, 80)})
_entropy = text(4096)
_maybe_user = (optional(_user), None)
_at_path = {"path": (_path, REQUIRED), "user": _maybe_user, "owner": _maybe_user}
"""With an ``owner`` what is relative, or begins with ``~``, begins in that user's home, and what is made is theirs."""
_namespace = (optional(text(32)), None)
"""Of a file's extended attributes those called ``user.<namespace>.…`` are told, and replaced where others are given."""
_metadata = mapping(text(255), text(METADATA_BYTES_MAX, empty=True), METADATA_MAX)
_by_id = {"id": (_id, REQUIRED)}
_no_limits = {"cpus": None, "memory_mib": None, "pids": None, "open_files": None}
_limits = shape(
    {
        "cpus": (optional(number(0.001, 4096)), None),
        "memory_mib": (optional(integer(1, 2**24)), None),
        "pids": (optional(integer(1, 2**22)), None),
        "open_files": (optional(integer(16, 2**20)), None),
    }
)
_world = {
    "now_ns": (optional(_nanoseconds), None),
    "entropy": (optional(_entropy), None),
    "hostname": (optional(text(64)), None),
    "machine_id": (optional(hexadecimal(32)), None),
}
"""What a guest is told of the world that it finds itself in: time, randomness, and who it is."""

REQUESTS = {
    "configure": shape(
        {
            **_world,
            "env": (optional(_env), None),
            "workdir": (optional(_path), None),
            "user": _maybe_user,
            "limits": (_limits, _no_limits),
        }
    ),
    "trust": shape(
        {"certificate": (optional(text(16 * 1024)), None), "subject_hash": (optional(hexadecimal(8)), None)}
    ),
    "start": shape(
        {
            **_by_id,
            "argv": (items(text(TEXT_BYTES_MAX, empty=True), ARGUMENTS_MAX, count_min=1), REQUIRED),
            "env": (_env, {}),
            "cwd": (optional(_path), None),
            "user": _maybe_user,
            "tty": (optional(_tty), None),
            "timeout_s": (optional(number(0.001, 1e9)), None),
            "detached": (boolean, False),
            "wait_output": (boolean, False),
            "streams": (
                shape(
                    {
                        "stdin": (optional(_stream), None),
                        "stdout": (optional(_stream), None),
                        "stderr": (optional(_stream), None),
                        "tty": (optional(_stream), None),
                    }
                ),
                REQUIRED,
            ),
        }
    ),
    "signal": shape({**_by_id, "signal": (integer(1, 64), REQUIRED), "tree": (boolean, True)}),
    "resize": shape({**_by_id, "rows": (_size, REQUIRED), "cols": (_size, REQUIRED)}),
    "forget": shape(_by_id),
    "list": shape({}),
    "file-read": shape(
        {**_at_path, "stream": (_stream, REQUIRED), "offset": (_offset, 0), "length": (optional(_offset), None)}
    ),
    "file-write": shape(
        {
            **_at_path,
            "stream": (_stream, REQUIRED),
            "mode": (optional(_mode), None),
            "size": (optional(_offset), None),
            "exclusive": (boolean, False),
            "namespace": _namespace,
            "metadata": (optional(_metadata), None),
        }
    ),
    "stat": shape({**_at_path, "follow": (boolean, True), "namespace": _namespace}),
    "list-dir": shape(
        {**_at_path, "stream": (_stream, REQUIRED), "depth": (integer(1, 64), 1), "namespace": _namespace}
    ),
    "mkdir": shape({**_at_path, "mode": (optional(_mode), None), "parents": (boolean, True)}),
    "move": shape(
        {
            "source": (_path, REQUIRED),
            "target": (_path, REQUIRED),
            "user": _maybe_user,
            "owner": _maybe_user,
            "overwrite": (boolean, True),
            "parents": (boolean, False),
        }
    ),
    "remove": shape({**_at_path, "recursive": (boolean, False), "missing_ok": (boolean, False)}),
    "chmod": shape({**_at_path, "mode": (_mode, REQUIRED)}),
    "archive-read": shape({**_at_path, "stream": (_stream, REQUIRED)}),
    "archive-write": shape({**_at_path, "stream": (_stream, REQUIRED)}),
    "watch": shape(
        {**_at_path, "stream": (_stream, REQUIRED), "recursive": (boolean, False), "marks": (boolean, False)}
    ),
    "watch-mark": shape({"mark": (_id, REQUIRED)}),
    "connect": shape({"port": (integer(1, 65535), REQUIRED), "stream": (_stream, REQUIRED)}),
    "metrics": shape({}),
    "activity": shape({}),
    "quiesce": shape({"event": (optional(choice("suspend", "snapshot")), None)}),
    "awaken": shape(
        {
            **_world,
            "env": (optional(_env), None),
            "limits": (_limits, _no_limits),
            "rename": (optional(mapping(_id, _id, COMMANDS_MAX)), None),
        }
    ),
}

_exit = shape(
    {
        "kind": (choice("exited", "signaled", "timed-out", "oom-killed"), REQUIRED),
        "code": (optional(integer(0, 255)), None),
        "signal": (optional(integer(1, 64)), None),
    },
    strict=False,
)
_place = shape(
    {
        "number": (_stream, REQUIRED),
        "acked": (_offset, REQUIRED),
        "produced": (_offset, REQUIRED),
        "ended": (boolean, REQUIRED),
    },
    strict=False,
)
_command = shape(
    {
        "id": (_id, REQUIRED),
        "pid": (optional(integer(1, 2**31 - 1)), None),
        "state": (choice("running", "ended"), REQUIRED),
        "exit": (optional(_exit), None),
        "streams": (mapping(choice("stdin", "stdout", "stderr", "tty"), _place, 4), REQUIRED),
    },
    strict=False,
)
_commands = items(_command, COMMANDS_MAX)
_file_type = choice("file", "directory", "symlink", "fifo", "socket", "block", "character")
_leads_to = shape({"path": (_path, REQUIRED), "type": (_file_type, REQUIRED), "mode": (_mode, REQUIRED)}, strict=False)
_file = {
    "name": (text(PATH_BYTES_MAX), REQUIRED),
    "type": (_file_type, REQUIRED),
    "size": (_offset, REQUIRED),
    "mode": (_mode, REQUIRED),
    "uid": (integer(0, NUMBER_MAX), REQUIRED),
    "gid": (integer(0, NUMBER_MAX), REQUIRED),
    "owner": (optional(_user), None),
    "group": (optional(_user), None),
    "mtime_ns": (integer(-(2**63), 2**63 - 1), REQUIRED),
    "target": (optional(text(PATH_BYTES_MAX, empty=True)), None),
    "full_path": (optional(_path), None),
    "leads_to": (optional(_leads_to), None),
    "metadata": (optional(_metadata), None),
}
_nothing = shape({}, strict=False)
_count = (_offset, 0)
_signed = integer(-(2**63), 2**63 - 1)
_hooks = items(
    shape(
        {
            "name": (text(1024), REQUIRED),
            "outcome": (choice("exited", "timed-out", "refused"), REQUIRED),
            "exit": (optional(integer(0, 255)), None),
        },
        strict=False,
    ),
    HOOKS_MAX,
)
_clock = {"clock_stepped_ns": (_signed, 0), "clock_off_ns": (_signed, 0)}

REPLIES = {
    "start": shape({"pid": (integer(1, 2**31 - 1), REQUIRED)}, strict=False),
    "list": shape({"commands": (_commands, REQUIRED)}, strict=False),
    "file-read": shape(_file, strict=False),
    "file-write": shape(
        {"size": (_offset, REQUIRED), "created": (boolean, REQUIRED), "full_path": (optional(_path), None)},
        strict=False,
    ),
    "stat": shape(_file, strict=False),
    "mkdir": shape({"created": (boolean, REQUIRED), "full_path": (optional(_path), None)}, strict=False),
    "archive-write": shape({"entries": _count, "bytes": _count, "skipped": _count}, strict=False),
    "metrics": shape(
        {
            name: (number(0, 2**63), 0)
            for name in (
                "uptime_s",
                "cpu_s",
                "memory_total",
                "memory_used",
                "memory_available",
                "disk_total",
                "disk_used",
                "pids",
                "commands",
                "load_1m",
            )
        },
        strict=False,
    ),
    "activity": shape(
        {"commands": (integer(0, COMMANDS_MAX), REQUIRED), "connections": (integer(0, 2**31), 0)}, strict=False
    ),
    "configure": shape(_clock, strict=False),
    "quiesce": shape({"hooks": (_hooks, [])}, strict=False),
    "awaken": shape({**_clock, "hooks": (_hooks, [])}, strict=False),
}
"""The shape of ``ok`` for each operation; one that is not named answers with an empty object."""

_counts = mapping(choice("stdout", "stderr", "tty"), _offset, 3)
EVENTS = {
    "exit": shape(
        {
            **_by_id,
            "kind": (choice("exited", "signaled", "timed-out", "oom-killed"), REQUIRED),
            "code": (optional(integer(0, 255)), None),
            "signal": (optional(integer(1, 64)), None),
            "produced": (_counts, REQUIRED),
        },
        strict=False,
    ),
    "oom": shape(_by_id, strict=False),
    "stream-at": shape({"stream": (_stream, REQUIRED), "offset": (_offset, REQUIRED)}, strict=False),
}

_watch_event = choice(
    "create", "modify", "delete", "attributes", "moved-from", "moved-to", "overflow", "limit", "gone", "mark"
)
check_file_line = shape({"path": (_path, REQUIRED), **_file}, strict=False)
"""One line of what ``list-dir`` streams; ``path`` is relative to the listed directory."""
check_watch_line = shape(
    {
        "event": (_watch_event, REQUIRED),
        "path": (text(PATH_BYTES_MAX * 2, empty=True), ""),
        "directory": (boolean, False),
        "cookie": (integer(0, NUMBER_MAX), 0),
    },
    strict=False,
)
"""One line of what ``watch`` streams; ``path`` is relative to the watched one. ``overflow``: events were lost;
``limit``: no more directories can be watched, what happens below ``path`` is not seen; ``gone``: the watch is over;
``mark``: all that had happened when ``watch-mark`` was asked for is told, ``path`` is its text."""
check_hello = shape({"version": (integer(1, 65535), REQUIRED), "nonce": (text(128), REQUIRED)}, strict=False)
check_welcome = shape(
    {
        "version": (integer(1, 65535), REQUIRED),
        "nonce": (text(128), REQUIRED),
        "boot_id": (text(64), REQUIRED),
        "pid": (integer(1, 2**31 - 1), REQUIRED),
        "number": (integer(0, NUMBER_MAX), 0),
        "standing": (boolean, False),
        "commands": (_commands, REQUIRED),
    },
    strict=False,
)
_failure = shape(
    {
        "code": (text(64), REQUIRED),
        "message": (text(4096, empty=True), ""),
        "errno": (optional(integer(0, 4096)), None),
    },
    strict=False,
)


def encode_json(message: dict[str, Any]) -> bytes:
    """Return the payload of a frame, or raise ``MessageError`` when it would not fit into one."""
    payload = json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise MessageError(f"The message is {len(payload)} bytes long; {PAYLOAD_BYTES_MAX} fit")
    return payload


def decode_json(payload: bytes) -> dict[str, Any]:
    """Return the object in a payload, or raise ``MessageError``; nesting and digits are bounded by the parser."""
    try:
        message = json.loads(payload.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        raise MessageError("The message is not JSON") from None
    if not isinstance(message, dict):
        raise MessageError("The message is not an object")
    return message


def check_request(op: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a request with defaults filled in."""
    check = REQUESTS.get(op)
    if check is None:
        raise MessageError(f"op: {op[:64]!r} is unknown")
    return check(fields)


def check_request_message(message: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the operation and the checked fields of a request as it travels."""
    op = message.pop("op", None)
    if not isinstance(op, str):
        raise MessageError("op: missing")
    return op, check_request(op, message)


def streams_of(fields: dict[str, Any]) -> list[int]:
    """Return the stream numbers that a checked request names."""
    named = [fields.get("stream"), *fields.get("streams", {}).values()]
    return [number for number in named if number is not None]


def check_reply(op: str, message: dict[str, Any]) -> tuple[dict[str, Any] | None, Failure | None]:
    """Return ``(ok, None)`` or ``(None, failure)`` of a reply to a request with that ``op``."""
    if "error" in message:
        return None, _failure(message["error"])
    return REPLIES.get(op, _nothing)(message.get("ok")), None


def check_event(message: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name of an event and its fields."""
    name = message.get("event")
    check = EVENTS.get(name) if isinstance(name, str) else None
    if check is None or not isinstance(name, str):
        raise MessageError("event: unknown")
    return name, check(message)


def check_reset(message: dict[str, Any]) -> Failure:
    """Return why a stream was reset."""
    return _failure(message)


if TYPE_CHECKING:

    class Failure(TypedDict):
        """Why something did not happen. ``errno`` is the guest kernel's, where it had one."""

        code: str
        message: str
        errno: int | None

    class ExitRecord(TypedDict):
        kind: str
        code: int | None
        signal: int | None

    class StreamPlace(TypedDict):
        """Where a stream of a command is. Output: ``acked`` is the last ACK the guest got. Input (named ``stdin``, also
        on a tty, whose number it shares): ``acked`` is what the program's side has taken, ``produced`` what arrived.
        """

        number: int
        acked: int
        produced: int
        ended: bool

    class CommandRecord(TypedDict):
        id: str
        pid: int | None
        state: str
        exit: ExitRecord | None
        streams: dict[str, StreamPlace]

    class Welcome(TypedDict):
        """``number`` is the highest request or stream number the guest has met; ``standing``: it has quiesced and not
        been awakened since.
        """

        version: int
        nonce: str
        boot_id: str
        pid: int
        number: int
        standing: bool
        commands: list[CommandRecord]

    class FileInfo(TypedDict):
        name: str
        type: str
        size: int
        mode: int
        uid: int
        gid: int
        owner: str | None
        group: str | None
        mtime_ns: int
        target: str | None
        full_path: NotRequired[str | None]
        """Where it is, absolute; told where the request names an owner."""
        leads_to: NotRequired[dict[str, Any] | None]
        """What a symbolic link leads to in the end, ``{path, type, mode}``; told as ``full_path`` is."""
        metadata: NotRequired[dict[str, str] | None]
