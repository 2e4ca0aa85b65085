"""A node process of its own for tests, and a broker for it whose machines are agents as ordinary processes.

The broker speaks the real wire. Its machines are real agents on real FIFOs, but for their boundary: pause stops the
agent's process, suspend keeps it stopped and replaces its FIFOs by nothing until it is woken. A process cannot be
copied: what boots from the snapshot of a suspended machine takes that machine's agent over, and from any other a new one.
"""

import asyncio
import hashlib
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from space.model.ids import new_id
from tests.agent import Agent, descendants
from tests.attached import Attached
from tests.installation import free_ports

SOURCE = Path(__file__).parent.parent / "src"
DIGEST = "sha256:" + "0" * 64
PATIENCE_S = 20.0
MIB = 1024 * 1024


class Refused(Exception):
    """The broker cannot do that in the machine's state."""


class AgentBroker:
    """A broker on ``socket_path``. ``failing`` maps a verb to the error that it answers once."""

    def __init__(self, socket_path: Path, channels: Path) -> None:
        self.socket_path, self.channels = socket_path, channels
        self.agents: dict[str, Agent] = {}
        self.states: dict[str, str] = {}
        self.failing: dict[str, dict[str, Any]] = {}
        self.holding: dict[str, threading.Event] = {}
        """Verbs that are answered only once their event is set."""
        self.asked: list[str] = []
        self.verbs: list[str] = []
        self.bodies: dict[str, str] = {}
        self.booted: dict[str, tuple[str | None, bool]] = {}
        self.spares: set[str] = set()
        self.snapshots: dict[str, dict[str, Any]] = {}
        self.templates = [{"name": "base", "tag": "latest", "digest": DIGEST, "defaults": {}, "bytes": 1}]
        self.requests: list[dict[str, Any]] = []
        self.cause = "machine-exited"
        """Why machines whose agent has ended are gone."""
        self.driver: dict[str, Any] = {"reason": "", "keeps_hardware": False}
        """What it says of its driver, beside its name."""
        """Why the driver is not to be used, for people."""
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(PATIENCE_S)

    def close(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE_S)
        for machine in list(self.agents):
            self._end(machine)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_unix_server(self._connected, self.socket_path)
        self._ready.set()
        await self._stop.wait()
        server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                request = json.loads(line)
                self.asked.append(request["verb"])
                if (held := self.holding.get(request["verb"])) is not None:
                    await asyncio.to_thread(held.wait, PATIENCE_S)
                writer.write(json.dumps({"id": request["id"], **self._answer(request)}).encode() + b"\n")
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        verb, machine = request["verb"], request.get("machine")
        self.verbs.append(verb)
        self.requests.append(request)
        if error := self.failing.pop(verb, None):
            return {"error": error}
        told: dict[str, Callable[[], Any]] = {
            "machines": lambda: [self._inspect(machine) for machine in self.states],
            "templates": lambda: self.templates,
            "snapshots": lambda: [{"snapshot": name, **known} for name, known in self.snapshots.items()],
            "doctor": list,
            "drivers": lambda: {
                "default": "fake",
                "drivers": [{"name": "fake", "usable": True, "builds": True, **self.driver}],
            },
            "figures": lambda: {"machines": {"running": len(self.agents)}},
            "gc": lambda: {"strays": [{"kind": "disk", "name": "old", "removed": not request["dry_run"]}]},
            "inspect": lambda: self._inspect(machine),
        }
        if verb in told:
            return {"ok": told[verb]()}
        try:
            more = getattr(self, f"_do_{verb.replace('-', '_')}")(machine, request) or {}
        except Refused as error:
            return {"error": {"code": "conflict", "message": str(error), "kind": "Conflict", "details": {}}}
        return {"ok": {"timings": {"work": 0.001}, "bytes": 7, "body": self.bodies.get(machine, machine), **more}}

    def _inspect(self, machine: str) -> dict[str, Any]:
        state = self.states.get(machine, "absent")
        if state == "running" and self.agents[machine].process.poll() is not None:
            state = "exited"
        return {
            "machine": machine,
            "body": self.bodies.get(machine, machine),
            "spare": machine in self.spares,
            "state": state,
            "cause": self.cause if state == "exited" else None,
            "usage": {"memory_mib": 30},
        }

    def _do_boot(self, machine: str, request: dict[str, Any] | None = None) -> None:
        request = request or {}
        if self.states.get(machine) == "running":
            if self.booted[machine] != (request.get("snapshot"), request.get("spare", False)):
                raise Refused("There is another machine of that id.")
            return
        self.booted[machine] = (request.get("snapshot"), request.get("spare", False))
        source = self.snapshots.get(request.get("snapshot", ""), {}).get("machine")
        if self.states.get(source) == "suspended":
            self.agents[machine] = self.agents.pop(source)
            self.bodies[machine] = self.bodies.pop(source, source)
            del self.states[source]
            self._do_resume(machine)
        else:
            self.agents[machine] = Agent(self.channels / machine)
        self.states[machine] = "running"
        if request.get("spare"):
            self.spares.add(machine)

    def _do_claim(self, machine: str, request: dict[str, Any]) -> None:
        spare = request["spare"]
        if machine in self.states or spare not in self.spares:
            raise Refused("That cannot be claimed.")
        self.agents[machine], self.states[machine] = self.agents.pop(spare), self.states.pop(spare)
        self.bodies[machine] = spare
        self.spares.discard(spare)
        self._do_resume(machine)

    def _do_snapshot(self, machine: str, request: dict[str, Any]) -> None:
        self.snapshots[request["snapshot"]] = {"machine": machine, "kind": request["kind"], "bytes": 7}

    def _do_drop_snapshot(self, _machine: None, request: dict[str, Any]) -> None:
        self.snapshots.pop(request["snapshot"], None)

    def _do_pause(self, machine: str, _request: Any = None) -> None:
        self.agents[machine].process.send_signal(signal.SIGSTOP)
        self.states[machine] = "paused"

    def _do_resume(self, machine: str, _request: Any = None) -> None:
        self.agents[machine].process.send_signal(signal.SIGCONT)
        self.states[machine] = "running"

    def _do_suspend(self, machine: str, _request: Any = None) -> None:
        self._do_pause(machine)
        self.states[machine] = "suspended"

    def _do_wake(self, machine: str, _request: Any = None) -> None:
        self._do_resume(machine)

    def _do_stop(self, machine: str, _request: Any = None) -> None:
        self._end(machine)
        self.states[machine] = "stopped"

    def _do_start(self, machine: str, _request: Any = None) -> None:
        self.bodies.pop(machine, None)
        self._do_boot(machine)

    def _do_destroy(self, machine: str, _request: Any = None) -> None:
        self._end(machine)
        self.states.pop(machine, None)
        self.bodies.pop(machine, None)
        self.spares.discard(machine)

    def _do_publish(self, machine: str, request: dict[str, Any]) -> dict[str, Any]:
        if self.states.get(machine) != "stopped":
            raise Refused("Only a stopped machine's disk can be published.")
        digest = "sha256:" + hashlib.sha256(json.dumps(request["defaults"]).encode()).hexdigest()
        self.templates.append({"digest": digest, "bytes": 7})
        return {"digest": digest}

    def _do_drop_template(self, _machine: None, request: dict[str, Any]) -> None:
        self.templates = [one for one in self.templates if one["digest"] != request["template"]]

    def _end(self, machine: str) -> None:
        agent = self.agents.pop(machine, None)
        if agent is not None:
            agent.stop()
            for name in ("in", "out"):
                (agent.directory / name).unlink()


