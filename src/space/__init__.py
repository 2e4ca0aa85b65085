"""SPACE: isolated Linux machines for AI agents.

The names here are the public Python interface. They are imported when first used, so that a part of SPACE that imports
a module of this package does not load the client library.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from space.errors import (
        CommandFailed,
        Conflict,
        Forbidden,
        GuestError,
        HostError,
        HostFull,
        InvalidRequest,
        LimitExceeded,
        MachineLost,
        NotFound,
        OutcomeUnknown,
        RequestError,
        SandboxError,
        SpaceError,
        Unauthenticated,
        Unavailable,
    )
    from space.sdk._async.client import AsyncClient
    from space.sdk._async.command import AsyncCommand
    from space.sdk._async.sandbox import AsyncSandbox
    from space.sdk._sync.client import Client
    from space.sdk._sync.command import Command
    from space.sdk._sync.sandbox import Sandbox
    from space.sdk.types import (
        ApiKey,
        CommandInfo,
        CommandResult,
        Event,
        Exit,
        Failure,
        FileInfo,
        Gap,
        Operation,
        Output,
        Resources,
        SandboxInfo,
        Tty,
    )

_MODULES = {
    "space.errors": (
        "CommandFailed",
        "Conflict",
        "Forbidden",
        "GuestError",
        "HostError",
        "HostFull",
        "InvalidRequest",
        "LimitExceeded",
        "MachineLost",
        "NotFound",
        "OutcomeUnknown",
        "RequestError",
        "SandboxError",
        "SpaceError",
        "Unauthenticated",
        "Unavailable",
    ),
    "space.sdk._async.client": ("AsyncClient",),
    "space.sdk._async.command": ("AsyncCommand",),
    "space.sdk._async.sandbox": ("AsyncSandbox",),
    "space.sdk._sync.client": ("Client",),
    "space.sdk._sync.command": ("Command",),
    "space.sdk._sync.sandbox": ("Sandbox",),
    "space.sdk.types": (
        "ApiKey",
        "CommandInfo",
        "CommandResult",
        "Event",
        "Exit",
        "Failure",
        "FileInfo",
        "Gap",
        "Operation",
        "Output",
        "Resources",
        "SandboxInfo",
        "Tty",
    ),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "ApiKey",
    "AsyncClient",
    "AsyncCommand",
    "AsyncSandbox",
    "Client",
    "Command",
    "CommandFailed",
    "CommandInfo",
    "CommandResult",
    "Conflict",
    "Event",
    "Exit",
    "Failure",
    "FileInfo",
    "Forbidden",
    "Gap",
    "GuestError",
    "HostError",
    "HostFull",
    "InvalidRequest",
    "LimitExceeded",
    "MachineLost",
    "NotFound",
    "Operation",
    "OutcomeUnknown",
    "Output",
    "RequestError",
    "Resources",
    "Sandbox",
    "SandboxError",
    "SandboxInfo",
    "SpaceError",
    "Tty",
    "Unauthenticated",
    "Unavailable",
]


def __getattr__(name: str) -> Any:
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
