"""A broker of their own for tests: in this process on the fake, or on gVisor with all that it does to the host."""

import asyncio
import contextlib
import json
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from space.broker import doctor, setup
from space.broker.defaults import Defaults
from space.broker.machines import Machines
from space.broker.server import Broker
from space.drivers.base import Driver
from space.drivers.gvisor import GVisorDriver
from space.model.ids import new_id
from space.node.broker import BrokerClient
from space.settings import Settings
from tests import installation
from tests.agent import Peer

RESOURCES = {"cpus": 1.0, "memory_mib": 256, "disk_mib": 64, "pids": 128}
DIGEST = "sha256:" + "0" * 64
ANSWER_S = 60.0
SERVE = """
import asyncio, sys
from pathlib import Path
from space.broker.server import serve
from space.drivers.gvisor import GVisorDriver
from space.settings import load
settings = load()
driver = GVisorDriver(Path(sys.argv[1]), settings.run_dir / "broker", settings.guest_dir)
asyncio.run(serve(settings, {"gvisor": driver}))
"""


@dataclass
class Site:
    """Settings of one broker, and requests to it."""

    settings: Settings
    driver: str
    template: str
    client: BrokerClient

    async def call(self, verb: str, **fields: Any) -> Any:
        return await self.client.call(verb, timeout_s=ANSWER_S, **fields)

    async def boot(self, machine: str | None = None, **changes: Any) -> str:
        machine = machine or new_id("sbx")
        resources = {**RESOURCES, **changes}
        await self.call(
            "boot", machine=machine, template=self.template, driver=self.driver, resources=resources, hostname="guest"
        )
        return machine

    async def state(self, machine: str) -> str:
        return (await self.call("inspect", machine=machine))["state"]

    async def until(self, machine: str, state: str, patience_s: float = 10) -> dict[str, Any]:
        """Wait for a state; return what `inspect` says then."""
        deadline = time.monotonic() + patience_s
        while (seen := await self.call("inspect", machine=machine))["state"] != state:
            assert time.monotonic() < deadline, f"still {seen}, not {state}"
        return seen

    @contextlib.contextmanager
    def peer(self, machine: str) -> Iterator[Peer]:
        peer = Peer(self.settings.channels_dir / machine)
        try:
            peer.greet()
            yield peer
        finally:
            peer.close()

    def strays(self, what: str = "machines") -> list[str]:
        words = [
            installation.SCRIPTS / "strays",
            what,
            self.settings.instance,
            self.settings.data_dir,
            self.settings.run_dir,
        ]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, timeout=60)
        return done.stdout.splitlines()

    def image(self, machine: str) -> Path:
        return self.settings.broker_dir / "snapshots" / machine


def settings_in(data_dir: Path, run_dir: Path, **changes: Any) -> Settings:
    values = {
        "instance": "t" + secrets.token_hex(3),
        "data_dir": data_dir,
        "run_dir": run_dir,
        "node_user": pwd.getpwuid(os.geteuid()).pw_name,
        "disk_store_mib": 2048,
        **installation.gateway_ports(),
    }
    return Settings.model_validate({**values, **changes})


@contextlib.asynccontextmanager
async def serving(
    settings: Settings, drivers: Mapping[str, Driver], template: str = DIGEST
) -> AsyncIterator[tuple[Site, Machines]]:
    """A broker in this process."""
    async with Broker(settings, drivers).serving() as machines:
        client = BrokerClient(settings.broker_socket)
        try:
            yield Site(settings, next(iter(drivers), ""), template, client), machines
        finally:
            await client.close()


