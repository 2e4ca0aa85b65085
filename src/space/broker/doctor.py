"""What this host can do for SPACE, and whether what runs of it answers: tried for real where looking is no proof.

``ok`` means that SPACE can work as things are; what would only be better is said in ``advice``. Changes nothing here.
"""

import argparse
import asyncio
import datetime as dt
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from space import installation
from space.broker import doctor_drivers
from space.broker.firewall import Firewall
from space.broker.installed import find_runsc
from space.broker.proofs import Proofs
from space.broker.weights import weighing_disks
from space.drivers.programs import run
from space.errors import HostError
from space.settings import Settings, load

RUNSC_DATE_MIN = 20240101
"""Earlier releases have no working systrap, the platform that needs no KVM."""
KERNEL_MIN = (5, 10)
DISK_FREE_MIB_MIN = 4096
MEMORY_FREE_MIB_MIN = 1024
PROBE_S = 30.0
SET_UP = "Run scripts/up, which installs it."
AUTHORITY_LEFT = dt.timedelta(days=30)
NEW_AUTHORITY = (
    "Stop SPACE, remove ca.key and ca.crt in <data_dir>/gateway, start it: there is a new one. Sandboxes learn of it"
    " when they start, wake or are forked."
)
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. ``detail`` is what was seen; ``advice`` what to do about it, empty when there is nothing to do."""

    check: str
    ok: bool
    detail: str
    advice: str = ""


def _good(check: str, detail: str, advice: str = "") -> Check:
    return Check(check, ok=True, detail=detail, advice=advice)


def _bad(check: str, detail: str, advice: str) -> Check:
    return Check(check, ok=False, detail=detail, advice=advice)


@dataclass(frozen=True, slots=True)
class Host:
    """Where the kernel's files are read; tests give another root."""

    root: Path = Path("/")

    def read(self, path: str) -> str:
        try:
            return (self.root / path).read_text(errors="replace")
        except OSError:
            return ""

    def exists(self, path: str) -> bool:
        return (self.root / path).exists()


async def examine(settings: Settings, host: Host | None = None) -> list[Check]:
    """Look at the host; the last entry says which driver is chosen and why. Takes a second or two, and
    some more when what KVM is worth is not known yet.
    """
    host = host or Host()
    looked = [
        check_kernel(os.uname().release, os.uname().machine),
        check_root(os.geteuid()),
        check_cgroups(host),
        check_io_weight(host),
        check_memory(host),
        check_disk_space(settings.data_dir),
        check_authority(settings.gateway_dir / "ca.crt", dt.datetime.now(dt.UTC)),
    ]
    probes: list[Callable[[], Awaitable[Check]]] = [
        lambda: probe_runsc(settings),
        lambda: probe_guest_runtime(settings.guest_dir),
        lambda: probe_disks(settings, host),
        lambda: probe_nftables(settings),
        probe_links,
    ]
    tried = [await probe() for probe in probes]
    checks = [*looked, *tried]
    return [*checks, *await check_drivers(settings, checks)]


def check_kernel(release: str, machine: str) -> Check:
    numbers = tuple(int(n) for n in re.findall(r"\d+", release)[:2])
    detail = f"Linux {release} on {machine}"
    if machine != "x86_64":
        return _bad("kernel", detail, "Only x86_64 is supported so far.")
    if numbers < KERNEL_MIN:
        return _bad("kernel", detail, "Use a distribution with Linux 5.10 or later, e.g. Debian 12.")
    return _good("kernel", detail)


def check_root(uid: int) -> Check:
    if uid != 0:
        return _bad("root", f"running as uid {uid}", "The broker must run as root; ask again with sudo.")
    return _good("root", "running as root")


def check_cgroups(host: Host) -> Check:
    wanted = ("cpu", "memory", "pids")
    if controllers := host.read("sys/fs/cgroup/cgroup.controllers").split():
        version, found = "version 2", [name for name in wanted if name in controllers]
    else:
        version = "version 1"
        found = [name for name in wanted if host.exists(f"sys/fs/cgroup/{name}/cgroup.procs")]
    if missing := [name for name in wanted if name not in found]:
        advice = (
            "Mount cgroup2 at /sys/fs/cgroup with these controllers; in a container, give it a writable cgroup tree."
        )
        return _bad("cgroups", f"{version}; missing: {', '.join(missing)}", advice)
    return _good("cgroups", f"{version} with {', '.join(found)}")


def check_io_weight(host: Host) -> Check:
    heed, ignore = weighing_disks(host.root)
    if not ignore:
        return _good("io-weight", f"heeded by {', '.join(heed)}" if heed else "no disk of its own is seen here")
    seen = f"{len(ignore)} of {len(heed) + len(ignore)} disks do not heed it ({', '.join(ignore[:4])})"
    return _good(
        "io-weight", seen, "io_weight has no effect there; it has with 'bfq' in /sys/block/<disk>/queue/scheduler."
    )


