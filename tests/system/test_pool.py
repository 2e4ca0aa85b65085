"""Sandboxes that were waiting, on a real installation: nobody can tell them from those that were not."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from space import Client, Sandbox
from tests.client import Api, wait_until
from tests.installation import Installation, usual_driver

# It measures, or needs the host's memory and processors to itself.
pytestmark = pytest.mark.alone

FACTS = {
    "memory": "awk '/MemTotal/ {print $2}' /proc/meminfo",
    "shared memory": "df -k --output=size /dev/shm | tail -1",
    "cpus": "nproc",
    "who and where": "id -un; pwd; umask",
    "environment": "env | sort | grep -v ^_=",
    # But for threads of a machine's own kernel, which have no arguments.
    "processes": "ps -e -o args= -o comm= | grep -v '^\\[' | awk '{print $NF}' | sort -u | grep -vxE 'ps|grep|awk|sort|sh'",
    "files": "ls -A /home/user /tmp /dev/shm /run",
}


@pytest.fixture
def client(installation: Installation) -> Iterator[Client]:
    with Client(installation.url, installation.key) as client:
        yield client


def shape(api: Api, memory_mib: int) -> dict[str, Any]:
    shapes = api.call("GET", "/v1/pool").json()["shapes"]
    return next((one for one in shapes if one["memory_mib"] == memory_mib), {"idle": 0, "claims": 0, "warm": False})


def facts(sandbox: Sandbox) -> dict[str, str]:
    return {what: sandbox.run(script, check=False).stdout for what, script in FACTS.items()}


@pytest.mark.parametrize("memory_mib", [512, 1024])
def test_a_sandbox_that_waited_is_like_one_that_was_stopped_and_booted(
    client: Client, api: Api, memory_mib: int
) -> None:
    # Two: what was asked for a single time is not waited with for longer than a slow host takes to make it.
    first, second = (Sandbox.create("base", client=client, memory_mib=memory_mib) for _ in range(2))
    with first, second:
        wait_until(lambda: shape(api, memory_mib)["idle"] > 0, what="a machine to wait", timeout_s=60)
    before = shape(api, memory_mib)["claims"]
    # A virtual machine keeps the processors that it waited with.
    more: dict[str, Any] = {"cpus": 2} if usual_driver() == "gvisor" else {}
    with Sandbox.create("base", client=client, memory_mib=memory_mib, env={"MINE": "1"}, **more) as sandbox:
        assert shape(api, memory_mib)["claims"] == before + 1
        claimed = facts(sandbox)
        if usual_driver() == "gvisor":  # A kernel of the machine's own keeps a part of its memory for itself.
            assert int(claimed["memory"]) == memory_mib * 1024
            assert int(claimed["shared memory"]) == memory_mib * 1024 // 2
        sandbox.stop()
        sandbox.wake()
        assert facts(sandbox) == claimed


def test_what_waited_side_by_side_has_nothing_in_common(client: Client, api: Api) -> None:
    wait_until(lambda: shape(api, 1024)["idle"] > 0, what="a machine to wait", timeout_s=60)
    with ExitStack() as stack:
        both = [stack.enter_context(Sandbox.create("base", client=client)) for _ in range(2)]
        for script in ("cat /etc/machine-id", "hostname", "head -c 16 /dev/urandom | sha256sum"):
            first, second = (sandbox.run(script, check=True).stdout for sandbox in both)
            assert first != second, script