class NodeHost:
    """Directories, a broker, and a node process that can be killed and started again."""

    def __init__(self, directory: Path, **settings: str) -> None:
        self.directory = directory
        self.run_dir, self.data_dir = directory / "run", directory / "data"
        (self.run_dir / "broker").mkdir(parents=True)
        (self.run_dir / "channels").mkdir()
        self.data_dir.mkdir()
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        self.broker = AgentBroker(self.run_dir / "broker" / "broker.sock", self.run_dir / "channels")
        self.environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(SOURCE),
            "SPACE_CONFIG": str(directory / "none.toml"),
            "SPACE_DATA_DIR": str(self.data_dir),
            "SPACE_RUN_DIR": str(self.run_dir),
            "SPACE_NODE_PORT": str(self.port),
            "SPACE_DRIVER": "fake",
            "SPACE_POOL_MAX": "0",
            **{f"SPACE_{name.upper()}": value for name, value in settings.items()},
        }
        self.key = Ed25519PrivateKey.generate()
        self.process: subprocess.Popen[bytes] | None = None
        self.socket = str(self.run_dir / "node" / "node.sock")
        self.local = httpx.Client(transport=httpx.HTTPTransport(uds=self.socket), base_url="http://node", timeout=60)
        self.start_node()
        pem = self.key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        assert self.local.put("/token-key", content=pem).status_code == 204

    def start_node(self, until: str = "/readyz") -> None:
        """Start it and return once ``until`` is answered with 200."""
        with (self.directory / "node.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "space.assemble", "node"], env=self.environment, stdout=log, stderr=log
            )
        wait_until(lambda: self._answers(until), "the node to be ready")

    def kill_node(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(PATIENCE_S)
        self.local.close()
        self.broker.close()

    def _answers(self, path: str) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.directory / "node.log").read_text()
        try:
            return self.local.get(path).status_code == 200
        except httpx.TransportError:
            return False

    # --- what tests ask for

    def boot(self, **fields: Any) -> str:
        """Boot a machine and return the sandbox's id."""
        sandbox = new_id("sbx")
        answer = self.local.put(f"/machines/{sandbox}", json=machine_request(**fields))
        assert answer.status_code == 200, answer.text
        assert answer.json()["ready"] is True
        return sandbox

    def token(self, sandbox: str, *, command: str | None = None, lasts_s: float = 600) -> str:
        claims: dict[str, Any] = {"sub": sandbox, "scope": "sandbox", "exp": time.time() + lasts_s}
        if command is not None:
            claims |= {"scope": "command", "cmd": command}
        return jwt.encode(claims, self.key, algorithm="EdDSA")

    def client(self, token: str | None = None) -> httpx.Client:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60)

    def create(self, sandbox: str, **body: Any) -> str:
        """Create a command and return its id."""
        answer = self.local.post(f"/v1/sandboxes/{sandbox}/commands", json=body)
        assert answer.status_code == 201, answer.text
        return answer.json()["command"]["id"]

    def exec(self, sandbox: str, **body: Any) -> dict[str, Any]:
        answer = self.local.post(f"/v1/sandboxes/{sandbox}/exec", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def attach_url(self, command: str, token: str, **offsets: int) -> str:
        query = "".join(f"&{name}={value}" for name, value in offsets.items())
        return f"ws://127.0.0.1:{self.port}/v1/commands/{command}/attach?token={token}{query}"

    def memory_kib(self) -> int:
        assert self.process is not None
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1])
        raise AssertionError("the node is gone")


