"""Whether KVM runs guests on this host: proven once, and remembered for as long as nothing changes that matters.

First a few instructions are run; where they run at a processor's pace, the kernel of virtual machines is booted once,
by Firecracker if it is installed, else by QEMU. Nothing of this is done before somebody asks.
"""

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from space.broker import installed, trial
from space.broker.trial import Trial
from space.drivers import processes, programs
from space.drivers.vm import proof
from space.drivers.vm.kernel import INITRD, VMLINUX
from space.drivers.vm.proof import Verdict
from space.errors import HostError
from space.settings import Settings, load

VERSION_S = 10.0


class Proofs:
    """The verdicts of one installation. They lie in ``<broker_dir>/kvm.json``, which is root's alone."""

    def __init__(
        self,
        settings: Settings,
        device: Path = proof.DEVICE,
        *,
        prove: Callable[[Path], Awaitable[Verdict]] = proof.prove,
        boot: Callable[[Trial], Awaitable[Verdict]] = trial.boot,
    ) -> None:
        self._settings = settings
        self._device = device
        self._prove = prove
        self._boot = boot
        self._file = settings.broker_dir / "kvm.json"
        self._asking = asyncio.Lock()

    async def kvm(self) -> Verdict:
        """Return whether KVM runs guests. At once when that is known; else after `proof.PROBE_S` and `trial.BOOT_S` at
        most, and much sooner mostly.
        """
        async with self._asking:
            trying = await self._trial()
            key = self._key(trying)
            if known := self._remembered(key):
                return known
            verdict = await self._prove(self._device)
            if verdict.runs and trying:
                booted = await self._boot(trying)
                verdict = Verdict(runs=True, detail=f"{verdict.detail}; {booted.detail}") if booted.runs else booted
            self._remember(key, verdict)
            return verdict

    async def _trial(self) -> Trial | None:
        """Return how the kernel is to be booted; None where there is no kernel, or nothing that boots it."""
        kernel = installed.find_kernel(self._settings)
        if kernel is None:
            return None
        if firecracker := installed.find_firecracker(self._settings):
            with suppress(HostError):
                return trial.of_firecracker(firecracker.firecracker, await firecracker.version(), kernel)
        if qemu := installed.find_qemu():
            with suppress(HostError):
                # SAFETY: the distribution's program, which says what it is and ends.
                said = await programs.check([str(qemu), "--version"], timeout_s=VERSION_S)
                return trial.of_qemu(said.decode(errors="replace").partition("(")[0].strip(), kernel)
        return None

    def _key(self, trying: Trial | None) -> list[Any]:
        """Return all that a verdict depends on."""
        kernel = installed.find_kernel(self._settings)
        files = [kernel.directory / name for name in (VMLINUX, INITRD)] if kernel else []
        host = [os.uname().release, processes.boot_id(), _identity(self._device)]
        return [*host, trying.told if trying else "", [[str(file), _identity(file)] for file in files]]

    def _remembered(self, key: list[Any]) -> Verdict | None:
        with suppress(OSError, ValueError, KeyError, TypeError):
            kept = json.loads(self._file.read_text())
            if kept["of"] == key:
                return Verdict(**kept["verdict"])
        return None

    def _remember(self, key: list[Any], verdict: Verdict) -> None:
        """Keep the verdict. Who may not write there proves again."""
        with suppress(OSError):
            new = self._file.with_name(f".{self._file.name}.{os.getpid()}")
            new.write_text(json.dumps({"of": key, "verdict": asdict(verdict)}))
            new.rename(self._file)


def main() -> int:
    """Say what KVM is worth here; 0 where it runs guests."""
    verdict = asyncio.run(Proofs(load()).kvm())
    sys.stdout.write(f"{verdict.detail}\n{verdict.advice}".strip() + "\n")
    return 0 if verdict.runs else 1


def _identity(file: Path) -> str:
    """Return what changes when a file, or a module's device, is made anew, changed, or given other rights."""
    try:
        found = file.stat()
    except OSError:
        return ""
    return f"{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_ctime_ns}"


if __name__ == "__main__":
    raise SystemExit(main())
