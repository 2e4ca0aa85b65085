"""Every error SPACE raises on purpose.

    SpaceError
    ├── RequestError            the caller must change the request
    │   ├── InvalidRequest      a field is malformed, out of range or unknown
    │   ├── Unauthenticated     no key or token, or one that is not valid
    │   ├── Forbidden           valid, but not for this
    │   ├── NotFound            no such thing, or not in this project
    │   └── Conflict            right request, wrong moment or state
    ├── LimitExceeded           a quota or rate; later, or with a larger limit
    ├── SandboxError            the workload or its machine is the cause
    │   ├── GuestError          the guest refused (its errno is in details)
    │   ├── MachineLost         the machine ended or stopped answering
    │   └── CommandFailed       the program did not exit with 0 (the SDK's `check`; its result is in `result`)
    ├── HostError               the operator must act
    │   ├── HostFull            no capacity or no disk; later, or elsewhere
    │   └── Unavailable         a part of SPACE is not running or not reachable
    └── OutcomeUnknown          sent, but the answer never came: do not repeat blindly

The class says who must act; `code` (stable, kebab-case) says what happened; `details` holds JSON values that name the
field, the state or the limit. The docstring of a class is its default message.
"""

from typing import Any, ClassVar


class SpaceError(Exception):
    """Something in SPACE failed."""

    code: str = "internal"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str | None = None, *, code: str | None = None, **details: Any) -> None:
        self.message = message or (type(self).__doc__ or "").strip()
        if code is not None:
            self.code = code
        self.details = details
        super().__init__(self.message)

    @property
    def retry_after_s(self) -> float | None:
        """After how many seconds the same may succeed, where that was said."""
        hinted = self.details.get("retry_after_s")
        return float(hinted) if isinstance(hinted, int | float) else None


class RequestError(SpaceError):
    """The request cannot be carried out as it stands."""

    code = "bad-request"


class InvalidRequest(RequestError):
    """A field of the request is not valid."""

    code = "invalid-request"


class Unauthenticated(RequestError):
    """A valid API key or token is needed."""

    code = "unauthenticated"


class Forbidden(RequestError):
    """This key or token does not allow that."""

    code = "forbidden"


class NotFound(RequestError):
    """There is nothing of that name."""

    code = "not-found"


class Conflict(RequestError):
    """That is not possible in the present state."""

    code = "conflict"


class LimitExceeded(SpaceError):
    """A limit is reached."""

    code = "limit-exceeded"
    retryable = True


class SandboxError(SpaceError):
    """The sandbox could not do that."""

    code = "sandbox-error"


class GuestError(SandboxError):
    """The guest refused."""

    code = "guest-error"


class MachineLost(SandboxError):
    """The sandbox's machine has ended or no longer answers."""

    code = "machine-lost"


class CommandFailed(SandboxError):
    """The command did not exit with 0."""

    code = "command-failed"

    def __init__(self, message: str | None = None, *, result: Any = None, **details: Any) -> None:
        super().__init__(message, **details)
        self.result = result


class HostError(SpaceError):
    """The host could not do that."""

    code = "host-error"


class HostFull(HostError):
    """The host has no room for that now."""

    code = "host-full"
    retryable = True


class Unavailable(HostError):
    """A part of SPACE is not reachable."""

    code = "unavailable"
    retryable = True


class OutcomeUnknown(SpaceError):
    """The request was sent but its outcome is not known."""

    code = "outcome-unknown"
