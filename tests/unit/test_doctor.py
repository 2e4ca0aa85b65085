"""The doctor's judgement on hosts that it has not met: kernel files laid out in a directory, programs that are small scripts."""

import datetime as dt
import json
import os
import secrets
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from space import authority
from space.broker import doctor, doctor_drivers, installed
from space.broker.doctor import Check, Host
from space.broker.doctor_drivers import Finding
from space.drivers import programs
from space.drivers.vm.proof import Verdict
from space.settings import Settings
from tests.installation import free_ports, printed_path


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


DISKS = {
    "sys/block/sda/device": "",
    "sys/block/sda/dev": "8:0\n",
    "sys/block/sda/queue/scheduler": "none mq-deadline [bfq]\n",
    "sys/block/nvme0n1/device": "",
    "sys/block/nvme0n1/dev": "259:0\n",
    "sys/block/nvme0n1/queue/scheduler": "[none] mq-deadline bfq\n",
    "sys/block/loop0/queue/scheduler": "[none] bfq\n",
}


def test_disks_that_do_not_weigh_are_named_and_how_they_would(tmp_path: Path) -> None:
    check = doctor.check_io_weight(host(tmp_path, DISKS))
    assert check.ok
    assert check.detail == "1 of 2 disks do not heed it (nvme0n1)"
    assert "bfq" in check.advice


def test_disks_under_the_cost_model_weigh_too(tmp_path: Path) -> None:
    check = doctor.check_io_weight(host(tmp_path, {**DISKS, "sys/fs/cgroup/io.cost.qos": "259:0 enable=1 ctrl=auto\n"}))
    assert check == Check("io-weight", ok=True, detail="heeded by nvme0n1, sda")


def test_an_authority_that_ends_soon_or_cannot_be_read_is_bad_and_one_not_made_yet_is_not(tmp_path: Path) -> None:
    certificate = tmp_path / authority.CERTIFICATE
    now = dt.datetime.now(dt.UTC)
    assert doctor.check_authority(certificate, now).ok
    authority.ensure(tmp_path, "space", os.geteuid(), os.getegid())
    assert doctor.check_authority(certificate, now).ok
    late = doctor.check_authority(certificate, now + authority.VALID - dt.timedelta(days=20))
    assert not late.ok
    assert "ca.key" in late.advice
    certificate.write_bytes(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    assert not doctor.check_authority(certificate, now).ok


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


GOOD = dict.fromkeys(("kernel", "root", "runsc", "guest-runtime", "disks", "cgroups", "links", "nftables"), True)
RUNS = Verdict(runs=True, detail="KVM runs guests on the processor (1 ms for the trial)")
RUNS_NOT = Verdict(runs=False, detail="no KVM device", advice="Load the module.")


def vm_host(directory: Path, *, release: str = "1.16.1", kernel: bool = True) -> Settings:
    """Settings of a host with a kernel for virtual machines and programs that call themselves Firecracker."""
    for name, says in (("firecracker", "Firecracker"), ("jailer", "Jailer")):
        program(directory / "programs" / name, f"echo {says} v{release}")
    for name in ("vmlinux", "initrd") if kernel else ():
        program(directory / "kernel" / name, "")
    return Settings(data_dir=directory, firecracker=directory / "programs", kernel=directory / "kernel")


def needs_disk_tools() -> None:
    if missing := installed.missing_disk_tools():
        pytest.skip(f"needs {', '.join(missing)}: run scripts/packages vm")


async def test_firecracker_is_usable_where_it_is_installed_and_kvm_runs_guests(tmp_path: Path) -> None:
    needs_disk_tools()
    found = await doctor_drivers.of_firecracker(vm_host(tmp_path), GOOD, RUNS)
    assert found.usable
    assert "1.16.1" in found.detail


@pytest.mark.parametrize(
    ("release", "kernel", "kvm", "detail", "advice"),
    [
        ("1.16.1", True, RUNS_NOT, "KVM runs no guests", "Load the module."),
        ("1.16.0", True, RUNS, "vsock", "kvm-host.md"),
        ("1.11.0", True, RUNS, "too old", "kvm-host.md"),
        ("1.16.1", False, RUNS, "no kernel", "scripts/up --vm"),
    ],
)
async def test_firecracker_is_not_usable_without_all_it_needs_and_what_lacks_is_said(
    tmp_path: Path, release: str, *, kernel: bool, kvm: Verdict, detail: str, advice: str
) -> None:
    found = await doctor_drivers.of_firecracker(vm_host(tmp_path, release=release, kernel=kernel), GOOD, kvm)
    assert not found.usable
    assert detail in found.detail
    assert advice in found.advice


async def test_firecracker_is_not_usable_where_jails_may_have_no_devices(tmp_path: Path) -> None:
    needs_disk_tools()
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]  # noqa: ASYNC240
    strict = [place for _, place, _, options, *_ in mounts if {"nodev", "noexec"} & set(options.split(","))]
    if not strict:
        pytest.skip("no file system here forbids devices")
    settings = vm_host(tmp_path).model_copy(update={"data_dir": Path(strict[0], "space")})
    found = await doctor_drivers.of_firecracker(settings, GOOD, RUNS)
    assert not found.usable
    assert "nodev" in found.advice


