"""HTTP requests as values, and which of them may be sent again. No I/O."""

import time
import uuid
from collections.abc import AsyncIterable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tenacity import RetryCallState
from tenacity.stop import stop_after_attempt
from tenacity.wait import wait_random_exponential

from space.errors import SpaceError, Unavailable

READ_TIMEOUT_S = 60.0
HELD_S_MAX = 30.0
"""How long one answer is held open; longer waits are made of several."""
ATTEMPTS_MAX = 4
RETRY_WAIT_S_MAX = 10.0
RECONNECT_S = 60.0
"""How long a lost connection is tried to be made again before the caller hears of it."""
FIRST_CONNECT_S = 15.0
"""As long is tried what never worked before."""
RECONNECT_WAIT_S_MAX = 2.0
UNREACHABLE = "unreachable"
"""Code of a request that was never sent."""
CONNECTION_LOST = "connection-lost"
"""Code of a request that was sent, but whose answer did not come."""
NOT_BY_WAITING = frozenset({"quota-exceeded"})
"""Codes of limits that pass when the caller lets go of something: waiting for that here would only be silent."""

Content = bytes | Iterable[bytes] | AsyncIterable[bytes]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address and what to show there: the API key at the api, a short-lived token at a data plane."""

    url: str
    secret: str = field(repr=False)

    @property
    def loopback(self) -> bool:
        host = urlsplit(self.url).hostname or ""
        return host in {"localhost", "::1"} or host.startswith("127.")

    @property
    def websocket_url(self) -> str:
        return "ws" + self.url.removeprefix("http")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call of the API. ``read_s`` bounds the silence before and within the answer; None: a command decides."""

    method: str
    path: str
    params: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None
    content: Content | None = None
    read_s: float | None = READ_TIMEOUT_S
    harmless: bool = False
    """Whether it changes nothing although its method could."""

    @property
    def rewindable(self) -> bool:
        """Whether its body can be sent from the start again."""
        return self.content is None or isinstance(self.content, bytes)

    @property
    def repeatable(self) -> bool:
        """Whether sending it twice has the effect of sending it once."""
        if not self.rewindable:
            return False
        return self.harmless or self.method in {"GET", "HEAD", "PUT", "DELETE"} or "idempotency-key" in self.headers


class Patience:
    """How often a connection was lost in a row, and how long to wait before the next try."""

    def __init__(self) -> None:
        self._failures = 0
        self._since: float | None = None
        self._limit_s = FIRST_CONNECT_S

    @property
    def delay_s(self) -> float:
        return min(RECONNECT_WAIT_S_MAX, 0.05 * 2 ** min(self._failures - 1, 10)) if self._failures else 0.0

    def connected(self) -> None:
        """It works in principle: from now on losing it is worth more patience."""
        self._limit_s = RECONNECT_S

    def worked(self) -> None:
        """It works again."""
        self.connected()
        self._failures, self._since = 0, None

    def failed(self, reason: str, to: str = "the command") -> None:
        """Count one failure. Raises ``Unavailable`` when they have been going on for too long."""
        now = time.monotonic()
        self._failures += 1
        self._since = self._since or now
        if now - self._since > self._limit_s:
            raise Unavailable(f"There is no connection to {to} ({reason}).", code=CONNECTION_LOST)


def creating(*, wait_s: float | None = None) -> dict[str, str]:
    """Return the headers of a request that creates: a fresh idempotency key, and how long the answer may be held."""
    return {"idempotency-key": uuid.uuid4().hex, **(waiting(wait_s) if wait_s else {})}


def waiting(wait_s: float) -> dict[str, str]:
    return {"prefer": f"wait={max(1, round(wait_s))}"}


def present(**fields: Any) -> dict[str, Any]:
    """Return the fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}


def retry_policy(request: Request, *, only_way: bool) -> dict[str, Any]:
    """Return tenacity's arguments for a request.

    What was never sent or surely refused is tried again, and what may be repeated also when its answer was lost. Where
    there is another way (``only_way`` is false), an endpoint that cannot be reached is not tried again.
    """
    return {
        "stop": stop_after_attempt(ATTEMPTS_MAX),
        "wait": _wait,
        "retry": lambda state: _is_worth_it(request, state, only_way=only_way),
        "reraise": True,
    }


_backoff = wait_random_exponential(multiplier=0.1, max=2.0)


def _wait(state: RetryCallState) -> float:
    hinted = _retry_after(state)
    return _backoff(state) if hinted is None else hinted


def _is_worth_it(request: Request, state: RetryCallState, *, only_way: bool) -> bool:
    error = state.outcome.exception() if state.outcome else None
    if not isinstance(error, SpaceError):
        return False
    if error.code == CONNECTION_LOST:
        return request.repeatable
    if error.code == UNREACHABLE:
        return only_way
    if not request.rewindable or error.code in NOT_BY_WAITING:
        return False
    if "idempotency-key" in request.headers and "operation_id" in error.details:
        return False  # The operation has failed: the same key would bring the same answer again.
    hinted = _retry_after(state)
    return error.retryable and hinted is not None and hinted <= RETRY_WAIT_S_MAX


def _retry_after(state: RetryCallState) -> float | None:
    error = state.outcome.exception() if state.outcome else None
    return error.retry_after_s if isinstance(error, SpaceError) else None