class Separate:
    """A broker with gVisor as a process of its own, on a tiny template; can be killed and started again. Needs root."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        found = doctor.find_runsc(Settings.model_construct())
        assert found is not None
        self.runsc = found
        instance = "t" + secrets.token_hex(3)
        name = f"{installation.PREFIX}{instance}"
        guest = installation.printed_path("guest-runtime")
        # Not under the test's own directory, which nobody but root could enter anyway.
        self.settings = settings_in(
            installation.DATA / name, installation.RUN / name, instance=instance, guest_dir=guest
        )
        self.settings.data_dir.mkdir()
        (self.settings.data_dir / "owner").write_text(str(os.getpid()))
        self.template = ""
        self.process: subprocess.Popen[bytes] | None = None

    def driver(self) -> GVisorDriver:
        return GVisorDriver(self.runsc, self.settings.run_dir / "broker", self.settings.guest_dir)

    async def set_up(self) -> None:
        """Import a template that holds next to nothing: machines bring their own Python."""
        root = self.directory / "root"
        (root / "etc").mkdir(parents=True)
        (root / "etc/passwd").write_text("root:x:0:0:root:/:/bin/sh\nuser:x:1000:1000::/:/bin/sh\n")
        (root / "etc/group").write_text("root:x:0:\nuser:x:1000:\n")
        template = await setup.import_template(self.settings, root, "tiny", "latest", Defaults())
        self.template = template.digest

    def environment(self) -> dict[str, str]:
        values = self.settings.model_dump(mode="json", exclude_none=True)
        own = {
            f"SPACE_{name.upper()}": value if isinstance(value, str) else json.dumps(value)
            for name, value in values.items()
        }
        return {**own, "SPACE_CONFIG": "/nonexistent", "PATH": os.environ["PATH"]}

    def start(self) -> None:
        log = (self.directory / "broker.log").open("ab")
        with log:
            words = [sys.executable, "-I", "-c", SERVE, str(self.runsc)]
            self.process = subprocess.Popen(words, env=self.environment(), stdout=log, stderr=log)
        deadline = time.monotonic() + 30
        while not installation.installation.accepts(self.settings.broker_socket):
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.005)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(30) == 0, self.log()

    def log(self) -> str:
        return (self.directory / "broker.log").read_text()

    def site(self) -> Site:
        return Site(self.settings, "gvisor", self.template, BrokerClient(self.settings.broker_socket))

    def remove(self) -> None:
        """Take all of it off the host by force."""
        if self.process and self.process.poll() is None:
            self.kill()
        words = ["all", self.settings.instance, self.settings.data_dir, self.settings.run_dir, "--remove"]
        subprocess.run([installation.SCRIPTS / "strays", *words], check=True, timeout=60)
        shutil.rmtree(self.settings.data_dir, ignore_errors=True)


GUEST_PYTHON = (
    "/.space/lib/ld-linux-x86-64.so.2",
    "--library-path",
    "/.space/lib",
    "/.space/bin/python3",
    "-I",
    "-S",
    "-c",
)


Kind = TypeVar("Kind", bound=Separate)


@contextlib.contextmanager
def started(one: Kind) -> Iterator[Kind]:
    """A broker in a process of its own, from set-up until nothing is left of it; skips where that cannot be."""
    if reason := installation.unfit():
        pytest.skip(reason)
    try:
        asyncio.run(one.set_up())
        one.start()
        yield one
        one.stop()
    finally:
        one.remove()


@contextlib.asynccontextmanager
async def cleared(broker: Separate) -> AsyncIterator[Site]:
    """A site on it, on which nothing of machines or snapshots may be left once all are destroyed."""
    one = broker.site()
    yield one
    for machine in await one.call("machines"):
        await one.call("destroy", machine=machine["machine"])
    for kept in await one.call("snapshots"):
        await one.call("drop-snapshot", snapshot=kept["snapshot"])
    await one.client.close()
    assert one.strays() == []
    assert [path.name for path in broker.settings.broker_dir.rglob("snp*")] == []


def wait(condition: Callable[[], bool], what: str, patience_s: float = 10) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


async def until(condition: Callable[[], bool], what: str, patience_s: float = 10) -> None:
    """Wait for a condition while the loop goes on."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.002)
