"""The supervisor of the installation on this machine, as a program of its own: it needs root, the CLI does not."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import typer

from space.cli.failures import ERROR

INSTALLED = Path("/opt/space/venv/bin/python")


def as_root(module: str, *arguments: str, root: bool = True) -> int:
    """Run a module of this installation, through sudo where we are not root and must be; return its status."""
    python = str(INSTALLED if INSTALLED.exists() else sys.executable)
    words = [python, "-I", "-m", module, *arguments]
    if root and os.geteuid() != 0:
        if shutil.which("sudo") is None:
            print("space: this needs root, and there is no sudo here.", file=sys.stderr)
            raise typer.Exit(ERROR)
        words = ["sudo", "--", *words]
    return subprocess.run(words, check=False).returncode


def supervise(verb: str) -> None:
    """Let the supervisor do something. Exits with its status when that is not 0."""
    if not INSTALLED.exists():
        print("space: SPACE is not set up on this machine.", file=sys.stderr)
        print("       Run scripts/up in a clone of its repository; repeating that later is quick.", file=sys.stderr)
        raise typer.Exit(ERROR)
    status = as_root("space.supervise", verb)
    if status:
        print("       `space doctor` says what this host lacks.", file=sys.stderr)
        raise typer.Exit(ERROR)
