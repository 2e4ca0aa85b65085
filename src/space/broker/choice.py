"""Which drivers this host has, and which one sandboxes get that name none: the strongest that really works here."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from space.broker import installed
from space.broker.proofs import Proofs
from space.drivers.base import Driver, Need
from space.drivers.firecracker.jail import forbids_jails
from space.drivers.vm.proof import Verdict
from space.errors import HostError, InvalidRequest
from space.settings import Settings

STRENGTH = ("firecracker", "gvisor", "qemu")
"""Strongest first. QEMU comes last: on emulated processors a sandbox is slow."""
VM_SET_UP = "Run scripts/up --vm, which installs what virtual machines need."
KVM_HOST = "docs/how-to/kvm-host.md says how."


@dataclass(frozen=True, slots=True)
class Candidate:
    """A driver that is installed. One that is not `usable` may be asked for by name, and will most likely fail."""

    name: str
    usable: bool
    reason: str = ""
    """For people: why it is not."""
    builds: bool = True
    """Whether templates can be made of its machines' disks: not where only a guest's kernel can read them."""
    keeps_hardware: bool = False
    """Whether a machine that is restored, or claimed, has the processors, memory and disk that it was made with."""
    volumes: bool = False
    """Whether volumes can be mounted in its machines."""


@dataclass(frozen=True, slots=True)
class Lack:
    """What keeps an installed driver from being used, and what would help."""

    detail: str
    advice: str


class Choice:
    """The choice of one broker, whose `drivers` never change."""

    def __init__(self, settings: Settings, drivers: Mapping[str, Driver], proofs: Proofs | None = None) -> None:
        self._settings = settings
        self._drivers = drivers
        self._proofs = proofs or Proofs(settings)

    async def candidates(self) -> list[Candidate]:
        """Return all drivers there are, strongest first. Where one needs KVM, what that is worth is proven first."""
        return [await self._candidate(name) for name in strongest_first(self._drivers)]

    async def told(self) -> dict[str, object]:
        """Return what the verb `drivers` answers."""
        candidates = await self.candidates()
        shown = [asdict(one) for one in candidates]
        return {"default": choose(self._settings.driver, candidates), "drivers": shown}

    async def _candidate(self, name: str) -> Candidate:
        virtual = Need.BLOCKS in self._drivers[name].capabilities.needs
        volumes = self._drivers[name].capabilities.volumes
        found = Candidate(name, usable=True, builds=not virtual, keeps_hardware=virtual, volumes=volumes)
        if name != "firecracker":
            return found
        _, lack = await judge_firecracker(self._settings, await self._proofs.kvm())
        return replace(found, usable=False, reason=f"{lack.detail}. {lack.advice}") if lack else found


async def judge_firecracker(settings: Settings, kvm: Verdict) -> tuple[str, Lack | None]:
    """Return the release that is installed, empty where none can be used, and what keeps it from working here; None:
    nothing does.
    """
    firecracker = installed.find_firecracker(settings)
    if firecracker is None:
        return "", Lack("KVM runs guests, but it is not installed", KVM_HOST) if kvm.runs else _of_kvm(kvm)
    try:
        release = await firecracker.version()
    except HostError as error:
        return "", Lack(error.message.removesuffix("."), KVM_HOST)
    if not kvm.runs:
        return release, _of_kvm(kvm)
    if lack := lack_of_machines(settings):
        return release, lack
    if forbids_jails(next(path for path in (settings.data_dir, *settings.data_dir.parents) if path.exists())):
        what = f"the file system of {settings.data_dir} forbids devices or programs, which jails need"
        return release, Lack(what, "Mount it without nodev and noexec, or set data_dir.")
    return release, None


def _of_kvm(kvm: Verdict) -> Lack:
    return Lack(kvm.detail, kvm.advice)


def lack_of_machines(settings: Settings) -> Lack | None:
    """Return what is not there of what every virtual machine needs; None when all is."""
    if installed.find_kernel(settings) is None:
        return Lack(f"there is no kernel for virtual machines in {settings.kernel}", VM_SET_UP)
    missing = installed.missing_disk_tools()
    return Lack(f"{', '.join(missing)} not installed", VM_SET_UP) if missing else None


class Usable(Protocol):
    """What is chosen from: what is installed, or what the doctor has found."""

    @property
    def name(self) -> str: ...
    @property
    def usable(self) -> bool: ...


def choose(wanted: str | None, candidates: Iterable[Usable]) -> str | None:
    """Return the driver of sandboxes that name none, given those there are. Pure.

    What the settings want holds, whether it works or not: nobody is given a weaker boundary than was asked for.
    """
    if wanted:
        return wanted
    usable = {one.name: one for one in candidates if one.usable}
    return next(iter(strongest_first(usable)), None)


def strongest_first(names: Mapping[str, object]) -> list[str]:
    """Return the names in the order of STRENGTH, others behind."""
    known = [name for name in STRENGTH if name in names]
    return [*known, *sorted(set(names) - set(known))]


def no_such_driver(names: Mapping[str, object]) -> InvalidRequest:
    """Return the error for a driver that this host has not."""
    found = strongest_first(names)
    return InvalidRequest(
        f"This host has no such driver: it has {' and '.join(found) or 'none'}. Leave the driver out, or have the"
        " operator ask `space doctor` what another one needs.",
        code="no-such-driver",
        field="driver",
        drivers=found,
    )
