"""What the gateway adds, beside the same client and server without it.

Clients are at links' ends, without machines: what a machine's own network stack costs is not in these figures.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Report, Row
from tests.egress_host import GatewayHost, Place, gateway_host
from tests.upstreams import GOOD

PORT, NAME = 9443, "good.example"
ROOT = Path(__file__).parents[1]
ADDED_MS_MAX, MB_S_MIN, CONNECTIONS, SLOWER_MAX = 3.0, 200.0, 500, 2.0
FLOODING = 64


@dataclass
class _Ends:
    """A client at a link's end, and the same client without the gateway between it and the server."""

    host: GatewayHost
    place: Place

    def through(self, what: str, number: int, place: Place | None = None) -> list[float]:
        at = place or self.place
        ca = str(self.host.settings.gateway_dir / "ca.crt")
        done = at.run(sys.executable, *_words(what, str(at.link.host_v4), ca, number), timeout_s=300)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def direct(self, what: str, number: int) -> list[float]:
        ca = str(self.host.outside.certificates.authorities / "ca.crt")
        words = [sys.executable, *_words(what, GOOD, ca, number)]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
        return json.loads(done.stdout.splitlines()[-1])


def measure_egress(report: Report, rounds: int, size_mib: int) -> None:
    """Latency, throughput, connections, and what one sandbox's flood does to another."""
    with gateway_host() as host, _server(host):
        place = host.place()
        place.attach(_POLICY)
        ends = _Ends(host, place)
        size = size_mib << 20
        values, raws = ends.through("latency", rounds), ends.direct("latency", rounds)
        row = Row("request through the gateway, kept alive", "ms", values, raws, "the same without it")
        report.add(_with(row, f"added <= {ADDED_MS_MAX:g} ms"), lambda r: r.p50 - (r.raw_p50 or 0) <= ADDED_MS_MAX)
        before_mib = host.memory_mib()
        for what in ("download", "upload"):
            values = [ends.through(what, size)[0] for _ in range(3)]
            raws = [ends.direct(what, size)[0] for _ in range(3)]
            row = Row(f"{what} through terminated TLS", "MB/s", values, raws, "the same without it")
            budget = f">= {MB_S_MIN:g} MB/s" if what == "download" else ""
            report.add(_with(row, budget), (lambda r: r.p50 >= MB_S_MIN) if budget else None)
        grown = host.memory_mib() - before_mib
        report.add(Row("memory of the gateway grown by that", "MiB", [grown], budget="flat"), lambda r: r.p50 <= 32)
        good, took = ends.through("many", CONNECTIONS)
        row = Row(f"{CONNECTIONS} connections at once, ten requests each", "s", [took], budget="all answered")
        report.add(row, lambda _: good == CONNECTIONS)
        _measure_flood(report, ends, rounds)


def _measure_flood(report: Report, ends: _Ends, rounds: int) -> None:
    """What a request of one sandbox takes while another asks as fast as it can."""
    other = ends.host.place()
    other.attach(_POLICY)
    alone = ends.through("latency", rounds)
    ca = str(ends.host.settings.gateway_dir / "ca.crt")
    words = _words("flood", str(other.link.host_v4), ca, FLOODING)
    with subprocess.Popen(
        ["ip", "netns", "exec", other.netns, sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE
    ) as flooding:
        try:
            assert flooding.stdout is not None
            flooding.stdout.readline()
            beside = ends.through("latency", rounds)
        finally:
            flooding.kill()
    row = Row("request beside another sandbox's flood", "ms", beside, alone, "the same without the flood")
    report.add(_with(row, f"<= {SLOWER_MAX:g} x"), lambda r: (r.ratio or 0) <= SLOWER_MAX)


_POLICY = {"rules": [{"hosts": [NAME], "ports": [PORT]}]}


def _with(row: Row, budget: str) -> Row:
    return Row(row.name, row.unit, row.values, row.raw, row.raw_tool, budget)


def _words(what: str, address: str, ca: str, number: int) -> list[str]:
    return ["-m", "benchmarks.egress_ends", what, address, str(PORT), NAME, ca, str(number)]


@contextlib.contextmanager
def _server(host: GatewayHost) -> Iterator[None]:
    """Serve outside while the block lasts."""
    trusted = host.outside.directory / "trusted"
    words = [
        "-m",
        "benchmarks.egress_ends",
        "serve",
        str(PORT),
        str(trusted / "server.pem"),
        str(trusted / "server.key"),
    ]
    with subprocess.Popen(
        ["ip", "netns", "exec", host.outside.netns, sys.executable, *words, GOOD], cwd=ROOT, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield
        finally:
            process.kill()
