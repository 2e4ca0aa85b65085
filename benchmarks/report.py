"""One row per figure, beside the raw tool and the budget; a table for people and JSON for machines."""

import json
import platform
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """``values`` and ``raw`` in ``unit``, one per repetition. ``holds`` is None where no budget is set."""

    name: str
    unit: str
    values: list[float]
    raw: list[float] = field(default_factory=list)
    raw_tool: str = ""
    budget: str = ""
    holds: bool | None = None
    driver: str = ""
    """Of which driver it is, where the same is measured of several: these have a table of their own."""
    tried: int = 0
    """How often it was tried, where ``values`` has only what succeeded."""

    @property
    def p50(self) -> float:
        return statistics.median(self.values)

    @property
    def p95(self) -> float:
        return quantile(self.values, 0.95)

    @property
    def p99(self) -> float:
        return quantile(self.values, 0.99)

    @property
    def raw_p50(self) -> float | None:
        return statistics.median(self.raw) if self.raw else None

    @property
    def ratio(self) -> float | None:
        return self.p50 / self.raw_p50 if self.raw_p50 else None


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Report:
    """Collects rows; ``add`` prints each as soon as it is known, so that a long run shows where it is."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.rows: list[Row] = []

    def add(self, row: Row, budget: Callable[[Row], bool] | None = None) -> None:
        holds = budget(row) if budget else None
        row = Row(**{**asdict(row), "holds": holds})
        self.rows.append(row)
        mark = {True: "in budget", False: "OVER BUDGET", None: ""}[holds]
        of = f" ({row.driver})" if row.driver else ""
        self.console.print(f"  {row.name}{of}: p50 {row.p50:.1f} {row.unit} {mark}")

    def say(self, text: str) -> None:
        self.console.print(f"  {text}")

    def table(self) -> Table:
        table = Table(title="SPACE beside the raw tool, same run")
        for column in ("what", "n", "p50", "p95", "p99", "raw p50", "ratio", "raw tool", "budget", ""):
            table.add_column(column, justify="left" if column in {"what", "raw tool", "budget", ""} else "right")
        for row in (row for row in self.rows if not row.driver):
            table.add_row(
                row.name,
                f"{len(row.values)} of {row.tried}" if row.tried else str(len(row.values)),
                f"{row.p50:.1f} {row.unit}",
                f"{row.p95:.1f}",
                f"{row.p99:.1f}",
                f"{row.raw_p50:.1f}" if row.raw_p50 is not None else "",
                f"{row.ratio:.2f}" if row.ratio is not None else "",
                row.raw_tool,
                row.budget,
                {True: "ok", False: "over", None: ""}[row.holds],
            )
        return table

    def drivers(self) -> Table | None:
        """Return the table with a column for each driver; None where none was measured by itself."""
        rows = [row for row in self.rows if row.driver]
        names = list(dict.fromkeys(row.driver for row in rows))
        if not names:
            return None
        table = Table(title="Drivers, p50")
        table.add_column("what")
        for name in names:
            table.add_column(name, justify="right")
        for what in dict.fromkeys(row.name for row in rows):
            found = {row.driver: f"{row.p50:.1f} {row.unit}" for row in rows if row.name == what}
            table.add_row(what, *(found.get(name, "") for name in names))
        return table

    def save(self, directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        now = datetime.now(UTC)
        path = directory / f"{now:%Y%m%dT%H%M%SZ}.json"
        machine = {"kernel": platform.release(), "python": platform.python_version(), "processor": platform.processor()}
        rows = [
            {**asdict(r), "p50": r.p50, "p95": r.p95, "p99": r.p99, "raw_p50": r.raw_p50, "ratio": r.ratio}
            for r in self.rows
        ]
        path.write_text(json.dumps({"at": now.isoformat(), "machine": machine, "rows": rows}, indent=1))
        return path
