"""docs/architecture.md stays true: the modules and tests that it names exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()
SOURCES = ROOT / "src/space"


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(title: str) -> list[str]:
    return [line for line in section(title).splitlines() if line.startswith("|")][2:]


def existing_tests() -> set[str]:
    return {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)\(", path.read_text(), re.MULTILINE)
    }


def test_every_module_it_leads_to_is_there() -> None:
    named = {name for row in rows("Where is…") for name in re.findall(r"`([\w/]+\.py|[\w/]+/)`", row)}
    assert len(named) > 50
    assert [name for name in named if not (SOURCES / name).exists()] == []


@pytest.mark.parametrize("row", rows("Invariants"), ids=lambda row: row.split("|")[1].strip()[:60])
def test_every_invariant_has_a_test_that_is_there(row: str) -> None:
    named = re.findall(r"`(test_\w+)`", row)
    assert named
    assert set(named) - existing_tests() == set()


def test_every_part_has_a_place_on_the_page() -> None:
    found = [*SOURCES.glob("*.py"), *(package.parent for package in SOURCES.glob("*/__init__.py"))]
    parts = {path.name.removesuffix(".py") for path in found if not path.name.startswith("_")}
    assert [part for part in sorted(parts) if f"`{part}" not in section("Layers") + section("Where is…")] == []
