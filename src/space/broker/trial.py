"""Whether the kernel of virtual machines comes up here: booted once, as far as its first program.

What KVM does with a few instructions (`drivers.vm.proof`) says little about a whole kernel. The kernel boots without
disks and without a network, runs one program of its initramfs, which says a word on the serial line, and ends.
"""

import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from space.drivers import programs
from space.drivers.qemu import command
from space.drivers.vm.kernel import INITRD, VMLINUX, Kernel
from space.drivers.vm.proof import Verdict
from space.errors import HostError

BOOT_S = 15.0
"""A processor, also a nested one, takes less than two."""
MEMORY_MIB = 128
BOOTED = "space-trial-booted"
_WORDS = f"console=ttyS0 quiet panic=-1 rdinit=/bin/busybox {{more}} -- echo {BOOTED}"
_ADVICE = "Try a kernel made anew (scripts/guest-kernel --activate), another release of that program, or another host."


@dataclass(frozen=True, slots=True)
class Trial:
    """What boots the kernel. `told` is the program and its release, for people."""

    told: str
    argv: tuple[str, ...]
    config: dict[str, Any] | None = None
    """What goes into the file that a last argument of ``CONFIG`` stands for."""


CONFIG = "CONFIG"


def of_firecracker(program: Path, release: str, kernel: Kernel) -> Trial:
    """Return a trial by Firecracker, without its jailer: the guest is ours, and nothing of the host is given to it."""
    boot = {
        "kernel_image_path": str(kernel.directory / VMLINUX),
        "initrd_path": str(kernel.directory / INITRD),
        "boot_args": _WORDS.format(more="pci=off reboot=k i8042.noaux"),
    }
    machine = {"vcpu_count": 1, "mem_size_mib": MEMORY_MIB}
    config = {"boot-source": boot, "drives": [], "machine-config": machine}
    return Trial(f"Firecracker {release}", (str(program), "--no-api", "--config-file", CONFIG), config)


def of_qemu(release: str, kernel: Kernel, *, accelerator: str = "kvm", more: str = "") -> Trial:
    """Return a trial by QEMU. `more` words for the kernel: with emulated processors it needs some."""
    argv = [command.PROGRAM, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", *command.SANDBOX]
    argv += ["-machine", "microvm,x-option-roms=off,rtc=on,acpi=on,isa-serial=on"]
    argv += ["-accel", accelerator, "-cpu", "host" if accelerator == "kvm" else "max", "-m", str(MEMORY_MIB)]
    argv += ["-kernel", str(kernel.directory / VMLINUX), "-initrd", str(kernel.directory / INITRD)]
    argv += ["-append", _WORDS.format(more=f"reboot=t {more}".strip()), "-serial", "stdio"]
    return Trial(release, tuple(argv))


async def boot(trial: Trial, timeout_s: float = BOOT_S) -> Verdict:
    """Boot the kernel and say whether it came as far as its first program. Never takes longer than that."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "config.json"
        config.write_text(json.dumps(trial.config))
        words = [str(config) if word == CONFIG else word for word in trial.argv]
        # SAFETY: fixed words, the operator's own programs and kernel, and no byte of a guest's. It runs without a
        # network and without any capability; root's name alone opens KVM's device. Its output is bounded.
        drop = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all", "--no-new-privs", "--"]
        try:
            done = await programs.run(["unshare", "--net", "--ipc", "--", *drop, *words], timeout_s=timeout_s)
            came_up = BOOTED.encode() in done.output
            reason = "ended before it had come up" if not came_up else ""
        except HostError as error:
            came_up, reason = False, f"had not come up after {timeout_s:g} s"
            if error.code != "program-timeout":
                reason = "could not be started"
    if came_up:
        took_s = time.monotonic() - began
        return Verdict(runs=True, detail=f"{trial.told} booted the guests' kernel in {took_s:.1f} s")
    detail = f"KVM runs instructions, but the guests' kernel, booted by {trial.told}, {reason}"
    return Verdict(runs=False, detail=detail, advice=_ADVICE)
