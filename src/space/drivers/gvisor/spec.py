"""The OCI runtime specification of one machine. Pure: data in, data out."""

from pathlib import Path
from typing import Any

from space.drivers.base import Machine

AGENT_ARGV = (
    "/.space/lib/ld-linux-x86-64.so.2",
    "--library-path",
    "/.space/lib",
    "/.space/bin/python3",
    "-I",
    "-S",
    "/.space/agent.pyz",
)
GUEST_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
OPEN_FILES_MAX = 65536
_SHM = "/dev/shm"  # noqa: S108 the guest's own

# All of Linux. They are capabilities within gVisor's own kernel; none is one of the host's.
CAPABILITIES = tuple(
    f"CAP_{name}"
    for name in [
        "CHOWN",
        "DAC_OVERRIDE",
        "DAC_READ_SEARCH",
        "FOWNER",
        "FSETID",
        "KILL",
        "SETGID",
        "SETUID",
        "SETPCAP",
        "LINUX_IMMUTABLE",
        "NET_BIND_SERVICE",
        "NET_BROADCAST",
        "NET_ADMIN",
        "NET_RAW",
        "IPC_LOCK",
        "IPC_OWNER",
        "SYS_MODULE",
        "SYS_RAWIO",
        "SYS_CHROOT",
        "SYS_PTRACE",
        "SYS_PACCT",
        "SYS_ADMIN",
        "SYS_BOOT",
        "SYS_NICE",
        "SYS_RESOURCE",
        "SYS_TIME",
        "SYS_TTY_CONFIG",
        "MKNOD",
        "LEASE",
        "AUDIT_WRITE",
        "AUDIT_CONTROL",
        "SETFCAP",
        "MAC_OVERRIDE",
        "MAC_ADMIN",
        "SYSLOG",
        "WAKE_ALARM",
        "BLOCK_SUSPEND",
        "AUDIT_READ",
    ]
)


def render(machine: Machine, guest_dir: Path) -> dict[str, Any]:
    """Return the contents of config.json for a machine whose root is a directory and whose link is a network
    namespace.
    """
    return {
        "ociVersion": "1.0.0",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": list(AGENT_ARGV),
            "env": [f"PATH={GUEST_PATH}"],
            "cwd": "/",
            # Nothing inheritable or ambient: what a user's program gets after exec follows from its uid alone.
            "capabilities": {kind: list(CAPABILITIES) for kind in ("bounding", "effective", "permitted")},
            "rlimits": [{"type": "RLIMIT_NOFILE", "soft": OPEN_FILES_MAX, "hard": OPEN_FILES_MAX}],
            "noNewPrivileges": False,  # sudo must work inside
        },
        "root": {"path": str(machine.root), "readonly": False},
        "hostname": machine.hostname,
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "noexec", "nodev", "ro"]},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
            {"destination": "/dev/pts", "type": "devpts", "source": "devpts"},
            {"destination": _SHM, "type": "tmpfs", "source": "shm", "options": ["mode=1777", "nosuid", "nodev"]},
            {"destination": "/run", "type": "tmpfs", "source": "run", "options": ["mode=0755", "nosuid", "nodev"]},
            {
                "destination": "/.space",
                "type": "bind",
                "source": str(guest_dir),
                "options": ["bind", "ro", "nosuid", "nodev"],
            },
            *(
                {
                    "destination": one.path,
                    "type": "bind",
                    "source": str(one.source),
                    "options": ["bind", "rw", "nosuid", "nodev"],
                }
                for one in machine.shared
            ),
        ],
        "linux": {
            "namespaces": [
                {"type": "pid"},
                {"type": "ipc"},
                {"type": "uts"},
                {"type": "mount"},
                {"type": "network", "path": str(machine.netns)},
            ]
        },
    }
