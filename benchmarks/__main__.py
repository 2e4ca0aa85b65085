"""``python -m benchmarks``: measure the running installation, print a table. Needs root: it runs the raw tool too."""

import argparse
import shutil
from pathlib import Path

from rich.console import Console

from benchmarks import suite
from benchmarks.raw import raw_runsc
from benchmarks.report import Report
from space.sdk.config import find_credentials


def found_runsc() -> str:
    own = Path("/opt/space/bin/runsc")
    return str(own) if own.exists() else shutil.which("runsc") or "runsc"


def newest_base() -> Path:
    """Return the template archive that set-up made last."""
    archives = sorted(Path("/var/cache/space/templates").glob("base-*.tar"), key=lambda path: path.stat().st_mtime)
    return archives[-1] if archives else Path("base.tar")


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
    parser.add_argument(
        "--only", nargs="*", choices=["create", "exec", "pause", "suspend", "streams", "many", "others"]
    )
    options = parser.parse_args()
    console = Console()
    report = Report(console)
    chosen = set(options.only or ["create", "exec", "pause", "suspend", "streams", "many", "others"])
    found = find_credentials()
    api = suite.Api(found.url, found.api_key)
    with raw_runsc(options.runsc, options.base_tar, options.guest_dir) as raw:
        if "create" in chosen:
            suite.measure_create(report, api, raw, options.rounds)
        if "exec" in chosen:
            suite.measure_exec(report, api, raw, options.execs)
        if "pause" in chosen:
            suite.measure_pause(report, api, raw, options.rounds)
        if "suspend" in chosen:
            suite.measure_suspend(report, api, raw, options.rounds)
        if "streams" in chosen:
            suite.measure_streams(report, raw, options.size_mib)
    if "many" in chosen:
        suite.measure_memory_and_burst(report, api, options.many)
    if "others" in chosen:
        suite.measure_others(report, options.rounds)
    console.print(report.table())
    console.print(f"saved as {report.save(options.results)}")
    return 1 if any(row.holds is False for row in report.rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
