"""Builds of templates on a real installation: images out of a real registry, steps in real machines."""

import contextlib
import json
import os
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from space.model.ids import new_id
from tests.build_client import BuildClient
from tests.client import wait_until
from tests.images import (
    File,
    Image,
    Layout,
    Members,
    Registry,
    archive_of,
    busybox,
    compressed,
    directory,
    hard_link,
    program,
    registry,
    symlink,
    tar_of,
)
from tests.installation import Installation

pytestmark = pytest.mark.machine
ENV = ["PATH=/bin", "GREETING=hello"]
PASSWORD = "correct-horse-battery"


@pytest.fixture(scope="module")
def client(installation: Installation) -> Iterator[BuildClient]:
    one = BuildClient(str(installation.settings.node_socket), lambda: installation.standing_still("api"))
    yield one
    one.empty_cache()
    for template in one.http.get("/templates").json()["templates"]:
        if not template.get("name"):
            answer = one.http.delete(f"/templates/{template['digest']}")
            assert answer.status_code == 200, (template, answer.text)
    one.close()


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with registry(tmp_path_factory.mktemp("shop") / "registry") as one:
        yield one


@pytest.fixture(scope="module")
def small(shop: Registry) -> str:
    """An image with a shell."""
    return shop.push_image("small:1", Image([busybox()], {"Env": ENV, "Cmd": ["sh"]}))


def image(reference: str, **fields: Any) -> dict[str, Any]:
    return {"kind": "image", "reference": reference, **fields}


def seen_in(client: BuildClient, shown: dict[str, Any], *argv: str) -> str:
    """What a program prints in a machine of the template that a build has made."""
    with client.machine(shown["digest"], shown["defaults"]) as machine:
        return client.exec(machine, *argv)


# --- images


def test_an_image_is_a_template_by_tag_and_by_digest(client: BuildClient, shop: Registry, small: str) -> None:
    by_tag = client.build(image(small))
    digest = shop.digest("small:1")
    by_digest = client.build(image(f"{shop.host}/small@{digest}"))
    assert by_tag["digest"] == by_digest["digest"]
    assert by_tag["base"] == {"ref": small, "digest": digest}
    assert by_tag["defaults"]["env"] == {"PATH": "/bin", "GREETING": "hello"}
    assert by_tag["defaults"]["user"] == "root"
    assert seen_in(client, by_tag, "/bin/sh", "-c", "echo $GREETING $(id -u)") == "hello 0\n"


@pytest.mark.parametrize(("compression", "manifests"), [("gzip", "docker"), ("zstd", "oci"), ("none", "oci")])
def test_the_same_files_are_the_same_template_however_they_are_packed(
    client: BuildClient, shop: Registry, small: str, compression: str, manifests: str
) -> None:
    expected = client.build(image(small))["digest"]
    packed = Image([busybox()], {"Env": ENV, "Cmd": ["sh"]}, compression, manifests)
    assert client.build(image(shop.push_image(f"{compression}-{manifests}:1", packed)))["digest"] == expected


def test_of_an_image_for_several_machines_the_one_for_this_is_taken(
    client: BuildClient, shop: Registry, tmp_path: Path
) -> None:
    layout = Layout(tmp_path / "layout")
    wrong = Image([tar_of({"wrong": "1"})], architecture="arm64")
    listed = layout.add_list([wrong, Image([busybox()], {"Env": ["PATH=/bin", "RIGHT=1"]})])
    shown = client.build(image(shop.push("several:1", layout.close(listed), every=True)))
    assert shown["defaults"]["env"]["RIGHT"] == "1"
    assert shown["base"]["digest"] != shop.digest("several:1"), "the variant's digest is told"


