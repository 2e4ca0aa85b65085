"""Imports go downwards only, and the parts that must stand alone do. Read from the sources, so that nothing need be installed."""

import ast
import sys
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src" / "space"
OURS = "space"

# What a part may import of ours beside itself. A part that is not named here may not be there.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "error_wire": {"errors"},
    "model": set(),
    "protocol": set(),
    "guest": {"protocol"},
    "settings": {"errors"},
    "drivers": {"errors", "model", "settings"},
    "listening": {"errors"},
    "children": set(),
    "logs": {"tracing"},
    "tracing": set(),
    "broker": {"drivers", "error_wire", "errors", "installation", "logs", "model", "settings", "tracing"},
    "egress": {"error_wire", "errors", "listening", "logs", "model", "settings", "tracing"},
    "node": {"children", "error_wire", "errors", "listening", "model", "protocol", "settings", "tracing"},
    "store": {"errors", "model", "settings"},
    "control": {"children", "egress", "error_wire", "errors", "model", "settings", "store", "tracing"},
    "api": {"control", "error_wire", "errors", "listening", "logs", "model", "node", "settings", "store", "tracing"},
    "e2b": {"control", "error_wire", "errors", "listening", "model", "node", "store", "tracing"},
    "sdk": {"error_wire", "errors"},
    "cli": {"errors", "sdk"},
    "authority": set(),
    "installation": {"authority", "errors", "settings"},
    "supervise": {"errors", "installation", "settings"},
}
STANDARD_LIBRARY_ONLY = {"errors", "error_wire", "model", "protocol", "guest"}
# These put parts together or ship fakes of them, and may name any.
FREE = {"assemble", "testing", "__init__"}


def modules() -> list[Path]:
    return sorted(SOURCES.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(SOURCES).parts[0].removesuffix(".py")


def part_named(name: str) -> str:
    """The part that a dotted name of ours is from; names of the package itself are the SDK's."""
    first = [*name.split("."), ""][1]
    return first if (first and (SOURCES / first).is_dir()) or (SOURCES / f"{first}.py").is_file() else "sdk"


def imported(path: Path) -> set[str]:
    """Absolute dotted names of everything that a module imports, wherever in it."""
    package = [OURS, *path.relative_to(SOURCES).parent.parts]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            found.update(f"{start}.{alias.name}" for alias in node.names)
    return found


def test_every_part_has_its_place() -> None:
    parts = {part_of(path) for path in modules()}
    assert parts - FREE - set(ALLOWED) == set()


@pytest.mark.parametrize("part", sorted(ALLOWED))
def test_a_part_imports_only_what_lies_below_it(part: str) -> None:
    wrong = [
        f"{path.relative_to(SOURCES)} imports {name}"
        for path in modules()
        if part_of(path) == part
        for name in imported(path)
        if name.split(".")[0] == OURS and part_named(name) not in {part, *ALLOWED[part]}
    ]
    assert wrong == []


@pytest.mark.parametrize("part", sorted(STANDARD_LIBRARY_ONLY))
def test_a_part_that_must_stand_alone_uses_the_standard_library_only(part: str) -> None:
    outside = {
        f"{path.relative_to(SOURCES)} imports {name}"
        for path in modules()
        if part_of(path) == part
        for name in imported(path)
        if name.split(".")[0] not in {OURS, *sys.stdlib_module_names}
    }
    assert outside == set()
