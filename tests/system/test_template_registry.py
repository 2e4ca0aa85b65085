"""Templates from a private registry, as a user builds them: the password reaches the registry and nothing else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.client import Api
from tests.images import Image, busybox, registry
from tests.installation import Installation
from tests.searching import files_with

pytestmark = pytest.mark.machine

SPACE = [sys.executable, "-c", "from space.cli import main; main()"]
PASSWORD = "correct-horse-battery-of-a-registry"


def test_a_private_image_is_built_with_a_password_that_nobody_finds_again(
    installation: Installation, api: Api, tmp_path: Path
) -> None:
    environment = {**os.environ, "SPACE_URL": installation.url, "SPACE_API_KEY": installation.key}

    def build(*words: str, password: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*SPACE, "template", "build", "private", *words],
            env=environment,
            input=password or "",
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    with registry(tmp_path / "private", users={"me": PASSWORD}, tls=True) as private:
        reference = private.push_image("mine:1", Image([busybox()], {"Env": ["PATH=/bin"]}))
        assert private.certificates is not None
        (tmp_path / "ca.pem").write_text(private.certificates.ca_pem)
        words = ["--from-image", reference, "--ca-cert", str(tmp_path / "ca.pem")]
        refused = build(*words)
        assert refused.returncode == 1
        assert "--registry-user" in refused.stderr
        done = build(*words, "--registry-user", "me", "--registry-password-stdin", password=f"{PASSWORD}\n")
        assert done.returncode == 0, done.stderr
    sandbox = api.create(template="private")
    assert api.output(sandbox, ["/bin/sh", "-c", "echo it runs"]) == "it runs\n"
    api.delete(sandbox)
    found = api.call("GET", "/v1/templates/private").json()
    assert found["lineage"]["images"] == [reference]
    told = found | {"log": api.call("GET", f"/v1/builds/{found['build_id']}/log").text}
    assert PASSWORD not in str(told) + done.stdout + done.stderr
    ours = (installation.settings.data_dir, installation.settings.run_dir)
    assert files_with(PASSWORD.encode(), ours, without=("disks",)) == []
    api.call("DELETE", f"/v1/templates/{found['digest']}")
