"""Whether KVM really runs guests here: proven by running one, not read off a device or a flag.

A paravirtual KVM has a device, answers as a real one does, and emulates guests instruction by instruction; a kernel
does not get far that way. So a few million instructions are run in a machine, and the time tells.
"""

import errno
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from space.drivers import programs
from space.drivers.vm import kvm_probe
from space.errors import HostError

DEVICE = Path("/dev/kvm")
PROBE_S = 10.0
EMULATED_S = 0.1
"""A processor takes a hundredth of that, nested ones included; emulation ten times that."""
_ELSEWHERE = "Use gvisor here, or a host (bare metal, or with nested virtualisation) whose processor shows vmx or svm."


@dataclass(frozen=True, slots=True)
class Verdict:
    """For people: what was found, and what would make it work; and whether it does."""

    runs: bool
    detail: str
    advice: str = ""


async def prove(device: Path = DEVICE, cpuinfo: Path = Path("/proc/cpuinfo")) -> Verdict:
    """Run a small machine to its end. Takes two seconds where that is emulated, and `PROBE_S` where it hangs."""
    # SAFETY: fixed words and this package's own file. The machine that it makes has 64 KiB of memory, no device, and
    # runs nine bytes of our own.
    argv = [sys.executable, "-I", "-S", str(Path(kvm_probe.__file__)), str(device)]
    try:
        finished = await programs.run(argv, timeout_s=PROBE_S)
        found: dict[str, Any] = json.loads(finished.output)
    except HostError:
        return Verdict(runs=False, detail="KVM starts a machine and never comes back from it", advice=_ELSEWHERE)
    except ValueError:
        return Verdict(runs=False, detail="KVM's device does not do what KVM does", advice=_ELSEWHERE)
    return judge(found, set(cpuinfo.read_text().split()))  # noqa: ASYNC240 the kernel's own


def judge(found: dict[str, Any], flags: set[str]) -> Verdict:
    """Say what the probe's outcome means on a host whose processor shows these flags. Pure."""
    match found:
        case {"step": "done", "ran_s": float(ran_s)} if ran_s < EMULATED_S:
            return Verdict(runs=True, detail=f"KVM runs guests on the processor ({ran_s * 1000:.0f} ms for the trial)")
        case {"step": "done"}:
            detail = "KVM emulates guests instruction by instruction (a paravirtual KVM): a kernel cannot run like that"
            return Verdict(runs=False, detail=detail, advice=_ELSEWHERE)
        case {"step": "open", "errno": errno.EACCES | errno.EPERM}:
            return Verdict(runs=False, detail="no right to use KVM's device", advice="Run the broker as root.")
        case {"step": "open"}:
            return Verdict(runs=False, detail="no KVM device", advice=_missing(flags))
        case _:
            return Verdict(runs=False, detail="KVM's device is there, but runs no machine", advice=_missing(flags))


def _missing(flags: set[str]) -> str:
    """Return what may bring KVM to this host."""
    if flags & {"vmx", "svm"}:
        return "The processor can: load the module (modprobe kvm_intel, or kvm_amd), or end what else uses it."
    if "hypervisor" in flags:
        return f"This host is a virtual machine without nested virtualisation. {_ELSEWHERE}"
    return "Enable virtualisation (VT-x, SVM) in the firmware's settings, if the processor has it."
