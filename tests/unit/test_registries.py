"""scripts/registries asks the package managers of a machine, and stands whatever they answer. Here they are small scripts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/registries"
TOOLS = {
    "pip3": "echo \"global.index-url='https://user:secret@Mirror.Example.:8443/simple'\"; echo \"global.proxy='http://proxy.example:3128'\"",
    "npm": "echo 'registry = \"https://node.example/npm/\"'; echo '; registry = \"https://default.example/\"'; echo 'home-page = \"https://help.example/\"'",
    "apt-get": "echo http://deb.example/debian; echo cdrom:[x]/; echo http://10.0.0.1/debian",
    "go": '[ "$2" != GOPROXY ] || echo https://go.example,direct; [ "$2" != GOSUMDB ] || echo sum.example+033de0ae+Ac4zctda0e5eza+HJyk9SxEdh+s3Ux18htTTAD8OuAn8',
    "gem": "echo '*** CURRENT SOURCES ***'; echo; echo https://gems.example/",
}
FOUND = {"mirror.example", "node.example", "deb.example", "go.example", "sum.example", "gems.example"}


def ask(tmp_path: Path, tools: dict[str, str], *words: str | Path) -> list[str]:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, script in tools.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    environment = {"PATH": str(programs), "HOME": str(tmp_path), "CARGO_HOME": str(tmp_path / "cargo")}
    done = subprocess.run(
        [sys.executable, "-I", SCRIPT, *words], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_hosts_are_taken_from_what_says_where_packages_come_from_and_from_nothing_else(tmp_path: Path) -> None:
    found = set(ask(tmp_path, TOOLS))
    assert found >= FOUND
    assert not [host for host in found if "secret" in host or host.startswith(("proxy.", "help.", "default.", "10."))]


def test_cargos_configuration_and_the_default_in_its_program_count(tmp_path: Path) -> None:
    (tmp_path / "cargo").mkdir()
    (tmp_path / "cargo/config.toml").write_text('[source.mine]\nregistry = "sparse+https://crates.example/index/"\n')
    found = ask(tmp_path, {"cargo": ": 'sparse+https://builtin.example/'"})
    assert {"crates.example", "builtin.example"} <= set(found)


@pytest.mark.parametrize(
    "script",
    [
        "exit 3",
        "head -c 300000 /dev/urandom",
        "kill -9 $$",
        "echo 'https://[::1'",
        "echo 'https://..'",
        "echo https://-/x",
    ],
)
def test_a_manager_that_answers_rubbish_or_fails_harms_nothing(tmp_path: Path, script: str) -> None:
    path = f"export PATH={os.environ['PATH']}; {script}"
    found = ask(tmp_path, dict.fromkeys(TOOLS, path) | {"gem": TOOLS["gem"]})
    assert "gems.example" in found


def test_the_file_is_written_for_everybody_to_read_and_a_place_that_is_not_there_is_no_failure(tmp_path: Path) -> None:
    target = tmp_path / "registries"
    ask(tmp_path, TOOLS, target)
    assert set(target.read_text().splitlines()) >= FOUND
    assert target.stat().st_mode & 0o777 == 0o644
    (tmp_path / "again").mkdir()
    ask(tmp_path / "again", TOOLS, tmp_path / "nowhere/registries")
