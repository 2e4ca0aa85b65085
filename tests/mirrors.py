"""Mirrors of packages and repositories, made here, for the servers outside to serve: for pip, npm and git."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import secrets
import subprocess
import tarfile
import zipfile
from pathlib import Path

HOST = "good.example"
INDEX_URL = f"https://{HOST}/www/simple/"
NPM_URL = f"https://{HOST}/www/npm/"
REPOSITORY_URL = f"https://{HOST}/git/large.git"
REPOSITORY_BYTES = 24 * 1024 * 1024


def make_mirrors(directory: Path) -> None:
    """Make all of them below the directory of ``outside``."""
    _wheel(directory / "www/simple")
    _npm(directory / "www/npm")
    _repository(directory / "git/large.git")


def _wheel(index: Path) -> None:
    """A wheel as PEP 427 has it, in an index as PEP 503 has it."""
    name = "greeting-1.0-py3-none-any.whl"
    files = {
        "greeting.py": "def greet():\n    return 'installed'\n",
        "greeting-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n",
        "greeting-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},{_digest(text)},{len(text)}\n" for path, text in files.items())
    files["greeting-1.0.dist-info/RECORD"] = record + "greeting-1.0.dist-info/RECORD,,\n"
    package = index / "greeting"
    package.mkdir(parents=True)
    with zipfile.ZipFile(package / name, "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
    (package / "index").write_text(f'<!DOCTYPE html><html><body><a href="{name}">{name}</a></body></html>')
    (index / "index").write_text('<!DOCTYPE html><html><body><a href="greeting/">greeting</a></body></html>')


def _digest(text: str) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def _npm(registry: Path) -> None:
    """A package as `npm pack` makes one, and what a registry says of it."""
    described = {"name": "greeting", "version": "1.0.0", "main": "index.js"}
    content = {"package.json": json.dumps(described), "index.js": "module.exports = () => 'installed'\n"}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for path, text in content.items():
            member = tarfile.TarInfo(f"package/{path}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    archive = packed.getvalue()
    registry.mkdir(parents=True)
    (registry / "greeting-1.0.0.tgz").write_bytes(archive)
    integrity = "sha512-" + base64.b64encode(hashlib.sha512(archive).digest()).decode()
    dist = {"tarball": f"{NPM_URL}greeting-1.0.0.tgz", "integrity": integrity}
    told = {"name": "greeting", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": {**described, "dist": dist}}}
    (registry / "greeting").write_text(json.dumps(told))


def _repository(bare: Path) -> None:
    """A repository with two commits, of some size."""
    bare.parent.mkdir(parents=True)
    work = bare.with_suffix(".work")
    identity = {
        f"GIT_{who}_{what}": "test@good.example" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", **identity}

    def git(*words: str) -> None:
        subprocess.run(["git", *words], check=True, capture_output=True, env=environment, timeout=60)

    git("init", "--quiet", "--initial-branch=main", str(work))
    (work / "README").write_text("a repository\n")
    git("-C", str(work), "add", "README")
    git("-C", str(work), "commit", "--quiet", "--message=first")
    (work / "data").write_bytes(secrets.token_bytes(REPOSITORY_BYTES))
    git("-C", str(work), "add", "data")
    git("-C", str(work), "commit", "--quiet", "--message=second")
    git("clone", "--quiet", "--bare", str(work), str(bare))
