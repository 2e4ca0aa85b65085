"""What docs/reference says is what the sources do: codes, statuses, paths, subcommands, names. And links lead somewhere."""

import ast
import functools
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import space
from space import error_wire, errors
from space.api import errors as api_errors
from space.api.routes import ROUTES
from space.control import outcomes
from space.node import errors as node_errors
from space.sdk import errors as sdk_errors
from space.sdk import requests as sdk_requests

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src/space"
REFERENCE = ROOT / "docs/reference"
SKIPPED = {".git", ".venv", ".pytest_cache", "results", "dist", "node_modules"}

# Which parts of the sources raise what a section of the page tells of.
OVER_HTTP = ("listening.py", "api/", "e2b/", "control/", "node/", "store/")
CARRYING_OUT = ("control/lifecycle.py", "control/forks.py")
FAILURES, LOCAL, OPERATORS = "Failures of operations", "SDK and command line", "For operators only"
GENERAL, FILES = "Of every kind", "Files"


def sections() -> dict[str, dict[str, list[str]]]:
    """The page's tables: section → code → the row's other cells."""
    found: dict[str, dict[str, list[str]]] = {}
    for part in (REFERENCE / "errors.md").read_text().split("\n## ")[1:]:
        title = part.splitlines()[0]
        rows = re.findall(r"^\| `([a-z0-9-]+)` \| (.*) \|$", part, re.MULTILINE)
        assert len(rows) == len({code for code, _ in rows}), f"{title} names a code twice"
        found[title] = {code: [cell.strip() for cell in cells.split(" | ")] for code, cells in rows}
    return found


PAGE = sections()


@functools.cache
def raised() -> list[tuple[str, type[errors.SpaceError], str]]:
    """Every `SomeError(…, code="…")` in the sources: code, class, and where."""
    found = []
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            for keyword in node.keywords:
                if keyword.arg == "code" and isinstance(keyword.value, ast.Constant) and keyword.value.value:
                    name = ast.unparse(node.func).rpartition(".")[2]
                    cls = getattr(errors, name)
                    found.append((str(keyword.value.value), cls, str(path.relative_to(SOURCES))))
    return found


def classes() -> dict[str, type[errors.SpaceError]]:
    found = [of for of in vars(errors).values() if isinstance(of, type) and issubclass(of, errors.SpaceError)]
    return {cls.__name__: cls for cls in found}


@functools.cache
def causes() -> set[str]:
    """Codes that are told as values: `Failure("…")`, and the table of causes of a machine's end."""
    found = set(outcomes.CAUSES)
    for path in (SOURCES / "control").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) == "Failure"
                and isinstance(node.args[0], ast.Constant)
            ):
                found.add(str(node.args[0].value))
    return found


def known() -> set[str]:
    """Every code there is."""
    found = {code for code, _, _ in raised()} | causes() | {cls.code for cls in classes().values()}
    found |= {*error_wire.STATUS_BY_CODE}
    found |= {code for _, code, _ in api_errors._BY_STATUS.values()}
    found |= {code for _, code, _ in node_errors._BY_ERRNO.values()}
    found |= {code for _, code, _ in node_errors._BY_GUEST_CODE.values() if code is not None}
    found |= set(node_errors._START_BY_GUEST_CODE.values())
    found |= {sdk_requests.UNREACHABLE, sdk_requests.CONNECTION_LOST, sdk_errors._UNKNOWN}
    # The SDK's word for a failure without a code.
    return found | {"failed"}


def test_every_code_is_on_the_page() -> None:
    assert known() - {code for rows in PAGE.values() for code in rows} == set()


def test_the_page_has_no_code_that_is_gone() -> None:
    assert {code for rows in PAGE.values() for code in rows} - known() == set()


def test_every_code_of_a_call_is_where_its_part_of_the_sources_is_told_of() -> None:
    """A code of the SDK is not hidden in the table of operators, and so on."""
    wrong = []
    for code, _, where in raised():
        wanted = {LOCAL} if where.startswith(("sdk/", "cli/")) else set(PAGE) - {LOCAL}
        if not any(code in PAGE[title] for title in wanted):
            wrong.append(f"{code} ({where})")
    assert wrong == []


Answer = tuple[int, type[errors.SpaceError]]


@functools.cache
def answers() -> dict[str, set[Answer]]:
    """With which statuses and as which classes each code is answered, as far as the sources show it."""
    found: defaultdict[str, set[Answer]] = defaultdict(set)
    for code, cls, where in raised():
        if where.startswith(OVER_HTTP) and where not in CARRYING_OUT:
            found[code].add((error_wire.status_of(cls(code=code)), cls))
    told = [*node_errors._BY_ERRNO.values()]
    told += [(cls, code, "") for cls, code, _ in node_errors._BY_GUEST_CODE.values() if code is not None]
    told += [(errors.InvalidRequest, code, "") for code in node_errors._START_BY_GUEST_CODE.values()]
    for cls, code, _ in told:
        found[code].add((error_wire.status_of(cls(code=code)), cls))
    for status, (cls, code, _) in api_errors._BY_STATUS.items():
        found[code].add((status, cls))
    for cls in classes().values():
        found[cls.code].add((error_wire.status_of(cls()), cls))
    return found


