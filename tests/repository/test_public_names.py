"""The public Python interface is pinned, complete, and loaded only when used."""

import ast
import subprocess
import sys
from pathlib import Path

import space

ROOT = Path(__file__).parents[2]
PUBLIC = [
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


def test_the_public_names_are_exactly_these() -> None:
    assert sorted(space.__all__) == PUBLIC


def test_every_public_name_can_be_imported_and_knows_its_type_checker_twin() -> None:
    for name in PUBLIC:
        assert getattr(space, name).__name__ == name
    tree = ast.parse((ROOT / "src/space/__init__.py").read_text())
    checked = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert set(PUBLIC) <= checked


def test_every_error_of_the_tree_is_public() -> None:
    from space import errors

    tree = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert tree <= set(PUBLIC)


def test_parts_of_space_do_not_load_the_sdk() -> None:
    program = "import sys, space.guest, space.protocol, space.errors; print([m for m in sys.modules if 'sdk' in m or m == 'httpx'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(space, "Sandbux")
