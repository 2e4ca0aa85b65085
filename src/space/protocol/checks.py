"""Small checks from which the shapes of messages are built. Each takes a JSON value and returns it, or raises.

Whatever arrives is hostile: types are exact (a bool is no integer), sizes are bounded, text is bytes-faithful.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    Check = Callable[[Any], Any]


class MessageError(ValueError):
    """A message is malformed: ``message`` names the field."""


REQUIRED = object()
"""Stands in a shape where a field has no default."""
_HEXADECIMAL = frozenset("0123456789abcdef")


def text(bytes_max: int, *, empty: bool = False) -> Check:
    """Text without NUL. Bytes that are not UTF-8 travel as lone surrogates (surrogateescape); no others are allowed."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or (not value and not empty):
            raise MessageError("must be text" if empty else "must be text that is not empty")
        try:
            size = len(value.encode("utf-8", "surrogateescape"))
        except UnicodeEncodeError:
            raise MessageError("is not valid text") from None
        if size > bytes_max:
            raise MessageError(f"is longer than {bytes_max} bytes")
        if "\0" in value:
            raise MessageError("must not contain NUL")
        return value

    return check


def hexadecimal(digits: int) -> Check:
    """Lower-case hexadecimal text of that many digits."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or len(value) != digits or not _HEXADECIMAL.issuperset(value):
            raise MessageError(f"must be {digits} lower-case hexadecimal digits")
        return value

    return check


def integer(lowest: int, highest: int) -> Check:
    def check(value: Any) -> int:
        if type(value) is not int or not lowest <= value <= highest:
            raise MessageError(f"must be a whole number from {lowest} to {highest}")
        return value

    return check


def number(lowest: float, highest: float) -> Check:
    def check(value: Any) -> float:
        if type(value) not in (int, float) or not lowest <= value <= highest:
            raise MessageError(f"must be a number from {lowest} to {highest}")
        return value

    return check


def boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise MessageError("must be true or false")
    return value


def choice(*values: str) -> Check:
    def check(value: Any) -> str:
        if value not in values:
            raise MessageError(f"must be one of {', '.join(values)}")
        return value

    return check


def optional(inner: Check) -> Check:
    def check(value: Any) -> Any:
        return None if value is None else inner(value)

    return check


def items(inner: Check, count_max: int, *, count_min: int = 0) -> Check:
    def check(value: Any) -> list[Any]:
        if not isinstance(value, list) or not count_min <= len(value) <= count_max:
            raise MessageError(f"must be a list of {count_min} to {count_max}")
        return [inner(item) for item in value]

    return check


def mapping(key: Check, inner: Check, count_max: int) -> Check:
    def check(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) > count_max:
            raise MessageError(f"must be an object of at most {count_max} entries")
        return {key(name): inner(item) for name, item in value.items()}

    return check


def variable(value: Any) -> str:
    """The name of an environment variable: text without ``=``."""
    name: str = text(4096)(value)
    if "=" in name:
        raise MessageError("must not contain =")
    return name


def shape(fields: Mapping[str, tuple[Check, Any]], *, strict: bool = True) -> Check:
    """An object with these fields: name → (check, default). Unknown ones are an error if ``strict``, else dropped."""

    def check(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise MessageError("must be an object")
        if strict:
            for name in value:
                if name not in fields:
                    raise MessageError(f"{name[:64]!r}: unknown field")
        result: dict[str, Any] = {}
        for name, (inner, default) in fields.items():
            if name not in value:
                if default is REQUIRED:
                    raise MessageError(f"{name}: missing")
                result[name] = default
                continue
            try:
                result[name] = inner(value[name])
            except MessageError as error:
                raise MessageError(f"{name}: {error}") from None
        return result

    return check
