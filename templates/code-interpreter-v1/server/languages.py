"""The languages there are: their kernels, and how each is told what is in its environment. Pure."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Values = Mapping[str, "str | None"]
"""Environment variables; None: it is not there."""

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""Of a variable that every kernel can have."""


@dataclass(frozen=True, slots=True)
class Language:
    """``change``, ``lend`` and ``take_back`` make code for its kernel that shows nothing and counts for nothing."""

    name: str
    kernel: str
    transport: str
    change: Callable[[Values], str]
    """Variables have these values from now on."""
    lend: Callable[[Values], str]
    """… until ``take_back``, after which they are as they were."""
    take_back: Callable[[Values], str]
    begin: str = ""
    """What it is told before its first cell."""
    lag_s: float = 0.0
    """How long after the end of a cell something of it may still come."""
    silence_s: float = 30.0
    """How long a kernel that has answered may take to say that it is idle: what it showed before may be large."""


def _python(function: str) -> Callable[[Values], str]:
    return lambda values: f"__import__('space_kernel').{function}({dict(values)!r})"


def _deno_set(values: str) -> str:
    return f"for (const [k, v] of Object.entries({values})) v === null ? Deno.env.delete(k) : Deno.env.set(k, v);"


def _deno_change(values: Values) -> str:
    return f"{{ {_deno_set(json.dumps(dict(values)))} }}"


def _deno_lend(values: Values) -> str:
    names = json.dumps(list(values))
    keep = f"globalThis[Symbol.for('space')] = Object.fromEntries({names}.map((k) => [k, Deno.env.get(k) ?? null]));"
    return f"{{ {keep} {_deno_set(json.dumps(dict(values)))} }}"


def _deno_take_back(_values: Values) -> str:
    return f"{{ {_deno_set('globalThis[Symbol.for(`space`)] ?? {}')} delete globalThis[Symbol.for('space')]; }}"


def _bash_change(values: Values) -> str:
    return "; ".join(
        f"unset {name}" if value is None else f"export {name}={_quoted(value)}" for name, value in values.items()
    )


def _bash_lend(values: Values) -> str:
    keep = [f'[ -z "${{{name}+x}}" ] || __space_{name}=${name}' for name in values]
    return "; ".join([*keep, _bash_change(values)])


def _bash_take_back(values: Values) -> str:
    return "; ".join(
        f'if [ -n "${{__space_{name}+x}}" ]; then export {name}="$__space_{name}"; unset __space_{name}; '
        f"else unset {name}; fi"
        for name in values
    )


def _quoted(value: str) -> str:
    """Quote for bash on one line: it reads what it is sent line by line, as from a terminal."""
    if value.isprintable() and "\\" not in value:
        return shlex.quote(value)
    return "$'" + "".join(f"\\x{byte:02x}" for byte in value.encode("utf-8", "surrogateescape")) + "'"


PYTHON = Language(
    "python", "space-python", "ipc", _python("change"), _python("lend"), _python("take_back"), _python("reseed")({})
)
_BASH = Language("bash", "space-bash", "ipc", _bash_change, _bash_lend, _bash_take_back)
_DENO = (_deno_change, _deno_lend, _deno_take_back)
# Its kernel knows no other transport, and tells of a result before or after it says that it is done.
_JAVASCRIPT = Language("javascript", "space-deno", "tcp", *_DENO, lag_s=0.1, silence_s=1.0)
_TYPESCRIPT = Language("typescript", "space-deno", "tcp", *_DENO, lag_s=0.1, silence_s=1.0)

_KNOWN = {language.name: language for language in (PYTHON, _BASH, _JAVASCRIPT, _TYPESCRIPT)}
_KNOWN |= {"js": _JAVASCRIPT, "ts": _TYPESCRIPT, "sh": _BASH, "python3": PYTHON}


def find(name: str) -> Language | None:
    """Return a language by one of its names, in any case."""
    return _KNOWN.get(name.strip().lower())


def names() -> list[str]:
    return sorted({language.name for language in _KNOWN.values()})