def test_layers_take_away_what_is_below_and_keep_links_owners_and_setuid(client: BuildClient, shop: Registry) -> None:
    second = tar_of(
        {
            "etc/.wh.group": "",
            "home/.wh..wh..opq": "",
            "home/new": "new",
            "opt/a": File(b"linked", 0o644, uid=7, gid=8),
            "opt/b": hard_link("opt/a"),
            "opt/s": File(b"#!/bin/sh\n", 0o4755, uid=1000),
            "opt/l": symlink("a"),
        }
    )
    shown = client.build(image(shop.push_image("layers:1", Image([busybox(), second], {"Env": ENV}))))
    script = "ls /home; ls /etc/group 2>/dev/null; stat -c '%h %u %g' /opt/b; stat -c '%a %u' /opt/s; cat /opt/l"
    assert seen_in(client, shown, "/bin/sh", "-c", f"{script}; true") == "new\n2 7 8\n4755 1000\nlinked"


def test_an_image_without_a_shell_runs_its_own_program(client: BuildClient, shop: Registry) -> None:
    busy = Path("/bin/busybox").read_bytes()
    alone = Image([tar_of({"app": directory(), "app/echo": File(busy, 0o755)})], {"WorkingDir": "/app"})
    shown = client.build(image(shop.push_image("distroless:1", alone)))
    assert shown["defaults"]["user"] == "0", "there is no file that names root"
    assert seen_in(client, shown, "/app/echo", "I am alone") == "I am alone\n"


def test_a_private_image_needs_its_registrys_authority_and_credentials_and_neither_is_kept(
    client: BuildClient, installation: Installation, tmp_path: Path
) -> None:
    with registry(tmp_path / "private", users={"me": PASSWORD}, tls=True) as private:
        reference = private.push_image("mine:1", Image([busybox()], {"Env": ENV}))
        assert private.certificates is not None
        ca = private.certificates.ca_pem
        right = {"username": "me", "password": PASSWORD}
        assert client.refuse(image(reference))["code"] == "registry-untrusted-certificate"
        assert client.refuse(image(reference, ca_pem=ca))["code"] == "registry-unauthorised"
        wrong = {"username": "me", "password": PASSWORD[:-1]}
        assert client.refuse(image(reference, ca_pem=ca, auth=wrong))["code"] == "registry-unauthorised"
        shown = client.build(image(reference, ca_pem=ca, auth=right))
        # What one may have, another may not, though it is here already.
        assert client.refuse(image(reference, ca_pem=ca))["code"] == "registry-unauthorised"
    for top in (installation.settings.node_dir, installation.settings.run_dir / "log"):
        for path in top.rglob("*"):
            if path.is_file():
                assert PASSWORD.encode() not in path.read_bytes(), path
    assert PASSWORD not in json.dumps(shown)


def test_a_registry_that_gives_tokens_is_asked_for_one(client: BuildClient, tmp_path: Path) -> None:
    with registry(tmp_path / "tokens", users={"me": PASSWORD}, tokens=True) as private:
        reference = private.push_image("mine:1", Image([busybox()], {"Env": ENV}))
        client.build(image(reference, auth={"username": "me", "password": PASSWORD}))
        assert client.refuse(image(reference))["code"] == "registry-unauthorised"


def test_archives_and_root_file_systems_are_templates_too(client: BuildClient, small: str, tmp_path: Path) -> None:
    expected = client.build(image(small))
    packed = Image([busybox()], {"Env": ENV, "Cmd": ["sh"]})
    for transport in ("oci-archive", "docker-archive"):
        upload = client.upload(archive_of(packed, tmp_path, transport))
        assert client.build({"kind": "archive", "upload": upload})["digest"] == expected["digest"]
    upload = client.upload(compressed(busybox(), "zstd"))
    shown = client.build({"kind": "rootfs", "upload": upload}, defaults={"env": expected["defaults"]["env"]})
    assert shown["digest"] == expected["digest"]
    assert client.refuse({"kind": "archive", "upload": client.upload(b"nothing")})["code"] == "archive-damaged"


# --- hostile images


@pytest.mark.parametrize(
    "members",
    [
        {"../../escaped": "x"},
        {".space": File(b"x")},
        {"dev/sda": File(kind=tarfile.BLKTYPE)},
        {"a": hard_link("/../../etc/shadow")},
    ],
    ids=["traversal", "runtime", "device", "hard-link"],
)
def test_a_hostile_layer_is_refused_and_leaves_nothing(
    client: BuildClient, shop: Registry, installation: Installation, members: dict[str, Any]
) -> None:
    before = client.http.get("/templates").json()
    reference = shop.push_image(f"hostile:{new_id('bld')}", Image([busybox(), tar_of(members)], {"Env": ENV}))
    error = client.refuse(image(reference))
    assert error["code"] == "layer-refused", error
    assert error["details"]["path"]
    assert client.http.get("/templates").json() == before
    assert nothing_is_left(client, installation)


