"""How results look: tables for people at a terminal, plain columns for pipes, JSON for programs."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Write rows under their headings."""
    if sys.stdout.isatty():
        _rich_table(columns, rows)
        return
    cells = [columns, *(list(map(one_line, row)) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _rich_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        shown.add_column(column, overflow="fold")
    for row in rows:
        shown.add_row(*(Text(one_line(cell), style=_STYLES.get(cell, "")) for cell in row))
    Console().print(shown)


_STYLES = {"running": "green", "failed": "red", "suspended": "cyan", "paused": "yellow", "stopped": "dim"}


def document(value: Any) -> None:
    """Write JSON."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def line(value: Any) -> None:
    """Write JSON on one line, for what comes bit by bit."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def fields(values: Mapping[str, Any], indent: str = "") -> None:
    """Write names and values below each other."""
    width = max((len(name) for name in values), default=0)
    for name, value in values.items():
        if isinstance(value, dict) and value:
            print(f"{indent}{name}")
            fields(value, indent + "  ")
        else:
            print(f"{indent}{name.ljust(width)}  {one_line(_plain(value))}")


def _plain(value: Any) -> str:
    if value is None or value in ({}, []):
        return "-"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def one_line(text: str) -> str:
    """Return text that cannot move the cursor: what is shown may come from a sandbox."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def size(count: int | None) -> str:
    """Return a number of bytes, roughly."""
    if count is None:
        return "-"
    for unit, factor in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"


def number(value: float | None) -> str:
    """Return a number without zeros that say nothing."""
    return "-" if value is None else f"{value:.10g}"


def ago(moment: datetime | None) -> str:
    """Return how long ago something was, roughly."""
    if moment is None:
        return "-"
    seconds = max(0, int((datetime.now(UTC) - moment).total_seconds()))
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
