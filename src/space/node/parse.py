"""What a client's bytes may say.

Each function takes raw input and returns a checked value or raises ``InvalidRequest`` that names the field. Pure; knows
nothing of HTTP objects or guests.
"""

import json
import re
import signal
from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import unquote_to_bytes

from space.errors import InvalidRequest
from space.model.command import OUTPUT_MIB_DEFAULT, CommandSpec, Tty
from space.model.ids import is_id

PATH_BYTES_MAX = 4096
SPEC_BYTES_MAX = 200 * 1024
"""Argument list, environment and the rest together: they travel in one frame of at most 256 KiB."""
ITEMS_MAX = 8192
OUTPUT_MIB_MAX = 256
TIMEOUT_S_MAX = 30 * 24 * 3600
TTY_SIDE_MAX = 10_000
TAG_CHARS_MAX = 256
METADATA_MAX = 64
METADATA_BYTES_MAX = 4096
QUERY_FIELDS_MAX = 64

_USER = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.@-]{0,63}(?::[A-Za-z0-9_.][A-Za-z0-9_.@-]{0,63})?")
_NAMESPACE = re.compile(r"[a-z0-9]{1,16}")
_MARK = re.compile(r"[A-Za-z0-9]{1,64}")
_MODE = re.compile(r"0?[0-7]{3,4}")
_RANGE = re.compile(r"bytes=(\d{0,19})-(\d{0,19})")
_EXEC_FIELDS = {"argv", "command", "cwd", "env", "user", "stdin_text", "timeout_s", "output_mib"}
_COMMAND_FIELDS = (_EXEC_FIELDS - {"stdin_text"}) | {"stdin", "tty", "tag", "wait_output"}


def invalid(field: str, why: str) -> InvalidRequest:
    """Return the error for one field: ``why`` completes the sentence that begins with the field's name."""
    return InvalidRequest(f"`{field}` {why}.", field=field)


def parse_object(raw: bytes) -> dict[str, Any]:
    """Parse a JSON object. Malformed text and anything but an object raise ``InvalidRequest`` (``malformed-json``)."""
    try:
        value = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}", code="malformed-json", field="body") from error
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.", code="malformed-json", field="body")
    return value


def parse_query(raw: bytes) -> dict[str, str]:
    """Parse a query string strictly: UTF-8 or an error that names the field, the last value of a name wins."""
    fields: dict[str, str] = {}
    parts = raw.split(b"&") if raw else []
    if len(parts) > QUERY_FIELDS_MAX:
        raise invalid("query", "has too many fields")
    for part in parts:
        name_raw, _, value_raw = part.partition(b"=")
        name = unquote_to_bytes(name_raw.replace(b"+", b" ")).decode("utf-8", "replace")
        try:
            fields[name] = unquote_to_bytes(value_raw.replace(b"+", b" ")).decode("utf-8")
        except UnicodeDecodeError as error:
            raise invalid(name, "is not valid UTF-8") from error
    return fields


def parse_command(body: Mapping[str, Any]) -> CommandSpec:
    """Return the program to run as a command session."""
    _refuse_unknown(body, _COMMAND_FIELDS)
    tty = body.get("tty")
    return _spec(body, stdin=_boolean(body, "stdin") or tty is not None, tty=None if tty is None else parse_tty(tty))


def parse_exec(body: Mapping[str, Any]) -> tuple[CommandSpec, bytes | None]:
    """Return the program to run to its end, and what to feed to its stdin (None: stdin is closed)."""
    _refuse_unknown(body, _EXEC_FIELDS)
    text = body.get("stdin_text")
    if text is not None and not isinstance(text, str):
        raise invalid("stdin_text", "must be a string")
    stdin = None if text is None else _bytes_of("stdin_text", text)
    return _spec(body, stdin=stdin is not None, tty=None), stdin