def check_memory(host: Host) -> Check:
    numbers = {
        key: int(kib) // 1024 for key, kib in re.findall(r"^(\w+): +(\d+) kB", host.read("proc/meminfo"), re.MULTILINE)
    }
    total, available = numbers.get("MemTotal", 0), numbers.get("MemAvailable", 0)
    detail = f"{available} MiB of {total} MiB available"
    if available < MEMORY_FREE_MIB_MIN:
        return _bad("memory", detail, f"At least {MEMORY_FREE_MIB_MIN} MiB should be available; stop something.")
    return _good("memory", detail)


def check_disk_space(data_dir: Path) -> Check:
    free = shutil.disk_usage(_nearest(data_dir)).free // _MIB
    detail = f"{free} MiB free for {data_dir}"
    if free < DISK_FREE_MIB_MIN:
        advice = f"At least {DISK_FREE_MIB_MIN} MiB should be free; make room, or set data_dir to another filesystem."
        return _bad("disk-space", detail, advice)
    return _good("disk-space", detail)


def check_authority(certificate: Path, now: dt.datetime) -> Check:
    """Whether the certificate that sandboxes trust holds for a while yet."""
    from cryptography import x509

    try:
        end = x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc
    except FileNotFoundError:
        return _good("authority", "not made yet; it is when SPACE starts")
    except (OSError, ValueError) as error:
        return _bad("authority", f"{certificate} cannot be read ({type(error).__name__})", NEW_AUTHORITY)
    detail = f"what sandboxes trust holds until {end:%Y-%m-%d}"
    return _bad("authority", detail, NEW_AUTHORITY) if end - now < AUTHORITY_LEFT else _good("authority", detail)


def check_processes(settings: Settings) -> Check:
    """Whether all four serve, where one of them runs; that none does is no fault of the host.

    From outside alone: a process that looks at its own lock loses it.
    """
    names = list(installation.users(settings))
    if installation.is_ready(settings):
        return _good("processes", f"{', '.join(names)} run and answer")
    try:
        locks = [installation.Lock(installation.process_lock(settings, name)) for name in names]
        if all(lock.holder() is None for lock in locks):
            return _good("processes", "none runs: `space up` starts SPACE")
        detail = installation.unready(settings)
    except PermissionError:
        return _good("processes", "the api does not say that all is ready; who is not root cannot see what runs")
    return _bad("processes", detail, "What ends is started again; the log of what does not answer says why.")


async def probe_runsc(settings: Settings) -> Check:
    """Run a program in a real gVisor sandbox, on the platform that the driver uses."""
    path = find_runsc(settings)
    if path is None:
        return _bad("runsc", "not found", SET_UP)
    try:
        lines = (await run([str(path), "--version"], timeout_s=PROBE_S)).output.decode(errors="replace").splitlines()
        version = lines[0] if lines else "no version"
        if runsc_date(version) < RUNSC_DATE_MIN:
            return _bad("runsc", f"{path}: {version}", f"A release of 2024 or later is needed. {SET_UP}")
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as state:
            options = [f"--root={state}", "--platform=systrap", "--network=none", "--ignore-cgroups"]
            # SAFETY: a fixed program, without network, that sees the host's files read-only and ends at once.
            done = await run([str(path), *options, "do", "/bin/echo", "works"], timeout_s=PROBE_S)
    except HostError as error:
        return _bad("runsc", f"{path}: {error.message}", SET_UP)
    if done.output.strip() != b"works":
        by_hand = f"{path} {' '.join(options[1:])} do /bin/true"
        advice = f"Try '{by_hand}': it prints the reason, in a container often its limits on ptrace or seccomp."
        return _bad("runsc", f"{path}: {version}, but a program in it does not run on systrap", advice)
    return _good("runsc", f"{path}: {version}; a program ran on systrap in {time.monotonic() - began:.2f} s")


def runsc_date(version: str) -> int:
    """The date in ``runsc version release-20240807.0`` or ``… 0.0~20240729.0``; 0 when there is none."""
    found = re.search(r"20\d{6}", version)
    return int(found[0]) if found else 0


async def probe_guest_runtime(guest_dir: Path) -> Check:
    library = guest_dir / "lib"
    loader = [str(library / "ld-linux-x86-64.so.2"), "--library-path", str(library)]
    look = "import sys; print('%d.%d.%d' % sys.version_info[:3])"
    try:
        done = await run([*loader, str(guest_dir / "bin/python3"), "-I", "-S", "-c", look], timeout_s=PROBE_S)
    except HostError as error:
        return _bad("guest-runtime", f"{guest_dir}: {error.message}", SET_UP)
    if done.status != 0 or not (guest_dir / "agent.pyz").is_file():
        return _bad("guest-runtime", f"{guest_dir} is not complete", SET_UP)
    return _good("guest-runtime", f"{guest_dir}: Python {done.output.decode(errors='replace').strip()}")


