"""The table of drivers says of each test what became of it, and why what was skipped was."""

import os
import subprocess
import sys
from pathlib import Path

from tests.driver_table import BEGIN, END, Table

ROOT = Path(__file__).parents[2]


def row(table: Table, name: str) -> list[str]:
    line = next(line for line in table.render().splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_a_test_has_one_row_and_each_driver_a_column_whatever_else_it_is_tried_with() -> None:
    table = Table()
    path = "tests/contract/test_driver.py::test_it_ends"
    for words in ("fake", "False-gvisor", "gvisor-True", "qemu-1"):
        table.note(f"{path}[{words}]", "passed")
    assert row(table, "it ends") == ["pass", "pass", "pass", ""]


def test_what_failed_in_one_of_several_tries_has_failed() -> None:
    table = Table()
    for words, outcome in (("True-gvisor", "failed"), ("False-gvisor", "passed"), ("fake", "passed")):
        table.note(f"tests/contract/test_driver_forks.py::test_it_ends[{words}]", outcome)
    assert row(table, "it ends") == ["pass", "FAIL", "", ""]


def test_what_was_skipped_has_its_reason_said_once_below_and_is_counted() -> None:
    table = Table()
    for name in ("a", "b"):
        table.note(f"tests/contract/test_driver.py::test_{name}[qemu]", "skipped", "Skipped: needs QEMU")
    table.note("tests/contract/test_driver.py::test_b[gvisor]", "skipped", "Skipped: not on a Sunday")
    assert row(table, "a") == ["", "", "skip (1)", ""]
    assert row(table, "b") == ["", "skip (2)", "skip (1)", ""]
    assert row(table, "**together**") == ["", "1 skip", "2 skip", ""]
    assert table.render().endswith("\n1. needs QEMU\n2. not on a Sunday\n")


def test_what_is_no_test_of_the_contract_is_not_in_it() -> None:
    table = Table()
    for nodeid in (
        "tests/unit/test_x.py::test_a[gvisor]",
        "tests/contract/test_driver.py::test_b",
        "tests/contract/test_driver.py::test_b[other]",
    ):
        table.note(nodeid, "passed")
    assert table.cells == {}


def test_a_page_gets_it_between_its_marks_and_keeps_the_rest(tmp_path: Path) -> None:
    table, page = Table(), tmp_path / "page.md"
    table.note("tests/contract/test_driver.py::test_a[fake]", "passed")
    page.write_text(f"before\n{BEGIN}old\n{END}after\n")
    for _ in range(2):
        table.write(page)
    assert page.read_text() == f"before\n{BEGIN}{table.render()}{END}after\n"


def test_a_run_shared_by_several_processes_prints_one_table(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    words = ["-q", "-p", "xdist", "--numprocesses=2", "-k", "fake and (hint or host_limits)"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, "tests/contract/test_driver.py"],
        cwd=ROOT,
        env={**os.environ, "SPACE_DRIVER_TABLE": str(page), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("| destroy needs no hint and no running machine | pass |") == 1
    assert "| **together** | 2 pass |" in page.read_text()