def parse_machine(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the api tells of a machine: template, defaults, driver, resources, env, hostname, snapshot."""
    defaults = body.get("template_defaults") or {}
    resources = body.get("resources")
    if not isinstance(defaults, dict):
        raise invalid("template_defaults", "must be an object")
    if not isinstance(resources, dict):
        raise invalid("resources", "must be an object")
    for field in ("template_digest", "hostname"):
        if not isinstance(body.get(field), str) or not body[field]:
            raise invalid(field, "must be a string")
    if body.get("driver") is not None and not isinstance(body["driver"], str):
        raise invalid("driver", "must be a string")
    workdir, snapshot = defaults.get("workdir"), body.get("snapshot")
    if snapshot is not None and not (isinstance(snapshot, str) and is_id("snp", snapshot)):
        raise invalid("snapshot", "must be the id of a snapshot")
    return {
        "template": body["template_digest"],
        "snapshot": snapshot,
        "defaults": {
            "env": parse_env(defaults.get("env"), "template_defaults.env"),
            "workdir": None if workdir is None else check_path(workdir, "template_defaults.workdir"),
            "user": parse_user(defaults.get("user")),
            "entry": _entry(defaults.get("entry")),
        },
        "driver": body.get("driver"),
        "resources": resources,
        "volumes": _volumes(body.get("volumes")),
        "env": parse_env(body.get("env")),
        "hostname": _hostname(body["hostname"]),
    }


def _entry(value: Any) -> dict[str, Any] | None:
    """Return what a template starts in a fresh machine (decided by its build), or None."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise invalid("template_defaults.entry", "must be an object")
    entry = cast("dict[str, Any]", value)
    for name in ("start", "ready"):
        command = entry.get(name)
        words = cast("list[Any]", command) if isinstance(command, list) else [command]
        if command is None and name == "ready":
            continue
        if not words or not all(isinstance(word, str) for word in words):
            raise invalid(f"template_defaults.entry.{name}", "must be a string or a list of strings")
    timeout_s = entry.get("timeout_s")
    if timeout_s is not None and (type(timeout_s) not in {int, float} or not 0 < timeout_s <= TIMEOUT_S_MAX):
        raise invalid("template_defaults.entry.timeout_s", "must be a number of seconds")
    return {name: entry.get(name) for name in ("start", "ready", "timeout_s")}


def _volumes(value: Any) -> list[dict[str, str]]:
    """Return what is to be mounted where, as the broker is told."""
    listed = cast("list[Any]", value) if isinstance(value, list) else [None] * (value is not None)
    mounts: list[dict[str, str]] = []
    for one in listed:
        match one:
            case {"volume": str(volume), "path": str(path)} if is_id("vol", volume):
                mounts.append({"volume": volume, "path": path})
            case _:
                raise invalid("volumes", "must be a list of volumes and paths")
    return mounts


def parse_condition(body: Mapping[str, Any]) -> dict[str, float]:
    """Return under which condition a machine is to be changed: ``if_idle_s``, or none."""
    value = body.get("if_idle_s")
    if value is None:
        return {}
    if type(value) not in {int, float} or not 0 <= value <= TIMEOUT_S_MAX:
        raise invalid("if_idle_s", f"must be a number of seconds from 0 to {TIMEOUT_S_MAX}")
    return {"if_idle_s": float(value)}


def parse_kind(body: Mapping[str, Any]) -> str:
    """Return what a snapshot is to hold."""
    kind = body.get("kind")
    if kind not in {"disk", "full"}:
        raise invalid("kind", "must be disk or full")
    return kind


def parse_tty(value: Any) -> Tty:
    """Return a terminal size from ``{rows, cols}``."""
    if not isinstance(value, dict):
        raise invalid("tty", "must be an object with rows and cols")
    _refuse_unknown(value, {"rows", "cols"}, "tty.")
    rows, cols = value.get("rows", 24), value.get("cols", 80)
    for field, side in (("tty.rows", rows), ("tty.cols", cols)):
        if type(side) is not int or not 1 <= side <= TTY_SIDE_MAX:
            raise invalid(field, f"must be a whole number from 1 to {TTY_SIDE_MAX}")
    return Tty(rows, cols)


def parse_signal(value: Any) -> int:
    """Return a signal's number from its number or its name with or without SIG."""
    if type(value) is int and 1 <= value <= 64:
        return value
    if isinstance(value, str):
        name = value.upper().removeprefix("SIG")
        if name.isdecimal() and len(name) <= 2 and 1 <= int(name) <= 64:
            return int(name)
        found = signal.Signals.__members__.get(f"SIG{name}")
        if found is not None:
            return int(found)
    raise invalid("signal", "must be the name or the number (1 to 64) of a signal")


def parse_path(query: Mapping[str, str], field: str = "path") -> str:
    """Return a path of the guest: not empty, no NUL, at most 4096 bytes. What it leads to is the guest's to decide."""
    return check_path(query.get(field), field)


def check_path(value: Any, field: str) -> str:
    if not isinstance(value, str) or not value:
        raise invalid(field, "is needed and must be a path")
    if "\0" in value:
        raise invalid(field, "must not contain NUL")
    try:
        size = len(value.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise invalid(field, "is not valid UTF-8") from error
    if size > PATH_BYTES_MAX:
        raise invalid(field, f"must be at most {PATH_BYTES_MAX} bytes")
    return value


def parse_user(value: Any) -> str | None:
    """Return the name or number of a guest user, or None for the template's default."""
    if value is None:
        return None
    if not isinstance(value, str) or _USER.fullmatch(value) is None:
        raise invalid("user", "must be the name or number of a user")
    return value


def parse_owner(value: Any) -> str | None:
    """Return the user whose home relative paths begin in, and whose what is made becomes; None: whoever acts."""
    if value is not None and (not isinstance(value, str) or _USER.fullmatch(value) is None):
        raise invalid("owner", "must be the name or number of a user")
    return value


def parse_namespace(value: str | None) -> str | None:
    """Return the name under which a file's extended attributes are looked for."""
    if value is not None and _NAMESPACE.fullmatch(value) is None:
        raise invalid("namespace", "must be 1 to 16 lower-case letters and digits")
    return value


def parse_metadata(value: str | None) -> dict[str, str] | None:
    """Return what a file's extended attributes are to be, from JSON; None: they stay."""
    if value is None:
        return None
    try:
        given: Any = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise invalid("metadata", "must be a JSON object of strings") from error
    if not isinstance(given, dict) or len(given) > METADATA_MAX:
        raise invalid("metadata", f"must be a JSON object of at most {METADATA_MAX} strings")
    for name, text in cast("dict[str, Any]", given).items():
        if not name or not isinstance(text, str) or len(text) > METADATA_BYTES_MAX:
            raise invalid("metadata", f"must have strings of at most {METADATA_BYTES_MAX} bytes")
        _bytes_without_nul("metadata", name + text)
    return cast("dict[str, str]", given)


def parse_mark(body: Mapping[str, Any]) -> str:
    """Return the text by which a watcher knows that it has been told everything."""
    mark = body.get("mark")
    if not isinstance(mark, str) or _MARK.fullmatch(mark) is None:
        raise invalid("mark", "must be 1 to 64 letters and digits")
    return mark


def parse_mode(value: str | None) -> int | None:
    """Return permission bits from an octal string such as 644 or 0644; a decimal number cannot be meant."""
    if value is None:
        return None
    if _MODE.fullmatch(value) is None:
        raise invalid("mode", "must be three or four octal digits, such as 644 or 0755")
    return int(value, 8)


def parse_range(value: str | None, size: int) -> tuple[int, int] | None:
    """Return ``(start, length)`` of a single byte range, None when the whole file is meant.

    A header that is not a single range of bytes is ignored, as RFC 9110 asks; one beyond the file raises 416.
    """
    match = _RANGE.fullmatch(value.strip()) if value is not None else None
    if match is None or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if first == "":
        length = min(int(last), size)
        start = size - length
    else:
        start = int(first)
        if last and int(last) < start:
            return None
        length = (min(int(last) + 1, size) if last else size) - start
    if length <= 0:
        raise InvalidRequest("No byte of that range exists.", code="range-not-satisfiable", size=size)
    return start, length


def parse_offset(query: Mapping[str, str], field: str) -> int:
    """Return a byte offset from the query, 0 when absent."""
    text = query.get(field, "0")
    if not (text.isascii() and text.isdecimal()) or len(text) > 18:
        raise invalid(field, "must be a byte offset")
    return int(text)


def parse_flag(query: Mapping[str, str], field: str) -> bool:
    """Return a yes-or-no of the query, no when absent."""
    text = query.get(field, "false")
    if text not in {"true", "false", "1", "0"}:
        raise invalid(field, "must be true or false")
    return text in {"true", "1"}


def parse_env(value: Any, field: str = "env") -> dict[str, str]:
    """Return environment variables; values are kept to the byte (lone bytes as surrogate escapes), never expanded."""
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > ITEMS_MAX:
        raise invalid(field, f"must be an object of at most {ITEMS_MAX} strings")
    for name, text in value.items():
        if not name or "=" in name or "\0" in name:
            raise invalid(field, "has a name that is empty or contains = or NUL")
        if not isinstance(text, str):
            raise invalid(f"{field}.{name}", "must be a string")
        _bytes_without_nul(field, name)
        _bytes_without_nul(f"{field}.{name}", text)
    return dict(value)


def _hostname(name: str) -> str:
    """Return the nearest thing to a name that is a host name."""
    cleaned = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:63].strip("-")
    return cleaned or "sandbox"


def _spec(body: Mapping[str, Any], *, stdin: bool, tty: Tty | None) -> CommandSpec:
    spec = CommandSpec(
        argv=_argv(body),
        env=parse_env(body.get("env")),
        cwd=None if body.get("cwd") is None else check_path(body["cwd"], "cwd"),
        user=parse_user(body.get("user")),
        stdin=stdin,
        tty=tty,
        timeout_s=_timeout(body.get("timeout_s")),
        output_mib=_output_mib(body.get("output_mib", OUTPUT_MIB_DEFAULT)),
        tag=_tag(body.get("tag")),
        wait_output=_boolean(body, "wait_output"),
    )
    if len(json.dumps([spec.argv, spec.env])) > SPEC_BYTES_MAX:
        raise invalid("argv", f"and `env` together must be at most {SPEC_BYTES_MAX} bytes as JSON")
    return spec


def _argv(body: Mapping[str, Any]) -> tuple[str, ...]:
    argv, text = body.get("argv"), body.get("command")
    if (argv is None) == (text is None):
        raise invalid("argv", "or `command` is needed, and not both")
    if text is not None:
        if not isinstance(text, str) or not text:
            raise invalid("command", "must be shell text")
        _bytes_without_nul("command", text)
        return ("/bin/sh", "-c", text)
    if not isinstance(argv, list) or not 1 <= len(argv) <= ITEMS_MAX:
        raise invalid("argv", f"must be a list of 1 to {ITEMS_MAX} strings")
    for item in argv:
        if not isinstance(item, str):
            raise invalid("argv", "must be a list of strings")
        _bytes_without_nul("argv", item)
    if not argv[0]:
        raise invalid("argv", "must begin with the name of a program")
    return tuple(argv)


def _timeout(value: Any) -> float | None:
    if value is None:
        return None
    # Compared before anything is made of it: an integer may be too large for a float.
    if type(value) not in {int, float} or not 0 < value <= TIMEOUT_S_MAX:
        raise invalid("timeout_s", f"must be a number of seconds above 0 and at most {TIMEOUT_S_MAX}")
    return float(value)


def _tag(value: Any) -> str | None:
    if value is not None and not (isinstance(value, str) and 0 < len(value) <= TAG_CHARS_MAX):
        raise invalid("tag", f"must be text of 1 to {TAG_CHARS_MAX} characters")
    return value


def _output_mib(value: Any) -> int:
    if type(value) is not int or not 1 <= value <= OUTPUT_MIB_MAX:
        raise invalid("output_mib", f"must be a whole number from 1 to {OUTPUT_MIB_MAX}")
    return value


def _boolean(body: Mapping[str, Any], field: str) -> bool:
    value = body.get(field, False)
    if type(value) is not bool:
        raise invalid(field, "must be true or false")
    return value


def _bytes_of(field: str, text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise invalid(field, "contains a lone surrogate") from error


def _bytes_without_nul(field: str, text: str) -> None:
    if b"\0" in _bytes_of(field, text):
        raise invalid(field, "must not contain NUL")


def _refuse_unknown(body: Mapping[str, Any], known: set[str], prefix: str = "") -> None:
    for name in body:
        if name not in known:
            raise invalid(f"{prefix}{name}", "is not a field of this request")


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON value")
