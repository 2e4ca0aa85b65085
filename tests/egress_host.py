"""A gateway of their own for tests: the real process as its own user, real links and rules, and programs that stand where
a sandbox does, in a link's namespace; without machines, so that one test takes milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from space import installation
from space.broker.addressing import Link, link
from space.broker.links import Links
from space.model.ids import new_id
from space.model.policy import parse_policy, render_policy
from space.settings import Settings
from tests.guest import Guest
from tests.installation import DATA, gateway_ports
from tests.upstreams import NAME_SERVER, NETWORKS, Outside, outside

READY_S = 20.0
RUN_S = 30.0
SECRET = "s3cr3t/V4lue+of=the.owner"
"""Every secret of the tests has this in it."""


@dataclass
class Place(Guest):
    """Where a sandbox is: its link, and what is done at the guest's end of it."""

    host: GatewayHost
    sandbox: str
    link: Link
    netns: str

    @property
    def authority(self) -> Path:  # type: ignore[override]
        return self.host.settings.gateway_dir / "ca.crt"

    def tcp_inside(self, port: int, to: str) -> socket.socket:
        """Connect from within, where nothing leaves the machine."""
        return self.tcp(port, to)

    def reaches(self, url: str = "https://good.example/hello") -> None:
        """See to it that what is allowed works: the twin of what is refused."""
        answer = self.get(url)
        assert answer.status == 200, answer

    def refusals(self, **wanted: str) -> set[tuple[str, str | None]]:
        """Return reason and host of what was refused."""
        return {(record["reason"], record["host"]) for record in self.egress(decision="deny", **wanted)}

    def run(self, *words: str, stdin: str = "", timeout_s: float = RUN_S) -> subprocess.CompletedProcess[str]:
        """Run a program at the guest's end; names are asked of the gateway."""
        return subprocess.run(
            ["ip", "netns", "exec", self.netns, *words],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env={"PATH": os.environ["PATH"], "SPACE_TEST_CA": str(self.authority)},
            cwd=Path(__file__).parents[1],
        )

    def python(self, script: str, *words: str, timeout_s: float = RUN_S) -> Any:
        """Run Python at the guest's end and return the JSON that it prints."""
        done = self.run(sys.executable, "-c", script, *words, timeout_s=timeout_s)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def attach(self, policy: Any = "none", grants: list[dict[str, Any]] | None = None, project: str = "prj") -> None:
        """Have the gateway hold that policy and those grants of the sandbox from now on."""
        document = render_policy(parse_policy(policy))
        self.host.generation += 1
        told = {"project": project, "generation": self.host.generation, "policy": document, "grants": grants or []}
        self.host.call("PUT", f"/sandboxes/{self.sandbox}", json=told)

    def egress(self, **wanted: str) -> list[dict[str, Any]]:
        """Return the audit's records of the sandbox."""
        answer = self.host.call("GET", "/egress", params={"sandbox": self.sandbox, "limit": "1000", **wanted})
        return [json.loads(line) for line in answer.text.splitlines()]