def test_a_layer_cannot_reach_the_runtime(client: BuildClient, shop: Registry) -> None:
    """What lies there is not of the disk: it is left out, and the machine still starts."""
    members = {"out": symlink("/.space"), "out/lib/x": "x", ".space": directory(0o777)}
    reference = shop.push_image("runtime:1", Image([busybox(), tar_of(members)], {"Env": ENV}))
    assert seen_in(client, client.build(image(reference)), "/bin/sh", "-c", "test ! -e /.space/lib/x") == ""


def test_a_bomb_meets_the_builders_disk_and_nothing_else(
    client: BuildClient, shop: Registry, installation: Installation
) -> None:
    bomb = tar_of({"zeros": bytes(200 * 1024 * 1024)})
    reference = shop.push_image("bomb:1", Image([bomb], compression="zstd"))
    error = client.refuse(image(reference), resources={"disk_mib": 64})
    assert error["code"] == "builder-disk-full", error
    assert nothing_is_left(client, installation)


def test_a_layer_that_is_not_what_the_image_says_is_refused(
    client: BuildClient, shop: Registry, tmp_path: Path
) -> None:
    layout = Layout(tmp_path / "layout")
    honest = layout.add(Image([busybox()], {"Env": ENV}))
    manifest = json.loads((layout.path / "blobs/sha256" / honest["digest"][7:]).read_text())
    digest, size = layout.add_blob(compressed(tar_of({"other": "1"}), "gzip"))
    lying = layout.add(
        Image([busybox()], {"Env": ENV}), layers=[{**manifest["layers"][0], "digest": digest, "size": size}]
    )
    assert client.refuse(image(shop.push("lying:1", layout.close(lying))))["code"] == "layer-damaged"


# --- Dockerfiles


MUCH = """\
# syntax=docker/dockerfile:1
ARG VERSION=1
FROM IMAGE AS tools
WORKDIR /work
COPY made.sh .
RUN ./made.sh > made && ln -s made link
FROM IMAGE
ARG VERSION
ARG COLOUR=red
ENV WHERE=/srv/app COLOURS="${COLOUR} and ${NONE:-blue}"
LABEL by="tests" version=$VERSION
WORKDIR $WHERE
COPY --from=tools /work/link /work/made.sh ./bin/
COPY --chown=user:staff --chmod=640 files/*.txt kept/
COPY files /all
ADD packed.tar.gz /unpacked/
COPY <<-EOF /etc/motd
		Version $VERSION
	EOF
RUN <<EOF
echo "$COLOURS" > colours
echo $VERSION >> colours
EOF
USER user:staff
RUN ["/bin/sh", "-c", "id -un > /home/user/me; id -gn >> /home/user/me; pwd >> /home/user/me"]
EXPOSE 8080/tcp 9000-9001
VOLUME /data
STOPSIGNAL TERM
HEALTHCHECK NONE
ENTRYPOINT ["/bin/sh"]
CMD ["-c", "true"]
"""
PACKED = compressed(tar_of({"p/q": File(b"packed", uid=5)}), "gzip")
MUCH_CONTEXT: Members = {
    ".dockerignore": "files/secret*\n!files/secret-not\n*.md\n",
    "made.sh": program("#!/bin/sh\necho made by $0\n"),
    "files/a.txt": "a",
    "files/b.txt": "b",
    "files/secret": "s",
    "files/secret-not": "n",
    "files/deep/c": File(b"c", 0o600),
    "files/link": symlink("deep/c"),
    "README.md": "r",
    "packed.tar.gz": PACKED,
}


