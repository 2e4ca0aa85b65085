"""Show a first sandbox at work, through HTTP with curl as any program could: created, a command run in it, deleted.

    first_sandbox.py show          what `up` prints at its end
    first_sandbox.py check URL     0 when the credentials are for that address and their key is accepted

Credentials (``{"url": …, "api_key": …}``) come on standard input and go to curl in a file of headers, never as an
argument.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

COMMAND = 'echo "Hello from $(uname -sr), $(nproc) CPU, as $(id -un) in $(pwd)"; python3 --version; node --version'


class Curl:
    def __init__(self, url: str, headers: Path) -> None:
        self._url = url
        self._headers = headers

    def __call__(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any], float]:
        """Status, JSON and seconds of one request."""
        words = ["curl", "--silent", "--show-error", "--max-time", "90", "--write-out", "\n%{http_code}"]
        words += ["--request", method, "--header", f"@{self._headers}", f"{self._url}{path}"]
        if body is not None:
            words += ["--data", json.dumps(body)]
        began = time.monotonic()
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"curl could not reach {self._url}: {done.stderr.strip()}")
        text, _, status = done.stdout.rpartition("\n")
        return int(status), json.loads(text) if text.strip() else {}, time.monotonic() - began


def expect(status: int, answer: dict[str, Any], what: str) -> dict[str, Any]:
    if status not in {200, 201, 202, 204}:
        error = answer.get("error", {})
        sys.exit(f"{what}: {status} {error.get('code')}: {error.get('message')}")
    return answer


def show(curl: Curl) -> None:
    status, answer, create_s = curl("POST", "/v1/sandboxes", {"template": "base", "name": "first", "timeout_s": 600})
    sandbox = expect(status, answer, "The sandbox could not be created")["sandbox"]
    timings = answer.get("operation", {}).get("timings", {})
    phases = ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in timings.items())
    print(f"  created {sandbox['id']} in {create_s:.2f} s" + (f" ({phases})" if phases else ""))
    if status != 201:
        print("  it is still being created; waiting for the command to start")
    try:
        status, answer, exec_s = curl("POST", f"/v1/sandboxes/{sandbox['id']}/exec", {"command": COMMAND})
        result = expect(status, answer, "The command could not be run")
        print("".join(f"    {line}\n" for line in result["stdout"].splitlines()), end="")
        print(f"  ran that in {exec_s:.2f} s, exit status {result['exit']['code']}")
        if result["exit"]["code"] != 0:
            sys.exit(f"  the command failed: {result['stderr']}")
    finally:
        status, answer, delete_s = curl("DELETE", f"/v1/sandboxes/{sandbox['id']}")
        print(f"  deleted in {delete_s:.2f} s" if status in {200, 202, 204} else f"  could not be deleted: {answer}")


def main() -> None:
    credentials = json.load(sys.stdin)
    with tempfile.TemporaryDirectory() as scratch:
        headers = Path(scratch) / "headers"
        headers.touch(mode=0o600)
        lines = [f"Authorization: Bearer {credentials['api_key']}", "Content-Type: application/json", "Prefer: wait=60"]
        headers.write_text("\n".join(lines) + "\n")
        curl = Curl(credentials["url"].rstrip("/"), headers)
        if sys.argv[1] == "show":
            show(curl)
        else:
            sys.exit(0 if credentials["url"] == sys.argv[2] and curl("GET", "/v1/sandboxes?limit=1")[0] == 200 else 1)


if __name__ == "__main__":
    main()
