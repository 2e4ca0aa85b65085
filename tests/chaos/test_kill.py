"""SIGKILL of each process: nothing that was accepted or printed is lost, and the host tells the store's story."""

from concurrent.futures import ThreadPoolExecutor

import httpx

from space import Sandbox
from tests.client import Api, wait_until
from tests.installation import Installation


def test_a_killed_node_loses_no_running_command_and_no_byte(api: Api, sandbox: str, installation: Installation) -> None:
    sbx = Sandbox.connect(sandbox, url=installation.url, api_key=installation.key)
    enough = "/tmp/killed-often-enough"
    script = (
        f"i=0; until [ -e {enough} ]; do echo line-$i; i=$((i+1)); [ $((i % 100)) = 0 ] && sleep 0.02; done;"
        "echo end; exit 7"
    )
    command = sbx.start(script)
    received = b""
    kills = [0]
    for event in command:
        if event.stream == "stdout":
            received += event.data
            if len(kills) <= 3 and len(received) > kills[-1] + 40_000:
                installation.kill("node")
                kills.append(len(received))
                if len(kills) > 3:
                    installation.wait_ready()
                    api.write(sandbox, enough, b"")
    assert len(kills) > 3
    lines = received.count(b"\n") - 1
    assert received == b"".join(f"line-{n}\n".encode() for n in range(lines)) + b"end\n"
    assert command.wait().code == 7


def test_an_unattended_command_goes_on_while_the_node_is_dead(
    api: Api, sandbox: str, installation: Installation
) -> None:
    sbx = Sandbox.connect(sandbox, url=installation.url, api_key=installation.key)
    command = sbx.start("for i in $(seq 1 300); do echo $i; sleep 0.01; done")
    first = next(iter(command))
    assert first.data
    command.detach()
    installation.kill("node")
    installation.wait_ready()
    wait_until(lambda: api.call("GET", f"/v1/commands/{command.id}").json()["state"] == "ended", what="the end")
    again = sbx.command(command.id)
    output = b"".join(event.data for event in again if event.stream == "stdout")
    assert output == b"".join(b"%d\n" % n for n in range(1, 301))


def test_a_killed_broker_loses_no_machine(api: Api, sandbox: str, installation: Installation) -> None:
    api.write(sandbox, "/home/user/kept", b"1")
    installation.kill("broker")
    installation.wait_ready()
    assert api.read(sandbox, "/home/user/kept") == b"1"
    api.verb(sandbox, "suspend")
    installation.kill("broker")
    installation.wait_ready()
    api.verb(sandbox, "wake")
    assert api.read(sandbox, "/home/user/kept") == b"1"


def test_an_api_killed_during_twenty_creates_leaves_none_stuck(installation: Installation) -> None:
    with Api(installation.url, installation.key) as api, ThreadPoolExecutor(20) as pool:

        def create(n: int) -> str | None:
            try:
                answer = httpx.post(
                    f"{installation.url}/v1/sandboxes",
                    json={"template": "base", "metadata": {"burst": "yes"}},
                    headers={"Authorization": f"Bearer {installation.key}", "Idempotency-Key": f"burst-{n}"},
                    timeout=60,
                )
            except httpx.HTTPError:
                return None
            return answer.json()["sandbox"]["id"] if answer.is_success else None

        futures = [pool.submit(create, n) for n in range(20)]
        wait_until(lambda: sum(f.done() for f in futures) >= 5, what="some creates accepted")
        installation.kill("api")
        accepted = {f.result() for f in futures} - {None}
        assert accepted
        installation.wait_ready()

        def listed() -> list[dict]:
            return api.call("GET", "/v1/sandboxes", params={"metadata.burst": "yes", "limit": 100}).json()["items"]

        wait_until(lambda: all(s["state"] in {"running", "failed"} for s in listed()), 90, "every create to end")
        found = {s["id"]: s for s in listed()}
        assert accepted <= set(found)
        assert all(s["failure"] for s in found.values() if s["state"] == "failed")
        for sandbox in found:
            api.delete(sandbox)
        wait_until(lambda: installation.strays() == [], 10, "no strays")