def test_a_dockerfile_is_carried_out_as_it_says(client: BuildClient, small: str) -> None:
    members = {"Dockerfile": MUCH.replace("IMAGE", small), **MUCH_CONTEXT}
    source = {"kind": "dockerfile", "upload": client.upload(compressed(tar_of(members), "gzip"))}
    shown = client.build(source, build_args={"VERSION": "7"})
    defaults = shown["defaults"]
    assert defaults["env"] == {"PATH": "/bin", "GREETING": "hello", "WHERE": "/srv/app", "COLOURS": "red and blue"}
    assert (defaults["workdir"], defaults["user"]) == ("/srv/app", "user:staff")
    assert defaults["ports"] == [8080, 9000, 9001]
    assert defaults["labels"] == {"by": "tests", "version": "7"}
    assert shown["lineage"]["command"] == {"entrypoint": ["/bin/sh"], "cmd": ["-c", "true"]}
    script = """
    cd /srv/app; cat bin/made; stat -c '%n %a %u %g' kept/*; ls -A /all /all/deep; cat /all/link; cat /unpacked/p/q
    stat -c %u /unpacked/p/q; cat /etc/motd colours /home/user/me
    """
    with client.machine(shown["digest"], {**defaults, "user": "root"}) as machine:
        told = client.exec(machine, "/bin/sh", "-c", script)
    assert told == (
        "made by ./made.sh\nkept/a.txt 640 1000 50\nkept/b.txt 640 1000 50\n"
        "/all:\na.txt\nb.txt\ndeep\nlink\nsecret-not\n\n/all/deep:\nc\ncpacked5\n"
        "Version 7\nred and blue\n7\nuser\nstaff\n/srv/app\n"
    )


def test_a_stage_that_several_need_is_made_once_and_counted_once(client: BuildClient, small: str) -> None:
    text = f"""FROM {small} AS one
RUN echo {new_id("bld")} > /a && mkdir /d && ln -s /a /d/l
FROM one AS two
COPY --from=one /a /two
FROM {small}
COPY --from=one /a /d/* /x/
COPY --from=two /two /y/z
COPY --from={small} /bin/busybox /x/
"""
    build = client.begin(client.context(text))
    shown = client.wait(build)
    assert shown["state"] == "succeeded", shown
    texts = [step["text"] for step in client.http.get(f"/builds/{build}").json()["lineage"]["steps"]]
    assert sum("mkdir /d" in text for text in texts) == 1
    counts = [line["text"].split()[0].split("/") for line in client.log(build) if line["stream"] == "step"]
    assert [int(place) for place, _ in counts] == list(range(1, len(counts) + 1))
    assert {int(every) for _, every in counts} == {len(counts)}
    assert "a\nbusybox\n" in seen_in(client, shown, "/bin/ls", "/x")


def test_editing_a_step_in_the_middle_does_anew_what_comes_from_there_on(client: BuildClient, small: str) -> None:
    def dockerfile(middle: str) -> dict[str, Any]:
        return client.context(f"FROM {small}\nCOPY a /a\nRUN echo one > /1\nRUN {middle}\nRUN cat /1 /2 > /3\n", a="A")

    first = client.build(dockerfile("echo two > /2"))
    again = client.build(dockerfile("echo two > /2"))
    edited = client.build(dockerfile("echo 2 > /2"))
    anew = client.build(dockerfile("echo two > /2"), no_cache=True)
    assert client.ran(first) == ["COPY a /a", "RUN echo one > /1", "RUN echo two > /2", "RUN cat /1 /2 > /3"]
    assert client.ran(again) == []
    assert client.ran(edited) == ["RUN echo 2 > /2", "RUN cat /1 /2 > /3"]
    assert len(client.ran(anew)) == 4
    assert first["digest"] == again["digest"] == anew["digest"]
    assert edited["digest"] != first["digest"]


def test_a_file_that_is_copied_decides_by_its_content_not_by_its_time(client: BuildClient, small: str) -> None:
    def source(file: File) -> dict[str, Any]:
        return client.context(f"FROM {small}\nCOPY a /a\nRUN cat /a\n", a=file)

    client.build(source(File(b"same")))
    touched = client.build(source(File(b"same", mtime=1_700_000_000)))
    assert client.ran(touched) == []
    changed = client.build(source(File(b"other")))
    assert client.ran(changed) == ["COPY a /a", "RUN cat /a"]


