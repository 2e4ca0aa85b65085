"""Whether KVM runs guests is found out by running one; whatever is there instead is told apart."""

import errno
import os
import time
from pathlib import Path

import pytest

from space.drivers.vm import proof

CAPABLE, NESTED, PLAIN = {"vmx"}, {"hypervisor"}, set[str]()


async def test_this_hosts_kvm_is_judged_in_seconds_as_its_processor_says() -> None:
    """Where the processor shows virtualisation, KVM runs guests; where it does not, it cannot, whatever device is there."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    began = time.monotonic()
    verdict = await proof.prove()
    assert time.monotonic() - began < proof.PROBE_S + 1
    flags = set(Path("/proc/cpuinfo").read_text().split())  # noqa: ASYNC240
    assert verdict.runs == (bool(flags & {"vmx", "svm"}) and os.path.exists("/dev/kvm"))  # noqa: ASYNC240, PTH110
    assert verdict.runs or verdict.advice


@pytest.mark.parametrize(("device", "detail"), [("/dev/null", "runs no machine"), ("/no/such/device", "no KVM device")])
async def test_what_is_no_kvm_is_told_of(device: str, detail: str) -> None:
    verdict = await proof.prove(Path(device))
    assert not verdict.runs
    assert detail in verdict.detail


@pytest.mark.parametrize(
    ("found", "flags", "detail", "advice"),
    [
        ({"step": "done", "exit": 5, "ran_s": 1.04}, NESTED, "instruction by instruction", "gvisor"),
        ({"step": "run", "exit": 17, "ran_s": 0.001}, CAPABLE, "runs no machine", "modprobe"),
        ({"step": "machine", "errno": errno.EBUSY}, CAPABLE, "runs no machine", "end what else uses it"),
        ({"step": "device"}, PLAIN, "runs no machine", "firmware"),
        ({"step": "open", "errno": errno.ENOENT}, CAPABLE, "no KVM device", "modprobe"),
        ({"step": "open", "errno": errno.ENOENT}, NESTED, "no KVM device", "nested"),
        ({"step": "open", "errno": errno.EACCES}, CAPABLE, "no right", "root"),
        ({}, PLAIN, "runs no machine", "firmware"),
    ],
)
def test_every_outcome_is_no_unless_the_machine_ran_at_a_processors_pace(
    found: dict[str, object], flags: set[str], detail: str, advice: str
) -> None:
    verdict = proof.judge(found, flags)
    assert not verdict.runs
    assert detail in verdict.detail
    assert advice in verdict.advice


def test_a_machine_that_ran_at_a_processors_pace_is_proof() -> None:
    assert proof.judge({"step": "done", "exit": 5, "ran_s": 0.0012}, CAPABLE).runs


async def test_a_kvm_that_never_comes_back_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "PROBE_S", 0.001)
    verdict = await proof.prove(Path("/dev/null"))
    assert not verdict.runs
    assert "never comes back" in verdict.detail
