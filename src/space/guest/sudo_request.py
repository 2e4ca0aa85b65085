"""What a caller of ``sudo`` asks for, and the program that it comes to: arguments, user, environment, directory."""

from __future__ import annotations

import os

from space.guest.groups import MARK
from space.guest.spawning import PATH_DEFAULT, Program, environment
from space.guest.system import Refused
from space.guest.users import find_identity

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from space.guest.system import Identity

_KEPT = {
    "COLORS",
    "DISPLAY",
    "HOSTNAME",
    "KRB5CCNAME",
    "LS_COLORS",
    "PS1",
    "PS2",
    "XAUTHORITY",
    "XAUTHORIZATION",
    "XDG_CURRENT_DESKTOP",
}
_KEPT_IF_HARMLESS = {"COLORTERM", "LANG", "LANGUAGE", "LINGUAS", "TERM", "TZ"}
"""Kept unless the value has a / or a %: a path or a format that the program would follow. sudo's own lists."""
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-$")
_WORDS_MIN = 6


class Request:
    """One call of ``sudo``, as ``sudo_client.encode`` writes it."""

    def __init__(self) -> None:
        self.user = "root"
        self.flags: frozenset[str] = frozenset()
        self.replaced: frozenset[str] = frozenset()
        self.rows = 0
        self.cols = 0
        self.assignments: dict[str, str] = {}
        self.argv: list[str] = []
        self.env: dict[str, str] = {}

    @classmethod
    def parse(cls, body: bytes) -> Request:
        """Raises ``ValueError`` for what no client sends."""
        words = os.fsdecode(body).split("\0")
        if len(words) < _WORDS_MIN:
            raise ValueError("words are missing")
        one = cls()
        one.user = words[0].removeprefix("#") or one.user
        one.flags = frozenset(words[1]) & frozenset("EHis")
        one.replaced = frozenset(words[1]) & frozenset("012")
        one.rows, one.cols = (min(max(int(word), 0), 9999) for word in words[2:4])
        assignments, arguments = (int(word) for word in words[4:6])
        rest = words[6:]
        if min(assignments, arguments) < 0 or assignments + arguments > len(rest):
            raise ValueError("a count is wrong")
        one.assignments = _variables(rest[:assignments])
        one.argv = rest[assignments : assignments + arguments]
        one.env = _variables(rest[assignments + arguments :])
        return one


def program_of(request: Request, caller: Identity) -> Program:
    """Return what is to be started, in the caller's directory if ``cwd`` is empty. Raises ``Refused``."""
    target = find_identity(request.user)
    argv = request.argv
    if request.flags & {"i", "s"}:
        shell = target.shell if "i" in request.flags else request.env.get("SHELL") or target.shell
        argv = [shell, *(["-l"] if "i" in request.flags else [])]
        if request.argv:
            argv += ["-c", " ".join(map(_escaped, request.argv))]
    if not argv or not argv[0]:
        raise Refused("invalid-request", "a command is needed")
    home = target.home if os.path.isdir(target.home) else "/"
    return Program(argv, _environment(request, caller, target, argv), home if "i" in request.flags else "", target)


def _environment(request: Request, caller: Identity, target: Identity, argv: list[str]) -> dict[str, str]:
    """As sudo does with ``env_reset`` and ``secure_path``: what the target user implies, and little of the caller's."""
    given = request.env
    if "E" in request.flags and "i" not in request.flags:
        kept = dict(given)
        if "H" in request.flags:
            kept.pop("HOME", None)
    else:
        kept = {name: value for name, value in given.items() if name in _KEPT or _is_harmless(name, value)}
    if "s" in request.flags:
        kept["SHELL"] = argv[0]
    implied = {"PATH": PATH_DEFAULT, "USER": target.name, "LOGNAME": target.name}
    about = {
        "SUDO_COMMAND": " ".join(argv)[:4096],
        "SUDO_USER": caller.name,
        "SUDO_UID": str(caller.uid),
        "SUDO_GID": str(caller.gid),
    }
    # Where there are no control groups, the mark is what makes a process one of its command's.
    mark = {MARK: given[MARK]} if MARK in given else {}
    return environment(target, kept, implied, request.assignments, about, mark)


def _is_harmless(name: str, value: str) -> bool:
    return (name in _KEPT_IF_HARMLESS or name.startswith("LC_")) and "/" not in value and "%" not in value


def _escaped(word: str) -> str:
    """As sudo hands words to a shell: only what is plain stays unescaped."""
    return "".join(letter if letter in _PLAIN or not letter.isascii() else f"\\{letter}" for letter in word)


def _variables(words: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if name and equals:
            found[name] = value
    return found