@dataclass
class GatewayHost:
    """One gateway, its links, and the servers outside."""

    settings: Settings
    outside: Outside
    directory: Path
    generation: int = 0
    _links: Links = field(init=False)
    _process: subprocess.Popen[bytes] | None = None
    _client: httpx.Client | None = None
    _places: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Of each sandbox the number of its link, and what the machine was called for which it was made."""

    def __post_init__(self) -> None:
        self._links = Links(self.settings)

    def start(self) -> None:
        environment = {f"SPACE_{name.upper()}": _text(value) for name, value in _named(self.settings).items()}
        account = [f"--reuid={self.settings.gateway_user}", f"--regid={self.settings.gateway_user}", "--clear-groups"]
        with (self.directory / "gateway.log").open("ab") as log:
            self._process = subprocess.Popen(
                ["setpriv", *account, sys.executable, "-I", "-m", "space.assemble", "gateway"],
                env={"PATH": os.environ["PATH"], **environment},
                stdout=log,
                stderr=log,
            )
        self._client = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(self.settings.gateway_socket)),
            base_url="http://gateway",
            timeout=RUN_S,
        )
        deadline = time.monotonic() + READY_S
        while True:
            assert self._process.poll() is None, (self.directory / "gateway.log").read_text()
            with contextlib.suppress(httpx.TransportError):
                self._client.get("/metrics")
                return
            assert time.monotonic() < deadline, "the gateway is not ready"
            time.sleep(0.02)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(10)
            self._process = None

    def kill(self) -> None:
        """Have it go as it goes when it crashes."""
        self.stop(signal.SIGKILL)

    def call(self, method: str, path: str, **more: Any) -> httpx.Response:
        assert self._client is not None
        answer = self._client.request(method, path, **more)
        assert answer.is_success, answer.text
        return answer

    def place(self, sandbox: str | None = None) -> Place:
        """Make a link as the broker does, of a sandbox that is there from now on."""
        sandbox = sandbox or new_id("sbx")

        async def make() -> Link:
            index = await self._links.reserve()
            await self._links.create(sandbox, index)
            self._links.enter(index, sandbox)
            self._places[sandbox] = index, sandbox
            return link(self.settings.instance, index)

        found = asyncio.run(make())
        resolver = self._resolver(sandbox)
        resolver.parent.mkdir(parents=True)
        resolver.write_text(f"nameserver {found.host_v4}\n")
        return Place(self, sandbox, found, f"{self.settings.instance}-{sandbox}")

    def leave(self, sandbox: str) -> None:
        """Take a link away as the broker does."""
        index, machine = self._places.pop(sandbox)
        asyncio.run(self._links.delete(machine, index))
        self._links.free(index)
        shutil.rmtree(self._resolver(machine).parent)

    @staticmethod
    def reach(address: str, port: int) -> socket.socket:
        """Connect as the host itself, which may."""
        return socket.create_connection((address, port), 5)

    def _resolver(self, sandbox: str) -> Path:
        """Where ``ip netns exec`` finds what programs in a namespace take for /etc/resolv.conf."""
        return Path("/etc/netns", f"{self.settings.instance}-{sandbox}", "resolv.conf")

    def hand_over(self, place: Place, sandbox: str) -> Place:
        """Let a link be another sandbox's, as when a spare is claimed."""
        index, machine = self._places.pop(place.sandbox)
        self._links.enter(index, sandbox)
        self._places[sandbox] = index, machine
        return Place(self, sandbox, place.link, place.netns)

    def memory_mib(self) -> float:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024

    def log(self) -> str:
        return (self.directory / "gateway.log").read_text()


def until(condition: Callable[[], object], what: Callable[[], str] = lambda: "it has not come about") -> None:
    """Wait until something is so; ``what`` says how it is instead."""
    deadline = time.monotonic() + RUN_S
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.01)


@contextlib.contextmanager
def gateway_host(**changes: Any) -> Iterator[GatewayHost]:
    """Serve while the block lasts; nothing of it is left afterwards."""
    instance = f"g{secrets.token_hex(2)}"
    directory = DATA / f"space-gateway-{instance}"
    directory.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        servers = stack.enter_context(outside(directory / "outside"))
        settings = Settings(
            instance=instance,
            data_dir=directory / "data",
            run_dir=directory / "run",
            **gateway_ports(),
            egress_resolvers=(NAME_SERVER,),
            egress_private_hosts=NETWORKS,
            egress_ca_file=servers.certificates.authorities / "ca.crt",
            log_level="debug",
            **changes,
        )
        for path in (directory, directory / "outside", directory / "outside/trusted"):
            path.chmod(0o755)
        installation.prepare(settings)
        host = GatewayHost(settings, servers, directory)
        asyncio.run(host._links.open(set()))
        stack.callback(_forget_resolvers, instance)
        stack.callback(lambda: asyncio.run(_close(host)))
        host.start()
        stack.callback(host.stop)
        yield host


async def _close(host: GatewayHost) -> None:
    for index, machine in list(host._places.values()):
        await host._links.delete(machine, index)
    await host._links.close()


def _forget_resolvers(instance: str) -> None:
    for directory in Path("/etc/netns").glob(f"{instance}-*"):
        shutil.rmtree(directory)


def _named(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in settings.model_fields_set}


def _text(value: Any) -> str:
    return json.dumps(list(value)) if isinstance(value, tuple) else str(value)
