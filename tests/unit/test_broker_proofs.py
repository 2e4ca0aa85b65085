"""What KVM is worth is proven when somebody asks, once, and again when what it depends on has changed."""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from space.broker import doctor_drivers, installed, trial
from space.broker.choice import Candidate, Choice, choose
from space.broker.proofs import Proofs
from space.broker.trial import Trial
from space.drivers.qemu import clock
from space.drivers.vm.kernel import Kernel
from space.drivers.vm.proof import Verdict
from space.settings import Settings
from space.testing import FakeDriver

RUNS = Verdict(runs=True, detail="KVM runs guests")
RUNS_NOT = Verdict(runs=False, detail="KVM emulates guests", advice="Use gvisor.")
BOOTED = Verdict(runs=True, detail="Firecracker 1.16.1 booted the guests' kernel")


class Place:
    """Settings of a host with everything a trial needs, and how often each thing was tried there."""

    def __init__(self, directory: Path, verdict: Verdict = RUNS, booted: Verdict = BOOTED) -> None:
        self.settings = Settings(data_dir=directory, firecracker=directory / "bin", kernel=directory / "kernel")
        self.device = directory / "kvm"
        self.verdict, self.booted = verdict, booted
        self.proven = 0
        self.trials: list[Trial] = []
        for part in ("broker", "bin", "kernel"):
            (directory / part).mkdir()
        for file in ("kvm", "kernel/vmlinux", "kernel/initrd"):
            (directory / file).touch()
        self.release("1.16.1")

    def release(self, release: str) -> None:
        for name, says in (("firecracker", "Firecracker"), ("jailer", "Jailer")):
            path = self.settings.data_dir / "bin" / name
            path.write_text(f"#!/bin/sh\necho {says} v{release}\n")
            path.chmod(0o755)

    def proofs(self) -> Proofs:
        """As a process that has just begun has them."""
        return Proofs(self.settings, self.device, prove=self._prove, boot=self._boot)

    async def _prove(self, _device: Path) -> Verdict:
        self.proven += 1
        return self.verdict

    async def _boot(self, one: Trial) -> Verdict:
        self.trials.append(one)
        return self.booted


async def test_it_is_proven_once_whoever_asks_and_also_by_the_next_process(tmp_path: Path) -> None:
    place = Place(tmp_path)
    proofs = place.proofs()
    found = await asyncio.gather(*(proofs.kvm() for _ in range(5)))
    assert {verdict.runs for verdict in found} == {True}
    assert "booted the guests' kernel" in found[0].detail
    assert await place.proofs().kvm() == found[0]
    assert (place.proven, len(place.trials)) == (1, 1)
    assert place.trials[0].told == "Firecracker 1.16.1"


async def test_that_no_guest_runs_is_remembered_too_and_no_kernel_is_booted_then(tmp_path: Path) -> None:
    place = Place(tmp_path, RUNS_NOT)
    assert [await place.proofs().kvm() for _ in range(3)] == [RUNS_NOT] * 3
    assert (place.proven, place.trials) == (1, [])


async def test_instructions_that_run_are_no_proof_where_the_kernel_does_not_come_up(tmp_path: Path) -> None:
    place = Place(tmp_path, booted=RUNS_NOT)
    assert await place.proofs().kvm() == RUNS_NOT


def another_kernel(place: Place) -> None:
    new = place.settings.kernel / "new"
    new.write_text("another")
    new.rename(place.settings.kernel / "vmlinux")


def another_device(place: Place) -> None:
    place.device.unlink()


def other_rights(place: Place) -> None:
    place.device.chmod(0o600 if place.device.stat().st_mode & 0o077 else 0o644)


def damaged(place: Place) -> None:
    (place.settings.broker_dir / "kvm.json").write_text('{"of": [')


@pytest.mark.parametrize("change", [another_kernel, another_device, other_rights, damaged])
async def test_what_it_depends_on_changes_and_it_is_proven_again(
    tmp_path: Path, change: Callable[[Place], None]
) -> None:
    place = Place(tmp_path)
    await place.proofs().kvm()
    change(place)
    await place.proofs().kvm()
    assert place.proven == 2


async def test_another_release_is_another_proof_and_one_that_is_not_to_be_used_boots_nothing(tmp_path: Path) -> None:
    place = Place(tmp_path)
    await place.proofs().kvm()
    place.release("1.17.0")
    await place.proofs().kvm()
    assert [one.told for one in place.trials] == ["Firecracker 1.16.1", "Firecracker 1.17.0"]
    place.release("1.16.0")
    await place.proofs().kvm()
    assert not any("1.16.0" in one.told for one in place.trials)


async def test_who_may_not_remember_still_gets_an_answer(tmp_path: Path) -> None:
    place = Place(tmp_path)
    (place.settings.broker_dir).rmdir()
    assert (await place.proofs().kvm()).runs


def kernel() -> Kernel:
    found = installed.find_kernel(Settings.model_construct(kernel=Path("/opt/space/kernel")))
    if os.geteuid() != 0 or found is None:
        pytest.skip("needs root and a kernel for guests: run scripts/guest-kernel --activate")
    return found


