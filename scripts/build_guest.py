"""Assemble the guest runtime and the agent. Called by `guest-runtime`; runs with the same Python as the guest will.

    build_guest.py runtime UNPACKED_DEBS OUT     Python, its standard library compiled, and the libraries it loads
    build_guest.py agent SOURCE_TREE OUT_FILE    the agent as one zip of compiled modules, and beside it `sudo`, whose
                                                 client is a file of its own because it is started for each call

Everything is bytecode without sources ("unchecked": the machine sees the tree read-only), so that a guest starts
without compiling or asking for times. The files' bytes depend on the inputs alone.
"""

import py_compile
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
LIBRARIES = """
ld-linux-x86-64.so.2 libc.so.6 libm.so.6 libdl.so.2 libpthread.so.0 librt.so.1 libutil.so.1 libresolv.so.2
libnss_files.so.2 libnss_dns.so.2 libz.so.1 libexpat.so.1 libffi.so.8 libbz2.so.1.0 liblzma.so.5
"""
# What a headless agent of a few files never imports, and what would need libraries that are not brought along.
DROPPED = """
_aix_support _bootsubprocess _osx_support antigravity cProfile cgi cgitb curses dbm distutils doctest ensurepip ftplib
idlelib imaplib lib2to3 mailbox multiprocessing nntplib pdb poplib profile pstats pydoc pydoc_data sitecustomize smtpd
smtplib sqlite3 ssl telnetlib test this tkinter turtle turtledemo unittest venv webbrowser wsgiref xml xmlrpc
"""
DROPPED_EXTENSIONS = """
_codecs_ _crypt _ctypes_test _curses _dbm _elementtree _gdbm _hashlib _lsprof _multibytecodec _multiprocessing
_posixshmem _sqlite3 _ssl _test _tkinter _uuid _xx audioop nis ossaudiodev readline xx
"""
# What /usr/bin/sudo of a template leads to. The agent's socket is there where set-uid bits have no effect.
SUDO = """#!/bin/sh
case $0 in *edit) set -- -e "$@" ;; esac
[ -S /dev/space/sudo ] || exec /usr/bin/sudo.real "$@"
exec /.space/lib/ld-linux-x86-64.so.2 --library-path /.space/lib /.space/bin/python3 -I -S /.space/sudo.pyc "$@"
"""


def compiled(source: Path, shown: str, out: Path, optimize: int) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(source), str(out), dfile=shown, doraise=True, optimize=optimize, invalidation_mode=unchecked)


def build_runtime(debs: Path, out: Path) -> None:
    library = out / "lib" / f"python{VERSION}"
    source = debs / "usr" / "lib" / f"python{VERSION}"
    (out / "bin").mkdir(parents=True)
    (library / "lib-dynload").mkdir(parents=True)
    shutil.copyfile(debs / "usr" / "bin" / f"python{VERSION}", out / "bin" / "python3")
    for name in LIBRARIES.split():
        found = next(
            (p for root in ("lib", "usr/lib") for p in sorted((debs / root).glob(f"x86_64-linux-gnu/{name}"))), None
        )
        found = found or next((p for p in (debs / "lib64" / name, debs / "usr" / "lib64" / name) if p.is_file()), None)
        if found is not None:  # newer C libraries have folded some of these into libc
            shutil.copyfile(found, out / "lib" / name)
    dropped = frozenset(DROPPED.split())
    for path in sorted(source.rglob("*.py")):
        inside = path.relative_to(source)
        if inside.parts[0] not in dropped and inside.stem not in dropped:
            compiled(path, f"/.space/lib/python{VERSION}/{inside}", library / inside.with_suffix(".pyc"), optimize=2)
    for path in sorted((source / "lib-dynload").glob("*.so")):
        if not path.name.startswith(tuple(DROPPED_EXTENSIONS.split())):
            shutil.copyfile(path, library / "lib-dynload" / path.name)
    for path in out.rglob("*"):
        path.chmod(0o755 if path.is_dir() or path.name == "python3" or path.name.startswith("ld-linux") else 0o644)


def build_agent(tree: Path, out: Path) -> None:
    """The packages `protocol` and `guest`, a bare `space` package around them, and their start; and `sudo`."""
    with tempfile.TemporaryDirectory() as scratch:
        staged = Path(scratch)
        (staged / "empty.py").write_text("")
        (staged / "main.py").write_text("from space.guest.__main__ import main\n\nmain()\n")
        modules = {"__main__.pyc": staged / "main.py", "space/__init__.pyc": staged / "empty.py"}
        for package in ("protocol", "guest"):
            for path in sorted((tree / "space" / package).rglob("*.py")):
                modules[str(path.relative_to(tree).with_suffix(".pyc"))] = path
        with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
            for name, path in sorted(modules.items()):
                compiled(path, f"/.space/agent.pyz/{name[:-1]}", staged / "module.pyc", optimize=0)
                archive.writestr(zipfile.ZipInfo(name), (staged / "module.pyc").read_bytes())
    client = tree / "space" / "guest" / "sudo_client.py"
    compiled(client, "/.space/sudo.py", out.with_name("sudo.pyc"), optimize=2)
    command = out.parent / "bin" / "sudo"
    command.parent.mkdir(exist_ok=True)
    command.write_text(SUDO)
    command.chmod(0o755)
    for path in (out, out.with_name("sudo.pyc")):
        path.chmod(0o644)


if __name__ == "__main__":
    build = {"runtime": build_runtime, "agent": build_agent}[sys.argv[1]]
    build(Path(sys.argv[2]), Path(sys.argv[3]))
