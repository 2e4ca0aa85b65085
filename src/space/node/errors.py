"""What a guest refuses, as an error of ours: by the agent's code if that is known, else by its kernel's errno."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

from space import errors

if TYPE_CHECKING:
    from space.protocol.messages import Failure

_BY_ERRNO: dict[int, tuple[type[errors.SpaceError], str, str]] = {
    errno.ENOENT: (errors.NotFound, "file-not-found", "There is no such file or directory in the sandbox."),
    errno.EACCES: (errors.Forbidden, "permission-denied", "The sandbox's user may not do that."),
    errno.EPERM: (errors.Forbidden, "permission-denied", "The sandbox's user may not do that."),
    errno.EROFS: (errors.Forbidden, "read-only", "That part of the sandbox's file system is read-only."),
    errno.EISDIR: (errors.Conflict, "is-a-directory", "That is a directory."),
    errno.ENOTDIR: (errors.Conflict, "not-a-directory", "A part of the path is not a directory."),
    errno.EEXIST: (errors.Conflict, "file-exists", "There is something of that name already."),
    errno.ENOTEMPTY: (errors.Conflict, "directory-not-empty", "The directory is not empty."),
    errno.ELOOP: (errors.Conflict, "too-many-links", "The path leads through too many symbolic links."),
    errno.EXDEV: (errors.Conflict, "other-file-system", "That would cross from one file system to another."),
    errno.EBUSY: (errors.Conflict, "busy", "That is in use."),
    errno.ETXTBSY: (errors.Conflict, "busy", "That program is running."),
    errno.ENXIO: (errors.Conflict, "not-a-file", "That is not a file that can be read or written."),
    errno.ESPIPE: (errors.Conflict, "not-a-file", "That is not a file that can be read or written."),
    errno.ENODEV: (errors.Conflict, "not-a-file", "That is not a file that can be read or written."),
    errno.ENAMETOOLONG: (errors.InvalidRequest, "invalid-request", "`path` has a part that is too long."),
    errno.EINVAL: (errors.InvalidRequest, "invalid-request", "`path` is not usable for that."),
    errno.EFBIG: (errors.GuestError, "file-too-large", "The file would be larger than the sandbox allows."),
    errno.ENOSPC: (errors.GuestError, "disk-full", "The sandbox's disk is full."),
    errno.EDQUOT: (errors.GuestError, "disk-full", "The sandbox's disk is full."),
}
_BY_GUEST_CODE: dict[str, tuple[type[errors.SpaceError], str | None, dict[str, str]]] = {
    "invalid-request": (errors.InvalidRequest, None, {}),
    "no-such-user": (errors.InvalidRequest, None, {"field": "user"}),
    "no-such-group": (errors.InvalidRequest, None, {"field": "user"}),
    "no-such-directory": (errors.InvalidRequest, None, {"field": "cwd"}),
    "not-an-archive": (errors.InvalidRequest, None, {"field": "body"}),
    "size-mismatch": (errors.InvalidRequest, None, {"field": "body"}),
    "not-a-file": (errors.Conflict, "not-a-file", {}),
    "not-a-terminal": (errors.Conflict, "no-tty", {}),
    "ended": (errors.Conflict, "command-ended", {}),
    "no-such-command": (errors.Conflict, "command-ended", {}),
    "disk-full": (errors.GuestError, "disk-full", {}),  # found out late, when no call is there to have an errno
    "clock-not-set": (errors.GuestError, "clock-not-set", {}),
    "entropy-not-taken": (errors.GuestError, "entropy-not-taken", {}),
    "hostname-not-set": (errors.GuestError, "hostname-not-set", {}),
    "machine-id-not-set": (errors.GuestError, "machine-id-not-set", {}),
    "quiesced": (errors.Conflict, "wrong-state", {"state": "suspending"}),
    "busy": (errors.LimitExceeded, None, {}),
    "too-many-commands": (errors.LimitExceeded, "too-many-commands", {}),
    "watch-limit": (errors.LimitExceeded, "watch-limit", {}),
    "outcome-unknown": (errors.OutcomeUnknown, None, {}),
    "resynchronised": (errors.OutcomeUnknown, None, {}),
    "port-closed": (errors.SandboxError, "port-closed", {}),
    "connection-reset": (errors.SandboxError, "connection-reset", {}),
    "too-many-connections": (errors.LimitExceeded, "too-many-connections", {}),
}
_START_BY_GUEST_CODE: dict[str, str] = {
    "not-found": "program-not-found",
    "not-executable": "program-not-executable",
    "permission-denied": "program-not-executable",
}
"""What these codes mean of a program that was to be started."""


def error_from_guest(failure: Failure, op: str | None = None) -> errors.SpaceError:
    """Return a guest's failure as an error. Its code decides where it is one of ours, else the guest kernel's errno."""
    code, message, number = failure["code"], failure["message"], failure["errno"]
    if op == "start" and code in _START_BY_GUEST_CODE:
        return errors.InvalidRequest(message or None, code=_START_BY_GUEST_CODE[code], field="argv")
    known = _BY_GUEST_CODE.get(code)
    if known is not None:
        known_class, known_code, known_details = known
        return known_class(message or None, code=known_code, **known_details)
    if number in _BY_ERRNO:
        cls, ours, sentence = _BY_ERRNO[number]
        details: dict[str, Any] = {"errno": errno.errorcode.get(number, str(number))}
        if cls is errors.InvalidRequest:
            details["field"] = "path"
        return cls(sentence, code=ours, **details)
    return errors.GuestError(message or None, guest_code=code, errno=number)
