"""``python -m benchmarks``: measure the running installation, print a table. Needs root: it runs the raw tool too."""

import argparse
import shutil
from pathlib import Path

from rich.console import Console

from benchmarks import branching, clients, drivers, egress, ports, suite, templates
from benchmarks.raw import raw_runsc
from benchmarks.report import Report
from space.sdk.config import find_credentials

PARTS = (
    *("pool", "exec", "pause", "suspend", "forks", "streams", "templates", "egress", "ports", "many", "others"),
    *("cells", "e2b", "drivers"),
)


def found_runsc() -> str:
    own = Path("/opt/space/bin/runsc")
    return str(own) if own.exists() else shutil.which("runsc") or "runsc"


def newest_base() -> Path:
    """Return the template archive that set-up made last."""
    archives = sorted(Path("/var/cache/space/templates").glob("base-*.tar"), key=lambda path: path.stat().st_mtime)
    return archives[-1] if archives else Path("base.tar")


def _measure_beside_raw(report: Report, api: suite.Api, options: argparse.Namespace, chosen: set[str]) -> None:
    """What has a raw figure of runsc beside it."""
    with raw_runsc(options.runsc, options.base_tar, options.guest_dir) as raw:
        if "pool" in chosen:
            branching.measure_pool(report, api, raw, options.claims)
            branching.measure_miss(report, api, raw, options.rounds)
        if "exec" in chosen:
            suite.measure_exec(report, api, raw, options.execs)
        if "pause" in chosen:
            suite.measure_pause(report, api, raw, options.rounds)
        if "suspend" in chosen:
            suite.measure_suspend(report, api, raw, options.rounds)
        if "forks" in chosen:
            branching.measure_forks(report, api, raw, options.forks)
        if "streams" in chosen:
            suite.measure_streams(report, raw, options.size_mib)
        if "templates" in chosen:
            templates.measure_templates(report, api, raw)


def main() -> int:
    """Run the chosen measurements; exit 1 when one is over its budget."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="repetitions of each lifecycle figure")
    parser.add_argument("--execs", type=int, default=200, help="repetitions of exec")
    parser.add_argument("--size-mib", type=int, default=1024, help="bytes moved for each throughput figure")
    parser.add_argument("--many", type=int, default=50, help="sandboxes of the burst and of the memory figure")
    parser.add_argument("--runsc", default=found_runsc(), help="the raw tool; the one SPACE uses unless told otherwise")
    parser.add_argument("--base-tar", type=Path, default=newest_base(), help="the base template's root filesystem")
    parser.add_argument("--guest-dir", type=Path, default=Path("/opt/space/guest"))
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--claims", type=int, default=200, help="repetitions of a create from the warm pool")
    parser.add_argument("--forks", type=int, default=16, help="forks made at once")
    parser.add_argument("--only", nargs="*", choices=PARTS)
    options = parser.parse_args()
    console = Console()
    report = Report(console)
    chosen = set(options.only or PARTS)
    found = find_credentials()
    api = suite.Api(found.url, found.api_key)
    _measure_beside_raw(report, api, options, chosen)
    if "egress" in chosen:
        egress.measure_egress(report, options.execs, options.size_mib)
    if "ports" in chosen:
        ports.measure_ports(report, options.execs)
    if "many" in chosen:
        suite.measure_memory_and_burst(report, api, options.many)
    if "cells" in chosen:
        clients.measure_first_result(report, options.rounds)
    if "e2b" in chosen:
        clients.measure_first_command(report, options.rounds)
    if "others" in chosen:
        suite.measure_others(report, options.rounds)
    if "drivers" in chosen:
        drivers.measure_drivers(report, api, max(3, options.rounds // 4))
    console.print(report.table())
    if (columns := report.drivers()) is not None:
        console.print(columns)
    console.print(f"saved as {report.save(options.results)}")
    return 1 if any(row.holds is False for row in report.rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
