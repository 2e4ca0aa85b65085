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
    from space.sdk._async.contexts import AsyncContext
    from space.sdk._async.sandbox import AsyncSandbox
    from space.sdk._sync.client import Client
    from space.sdk._sync.command import Command
    from space.sdk._sync.contexts import Context
    from space.sdk._sync.sandbox import Sandbox
    from space.sdk.admin import ApiKey, Pool, PoolShape, Project, Quota, Stray
    from space.sdk.cells import Cell, CellError, CellOutput, Display
    from space.sdk.egress import EgressRecord, Grant, Policy, PolicyCheck, PolicyInForce, Secret
    from space.sdk.templates import Audited, Build, LogLine, RegistryAuth, TagMove, Template
    from space.sdk.types import (
        CommandInfo,
        CommandResult,
        Event,
        Exit,
        Failure,
        FileInfo,
        Gap,
        Operation,
        Output,
        Port,
        Resources,
        SandboxInfo,
        Snapshot,
        Tty,
    )
    from space.sdk.volumes import Volume
    from space.sdk.webhooks import Delivery, Webhook

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
    "space.sdk._async.contexts": ("AsyncContext",),
    "space.sdk._async.sandbox": ("AsyncSandbox",),
    "space.sdk._sync.client": ("Client",),
    "space.sdk._sync.command": ("Command",),
    "space.sdk._sync.contexts": ("Context",),
    "space.sdk._sync.sandbox": ("Sandbox",),
    "space.sdk.admin": ("ApiKey", "Pool", "PoolShape", "Project", "Quota", "Stray"),
    "space.sdk.cells": ("Cell", "CellError", "CellOutput", "Display"),
    "space.sdk.egress": ("EgressRecord", "Grant", "Policy", "PolicyCheck", "PolicyInForce", "Secret"),
    "space.sdk.templates": ("Audited", "Build", "LogLine", "RegistryAuth", "TagMove", "Template"),
    "space.sdk.types": (
        "CommandInfo",
        "CommandResult",
        "Event",
        "Exit",
        "Failure",
        "FileInfo",
        "Gap",
        "Operation",
        "Output",
        "Port",
        "Resources",
        "SandboxInfo",
        "Snapshot",
        "Tty",
    ),
    "space.sdk.volumes": ("Volume",),
    "space.sdk.webhooks": ("Delivery", "Webhook"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "ApiKey",
    "AsyncClient",
    "AsyncCommand",
    "AsyncContext",
    "AsyncSandbox",
    "Audited",
    "Build",
    "Cell",
    "CellError",
    "CellOutput",
    "Client",
    "Command",
    "CommandFailed",
    "CommandInfo",
    "CommandResult",
    "Conflict",
    "Context",
    "Delivery",
    "Display",
    "EgressRecord",
    "Event",
    "Exit",
    "Failure",
    "FileInfo",
    "Forbidden",
    "Gap",
    "Grant",
    "GuestError",
    "HostError",
    "HostFull",
    "InvalidRequest",
    "LimitExceeded",
    "LogLine",
    "MachineLost",
    "NotFound",
    "Operation",
    "OutcomeUnknown",
    "Output",
    "Policy",
    "PolicyCheck",
    "PolicyInForce",
    "Pool",
    "PoolShape",
    "Port",
    "Project",
    "Quota",
    "RegistryAuth",
    "RequestError",
    "Resources",
    "Sandbox",
    "SandboxError",
    "SandboxInfo",
    "Secret",
    "Snapshot",
    "SpaceError",
    "Stray",
    "TagMove",
    "Template",
    "Tty",
    "Unauthenticated",
    "Unavailable",
    "Volume",
    "Webhook",
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
