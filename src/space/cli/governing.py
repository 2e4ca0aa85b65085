"""How policies, grants and values are written on a command line, and read from files and standard input."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer

DOCUMENT_CHARS_MAX = 256 * 1024
VALUE_CHARS_MAX = 64 * 1024
INHERIT = "default"
_REPEATED = {"port": "ports", "method": "methods", "path": "paths"}
_SINGLE = {"placement", "name", "template", "region", "service", "env"}
_FLAGS = {"cleartext": ("cleartext", True), "no-scrub": ("scrub", False)}
"""Options of a grant that turn something on, or off."""
_NO_FLAGS = {"scrub", "no-cleartext"}
"""What is so without being said; as a host's name it would be a mistake."""

PolicyOption = Annotated[
    str | None,
    typer.Option(
        "--policy",
        metavar="POLICY",
        help="What may leave it: none, package-registries, public-internet, a policy's name, or @FILE.",
    ),
]
GrantOption = Annotated[
    list[str],
    typer.Option(
        "--grant",
        metavar="SECRET=HOST[,…]",
        help="Place a secret into requests to a host; more hosts, env=NAME, placement=…, path=… and so on may follow, "
        "with commas between. May be repeated.",
    ),
]


def parse_policy(text: str, option: str = "--policy") -> str | dict[str, Any] | None:
    """Return a policy as the api takes it: a name, a document from ``@FILE`` or ``@-``, or None for ``default``."""
    if text == INHERIT:
        return None
    return read_document(text[1:], option) if text.startswith("@") else text


def read_document(file: str, option: str) -> dict[str, Any]:
    """Return the JSON object in a file; ``-`` is standard input."""
    try:
        text = sys.stdin.read(DOCUMENT_CHARS_MAX) if file == "-" else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{file!r} cannot be read: {error}", param_hint=option) from None
    try:
        found: Any = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"{file!r} is not JSON: {error}", param_hint=option) from None
    if not isinstance(found, dict):
        raise typer.BadParameter(f"{file!r} is not a JSON object", param_hint=option)
    return cast("dict[str, Any]", found)


def parse_grant(text: str) -> dict[str, Any]:
    """Return ``SECRET=HOST[,HOST…][,KEY=VALUE…]`` as the api takes a grant."""
    secret, equals, rest = text.partition("=")
    grant: dict[str, Any] = {"secret": secret, "hosts": []}
    for part in rest.split(",") if equals else []:
        name, has_value, value = part.partition("=")
        if part in _FLAGS:
            key, flag = _FLAGS[part]
            grant[key] = flag
        elif part in _NO_FLAGS:
            raise typer.BadParameter(f"{part!r} is so by itself: leave it out", param_hint="--grant")
        elif not has_value:
            grant["hosts"].append(part)
        elif name in _REPEATED:
            grant.setdefault(_REPEATED[name], []).append(number(value, "--grant") if name == "port" else value)
        elif name == "expires":
            grant["expires_in_s"] = number(value, "--grant")
        elif name in _SINGLE:
            grant[name] = value
        else:
            known = ", ".join(sorted({*_REPEATED, *_SINGLE, "expires", "cleartext", "no-scrub"}))
            raise typer.BadParameter(f"{name!r} is none of {known}", param_hint="--grant")
    if not secret or not grant["hosts"]:
        raise typer.BadParameter(f"{text!r} is not SECRET=HOST", param_hint="--grant")
    return grant


def number(text: str, option: str) -> int:
    if not text.isascii() or not text.isdecimal():
        raise typer.BadParameter(f"{text!r} is no number", param_hint=option)
    return int(text)


def read_value(kind: str) -> str | dict[str, str]:
    """Read a secret's value: from standard input, or from whoever sits at the terminal, without showing it.

    Never from the command line, which every user of this machine can see. On standard input a text is taken as it is,
    but for a line's end behind it; the other kinds are a JSON object.
    """
    if sys.stdin is not None and sys.stdin.isatty():
        return _ask(kind)
    text = "" if sys.stdin is None else sys.stdin.read(VALUE_CHARS_MAX + 1)
    if not text:
        raise typer.BadParameter("there is nothing on it: pipe the value in", param_hint="standard input")
    if len(text) > VALUE_CHARS_MAX:
        raise typer.BadParameter(f"more than {VALUE_CHARS_MAX} characters", param_hint="standard input")
    if kind == "text":
        return text.removesuffix("\n").removesuffix("\r")
    try:
        found: Any = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise typer.BadParameter(f"a secret of the kind {kind} is a JSON object", param_hint="standard input")
    return cast("dict[str, str]", found)


_FIELDS = {
    "basic": ("username", "password"),
    "aws": ("access_key_id", "secret_access_key", "session_token"),
    "oauth": ("token_url", "client_id", "client_secret", "refresh_token", "scope"),
}
_SHOWN = {"username", "access_key_id", "token_url", "client_id", "scope"}
_MAY_LACK = {"session_token", "client_secret", "refresh_token", "scope"}


def _ask(kind: str) -> str | dict[str, str]:
    if kind == "text":
        return str(typer.prompt("Value", hide_input=True, err=True))
    found: dict[str, str] = {}
    for name in _FIELDS.get(kind, ()):
        default: Any = "" if name in _MAY_LACK else None
        text = str(typer.prompt(name, hide_input=name not in _SHOWN, err=True, default=default, show_default=False))
        if text:
            found[name] = text
    return found
