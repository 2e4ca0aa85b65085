"""Runs a few million instructions in a virtual machine of KVM's, and says how that went.

``python -I -S kvm_probe.py DEVICE`` prints one line of JSON: ``{"step": …, "ran_s": …}``. `step` is how far it came:
``open`` (no device, or no right to it; ``errno`` says which), ``device`` (it is not KVM's), ``machine`` (no virtual
machine can be made), ``run`` (the processor did not get to the end; ``exit`` is KVM's reason) or ``done``.

It is a program of its own because the kernel may never come back from it: a device that is there proves nothing. See
linux/kvm.h for the numbers. Knows the standard library alone.
"""

import ctypes
import fcntl
import json
import mmap
import os
import struct
import sys
import time
from typing import Any

LOOPS = 2_000_000
"""Two instructions each: a millisecond on a processor, a second where each one is emulated."""
_RUNS = 2
_API_VERSION = 12
_GET_API_VERSION, _CREATE_VM, _GET_VCPU_MMAP_SIZE = 0xAE00, 0xAE01, 0xAE04
_CREATE_VCPU, _SET_TSS_ADDR, _SET_USER_MEMORY_REGION = 0xAE41, 0xAE47, 0x4020AE46
_RUN, _SET_REGS, _GET_SREGS, _SET_SREGS = 0xAE80, 0x4090AE82, 0x8138AE83, 0x4138AE84
_EXIT_HLT = 5
_SREGS_BYTES = 312
_SEGMENT = struct.Struct("<QIH")  # the beginning of kvm_segment: base, limit, selector
_MEMORY_BYTES = 1 << 16
_ENTRY = 0x1000
_TSS = 0x10000000  # three pages that Intel processors want, beside the memory
# As a processor begins, in 16 bits: mov ecx, LOOPS; again: dec ecx; jnz again; hlt
_PROGRAM = b"\x66\xb9" + struct.pack("<I", LOOPS) + b"\x66\x49\x75\xfc\xf4"


def main() -> None:
    print(json.dumps(probe(sys.argv[1])))  # noqa: T201


def probe(device: str) -> dict[str, Any]:
    try:
        kvm = os.open(device, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        return {"step": "open", "errno": error.errno}
    try:
        if fcntl.ioctl(kvm, _GET_API_VERSION, 0) != _API_VERSION:
            return {"step": "device"}
    except OSError:
        return {"step": "device"}
    # On a busy host one run may be interrupted for long; where instructions are emulated, every one is slow.
    runs = [_run(kvm) for _ in range(_RUNS)]
    return min(runs, key=lambda one: (one["step"] == "done", one.get("ran_s", 0)))


def _run(kvm: int) -> dict[str, Any]:
    """Run the program once in a machine of its own."""
    try:
        cpu, shared, memory = _machine(kvm)
    except OSError as error:
        return {"step": "machine", "errno": error.errno}
    began = time.monotonic()
    try:
        fcntl.ioctl(cpu, _RUN, 0)
    except OSError as error:
        return {"step": "run", "errno": error.errno}
    ran_s = time.monotonic() - began
    reason = struct.unpack_from("<I", shared, 8)[0]
    del memory
    return {"step": "done" if reason == _EXIT_HLT else "run", "exit": reason, "ran_s": round(ran_s, 4)}


def _machine(kvm: int) -> tuple[int, mmap.mmap, object]:
    """Make a machine of one processor, about to run the program; return it, what it shares with KVM, and its memory."""
    machine = fcntl.ioctl(kvm, _CREATE_VM, 0)
    fcntl.ioctl(machine, _SET_TSS_ADDR, _TSS)
    memory = mmap.mmap(-1, _MEMORY_BYTES)
    memory[_ENTRY : _ENTRY + len(_PROGRAM)] = _PROGRAM
    held = ctypes.c_char.from_buffer(memory)
    region = struct.pack("<IIQQQ", 0, 0, 0, _MEMORY_BYTES, ctypes.addressof(held))
    fcntl.ioctl(machine, _SET_USER_MEMORY_REGION, region)
    cpu = fcntl.ioctl(machine, _CREATE_VCPU, 0)
    shared = mmap.mmap(cpu, fcntl.ioctl(kvm, _GET_VCPU_MMAP_SIZE, 0))
    segments = bytearray(_SREGS_BYTES)
    fcntl.ioctl(cpu, _GET_SREGS, segments)
    _SEGMENT.pack_into(segments, 0, 0, 0xFFFF, 0)
    fcntl.ioctl(cpu, _SET_SREGS, bytes(segments))
    fcntl.ioctl(cpu, _SET_REGS, struct.pack("<18Q", *[0] * 16, _ENTRY, 2))
    return cpu, shared, (memory, held)


if __name__ == "__main__":
    main()