async def test_a_host_that_could_run_firecracker_is_told_how(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, firecracker=tmp_path / "absent")
    found = await doctor_drivers.of_firecracker(settings, GOOD, RUNS)
    assert not found.usable
    assert "kvm-host.md" in found.advice


def test_qemu_is_never_told_of_without_that_it_is_slow(tmp_path: Path) -> None:
    needs_disk_tools()
    if installed.find_qemu() is None:
        pytest.skip("needs QEMU: run scripts/packages vm")
    found = doctor_drivers.of_qemu(vm_host(tmp_path), GOOD)
    assert found.usable
    assert "slow" in found.advice
    without = doctor_drivers.of_qemu(Settings(data_dir=tmp_path, kernel=tmp_path / "absent"), GOOD)
    assert not without.usable
    assert "no kernel" in without.detail


@pytest.mark.parametrize("broken", GOOD)
async def test_a_driver_that_lacks_something_of_the_host_names_it(tmp_path: Path, broken: str) -> None:
    checks = {**GOOD, broken: False}
    gvisor = doctor_drivers.of_gvisor(checks)
    assert not gvisor.usable
    assert broken in gvisor.detail
    machine = await doctor_drivers.of_firecracker(vm_host(tmp_path), checks, RUNS)
    assert machine.usable == (broken == "runsc" and not installed.missing_disk_tools())


def findings(**usable: bool) -> list[Finding]:
    return [Finding(name, usable=there, detail="usable: it", advice=f"get {name}") for name, there in usable.items()]


@pytest.mark.parametrize(
    ("firecracker", "gvisor", "qemu", "chosen"),
    [
        (True, True, True, "firecracker"),
        (False, True, True, "gvisor"),
        (False, False, True, "qemu"),
    ],
)
def test_the_strongest_driver_that_works_is_chosen_and_what_a_stronger_one_needs_is_said(
    *, firecracker: bool, gvisor: bool, qemu: bool, chosen: str
) -> None:
    ok, detail, advice = doctor_drivers.told_choice(None, findings(firecracker=firecracker, gvisor=gvisor, qemu=qemu))
    assert ok
    assert detail.startswith(f"{chosen} ")
    assert ("get firecracker" in advice) is not firecracker


def test_a_driver_that_the_settings_ask_for_and_that_does_not_work_is_a_fault() -> None:
    ok, detail, advice = doctor_drivers.told_choice("qemu", findings(firecracker=True, gvisor=True, qemu=False))
    assert not ok
    assert detail.startswith("qemu")
    assert "SPACE_DRIVER" in advice
    assert not doctor_drivers.told_choice("quantum", findings(firecracker=True, gvisor=True, qemu=True))[0]
    assert not doctor_drivers.told_choice(None, findings(firecracker=False, gvisor=False, qemu=False))[0]


@pytest.mark.machine
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
async def test_this_host_is_examined_for_real_and_left_as_it_was(tmp_path: Path) -> None:
    """As the installation of nobody: what others on this host have is not judged, and not written to."""
    own = Settings(instance=f"t{secrets.token_hex(3)}", data_dir=tmp_path, guest_dir=printed_path("guest-runtime"))
    checks = {check.check: check for check in await doctor.examine(own)}
    assert list(checks)[-5:] == ["kvm", "firecracker", "gvisor", "qemu", "driver"]
    assert checks["gvisor"].detail.startswith("usable")
    for name in ("kernel", "root", "cgroups", "runsc", "guest-runtime", "disks", "nftables", "links"):
        assert checks[name].ok, checks[name]
    assert all(check.ok or check.advice for check in checks.values())
    assert not any(name.startswith("spd") for _, name in socket.if_nameindex())
    tables = await programs.run(["nft", "list", "tables"], timeout_s=10)
    assert b"space_doctor" not in tables.output


def test_the_command_prints_json_and_says_by_its_status_whether_all_is_well(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPACE_RUNSC", str(tmp_path / "absent"))
    monkeypatch.setenv("SPACE_DATA_DIR", str(tmp_path))
    status = doctor.main(["--json"])
    checks = json.loads(capsys.readouterr().out)
    assert status == 1
    assert {"check", "ok", "detail", "advice"} == set(checks[0])
    assert next(c for c in checks if c["check"] == "runsc")["ok"] is False


HOLDER = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()"


def test_an_installation_of_which_only_a_part_runs_is_named_with_its_log(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    settings = Settings(run_dir=tmp_path, api_port=port)
    assert doctor.check_processes(settings) == Check("processes", ok=True, detail="none runs: `space up` starts SPACE")
    (tmp_path / "locks").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path / "locks" / "broker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout
        child.stdout.readline()
        check = doctor.check_processes(settings)
        assert child.stdin
        child.stdin.close()
    assert not check.ok
    assert check.detail == f"Not running: gateway, node, api; see {tmp_path}/log/gateway.log."