def test_one_of_our_templates_can_be_built_upon(client: BuildClient, small: str) -> None:
    below = client.build(image(small), steps=[{"run": "echo below > /below"}, {"env": {"BELOW": "1"}}])
    templates = {"mine:latest": {"digest": below["digest"], "defaults": below["defaults"]}}
    source = client.context("FROM space:mine AS x\nRUN cat /below\nFROM scratch\nCOPY --from=x /below /bin/busybox /\n")
    shown = client.build(source, templates=templates)
    assert {"kind": "template", "ref": "space:mine", "digest": below["digest"], "stage": "x"} in shown["lineage"][
        "bases"
    ]
    with client.machine(shown["digest"], shown["defaults"]) as machine:
        assert client.exec(machine, "/busybox", "cat", "/below") == "below\n"
    assert client.refuse(client.context("FROM space:other\n"))["code"] == "unknown-template"


@pytest.mark.parametrize(
    ("dockerfile", "code", "line"),
    [
        ("FROM {small}\nFETCH x\n", "dockerfile-invalid", 2),
        ("RUN true\n", "dockerfile-invalid", 1),
        ("FROM {small}\nRUN <<EOF\ntrue\n", "dockerfile-invalid", 2),
        ("FROM {small}\n\nONBUILD RUN true\n", "instruction-not-supported", 3),
        ("FROM {small}\nRUN --mount=type=cache,target=/c true\n", "instruction-not-supported", 2),
        ("FROM {small}\nADD https://example.com/x /\n", "instruction-not-supported", 2),
        ("FROM {small}\nCOPY nothing /\n", "copy-source-missing", 2),
        ("FROM {small}\nCOPY --from=0 /nothing /\n", "dockerfile-invalid", 2),
        ("FROM {small} AS a\nFROM {small}\nCOPY --from=a /nothing /\n", "copy-source-missing", 3),
        ("FROM {small}\nRUN exit 7\n", "step-failed", 2),
        ("FROM {small}\nCOPY --chown=nobody-here Dockerfile /\n", "copy-failed", 2),
        ("FROM {small}\nCOPY Dockerfile /etc/passwd/x\n", "copy-failed", 2),
        ("FROM {small}\nCOPY Dockerfile /.space/x\n", "read-only", 2),
        ("FROM {small}\nUSER nobody-here\nRUN true\n", "invalid-request", 3),
        ('FROM {small}\nRUN ["/nothing"]\n', "program-not-found", 2),
    ],
)
def test_what_a_dockerfile_does_not_get_is_told_with_its_line(
    client: BuildClient, small: str, dockerfile: str, code: str, line: int
) -> None:
    error = client.refuse(client.context(dockerfile.replace("{small}", small)))
    assert (error["code"], error["details"].get("line")) == (code, line), error


# --- other sources


def test_a_snapshots_disk_is_a_template_and_what_ran_in_it_is_not(client: BuildClient, small: str) -> None:
    below = client.build(image(small))
    with client.machine(below["digest"], below["defaults"]) as machine:
        client.exec(machine, "/bin/sh", "-c", "echo kept > /kept; (while true; do date > /ticking; sleep 1; done) &")
        made = {}
        for kind in ("disk", "full"):
            snapshot = new_id("snp")
            taken = client.http.post(f"/machines/{machine}/snapshots/{snapshot}", json={"kind": kind})
            assert taken.status_code == 200, taken.text
            source = {"kind": "snapshot", "snapshot": snapshot, "template_digest": below["digest"]}
            try:
                made[kind] = client.build({**source, "defaults": below["defaults"]}, steps=[{"run": "rm -f /ticking"}])
            finally:
                client.empty_cache()
                assert client.http.delete(f"/snapshots/{snapshot}").status_code == 200
    assert made["disk"]["digest"] == made["full"]["digest"]
    assert seen_in(client, made["full"], "/bin/cat", "/kept") == "kept\n"


# --- ends


def nothing_is_left(client: BuildClient, installation: Installation) -> bool:
    """Whether no machine, snapshot or file of a build is there that has ended. The pool's come and go meanwhile."""
    deadline = time.monotonic() + 20
    while left := leftovers(client, installation):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    return True


