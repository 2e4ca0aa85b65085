"""What is in the repository as files: scripts that parse, no registry's address, versions that agree, limits of size."""

import ast
import os
import re
import subprocess
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from space.settings import Settings

ROOT = Path(__file__).parents[2]
SKIPPED = {".git", ".venv", "__pycache__", ".ruff_cache", ".hypothesis", ".import_linter_cache", "results", "dist"}
LOCKS = ["requirements.lock", "requirements-test.lock", "requirements-dev.lock", "scripts/tools.lock"]
MODULE_LINES_MAX = 500
TEST_MODULE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70


def files(*suffixes: str) -> list[Path]:
    """Every file that belongs to the repository, with one of these endings if any are given."""
    found = []
    for directory, names, entries in os.walk(ROOT):
        names[:] = sorted(name for name in names if name not in SKIPPED)
        found += [Path(directory) / entry for entry in entries]
    return sorted(path for path in found if not suffixes or path.suffix in suffixes)


def scripts() -> list[Path]:
    return [path for path in files() if path.read_bytes()[:2] == b"#!"]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_there_are_scripts_to_look_at() -> None:
    assert {"scripts/up", "scripts/down", "scripts/test", ".ci/run", "templates/base/setup"} <= set(
        map(named, scripts())
    )


def interpreter(path: Path) -> list[str]:
    return path.read_text().splitlines()[0].removeprefix("#!").split()


@pytest.mark.parametrize("path", scripts(), ids=named)
def test_a_script_is_executable_and_parses_in_what_it_names(path: Path) -> None:
    assert os.access(path, os.X_OK), "not executable"
    words = interpreter(path)
    assert words[0] in {"/bin/sh", "/usr/bin/env"}, words
    if words[-1] == "python3":
        ast.parse(path.read_text())
    else:
        done = subprocess.run([words[-1], "-n", path], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", [path for path in scripts() if interpreter(path) == ["/bin/sh"]], ids=named)
def test_a_shell_script_stops_at_the_first_failure(path: Path) -> None:
    assert "\nset -eu\n" in path.read_text()


@pytest.mark.parametrize("target", ["up", "down", "clean-data", "test", "check", "bench", "lock", "format"])
def test_a_make_target_calls_what_exists(target: str) -> None:
    done = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "--always-make", target],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    called = re.findall(r"^(scripts/\S+)", done.stdout, re.MULTILINE)
    assert [name for name in called if not os.access(ROOT / name, os.X_OK)] == []


# Put together from pieces, so that this file does not name them either.
REGISTRIES = [
    ".".join(pieces)
    for pieces in [
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("deb", "debian", "org"),
        ("archive", "ubuntu", "com"),
        ("security", "ubuntu", "com"),
        ("npmjs", "org"),
        ("docker", "io"),
        ("ghcr", "io"),
        ("quay", "io"),
        ("crates", "io"),
        ("proxy", "golang", "org"),
        ("nodesource", "com"),
    ]
]


def test_no_file_names_a_package_registry() -> None:
    """Where packages come from is the machine's own configuration, and mirrors must work."""
    pattern = re.compile("|".join(rf"\b{re.escape(host)}\b" for host in REGISTRIES))
    found = [
        f"{named(path)}: {match[0]}" for path in files() for match in pattern.finditer(path.read_text(errors="replace"))
    ]
    assert found == []


def locked(name: str) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", (ROOT / name).read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_file_pins_every_package_by_hash_and_names_no_address(name: str) -> None:
    text = (ROOT / name).read_text()
    entries = re.split(r"^(?=[a-z0-9-]+==)", text, flags=re.MULTILINE)[1:]
    assert len(entries) > 3
    assert [entry.split()[0] for entry in entries if "--hash=sha256:" not in entry] == []
    assert "://" not in text


def test_the_lock_files_agree() -> None:
    run, test, dev = (locked(name) for name in LOCKS[:3])
    assert run.items() <= test.items()
    assert test.items() <= dev.items()


def test_every_dependency_is_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.match(r"[A-Za-z0-9-]+", line)[0].lower() for line in project["dependencies"]}  # type: ignore[index]
    assert names <= set(locked("requirements.lock"))


def test_the_version_is_the_same_wherever_it_is_said() -> None:
    said = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert version("space-sandbox") == said
    headings = re.findall(r"^## \[?(Unreleased|\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings
    assert headings[0] in {"Unreleased", said}


def test_every_setting_is_documented() -> None:
    page = (ROOT / "docs/reference/settings.md").read_text()
    assert [name for name in Settings.model_fields if f"`{name}`" not in page] == []


def test_units_name_programs_and_users_as_set_up_makes_them() -> None:
    units = {path.name: path.read_text() for path in (ROOT / "deploy/systemd").iterdir()}
    assert set(units) == {"space.target", *(f"space-{name}.service" for name in ("broker", "gateway", "node", "api"))}
    up = (ROOT / "scripts/up").read_text()
    for name in ("broker", "gateway", "node", "api"):
        assert f"/opt/space/venv/bin/python -I -m space.supervise serve {name}\n" in units[f"space-{name}.service"]
    assert "$PREFIX/venv" in up
    for name in ("gateway", "node", "api"):
        assert f"User=space-{name}\n" in units[f"space-{name}.service"]
        assert f"space-{name}" in (ROOT / "scripts/users").read_text()


@pytest.mark.parametrize("path", [p for p in files(".py") if "migrations" not in p.parts], ids=named)
def test_modules_and_functions_keep_to_their_limits(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= (TEST_MODULE_LINES_MAX if "tests" in path.parts else MODULE_LINES_MAX)
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert [f.name for f in functions if f.end_lineno - f.lineno >= FUNCTION_LINES_MAX] == []  # type: ignore[operator]


def test_nothing_is_left_for_later() -> None:
    """What is not done is in the tracker, not in the sources."""
    marks = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X)\b")
    found = [
        f"{named(path)}:{n}"
        for path in files(".py")
        for n, line in enumerate(path.read_text().splitlines(), 1)
        if marks.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("recipe", sorted(path.parent.name for path in (ROOT / "templates").glob("*/Dockerfile")))
def test_a_recipe_takes_nothing_that_is_not_pinned_by_hash(recipe: str) -> None:
    directory = ROOT / "templates" / recipe
    asked = {line for line in (directory / "packages.in").read_text().splitlines() if line}
    locked = (directory / "packages.lock").read_text()
    pinned = re.findall(r"^([a-z0-9-]+)==(.+?)(?: ;.*)?(?= \\$)", locked, re.MULTILINE)
    assert {re.split("[<>=]", line)[0] for line in asked} <= {name for name, _ in pinned}
    assert all(f"{name}=={version}" in locked and "--hash=sha256:" in locked for name, version in pinned)
    assert locked.count("==") <= locked.count("--hash=sha256:")
    assert "://" not in locked
    assert (directory / "Dockerfile").read_text().splitlines()[1] == "FROM space:base"
