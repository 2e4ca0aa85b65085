"""The doctor's judgement on hosts that it has not met: kernel files laid out in a directory, programs that are small scripts."""

import json
import os
import socket
import stat
from pathlib import Path

import pytest

from space.broker import doctor
from space.broker.doctor import Check, Host
from space.drivers import programs
from space.settings import Settings

PVM_CPU = "flags\t\t: fpu vme de pse sse2 lm nx rdtscp\n"
INTEL_CPU = "flags\t\t: fpu vme de vmx sse2\n"
AMD_CPU = "flags\t\t: fpu vme de svm sse2\n"


def host(root: Path, files: dict[str, str]) -> Host:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Host(root)


def program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_a_kvm_device_without_cpu_support_is_called_paravirtual(tmp_path: Path) -> None:
    check = doctor.check_kvm(host(tmp_path, {"dev/kvm": "", "proc/cpuinfo": PVM_CPU}))
    assert "paravirtual" in check.detail
    assert "vmx or svm" in check.advice


@pytest.mark.parametrize(("cpu", "flag"), [(INTEL_CPU, "vmx"), (AMD_CPU, "svm")])
def test_kvm_with_cpu_support_needs_no_advice(tmp_path: Path, cpu: str, flag: str) -> None:
    check = doctor.check_kvm(host(tmp_path, {"dev/kvm": "", "proc/cpuinfo": cpu}))
    assert flag in check.detail
    assert check.advice == ""


def test_a_host_without_kvm_is_still_fit(tmp_path: Path) -> None:
    check = doctor.check_kvm(host(tmp_path, {"proc/cpuinfo": PVM_CPU}))
    assert check.ok
    assert "no /dev/kvm" in check.detail


def test_cgroups_version_2_is_recognised(tmp_path: Path) -> None:
    check = doctor.check_cgroups(host(tmp_path, {"sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory pids\n"}))
    assert check == Check("cgroups", ok=True, detail="version 2 with cpu, memory, pids")


def test_cgroups_version_1_is_recognised(tmp_path: Path) -> None:
    groups = {f"sys/fs/cgroup/{name}/cgroup.procs": "" for name in ("cpu", "memory", "pids")}
    assert doctor.check_cgroups(host(tmp_path, groups)).detail == "version 1 with cpu, memory, pids"


def test_a_missing_controller_is_named(tmp_path: Path) -> None:
    check = doctor.check_cgroups(host(tmp_path, {"sys/fs/cgroup/cgroup.controllers": "cpu pids\n"}))
    assert not check.ok
    assert "missing: memory" in check.detail
    assert check.advice


def test_no_cgroups_at_all_is_a_finding_not_a_crash(tmp_path: Path) -> None:
    assert not doctor.check_cgroups(Host(tmp_path)).ok


@pytest.mark.parametrize(
    ("release", "machine", "ok"),
    [
        ("6.1.0-18-amd64", "x86_64", True),
        ("5.10.0", "x86_64", True),
        ("4.19.0-25-amd64", "x86_64", False),
        ("6.1.0", "aarch64", False),
    ],
)
def test_kernels(release: str, machine: str, *, ok: bool) -> None:
    check = doctor.check_kernel(release, machine)
    assert check.ok is ok
    assert bool(check.advice) is not ok


def test_another_user_than_root_is_told_to_use_sudo() -> None:
    assert "sudo" in doctor.check_root(1000).advice
    assert doctor.check_root(0).ok


@pytest.mark.parametrize(("available_mib", "ok"), [(16000, True), (500, False)])
def test_memory(tmp_path: Path, available_mib: int, *, ok: bool) -> None:
    text = f"MemTotal:       24684092 kB\nMemFree:         100 kB\nMemAvailable:   {available_mib * 1024} kB\n"
    check = doctor.check_memory(host(tmp_path, {"proc/meminfo": text}))
    assert check.ok is ok
    assert f"{available_mib} MiB of 24105 MiB" in check.detail


def test_disk_space_is_looked_up_where_the_directory_will_be(tmp_path: Path) -> None:
    assert str(tmp_path / "not" / "yet") in doctor.check_disk_space(tmp_path / "not" / "yet").detail
    assert not (tmp_path / "not").exists()


@pytest.mark.parametrize(
    ("version", "date"),
    [
        ("runsc version 0.0~20240729.0", 20240729),
        ("runsc version release-20250101.0", 20250101),
        ("runsc version 0.0~20221219.0", 20221219),
        ("runsc version VERSION_MISSING", 0),
    ],
)
def test_runsc_dates(version: str, date: int) -> None:
    assert doctor.runsc_date(version) == date