def leftovers(client: BuildClient, installation: Installation) -> list[str]:
    settings = installation.settings
    snapshots = {path.name for path in (settings.broker_dir / "snapshots").glob("snp*")}
    journals = read_all((settings.broker_dir / "machines").glob("*/journal.json"))
    kept = {entry["id"] for entry in client.http.get("/build-cache").json()["entries"]}
    warm = {row["snapshot"] for row in json.loads((settings.node_dir / "warm.json").read_text())["warm"]}
    others = {row["snapshot"] for row in client.http.get("/snapshots").json()["snapshots"]}
    records = read_all((settings.node_dir / "builds/records").glob("*/record.json"))
    return [
        *(str(path) for path in (settings.node_dir / "builds/work").iterdir()),
        *(str(machine) for machine in client.http.get("/machines").json()["machines"]),
        *(entry["machine"] for entry in journals if not entry["spare"]),
        *(record["machine"] for record in records if record["machine"]),
        *sorted(snapshots - kept - warm - others),
    ]


def read_all(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """What these hold that are still there."""
    found = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            found.append(json.loads(path.read_text()))
    return found


def children_named(word: bytes, installation: Installation) -> list[int]:
    """Processes with this among their arguments, and a path of this installation: others' have other tests."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes()
            if word in words and bytes(installation.settings.data_dir) in words:
                found.append(int(process.name))
    return found


def test_a_cancelled_build_leaves_nothing(client: BuildClient, small: str, installation: Installation) -> None:
    build = client.begin(image(small), steps=[{"run": "echo begun; sleep 1000"}])
    client.wait_for_line(build, "begun")
    assert client.http.get("/machines").json()["machines"] == [], "a builder is nobody's"
    assert client.http.get("/snapshots").json()["snapshots"] == []
    cancelled = client.http.post(f"/builds/{build}/cancel").json()
    assert (cancelled["state"], cancelled["error"]["code"]) == ("cancelled", "build-cancelled")
    assert nothing_is_left(client, installation)
    assert client.http.delete(f"/builds/{build}").status_code == 200
    assert client.http.get(f"/builds/{build}").status_code == 404


def test_a_build_that_takes_too_long_is_ended_and_leaves_nothing(
    client: BuildClient, small: str, installation: Installation
) -> None:
    error = client.refuse(image(small), steps=[{"run": "sleep 1000"}], timeout_s=4)
    assert error["code"] == "build-timed-out"
    assert nothing_is_left(client, installation)


def test_what_a_template_starts_is_tried_and_leaves_nothing_in_it(
    client: BuildClient, small: str, installation: Installation
) -> None:
    entry = {"start": "echo tried > /tried; sleep 1000", "ready": "cat /tried", "timeout_s": 20}
    shown = client.build(image(small), defaults={"entry": entry, "workdir": "/made"})
    assert (
        seen_in(client, {**shown, "defaults": {}}, "/bin/sh", "-c", "ls -d /made /tried 2>/dev/null; true") == "/made\n"
    )
    error = client.refuse(image(small), defaults={"entry": {**entry, "ready": "false", "timeout_s": 0.3}})
    assert error["code"] == "entry-failed"
    assert nothing_is_left(client, installation)


def test_a_step_that_fails_keeps_what_was_done_before_it(
    client: BuildClient, small: str, installation: Installation
) -> None:
    marker = new_id("bld")
    steps = [{"run": f"echo {marker} > /marker"}, {"run": "cat /marker; exit 3"}]
    error = client.refuse(image(small), steps=steps)
    assert (error["code"], error["details"]["exit"]["code"]) == ("step-failed", 3)
    assert nothing_is_left(client, installation)
    steps[1] = {"run": "cat /marker"}
    assert client.ran(client.build(image(small), steps=steps)) == ["run cat /marker"]


def test_a_killed_nodes_build_is_interrupted_and_leaves_nothing(
    client: BuildClient, small: str, installation: Installation
) -> None:
    build = client.begin(image(small), steps=[{"run": "echo begun; sleep 1000"}])
    client.wait_for_line(build, "begun")
    installation.kill("node")
    installation.wait_ready()
    shown = client.wait(build)
    assert (shown["state"], shown["error"]["code"]) == ("failed", "build-interrupted")
    deadline = time.monotonic() + 20
    after = new_id("bld")
    while client.http.put(f"/builds/{after}", json={"source": image("127.0.0.1:1/x")}).status_code != 202:
        assert time.monotonic() < deadline
    assert client.wait(after)["error"]["code"] == "registry-unreachable"
    assert nothing_is_left(client, installation)


def test_a_node_killed_while_it_pulls_takes_skopeo_with_it(
    client: BuildClient, shop: Registry, installation: Installation
) -> None:
    reference = shop.push_image("large:1", Image([tar_of({"a": os.urandom(64 * 1024 * 1024)})], compression="none"))
    build = client.begin(image(reference))
    client.wait_for_line(build, "Fetching")
    installation.kill("node")
    installation.wait_ready()
    assert client.wait(build)["error"]["code"] == "build-interrupted"
    wait_until(lambda: not children_named(b"--dest-shared-blob-dir", installation), 5, "the end of skopeo")


def test_a_build_that_is_being_published_when_the_node_dies_is_published(
    client: BuildClient, installation: Installation
) -> None:
    base = next(row for row in client.http.get("/templates").json()["templates"] if row.get("name") == "base")
    source = {"kind": "template", "digest": base["digest"], "defaults": base["defaults"]}
    build = client.begin(source, steps=[{"run": "sudo touch /made"}])
    client.wait_for_line(build, "publish")
    installation.kill("node")
    installation.wait_ready()
    shown = client.wait(build)
    assert shown["state"] == "succeeded", shown
    assert shown["digest"] in {row["digest"] for row in client.http.get("/templates").json()["templates"]}
    assert any(package["name"] == "python3" and package["manager"] == "deb" for package in shown["packages"])


def test_the_same_dockerfile_on_another_installation_is_the_same_template(
    client: BuildClient, small: str, fresh_installation: Callable[..., AbstractContextManager[Installation]]
) -> None:
    # What a step does with the store of certificates is the same, too, although each installation has its own authority.
    text = (
        f"FROM {small} AS one\nRUN mkdir -p /etc/ssl/certs && echo roots > /etc/ssl/certs/ca-certificates.crt\n"
        "RUN grep -q BEGIN /etc/ssl/certs/ca-certificates.crt && grep -q BEGIN $SSL_CERT_FILE && echo $SSL_CERT_FILE > /said\n"
        f"FROM {small}\nCOPY a /srv/\nRUN date > /tmp/now; echo $SOURCE_DATE_EPOCH > /epoch\n"
        "COPY --from=one /said /etc/ssl/certs/ca-certificates.crt /stores/\n"
        "RUN grep -qx roots /stores/ca-certificates.crt && ! grep -q BEGIN /stores/ca-certificates.crt\nUSER user\n"
    )
    here = client.build(client.context(text, a="A"))
    with fresh_installation(disk_store_mib=2048, trusted_template_registries=small.partition("/")[0]) as other:
        there = BuildClient(str(other.settings.node_socket))
        assert there.build(there.context(text, a="A"))["digest"] == here["digest"]
        untrusted = there.refuse(image("registry.invalid/x/y"))
        assert untrusted["code"] == "registry-not-trusted"
        there.empty_cache()
        there.close()


def test_a_template_that_is_in_use_stays_until_it_is_not(client: BuildClient, small: str) -> None:
    shown = client.build(image(small), steps=[{"run": f"echo {new_id('bld')} > /unlike-any"}])
    path = f"/templates/{shown['digest']}"
    with client.machine(shown["digest"], shown["defaults"]) as machine:
        refused = client.http.delete(path)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "template-in-use")
        assert client.exec(machine, "/bin/true") == ""
    assert client.http.delete(path).status_code == httpx.codes.OK
    assert client.http.delete(path).status_code == httpx.codes.OK
    assert shown["digest"] not in {row["digest"] for row in client.http.get("/templates").json()["templates"]}
