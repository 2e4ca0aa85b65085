"""The steps of E2B's builds as ours. Pure.

Theirs run in bash as a login shell, by the user `user` unless another is named, and copy as that one.
"""

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from space.e2b.build_bodies import STEPS_MAX, Step
from space.errors import InvalidRequest

SHELL = ["/bin/bash", "-l", "-c"]
USER, HOME = "user", "/home/user"
ROOT = "0"
"""By number: an image may have no file that names users."""
BASE = 0
"""The number of what comes before the first step."""
ACCOUNT = r"""set -e
if ! grep -q '^user:' /etc/passwd 2>/dev/null; then
    id=1000
    while grep -q "^[^:]*:[^:]*:$id:" /etc/passwd /etc/group 2>/dev/null; do id=$((id + 1)); done
    grep -q '^user:' /etc/group 2>/dev/null || echo "user:x:$id:" >>/etc/group
    gid=$(sed -n 's/^user:[^:]*:\([0-9]*\):.*/\1/p' /etc/group)
    echo "user:x:$id:$gid::/home/user:/bin/bash" >>/etc/passwd
    [ ! -f /etc/shadow ] || echo 'user:*:19000:0:99999:7:::' >>/etc/shadow
fi
mkdir -p /home/user
chown "$(sed -n 's/^user:[^:]*:\([0-9]*\):\([0-9]*\):.*/\1:\2/p' /etc/passwd)" /home/user
grep -q '^sudo:' /etc/group || echo 'sudo:x:27:' >>/etc/group
grep -q '^sudo:.*[:,]user\(,\|$\)' /etc/group ||
    sed -i 's/^\(sudo:.*:\)$/\1user/; t; s/^\(sudo:.*\)$/\1,user/' /etc/group
mkdir -p /usr/bin
[ -e /usr/bin/sudo ] || ln -s /.space/bin/sudo /usr/bin/sudo
[ -e /bin/bash ] || { printf '#!/bin/sh\nexec /bin/sh "$@"\n' >/bin/bash; chmod 755 /bin/bash; }
"""
"""Gives an image what E2B's clients count on: the user `user`, `sudo` for it, and something called bash."""
_GLOB = frozenset("*?[")
_USER = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.@-]{0,63}(:[A-Za-z0-9_.][A-Za-z0-9_.@-]{0,63})?")
_MODE = re.compile(r"0?[0-7]{3,4}")
_PATH_CHARS_MAX = 4096


@dataclass(slots=True)
class Steps:
    """Our steps, and the number that each has with E2B's client."""

    user: str
    """Who runs the next one, as the template to begin with says or a step did."""
    uploads: Mapping[str, str]
    """Ids of uploads by the hash of the files in them."""
    ours: list[dict[str, Any]] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)

    def prepare_image(self) -> None:
        """Begin with what makes an image one that E2B's clients know their way in."""
        self._add(BASE, user=ROOT)
        self._add(BASE, run=["/bin/sh", "-c", ACCOUNT])
        self._add(BASE, user=USER)
        self._add(BASE, workdir=HOME)
        self.user = USER

    def take(self, steps: Sequence[Step]) -> None:
        """Go on with a client's steps. Raises ``InvalidRequest`` that names the first that is wrong."""
        for number, step in enumerate(steps, 1):
            match step.type:
                case "RUN":
                    self._run(number, step.args)
                case "COPY":
                    self._copy(number, step)
                case "ENV":
                    self._env(number, step.args)
                case "WORKDIR":
                    self._add(number, workdir=_path(number, *_exactly(number, step.args, 1)))
                case "USER":
                    self.user = _user(number, *_exactly(number, step.args, 1))
                    self._add(number, user=self.user)
        if len(self.ours) > STEPS_MAX:
            raise InvalidRequest(f"steps: There may be {STEPS_MAX}, and one with a user of its own counts as three.")

    def _run(self, number: int, args: list[str]) -> None:
        command, user = _exactly(number, [*args, ""][:2] if len(args) == 1 else args, 2)
        if not command:
            raise _wrong(number, "There is nothing to run.")
        if not user or user == self.user:
            self._add(number, run=command)
            return
        self._add(number, user=_user(number, user))
        self._add(number, run=command)
        self._add(number, user=self.user or ROOT)

    def _copy(self, number: int, step: Step) -> None:
        source, to, owner, mode = _exactly(number, [*step.args, "", "", "", ""][:4], 4)
        if step.filesHash is None:
            raise _wrong(number, "A COPY needs filesHash.")
        copied: dict[str, Any] = {
            "upload": self.uploads[step.filesHash],
            "sources": [_source(number, source)],
            "to": _path(number, to),
            "keep_links": True,
        }
        if owner or self.user:
            copied["owner"] = _user(number, owner) if owner else self.user
        if mode:
            if _MODE.fullmatch(mode) is None:
                raise _wrong(number, "The mode must be three or four octal digits.")
            copied["mode"] = mode
        self._add(number, copy=copied)

    def _env(self, number: int, args: list[str]) -> None:
        if not args or len(args) % 2:
            raise _wrong(number, "ENV needs names and values, in turn.")
        env = dict(zip(args[::2], args[1::2], strict=True))
        if any(not name or "=" in name for name in env):
            raise _wrong(number, "That is not the name of an environment variable.")
        self._add(number, env=env)

    def _add(self, number: int, **step: Any) -> None:
        self.ours.append(step)
        self.numbers.append(number)


def command_of(steps: Sequence[Mapping[str, Any]], number: int) -> str | None:
    """Return the shell text of one of our steps; None when it runs none."""
    command: Any = steps[number].get("run")
    return command if isinstance(command, str) else None


def user_of(steps: Sequence[Mapping[str, Any]], number: int) -> str | None:
    """Return who does one of our steps, where a step before it says that."""
    return next((step["user"] for step in reversed(steps[:number]) if "user" in step), None)


def _source(number: int, text: str) -> str:
    """Return what is copied of an upload, which has nothing else in it: of a pattern, the directory above it."""
    parts = [part for part in posixpath.normpath(text).split("/") if part]
    if not text or text.startswith("/") or ".." in parts:
        raise _wrong(number, "What is copied must be a path within the context.")
    plain = next((place for place, part in enumerate(parts) if _GLOB & set(part)), None)
    return _path(number, "/".join(parts if plain is None else parts[:plain]) or ".")


def _path(number: int, text: str) -> str:
    if not text or len(text) > _PATH_CHARS_MAX:
        raise _wrong(number, f"A path has 1 to {_PATH_CHARS_MAX} characters.")
    return text


def _user(number: int, text: str) -> str:
    if _USER.fullmatch(text) is None:
        raise _wrong(number, "That cannot be the name of a user.")
    return text


def _exactly(number: int, args: list[str], count: int) -> list[str]:
    if len(args) != count:
        raise _wrong(number, "It has not the arguments that it needs.")
    return args


def _wrong(number: int, message: str) -> InvalidRequest:
    return InvalidRequest(f"steps.{number - 1}: {message}", field=f"steps.{number - 1}")
