"""A sandbox asked for as a Firecracker machine where KVM emulates its guests: all but the guest is real, and what
cannot be is told.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from space.drivers.vm import users
from tests import installation as installations
from tests.client import Api, wait_until
from tests.driver_bench import FIRECRACKER, no_guests, unfit_for_firecracker
from tests.installation import Installation

SMALL = {"memory_mib": 256, "disk_mib": 256}
LIMIT_S = 75
"""The guest has half a minute to answer; the rest is for a machine of two processors, one of which emulates it."""


@pytest.fixture(scope="module")
def installation() -> Iterator[Installation]:
    if reason := installations.unfit() or unfit_for_firecracker():
        pytest.skip(f"driver firecracker {reason}")
    if no_guests() is None:
        pytest.skip("driver firecracker brings guests up here: that is told of by the suites that run on it")
    # Not of the sandboxes that name no driver: this one is asked for.
    with installations.running(firecracker=FIRECRACKER.directory, driver="gvisor", pool_max=0) as one:
        yield one


def firecracker_of(sandbox: str) -> Path | None:
    """The sandbox's Firecracker in /proc, once it has its own name and user."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            if f"vm-{sandbox}".encode() in words and (process / "comm").read_text() == "firecracker\n":
                return process
        except OSError:
            continue
    return None


def logged(installation: Installation, event: str) -> list[dict[str, object]]:
    lines = (installation.settings.run_dir / "log" / "broker.log").read_text().splitlines()
    return [json.loads(line) for line in lines if f'"{event}"' in line]


def test_a_machine_whose_guest_does_not_come_up_fails_with_the_doctors_explanation_and_leaves_nothing(
    installation: Installation,
) -> None:
    with Api(installation.url, installation.key) as api:
        asked = {"template": "base", "driver": "firecracker", "resources": SMALL}
        body = api.call("POST", "/v1/sandboxes", json=asked).json()
        sandbox, operation = body["sandbox"]["id"], body["operation"]["id"]
        wait_until(lambda: firecracker_of(sandbox), LIMIT_S, "a Firecracker runs")
        process = firecracker_of(sandbox)
        assert process
        assert process.stat().st_uid >= users.FIRST
        assert os.readlink(process / "ns/net") != os.readlink("/proc/self/ns/net")  # noqa: PTH115 no path

        def ended() -> bool:
            return api.call("GET", f"/v1/operations/{operation}").json()["state"] in {"succeeded", "failed"}

        wait_until(ended, LIMIT_S, "the operation has ended")
        error = api.call("GET", f"/v1/operations/{operation}").json()["error"]
        assert error["code"] == "guest-not-ready", error
        assert error["kind"] == "HostError"
        assert "KVM emulates guests instruction by instruction" in error["message"]
        assert "vmx or svm" in error["message"]
        assert "Linux version" not in json.dumps(error)
        [told] = logged(installation, "guest-never-answered")
        assert any("Linux version" in str(line) for line in told["console"]), told
        node = str(installation.settings.node_dir)
        assert [one for one in installation.leftovers_of(sandbox) if node not in one] == []
        assert [path for path in users.TAKEN.iterdir() if path.readlink().name == sandbox] == []
        assert api.get(sandbox)["state"] == "failed"
        api.delete(sandbox)
        assert installation.leftovers_of(sandbox) == []
