"""What the contract of drivers came to in this run, as one table of tests and drivers. Pytest's hooks, and the table.

It is printed at the end of every run in which a test of the contract had a turn, also where several processes share the
work. ``SPACE_DRIVER_TABLE=PAGE`` writes it into that page, between its marks, or alone where there is no such page.
"""

import os
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

DRIVERS = ("fake", "gvisor", "qemu", "firecracker")
BEGIN, END = "<!-- generated: contract -->\n", "<!-- end: contract -->\n"
_TEST = re.compile(r"tests/contract/test_driver\w*\.py::test_(?P<name>\w+)\[(?P<words>.+)\]$")
_WORST = ("pass", "skip", "FAIL")


@dataclass
class Table:
    """`cells` by test and driver: how that ended, and how often. A test with more parameters is one row."""

    cells: dict[str, dict[str, str]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    """Why something was skipped, by the cell's ``name[driver]``."""

    def note(self, nodeid: str, outcome: str, reason: str = "") -> None:
        """Take down one outcome: ``passed``, ``failed`` or ``skipped``. What is no test of the contract is passed over."""
        found = _TEST.search(nodeid)
        driver = next((word for word in found["words"].split("-") if word in DRIVERS), None) if found else None
        if found is None or driver is None:
            return
        name = found["name"].replace("_", " ")
        word = {"passed": "pass", "skipped": "skip"}.get(outcome, "FAIL")
        row = self.cells.setdefault(name, {})
        row[driver] = max(row.get(driver, "pass"), word, key=_WORST.index)
        if word == "skip":
            self.reasons[f"{name}[{driver}]"] = reason.removeprefix("Skipped: ")

    def render(self) -> str:
        """Return it in Markdown: the tests, how many passed and were skipped of each driver, and each reason once."""
        reasons = list(dict.fromkeys(self.reasons[cell] for cell in sorted(self.reasons)))
        lines = [f"| test | {' | '.join(DRIVERS)} |", "|---|" + "---|" * len(DRIVERS)]
        for name, row in self.cells.items():
            shown = []
            for driver in DRIVERS:
                word = row.get(driver, "")
                number = reasons.index(self.reasons[f"{name}[{driver}]"]) + 1 if word == "skip" else 0
                shown.append(f"skip ({number})" if number else word)
            lines.append(f"| {name} | {' | '.join(shown)} |")
        sums = [Counter(row.get(driver, "") for row in self.cells.values()) for driver in DRIVERS]
        told = [", ".join(f"{one[word]} {word}" for word in _WORST if one[word]) for one in sums]
        lines.append(f"| **together** | {' | '.join(told)} |")
        lines += ["", *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))]
        return "\n".join(lines).rstrip() + "\n"

    def write(self, page: Path) -> None:
        text = page.read_text() if page.exists() else BEGIN + END
        before, _, rest = text.partition(BEGIN)
        page.write_text(before + BEGIN + self.render() + END + rest.partition(END)[2])


_table = Table()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Of several phases the one counts that did not pass; where processes share the work, one hears of all."""
    if report.when == "call" or report.outcome != "passed":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        _table.note(report.nodeid, report.outcome, reason)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _table.cells:
        terminalreporter.section("contract of drivers")
        terminalreporter.write(_table.render())
        if page := os.environ.get("SPACE_DRIVER_TABLE"):
            _table.write(Path(page))