async def test_a_kernel_that_comes_up_is_seen_to() -> None:
    """By QEMU on emulated processors, as this may be a host whose KVM runs nothing."""
    if installed.find_qemu() is None:
        pytest.skip("needs QEMU: run scripts/packages vm")
    more = f"tsc_early_khz={clock.counter_khz()}"
    verdict = await trial.boot(trial.of_qemu("QEMU", kernel(), accelerator="tcg", more=more), timeout_s=60)
    assert verdict.runs, verdict
    assert "QEMU booted" in verdict.detail


@pytest.mark.parametrize(
    ("argv", "timeout_s", "reason"),
    [
        (("true",), 5, "ended before it had come up"),
        (("sleep", "60"), 0.5, "had not come up after 0.5 s"),
        (("/nonexistent/firecracker",), 5, "ended before it had come up"),
    ],
)
async def test_a_kernel_that_does_not_come_up_is_given_up_in_time(
    argv: tuple[str, ...], timeout_s: float, reason: str
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    began = time.monotonic()
    verdict = await trial.boot(Trial("Firecracker 1.16.1", argv), timeout_s=timeout_s)
    assert time.monotonic() - began < 20
    assert not verdict.runs
    assert reason in verdict.detail
    assert verdict.advice


def test_firecracker_is_given_a_kernel_and_nothing_of_the_host(tmp_path: Path) -> None:
    one = trial.of_firecracker(tmp_path / "firecracker", "1.16.1", Kernel(tmp_path))
    assert one.config is not None
    assert one.config.keys() == {"boot-source", "drives", "machine-config"}
    assert one.config["drives"] == []
    assert trial.BOOTED in one.config["boot-source"]["boot_args"]


def drivers(directory: Path, *names: str) -> dict[str, FakeDriver]:
    return {name: FakeDriver(directory / name) for name in names}


async def told(place: Place, directory: Path, *names: str) -> dict[str, object]:
    return await Choice(place.settings, drivers(directory, *names), place.proofs()).told()


@pytest.mark.parametrize(
    ("names", "verdict", "default", "order"),
    [
        (("qemu", "gvisor", "firecracker"), RUNS, "firecracker", ["firecracker", "gvisor", "qemu"]),
        (("qemu", "gvisor", "firecracker"), RUNS_NOT, "gvisor", ["firecracker", "gvisor", "qemu"]),
        (("qemu", "firecracker"), RUNS_NOT, "qemu", ["firecracker", "qemu"]),
        (("firecracker",), RUNS_NOT, None, ["firecracker"]),
        (("fake",), RUNS_NOT, "fake", ["fake"]),
    ],
)
async def test_the_strongest_that_is_proven_is_the_default(
    tmp_path: Path, names: tuple[str, ...], verdict: Verdict, default: str | None, order: list[str]
) -> None:
    if missing := installed.missing_disk_tools():
        pytest.skip(f"needs {', '.join(missing)}: run scripts/packages vm")
    place = Place(tmp_path, verdict)
    answer = await told(place, tmp_path, *names)
    assert answer["default"] == default
    shown = answer["drivers"]
    assert isinstance(shown, list)
    assert [one["name"] for one in shown] == order
    reasons = {one["name"]: one["reason"] for one in shown if not one["usable"]}
    assert reasons == (
        {"firecracker": "KVM emulates guests. Use gvisor."} if RUNS_NOT is verdict and "firecracker" in names else {}
    )


@pytest.mark.parametrize("release", ["1.16.0", "1.11.0", "1.16.1"])
@pytest.mark.parametrize("verdict", [RUNS, RUNS_NOT], ids=["kvm", "no-kvm"])
@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "no-kernel"])
async def test_the_driver_that_sandboxes_get_is_the_one_that_the_doctor_names(
    tmp_path: Path, release: str, verdict: Verdict, *, kernel: bool
) -> None:
    """KVM alone does not make Firecracker the one: it needs a release that works, and what its machines are made of."""
    place = Place(tmp_path, verdict)
    place.release(release)
    if not kernel:
        (tmp_path / "kernel/vmlinux").unlink()
    answer = await told(place, tmp_path, "gvisor", "firecracker")
    works = release == "1.16.1" and verdict is RUNS and kernel and not installed.missing_disk_tools()
    assert answer["default"] == ("firecracker" if works else "gvisor")
    well = dict.fromkeys(("kernel", "root", "runsc", "guest-runtime", "disks", "cgroups", "links", "nftables"), True)
    findings = [
        await doctor_drivers.of_firecracker(place.settings, well, verdict),
        doctor_drivers.of_gvisor(well),
        doctor_drivers.of_qemu(place.settings, well),
    ]
    ok, detail, _ = doctor_drivers.told_choice(None, findings)
    assert ok
    assert detail.split()[0] == answer["default"]


async def test_nothing_is_proven_where_no_driver_needs_it(tmp_path: Path) -> None:
    place = Place(tmp_path)
    await told(place, tmp_path, "gvisor", "qemu")
    assert place.proven == 0


def test_what_the_settings_name_holds_even_if_it_does_not_work() -> None:
    """Nobody gets a weaker boundary than the operator asked for."""
    assert (
        choose("firecracker", [Candidate("firecracker", usable=False), Candidate("gvisor", usable=True)])
        == "firecracker"
    )