def machine_request(**fields: Any) -> dict[str, Any]:
    return {
        "template_digest": DIGEST,
        "template_defaults": {"env": {"FROM_TEMPLATE": "1"}, "workdir": "/tmp", "user": None},
        "driver": None,
        "resources": {"cpus": 1.0, "memory_mib": 256, "disk_mib": 512, "pids": 256},
        "env": {"FROM_SANDBOX": "2"},
        "hostname": "Test Box",
        **fields,
    }


@contextmanager
def node_host(directory: Path, **settings: str) -> Iterator[NodeHost]:
    host = NodeHost(directory, **settings)
    try:
        yield host
    finally:
        host.close()


def wait_until(condition: Any, what: str, patience_s: float = PATIENCE_S) -> None:
    """Wait until the condition holds, or fail."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {patience_s} s: {what}"
        time.sleep(0.01)


def processes_of(host: NodeHost, sandbox: str) -> set[int]:
    return descendants(host.broker.agents[sandbox].process.pid)


def random_bytes(count: int) -> bytes:
    return secrets.token_bytes(count)


# --- what several test modules do with a node


def attach(host: NodeHost, command: str, at: dict[str, int] | None = None, **options: Any) -> Attached:
    """Attach to a command with a token of its own."""
    sandbox = host.local.get(f"/v1/commands/{command}").json()["sandbox_id"]
    token = host.token(sandbox, command=command)
    return Attached(host.attach_url(command, token, **{f"{k}_from": v for k, v in (at or {}).items()}), at, **options)


def state(host: NodeHost, command: str) -> str:
    return host.local.get(f"/v1/commands/{command}").json()["state"]


def output_lines(host: NodeHost, command: str, query: str = "") -> list[dict[str, Any]]:
    return [json.loads(line) for line in host.local.get(f"/v1/commands/{command}/output{query}").text.splitlines()]


def exec_in_thread(host: NodeHost, sandbox: str, command: str, answers: list[httpx.Response]) -> threading.Thread:
    """Run a command with exec beside the test; an answer that never comes is no error here."""

    def run() -> None:
        with httpx.Client(transport=httpx.HTTPTransport(uds=host.socket), base_url="http://node", timeout=60) as client:
            try:
                answers.append(client.post(f"/v1/sandboxes/{sandbox}/exec", json={"command": command}))
            except httpx.TransportError:
                return

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def running(host: NodeHost, sandbox: str, argument: str) -> bool:
    """Whether a process below the sandbox's agent has that argument."""
    for pid in processes_of(host, sandbox):
        try:
            if argument.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                return True
        except OSError:
            continue
    return False


def open_files(host: NodeHost, sandbox: str, name: str) -> bool:
    """Whether the sandbox's agent has a file of that name open."""
    for descriptor in Path(f"/proc/{host.broker.agents[sandbox].process.pid}/fd").iterdir():
        try:
            if name in str(descriptor.readlink()):
                return True
        except OSError:
            continue
    return False


def wait_until_still(value: Callable[[], int], still_s: float = 0.5) -> None:
    """Wait until a value has been the same for a while."""
    last, since = value(), time.monotonic()
    deadline = since + PATIENCE_S
    while time.monotonic() - since < still_s:
        assert time.monotonic() < deadline, "the value never came to rest"
        time.sleep(0.02)
        if (now := value()) != last:
            last, since = now, time.monotonic()
