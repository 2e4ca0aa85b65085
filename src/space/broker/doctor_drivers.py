"""What the doctor says of each driver: whether it can be used here, why not, and what would make it work."""

from dataclasses import dataclass

from space.broker import choice, installed
from space.broker.choice import STRENGTH
from space.drivers.vm.proof import Verdict
from space.settings import Settings

_FOR_ALL = ("kernel", "root", "guest-runtime", "disks", "cgroups", "links", "nftables")


@dataclass(frozen=True, slots=True)
class Finding:
    """Whether one driver can be used, what was seen, and what would help."""

    name: str
    usable: bool
    detail: str
    advice: str = ""


def of_gvisor(checks: dict[str, bool]) -> Finding:
    """`checks` are the doctor's other findings, by name."""
    failed = [name for name in ("runsc", *_FOR_ALL) if not checks[name]]
    if failed:
        return Finding("gvisor", usable=False, detail=_see(failed), advice="See those checks.")
    return Finding("gvisor", usable=True, detail="usable: a kernel in user space between sandbox and host")


async def of_firecracker(settings: Settings, checks: dict[str, bool], kvm: Verdict) -> Finding:
    if failed := [one for one in _FOR_ALL if not checks[one]]:
        return Finding("firecracker", usable=False, detail=_see(failed), advice="See those checks.")
    release, lack = await choice.judge_firecracker(settings, kvm)
    if lack is None:
        detail = f"usable: Firecracker {release}; a virtual machine with its own kernel"
        return Finding("firecracker", usable=True, detail=detail)
    what = lack.detail
    if not kvm.runs and what == kvm.detail:
        what = f"{f'Firecracker {release} is installed, but ' if release else ''}KVM runs no guests (see kvm)"
    return Finding("firecracker", usable=False, detail=f"not usable: {what}", advice=lack.advice)


def of_qemu(settings: Settings, checks: dict[str, bool]) -> Finding:
    if failed := [one for one in _FOR_ALL if not checks[one]]:
        return Finding("qemu", usable=False, detail=_see(failed), advice="See those checks.")
    if installed.find_qemu() is None:
        return Finding("qemu", usable=False, detail="not usable: QEMU is not installed", advice=choice.VM_SET_UP)
    if lack := choice.lack_of_machines(settings):
        return Finding("qemu", usable=False, detail=f"not usable: {lack.detail}", advice=lack.advice)
    detail = "usable: a virtual machine with its own kernel"
    advice = "Its processors are emulated (TCG), which is slow: for tests, and for hosts where nothing else works."
    return Finding("qemu", usable=True, detail=detail, advice=advice)


def told_choice(wanted: str | None, findings: list[Finding]) -> tuple[bool, str, str]:
    """Return whether new sandboxes get a driver that works, which one and why, and what would be better. Pure."""
    by_name = {finding.name: finding for finding in findings}
    name = choice.choose(wanted, findings)
    if wanted and wanted not in by_name:
        known = ", ".join(STRENGTH)
        return False, f"the settings ask for {wanted!r}, which is not known", f"Set SPACE_DRIVER to one of {known}."
    if wanted:
        found = by_name[wanted]
        why = f"{wanted} (set by SPACE_DRIVER)"
        if found.usable:
            return True, f"{why}; {_boundary(found)}", ""
        reason = found.detail.removeprefix("not usable: ")
        return False, f"{why} cannot be used: {reason}", f"{found.advice} Or unset SPACE_DRIVER."
    if name is None:
        return False, "none can be used", "See the checks of gvisor, firecracker and qemu."
    chosen = by_name[name]
    stronger = [by_name[name] for name in STRENGTH[: STRENGTH.index(chosen.name)]]
    advice = " ".join(f"For {one.name}: {one.advice}" for one in stronger)
    return True, f"{chosen.name} (the strongest that works here); {_boundary(chosen)}", advice


def _boundary(finding: Finding) -> str:
    return finding.detail.removeprefix("usable: ")


def _see(failed: list[str]) -> str:
    return f"not usable: {', '.join(failed)}"
