"""What tests ask of a node about builds, over its Unix socket as the api does."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import httpx

from space.model.ids import new_id
from tests.images import Members, tar_of

PATIENCE_S = 60.0
ENDED = {"succeeded", "failed", "cancelled"}


class BuildClient:
    """A node's routes for builds. ``http`` speaks to its socket; ``undisturbed`` holds off, while there is a machine
    that the node alone was asked for, whoever would collect it.
    """

    def __init__(
        self, socket: str, undisturbed: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    ) -> None:
        self._undisturbed = undisturbed
        transport = httpx.HTTPTransport(uds=socket)
        self.http = httpx.Client(transport=transport, base_url="http://node", timeout=PATIENCE_S)

    def close(self) -> None:
        self.http.close()

    def upload(self, data: bytes) -> str:
        upload = new_id("upl")
        answer = self.http.put(f"/uploads/{upload}?offset=0", content=data)
        assert answer.json() == {"bytes": len(data)}, answer.text
        return upload

    def context(self, dockerfile: str, **files: Any) -> dict[str, Any]:
        """The source of a build from a Dockerfile and files by path (``__`` in a name stands for a slash)."""
        members: Members = {name.replace("__", "/"): file for name, file in files.items()}
        return {"kind": "dockerfile", "upload": self.upload(tar_of({"Dockerfile": dockerfile, **members}))}

    def begin(self, source: dict[str, Any], **spec: Any) -> str:
        build = new_id("bld")
        answer = self.http.put(f"/builds/{build}", json={"source": source, **spec})
        assert answer.status_code == 202, answer.text
        return build

    def show(self, build: str) -> dict[str, Any]:
        answer = self.http.get(f"/builds/{build}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    def wait(self, build: str, patience_s: float = PATIENCE_S) -> dict[str, Any]:
        """Wait until a build has ended; return it."""
        deadline = time.monotonic() + patience_s
        while (shown := self.show(build))["state"] not in ENDED:
            assert time.monotonic() < deadline, shown
            time.sleep(0.02)
        return shown

    def wait_for_line(self, build: str, text: str) -> None:
        """Wait until the log has a line that a program has written, a step that ends with it, or news that begin so."""
        deadline = time.monotonic() + PATIENCE_S
        while not any(_tells(line, text) for line in self.log(build)):
            assert time.monotonic() < deadline, self.log(build)
            time.sleep(0.02)

    def build(self, source: dict[str, Any], **spec: Any) -> dict[str, Any]:
        """Build and expect success."""
        build = self.begin(source, **spec)
        shown = self.wait(build)
        assert shown["state"] == "succeeded", (shown["error"], self.log(build))
        return shown

    def refuse(self, source: dict[str, Any], **spec: Any) -> dict[str, Any]:
        """Build and expect failure; return the error."""
        shown = self.wait(self.begin(source, **spec))
        assert shown["state"] == "failed", shown
        assert shown["digest"] is None
        return shown["error"]

    def log(self, build: str, query: str = "") -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.http.get(f"/builds/{build}/log{query}").text.splitlines()]

    def output(self, build: str, stream: str = "stdout") -> str:
        return "\n".join(line["text"] for line in self.log(build) if line["stream"] == stream)

    def ran(self, shown: dict[str, Any]) -> list[str]:
        """The steps that were not taken from the cache."""
        steps = [step["text"] for step in shown["lineage"]["steps"] if not step["cached"]]
        return [text for text in steps if not text.startswith("FROM ")]

    def empty_cache(self) -> None:
        assert self.http.post("/build-cache/gc", json={}).status_code == 200

    @contextlib.contextmanager
    def machine(self, digest: str, defaults: dict[str, Any] | None = None, **fields: Any) -> Iterator[str]:
        """A machine of a template while the block lasts."""
        machine = new_id("sbx")
        body = {
            "template_digest": digest,
            "template_defaults": defaults or {},
            "driver": None,
            "resources": {"cpus": 1.0, "memory_mib": 256, "disk_mib": 512, "pids": 256},
            "env": {},
            "hostname": "test",
            **fields,
        }
        with self._undisturbed():
            answer = self.http.put(f"/machines/{machine}", json=body)
            assert answer.status_code == 200, answer.text
            try:
                yield machine
            finally:
                assert self.http.delete(f"/machines/{machine}").status_code == 200

    def exec(self, machine: str, *argv: str, **fields: Any) -> str:
        answer = self.http.post(f"/v1/sandboxes/{machine}/exec", json={"argv": list(argv), **fields})
        assert answer.status_code == 200, answer.text
        assert answer.json()["exit"]["code"] == 0, answer.json()
        return answer.json()["stdout"]


def _tells(line: dict[str, Any], text: str) -> bool:
    match line["stream"]:
        case "step":
            return line["text"].endswith(text)
        case "info":
            return line["text"].startswith(text)
        case _:
            return line["text"] == text
