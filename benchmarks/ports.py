"""What it costs to reach a server in a sandbox through its port, beside the same asked inside."""

import time
from contextlib import suppress

import httpx

from benchmarks.report import Report, Row
from benchmarks.suite import MIB
from space import Port, Sandbox

PORT = 8000
START_S = 20.0
LARGE_BYTES = 200 * MIB
INSIDE = f"""
import http.client, time
one = http.client.HTTPConnection("127.0.0.1", {PORT})
for _ in range(COUNT):
    began = time.perf_counter()
    one.request("GET", "/small", headers={{"connection": "close"}})
    one.getresponse().read()
    one.close()
    print((time.perf_counter() - began) * 1000)
"""


def measure_ports(report: Report, rounds: int) -> None:
    """A small answer through the port's own host, and the throughput of a large one."""
    with Sandbox.create("base") as sandbox:
        sandbox.run(f"mkdir /tmp/www; echo hello >/tmp/www/small; truncate -s {LARGE_BYTES} /tmp/www/large", check=True)
        sandbox.start(["python3", "-m", "http.server", str(PORT), "--directory", "/tmp/www"]).detach()
        port = sandbox.ports.expose(PORT)
        with _client(port) as client:
            _wait_until_it_answers(client)
            values = [_ask(client, "small") * 1000 for _ in range(rounds)]
            inside = sandbox.run(["python3", "-c", INSIDE.replace("COUNT", str(rounds))], check=True).stdout
            raws = [float(line) for line in inside.split()]
            report.add(Row("port: HTTP GET through preview", "ms", values, raws, "the same inside the sandbox"))
            speeds = [LARGE_BYTES / 1e6 / _ask(client, "large") for _ in range(3)]
            report.add(Row("port: download through preview", "MB/s", speeds))


def _client(port: Port) -> httpx.Client:
    """Ask the port's own host at the address of the data plane: the name need not resolve here."""
    plane = httpx.URL(port.api_url).copy_with(path="/")
    headers = {"host": httpx.URL(port.url).netloc.decode(), "x-space-token": port.token or ""}
    return httpx.Client(base_url=plane, headers=headers, timeout=60)


def _wait_until_it_answers(client: httpx.Client) -> None:
    ends = time.monotonic() + START_S
    while time.monotonic() < ends:
        with suppress(httpx.HTTPStatusError):
            _ask(client, "small")
            return
    raise TimeoutError("The server in the sandbox does not start.")


def _ask(client: httpx.Client, path: str) -> float:
    began = time.perf_counter()
    with client.stream("GET", f"/{path}") as answer:
        answer.raise_for_status()
        for _ in answer.iter_raw():
            pass
    return time.perf_counter() - began
