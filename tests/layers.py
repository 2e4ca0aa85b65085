"""Layers of images made in a test, and `unpack-layer` on a tree of the test's own."""

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.agent import SOURCE

Entry = tarfile.TarInfo | tuple[tarfile.TarInfo, bytes]
BLOCK = 512


def make_root(directory: Path) -> Path:
    """An empty tree, and beside it one that nothing may reach."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    (directory / "outside").mkdir()
    (directory / "outside/kept").write_text("kept")
    path = directory / "root"
    path.mkdir()
    return path


def entry(name: str, kind: bytes = tarfile.REGTYPE, **fields: Any) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.mode, member.mtime = kind, 0o755 if kind == tarfile.DIRTYPE else 0o644, 1_700_000_000
    for field, value in fields.items():
        setattr(member, field, value)
    return member


def file(name: str, data: bytes | str = b"", **fields: Any) -> Entry:
    content = data.encode() if isinstance(data, str) else data
    return entry(name, size=len(content), **fields), content


def directory(name: str, **fields: Any) -> Entry:
    return entry(name, tarfile.DIRTYPE, **fields)


def symlink(name: str, target: str, **fields: Any) -> Entry:
    return entry(name, tarfile.SYMTYPE, linkname=target, **fields)


def link(name: str, target: str) -> Entry:
    return entry(name, tarfile.LNKTYPE, linkname=target)


def tar(entries: Iterable[Entry], kind: int = tarfile.PAX_FORMAT, **options: Any) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=kind, errors="surrogateescape", **options) as archive:
        for one in entries:
            member, data = one if isinstance(one, tuple) else (one, b"")
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


def run(root: Path, data: bytes, before: Callable[[], None] | None = None) -> subprocess.CompletedProcess[bytes]:
    words = [sys.executable, "-m", "space.guest", "unpack-layer", str(root)]
    environment = {"PYTHONPATH": str(SOURCE), "PATH": os.defpath}
    return subprocess.run(
        words, input=data, env=environment, capture_output=True, timeout=60, check=False, preexec_fn=before
    )


def unpack(root: Path, *entries: Entry, **options: Any) -> dict[str, int]:
    """Apply a layer; return the counts it tells."""
    return unpack_bytes(root, tar(entries, **options))


def unpack_bytes(root: Path, data: bytes) -> dict[str, int]:
    done = run(root, data)
    assert (done.returncode, done.stderr) == (0, b"")
    return json.loads(done.stdout)


def refused(root: Path, data: bytes | Iterable[Entry]) -> dict[str, str]:
    """Return why a layer is refused."""
    done = run(root, data if isinstance(data, bytes) else tar(data))
    assert done.returncode == 3, done
    assert done.stdout == b""
    (line,) = done.stderr.decode().splitlines()
    told = json.loads(line)
    assert set(told) == {"code", "message", "path"}
    return told


def tree(root: Path) -> dict[str, str]:
    """Return every file by its path: its contents, where a link leads, or its kind."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"  # noqa: PTH115 - a link need not be a path
        elif path.is_file():
            found[name] = path.read_text()
        else:
            found[name] = "directory" if path.is_dir() else "special"
    return found
