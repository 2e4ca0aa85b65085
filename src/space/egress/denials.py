"""Why a request was not carried out. What is said here goes to the guest and into the audit."""

from __future__ import annotations

import json
from dataclasses import dataclass

STATUS_DENIED = 403
_CODES = {True: "egress-denied", False: "egress-failed"}


class NotCarriedOut(Exception):
    """Base: the guest gets an answer of ours instead of the server's. ``reason`` is kebab-case and stable."""

    status = STATUS_DENIED
    denied = True

    def __init__(self, reason: str, message: str, rule: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.rule = rule


class Denied(NotCarriedOut):
    """The policy, or what holds for every sandbox, does not let it out."""


class BadRequest(NotCarriedOut):
    """A request that could be read in two ways, or in none."""

    status = 400


class Failed(NotCarriedOut):
    """It may go out, and the server could not be reached or broke off."""

    denied = False

    def __init__(self, reason: str, status: int, message: str) -> None:
        super().__init__(reason, message)
        self.status = status


@dataclass(frozen=True, slots=True)
class About:
    """What of a request its refusal repeats."""

    host: str | None
    method: str | None
    path: str | None


def body(error: NotCarriedOut, about: About) -> bytes:
    """Return the machine-readable answer for a guest."""
    told = {
        "code": _CODES[error.denied],
        "reason": error.reason,
        "rule": error.rule,
        "message": error.message,
        "host": about.host,
        "method": about.method,
        "path": about.path,
    }
    return json.dumps({"error": told}).encode() + b"\n"
