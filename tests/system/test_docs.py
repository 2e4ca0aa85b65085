"""Every code block of the README, the tutorial, the how-to pages and the API's page runs as it stands, for real."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.installation import Installation

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs/tutorial").glob("*.md")),
    *sorted((ROOT / "docs/how-to").glob("*.md")),
    ROOT / "docs/reference/api.md",
]
LONG = {"build-templates.md", "code-interpreter.md"}
PATIENCE_S = 300
BLOCK = re.compile(r"(?P<skip><!-- not run: [^>]*-->\n)?```(?P<language>sh|python)\n(?P<code>.*?)```", re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str]]:
    """The page's code in order. The shell blocks of a page share their variables, so they are one script each."""
    found = [(m["language"], m["code"]) for m in BLOCK.finditer(page.read_text()) if not m["skip"]]
    assert found, f"{page.name} has no code"
    return found


@pytest.mark.timeout(PATIENCE_S + 60)
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.long if page.name in LONG else ()) for page in PAGES],
    ids=lambda page: page.name,
)
def test_the_pages_code_runs(page: Path, installation: Installation, tmp_path: Path) -> None:
    """The page is one session: shell blocks keep their variables, Python blocks run between them."""
    if page.name == "code-interpreter.md":
        installation.add_interpreter()
    script = ["set -eu"]
    for number, (language, code) in enumerate(blocks(page)):
        if language == "sh":
            script.append(code)
        else:
            (tmp_path / f"block{number}.py").write_text(code)
            script.append(f"{sys.executable} {tmp_path}/block{number}.py")
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "SPACE_URL": installation.url,
        "SPACE_API_KEY": installation.key,
        "LC_ALL": "C.UTF-8",
    }
    done = subprocess.run(
        ["sh", "-c", "\n".join(script)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if page.name == "README.md":
        assert "hello from a sandbox" in done.stdout
        assert "some data" in done.stdout
        assert "42" in done.stdout
