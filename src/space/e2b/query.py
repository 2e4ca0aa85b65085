"""What stands behind the question mark of E2B's requests."""

from collections.abc import Mapping

from space.errors import InvalidRequest

DIGITS_MAX = 9


def number(query: Mapping[str, str], name: str, what: str = "a number", digits_max: int = DIGITS_MAX) -> int | None:
    """Return a number that is not negative; None where none is given. Raise ``InvalidRequest`` for anything else."""
    text = query.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= digits_max):
        raise InvalidRequest(f"{name} must be {what}.")
    return int(text)


def limit(query: Mapping[str, str], most: int, *, least: int = 1) -> int:
    """Return how many rows are asked for: ``most``, where more are or nothing is said."""
    what = f"a number from {least} to {most}"
    found = number(query, "limit", what)
    if found is not None and found < least:
        raise InvalidRequest(f"limit must be {what}.")
    return most if found is None else min(found, most)