@functools.cache
def failures() -> dict[str, set[Answer]]:
    """As `answers`, of the errors that an operation can fail with below the node."""
    found: defaultdict[str, set[Answer]] = defaultdict(set)
    for code, cls, where in raised():
        if where.startswith(("broker/", "drivers/", "node/machines.py", "node/introductions.py", *CARRYING_OUT)):
            found[code].add((error_wire.status_of(cls(code=code)), cls))
    return found


def in_the_sdk(code: str, possible: set[Answer], details: dict[str, str]) -> set[str]:
    """Which classes the SDK raises for a code that is answered so."""
    return {
        type(sdk_errors.from_wire({"code": code, "kind": cls.__name__, "details": details}, status)).__name__
        for status, cls in possible
    }


ANSWERED = [(title, code) for title in PAGE if title not in {FAILURES, LOCAL, OPERATORS} for code in PAGE[title]]


@pytest.mark.parametrize(("title", "code"), ANSWERED, ids=str)
def test_status_and_class_are_those_of_the_sources(title: str, code: str) -> None:
    status_cell, class_cell = PAGE[title][code][:2]
    said = {int(text) for text in status_cell.split(", ")}
    assert said == {status for status, _ in answers()[code]}
    possible = in_the_sdk(code, answers()[code], {})
    if title == FILES:
        possible |= in_the_sdk(code, answers()[code], {"errno": "EIO"})
    named = {name.strip("`") for name in class_cell.split(", ")}
    assert named <= possible
    assert title == FILES or named == possible


def test_a_class_of_the_tree_has_a_row_for_its_own_code() -> None:
    for cls in classes().values():
        title = LOCAL if cls is errors.CommandFailed else GENERAL
        assert cls.__name__ in PAGE[title][cls.code][0 if title == LOCAL else 1]


@pytest.mark.parametrize("code", PAGE[FAILURES])
def test_a_failure_has_the_status_and_the_class_that_a_caller_who_waited_gets(code: str) -> None:
    """What is only told of a failed sandbox, and never an answer, has no status."""
    status_cell, class_cell = PAGE[FAILURES][code][:2]
    possible = failures()[code]
    assert status_cell == (", ".join(sorted({str(status) for status, _ in possible})) or "-")
    told = in_the_sdk(code, possible, {}) or {errors.MachineLost.__name__}
    assert {name.strip("`") for name in class_cell.split(", ")} == told


def test_every_cause_of_a_failed_sandbox_is_among_the_failures() -> None:
    assert causes() - set(PAGE[FAILURES]) == set()


def test_the_class_of_what_is_not_answered_is_the_one_raised() -> None:
    wrong = []
    for title, parts in ((LOCAL, ("sdk/", "cli/")), (OPERATORS, ("",))):
        for code, cells in PAGE[title].items():
            named = {name.strip("`") for name in cells[0].split(", ")}
            possible = {cls.__name__ for known, cls, where in raised() if known == code and where.startswith(parts)}
            if not named <= (possible or set(classes())) or (title == LOCAL and possible and named != possible):
                wrong.append(f"{code}: {named}, not {possible}")
    assert wrong == []


def test_generated_pages_are_what_the_sources_say() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/reference", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_setting_and_option_says_what_it_means() -> None:
    rows = [row for name in ("settings.md", "sdk.md") for row in (REFERENCE / name).read_text().splitlines()]
    assert [row for row in rows if re.fullmatch(r"\| `\w+` \|.*\| *\|", row)] == []


def test_every_path_of_the_api_is_on_its_page() -> None:
    page = (REFERENCE / "api.md").read_text()
    assert [row.path for row in ROUTES if f"| {row.method} | `{row.path}` | {row.access} |" not in page] == []


def test_every_public_name_of_the_sdk_is_on_its_page() -> None:
    page = (REFERENCE / "sdk.md").read_text()
    assert [name for name in space.__all__ if not re.search(rf"`{name}`|^### {name}$", page, re.MULTILINE)] == []


def test_every_row_of_the_drivers_table_is_a_test_that_there_is_and_none_failed() -> None:
    page = (REFERENCE / "drivers.md").read_text()
    table = page.split("<!-- generated: contract -->")[1].split("<!-- end: contract -->")[0]
    rows = re.findall(r"^\| ([a-z][^|]*) \|(.*)\|$", table, re.MULTILINE)[1:]
    there = {
        name.replace("_", " ")
        for path in (ROOT / "tests/contract").glob("test_driver*.py")
        for name in re.findall(r"def test_(\w+)\(", path.read_text())
    }
    assert len(rows) > 30
    assert [name for name, _ in rows if name not in there] == []
    assert [name for name, cells in rows if "FAIL" in cells] == []


def pages() -> list[Path]:
    found = []
    for directory, names, entries in os.walk(ROOT):
        names[:] = sorted(name for name in names if name not in SKIPPED)
        found += [Path(directory) / entry for entry in entries if entry.endswith(".md")]
    return found


def anchors(page: Path) -> set[str]:
    """What may stand behind # in a link to a page, as GitHub names headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_pages_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        to = (page.parent / path).resolve() if path else page
        if not to.exists() or (anchor and anchor not in anchors(to)):
            broken.append(target)
    assert broken == []