async def test_an_old_runsc_is_refused_without_being_tried(tmp_path: Path) -> None:
    runsc = program(tmp_path / "runsc", f'echo "runsc version 0.0~20221219.0"; echo "$@" >> {tmp_path}/calls')
    check = await doctor.probe_runsc(Settings(runsc=runsc))
    assert not check.ok
    assert "2024 or later" in check.advice
    assert (tmp_path / "calls").read_text() == "--version\n"


async def test_a_runsc_that_cannot_run_a_program_is_refused(tmp_path: Path) -> None:
    runsc = program(tmp_path / "runsc", '[ "$1" = --version ] && echo "runsc version 0.0~20240729.0" || exit 128')
    check = await doctor.probe_runsc(Settings(runsc=runsc))
    assert not check.ok
    assert "does not run on systrap" in check.detail
    assert "do /bin/true" in check.advice


async def test_a_runsc_setting_that_names_nothing_is_a_finding(tmp_path: Path) -> None:
    check = await doctor.probe_runsc(Settings(runsc=tmp_path / "absent"))
    assert not check.ok
    assert "scripts/up" in check.advice


async def test_a_missing_guest_runtime_is_a_finding(tmp_path: Path) -> None:
    check = await doctor.probe_guest_runtime(tmp_path / "absent")
    assert not check.ok
    assert "scripts/up" in check.advice


async def test_a_guest_runtime_without_an_agent_is_not_complete(tmp_path: Path) -> None:
    program(tmp_path / "lib/ld-linux-x86-64.so.2", "echo 3.11.2")
    assert not (await doctor.probe_guest_runtime(tmp_path)).ok
    (tmp_path / "agent.pyz").write_bytes(b"")
    check = await doctor.probe_guest_runtime(tmp_path)
    assert check.ok
    assert "Python 3.11.2" in check.detail


async def test_a_kernel_without_btrfs_is_named(tmp_path: Path) -> None:
    check = await doctor.probe_disks(
        Settings(data_dir=tmp_path), host(tmp_path, {"proc/filesystems": "nodev\tproc\n\text4\n"})
    )
    assert not check.ok
    assert "no btrfs" in check.detail


ALL_WELL = [
    Check(name, ok=True, detail="")
    for name in ("kernel", "root", "runsc", "guest-runtime", "disks", "cgroups", "links", "nftables")
]


def test_the_driver_says_what_would_make_a_stronger_one_work(tmp_path: Path) -> None:
    kvm = doctor.check_kvm(host(tmp_path, {"dev/kvm": "", "proc/cpuinfo": PVM_CPU}))
    check = doctor.choose_driver(None, [*ALL_WELL, kvm])
    assert check.ok
    assert check.detail.startswith("gvisor")
    assert "vmx or svm" in check.advice


@pytest.mark.parametrize("broken", [check.check for check in ALL_WELL])
def test_the_driver_is_refused_with_the_checks_that_it_needs(tmp_path: Path, broken: str) -> None:
    kvm = doctor.check_kvm(host(tmp_path, {"proc/cpuinfo": PVM_CPU}))
    checks = [Check(c.check, ok=c.check != broken, detail="") for c in ALL_WELL]
    check = doctor.choose_driver(None, [*checks, kvm])
    assert not check.ok
    assert broken in check.detail


def test_a_driver_that_does_not_exist_is_refused() -> None:
    check = doctor.choose_driver("quantum", ALL_WELL)
    assert not check.ok
    assert "quantum" in check.detail


@pytest.mark.machine
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
async def test_this_host_is_examined_for_real_and_left_as_it_was() -> None:
    checks = {check.check: check for check in await doctor.examine(Settings())}
    assert list(checks)[-1] == "driver"
    for name in ("kernel", "root", "cgroups", "runsc", "disks", "nftables", "links"):
        assert checks[name].ok, checks[name]
    assert all(check.ok or check.advice for check in checks.values())
    assert socket.if_nameindex() == [link for link in socket.if_nameindex() if not link[1].startswith("spd")]
    tables = await programs.run(["nft", "list", "tables"], timeout_s=10)
    assert b"space_doctor" not in tables.output


def test_the_command_prints_json_and_says_by_its_status_whether_all_is_well(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPACE_RUNSC", str(tmp_path / "absent"))
    status = doctor.main(["--json"])
    checks = json.loads(capsys.readouterr().out)
    assert status == 1
    assert {"check", "ok", "detail", "advice"} == set(checks[0])
    assert next(c for c in checks if c["check"] == "runsc")["ok"] is False