async def probe_disks(settings: Settings, host: Host) -> Check:
    """Copy-on-write disks are btrfs subvolumes, on the data directory's own filesystem or in a loop-mounted file."""
    kernel = "btrfs" in host.read("proc/filesystems").split()
    if not kernel and shutil.which("modprobe"):
        # SAFETY: loads the distribution's own module by a fixed name, as mounting would.
        await run(["modprobe", "btrfs"], timeout_s=PROBE_S)
        kernel = "btrfs" in host.read("proc/filesystems").split()
    if not kernel:
        return _bad("disks", "this kernel has no btrfs", "Use a distribution's kernel; Debian's and Ubuntu's have it.")
    if shutil.which("mkfs.btrfs") is None:
        return _bad("disks", "btrfs-progs is not installed", SET_UP)
    kind = (
        (await run(["stat", "-f", "-c", "%T", str(_nearest(settings.data_dir))], timeout_s=PROBE_S))
        .output.decode()
        .strip()
    )
    if not host.exists("dev/loop-control"):
        return _bad("disks", f"no loop devices (data directory on {kind})", "Load the loop module (modprobe loop).")
    return _good("disks", f"btrfs in a loop-mounted file on {kind}")


async def probe_nftables(settings: Settings) -> Check:
    """Whether the kernel takes the rules, and where a broker has installed them, whether they are as it left them."""
    firewall = Firewall(settings.instance, settings.gateway_port, settings.gateway_dns_port)
    if shutil.which("nft") is None:
        return _bad("nftables", "nft is not installed", SET_UP)
    # SAFETY: --check asks the kernel whether it would take the rules, and changes nothing.
    done = await run(["nft", "--check", "--file", "-"], stdin=firewall.rules().encode(), timeout_s=PROBE_S)
    if done.status != 0:
        return _bad(
            "nftables",
            "the kernel does not take the rules",
            "Root and a kernel with nf_tables, nf_nat, nf_conntrack with time-outs, connlimit and reject are needed.",
        )
    if not await firewall.is_installed():
        return _good("nftables", "the kernel takes the rules; they are not installed, no broker has started")
    if not await firewall.holds():
        detail = f"somebody has changed the table inet {settings.instance}, which keeps sandboxes off the network"
        return _bad("nftables", detail, "Start the broker again: it puts the rules right. Find out who changes them.")
    return _good("nftables", "the rules are installed and as they should be")


async def probe_links() -> Check:
    make = ["ip", "link", "add", "spd0", "type", "veth", "peer", "name", "spd1"]
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return _bad("links", "iproute2 or util-linux is not installed", SET_UP)
    # SAFETY: the pair is made in a network namespace that ends with this program.
    done = await run(["unshare", "--net", *make], timeout_s=PROBE_S)
    if done.status != 0:
        return _bad(
            "links",
            "no network namespace with a veth pair can be made",
            "Root and a kernel with veth are needed.",
        )
    return _good("links", "network namespaces and veth pairs can be made")


async def check_drivers(settings: Settings, checks: list[Check]) -> list[Check]:
    """Say of KVM and of each driver whether it can be used, and last which one is chosen. What is not used is no fault
    of the host.
    """
    kvm = await Proofs(settings).kvm()
    found = {check.check: check.ok for check in checks}
    findings = [
        await doctor_drivers.of_firecracker(settings, found, kvm),
        doctor_drivers.of_gvisor(found),
        doctor_drivers.of_qemu(settings, found),
    ]
    told = [_good(one.name, one.detail, one.advice) for one in findings]
    ok, detail, advice = doctor_drivers.told_choice(settings.driver, findings)
    return [_good("kvm", kvm.detail, kvm.advice), *told, Check("driver", ok, detail, advice)]


def _nearest(path: Path) -> Path:
    """The path, or its closest parent that exists."""
    return next(p for p in (path, *path.parents) if p.exists())


def main(arguments: list[str] | None = None) -> int:
    """Print the findings; 0 when SPACE can work here."""
    parser = argparse.ArgumentParser(prog="python -m space.broker doctor")
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args(arguments).json
    settings = load()
    checks = [*asyncio.run(examine(settings)), check_processes(settings)]
    if as_json:
        print(json.dumps([asdict(check) for check in checks], indent=2))  # noqa: T201
    else:
        for check in checks:
            mark = "FAIL" if not check.ok else "note" if check.advice else "ok  "
            print(f"{mark} {check.check:<14} {check.detail}")  # noqa: T201
            if check.advice:
                print(f"     {'':<14} {check.advice}")  # noqa: T201
    return 0 if all(check.ok for check in checks) else 1


if __name__ == "__main__":
    raise SystemExit(main())
