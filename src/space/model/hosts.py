"""Host names as policies and requests write them: one form for each, and no address in any disguise."""

import re

HOST_CHARS_MAX = 253

# No label begins or ends with a hyphen. One character class for each place, so matching takes linear time.
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
# What the resolver's library takes for a number ends in one: "127.1", "2130706433", "0x7f.1", "0177.0.0.1".
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")


def normalise_host(text: str) -> str | None:
    """Return a name in lower case without its trailing dot; None for anything else, and for an address in any form.

    Labels are letters, digits, hyphens and underscores; a name beyond ASCII is one in its ``xn--`` form only.
    """
    # Before lower(): the Kelvin sign, among others, becomes an ASCII letter there.
    if len(text) > HOST_CHARS_MAX + 1 or not text.isascii():
        return None
    host = text.lower().removesuffix(".")
    if len(host) > HOST_CHARS_MAX or _HOST.fullmatch(host) is None:
        return None
    return None if _NUMBER.fullmatch(host.rpartition(".")[2]) else host


def normalise_pattern(text: str) -> str | None:
    """Return a pattern in its one form: a name, ``*.suffix``, or ``*``; None for anything else."""
    if text == "*":
        return text
    star = "*." if text.startswith("*.") else ""
    host = normalise_host(text[len(star) :])
    return None if host is None else star + host


def host_matches(pattern: str, host: str) -> bool:
    """Whether a pattern covers a host, both normalised; ``*.suffix`` covers every depth below it, not the suffix."""
    return pattern == host or (pattern[:1] == "*" and host.endswith(pattern[1:]))


def covers(patterns: tuple[str, ...], host: str) -> bool:
    """Whether one of the patterns covers a host, all normalised."""
    return host in patterns or any(pattern[:1] == "*" and host.endswith(pattern[1:]) for pattern in patterns)
