"""The HTTP surface as curl sees it, in as few words as a test needs."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import httpx

from tests.installation import patient

WAIT = {"Prefer": f"wait={patient(60):.0f}"}


class Api:
    """Calls that must succeed raise on anything but 2xx; everything else goes through ``http`` and looks at the answer."""

    def __init__(self, url: str, key: str) -> None:
        self.url, self.key = url, key
        self.http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=patient(90))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.http.close()

    def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        answer = self.http.request(method, path, **options)
        assert answer.is_success, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer

    def create(self, **fields: Any) -> str:
        answer = self.call("POST", "/v1/sandboxes", json={"template": "base", **fields}, headers=WAIT)
        body = answer.json()
        assert answer.status_code == httpx.codes.CREATED, body
        return str(body["sandbox"]["id"])

    def get(self, sandbox: str) -> dict[str, Any]:
        return self.call("GET", f"/v1/sandboxes/{sandbox}").json()

    def verb(self, sandbox: str, verb: str) -> dict[str, Any]:
        """Ask for a lifecycle change and wait for its end."""
        return self.finished(self.call("POST", f"/v1/sandboxes/{sandbox}/{verb}", headers=WAIT).json())

    def delete(self, sandbox: str) -> None:
        self.call("DELETE", f"/v1/sandboxes/{sandbox}", headers=WAIT)

    def finished(self, body: dict[str, Any]) -> dict[str, Any]:
        operation = body.get("operation", body)
        deadline = time.monotonic() + patient(60)
        while operation["state"] in {"pending", "running"} and time.monotonic() < deadline:
            operation = self.call("GET", f"/v1/operations/{operation['id']}", params={"wait_s": 10}).json()
        assert operation["state"] == "succeeded", operation
        return operation

    def exec(self, sandbox: str, command: str | list[str], **fields: Any) -> dict[str, Any]:
        what = {"command": command} if isinstance(command, str) else {"argv": command}
        return self.call("POST", f"/v1/sandboxes/{sandbox}/exec", json={**what, **fields}).json()

    def output(self, sandbox: str, command: str | list[str], **fields: Any) -> str:
        """Standard output of a command that must succeed."""
        limits = {"timeout_s": patient(fields.pop("timeout_s"))} if "timeout_s" in fields else {}
        result = self.exec(sandbox, command, **fields, **limits)
        assert result["exit"]["kind"] == "exited", result
        assert result["exit"]["code"] == 0, result
        return str(result["stdout"])

    def command(self, sandbox: str, command: str | list[str], **fields: Any) -> dict[str, Any]:
        what = {"command": command} if isinstance(command, str) else {"argv": command}
        return self.call("POST", f"/v1/sandboxes/{sandbox}/commands", json={**what, **fields}).json()

    def write(self, sandbox: str, path: str, data: bytes, **params: Any) -> None:
        self.call("PUT", f"/v1/sandboxes/{sandbox}/files", params={"path": path, **params}, content=data)

    def read(self, sandbox: str, path: str, **params: Any) -> bytes:
        return self.call("GET", f"/v1/sandboxes/{sandbox}/files", params={"path": path, **params}).content


def wait_until(condition: Callable[[], object], timeout_s: float = 20, what: str = "the condition") -> None:
    """Poll until ``condition`` is true; the deadline makes a hang a failure that names what was waited for."""
    timeout_s = patient(timeout_s)
    deadline = time.monotonic() + timeout_s
    pause = 0.01
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not hold within {timeout_s} s"
        time.sleep(pause)
        pause = min(pause * 1.5, 0.25)


def error_code(answer: httpx.Response) -> str:
    """The stable code of an error answer, which must have our shape."""
    error = answer.json()["error"]
    assert set(error) == {"code", "message", "kind", "details", "request_id"}, error
    assert error["message"]
    return str(error["code"])
