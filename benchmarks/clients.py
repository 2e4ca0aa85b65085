"""What agents' programs wait for: a first command through E2B's own client, and a first result of a code cell."""

import json
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.report import Report, Row
from space import Client, NotFound, Sandbox

PROGRAM_S = 600
INTERPRETER = "code-interpreter-v1"
WAYS = {"sequential": "one after the other", "staggered": "one each 200 ms", "at_once": "all at once"}


def measure_first_command(report: Report, count: int) -> None:
    """From ``create()`` to the return of ``node -v`` in the template `base`, by E2B's client."""
    with Client() as client:
        environment = {**client.e2b_environment(), "LC_ALL": "C.UTF-8", "NO_PROXY": "*"}
    program = Path(__file__).with_name("tti.py")
    done = subprocess.run(
        [sys.executable, program, str(count)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        check=False,
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RuntimeError(f"the program with E2B's client failed: {last}")
    for way, what in WAYS.items():
        found = json.loads(done.stdout)[way]
        for error in sorted(set(found["errors"])):
            report.say(f"E2B client, {what}: {error}")
        values = found["ms"] or [float("inf")]
        row = Row(f"E2B client: create to `node -v`, {what}", "ms", values, budget="all succeed", tried=count)
        report.add(row, lambda _, found=found: len(found["ms"]) == count)


def measure_first_result(report: Report, rounds: int) -> None:
    """From the request for a sandbox to the first result of a code cell, from a template that is warm."""
    with Client() as client:
        try:
            client.templates.get(INTERPRETER)
        except NotFound:
            report.say("code cells: not measured; scripts/interpreter-template --import makes their template")
            return
        values = []
        for _ in range(rounds):
            client.templates.warm(INTERPRETER)
            began = time.perf_counter()
            with Sandbox.create(INTERPRETER, client=client) as sandbox:
                if sandbox.contexts.default.run("6 * 7", check=True).text != "42":
                    raise RuntimeError("6 * 7 is not 42 in a code cell")
                values.append((time.perf_counter() - began) * 1000)
    row = Row("code cells: create to first result", "ms", values, budget="p50 <= 1500 ms")
    report.add(row, lambda row: row.p50 <= 1500)
