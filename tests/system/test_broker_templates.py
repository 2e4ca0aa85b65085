"""Templates through the broker on gVisor: what a machine was made into can be begun with, again and again, until it is dropped."""

import asyncio
import json
import os
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from space.broker import setup
from space.broker.defaults import Defaults
from space.broker.subvolumes import snapshot as copy_subvolume
from space.errors import Conflict, HostError, InvalidRequest, NotFound
from space.model.ids import new_id
from tests.agent import Result
from tests.brokers import GUEST_PYTHON, RESOURCES, Separate, Site, cleared, started
from tests.layers import Entry, directory, entry, file, link, symlink, tar

DEFAULTS = {"env": {"A": "b"}, "workdir": "/work", "user": "1000", "ports": [80], "entry": {"start": "serve"}}
UNKNOWN = "sha256:" + "0" * 64
WORK = """
import os
os.makedirs('/work', exist_ok=True)
with open('/work/kept', 'w') as file:
    file.write('kept')
os.chown('/work/kept', 1000, 1001)
os.chmod('/work/kept', 0o4750)
open(b'/work/\\xff', 'w').close()
os.symlink('/etc/shadow', '/work/link')
for place in ('/tmp', '/run'):
    open(f'{place}/left', 'w').write(os.uname().nodename)
open('/etc/hosts', 'w').write(os.uname().nodename)
"""
LOOK = """
import os
status = os.lstat('/work/kept')
print(open('/work/kept').read(), oct(status.st_mode), status.st_uid, status.st_gid)
print(sorted(os.listdir(b'/work')), os.readlink('/work/link'), os.listdir('/tmp'), open('/etc/hosts').readline(), end='')
"""
SEEN = r"""kept 0o104750 1000 1001
[b'kept', b'link', b'\xff'] /etc/shadow ['.X11-unix'] 127.0.0.1 localhost
"""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Separate]:
    with started(Separate(tmp_path_factory.mktemp("broker"))) as one:
        yield one


@pytest.fixture
async def site(broker: Separate) -> AsyncIterator[Site]:
    """A site whose templates, but for those that were there before, are dropped afterwards without leaving a trace."""
    before = recorded(broker)
    async with cleared(broker) as one:
        yield one
    again = broker.site()
    for row in await again.call("templates"):
        if "name" not in row:
            await again.call("drop-template", template=row["digest"])
    await again.client.close()
    assert recorded(broker) == stored(broker) == before


def recorded(broker: Separate) -> set[str]:
    return {path.stem for path in (broker.settings.broker_dir / "templates").glob("*.json")}


def stored(broker: Separate) -> set[str]:
    return {path.name for path in (broker.settings.broker_dir / "disks/templates").iterdir()}


def python(site: Site, body: str, code: str) -> str:
    with site.peer(body) as peer:
        done = peer.run(*GUEST_PYTHON, code)
    assert done.exit["code"] == 0, done.stderr
    return done.stdout.decode()


async def boot(site: Site, template: str, **changes: Any) -> str:
    machine = new_id("sbx")
    fields = {"template": template, "driver": "gvisor", "resources": RESOURCES, "hostname": "guest", **changes}
    await site.call("boot", machine=machine, **fields)
    return machine


async def worked(site: Site, template: str | None = None, hostname: str = "guest", code: str = WORK) -> str:
    """A stopped machine in which something was done."""
    machine = await boot(site, template or await scratch(site), hostname=hostname)
    python(site, machine, code)
    await site.call("stop", machine=machine)
    return machine


async def scratch(site: Site) -> str:
    return next(row["digest"] for row in await site.call("templates") if row.get("name") == "scratch")


async def publish(site: Site, machine: str, defaults: dict[str, Any] | None = None) -> dict[str, Any]:
    return await site.call("publish", machine=machine, defaults=DEFAULTS if defaults is None else defaults)


def disk(site: Site, machine: str) -> Path:
    return site.settings.broker_dir / "disks/machines" / machine


async def test_a_machine_of_scratch_has_an_empty_root_and_works(site: Site) -> None:
    machine = await boot(site, await scratch(site))
    assert python(site, machine, "import os; print(sorted(os.listdir('/')))") == (
        "['.space', 'dev', 'etc', 'proc', 'run', 'sys', 'tmp']\n"
    )


async def test_what_was_done_in_a_machine_is_in_those_made_of_its_template_and_nothing_of_the_machine_is(
    site: Site,
) -> None:
    made = await publish(site, await worked(site))
    assert {"copy", "digest", "keep"} <= set(made["timings"])
    assert made["bytes"] > 0
    (row,) = [row for row in await site.call("templates") if row["digest"] == made["digest"]]
    assert row == {"digest": made["digest"], "bytes": made["bytes"]}
    for _ in range(2):
        assert python(site, await boot(site, made["digest"]), LOOK) == SEEN


async def test_the_machine_keeps_its_disk_and_the_template_changes_with_nobody(site: Site) -> None:
    machine = await worked(site)
    made = await publish(site, machine)
    await site.call("start", machine=machine)
    assert python(site, machine, "print(open('/tmp/left').read(), open('/etc/hosts').read())") == "guest guest\n"
    python(site, machine, "open('/work/kept', 'w').write('changed')")
    await site.call("destroy", machine=machine)
    other = await boot(site, made["digest"])
    assert python(site, other, LOOK) == SEEN
    python(site, other, "open('/work/kept', 'w').write('changed')")
    assert python(site, await boot(site, made["digest"]), LOOK) == SEEN


async def test_the_same_work_in_two_machines_is_one_template_and_other_work_or_defaults_another(site: Site) -> None:
    one, other = await worked(site), await worked(site, hostname="other")
    digest = (await publish(site, one))["digest"]
    assert {(await publish(site, machine))["digest"] for machine in (one, one, other)} == {digest}
    assert (await publish(site, one, {**DEFAULTS, "user": "root"}))["digest"] != digest
    different = await worked(site, code=WORK.replace("'kept')\n", "'Kept')\n"))
    assert (await publish(site, different))["digest"] != digest


async def test_a_template_made_of_a_template_made_of_a_snapshot_has_all_of_it(site: Site) -> None:
    machine, name = await boot(site, site.template), new_id("snp")
    python(site, machine, "open('/one', 'w').close()")
    await site.call("snapshot", machine=machine, snapshot=name, kind="disk")
    builder = await boot(site, site.template, snapshot=name)
    python(site, builder, "open('/two', 'w').close()")
    await site.call("stop", machine=builder)
    first = (await publish(site, builder))["digest"]
    second = (await publish(site, await worked(site, first)))["digest"]
    look = "import os; print([os.path.exists(name) for name in ('/one', '/two', '/work/kept', '/etc/passwd')])"
    assert python(site, await boot(site, second), look) == "[True, True, True, True]\n"


async def test_only_a_stopped_machine_is_published(site: Site) -> None:
    machine = await boot(site, site.template)
    for verb, state in ((None, "running"), ("pause", "paused"), ("suspend", "suspended")):
        if verb:
            await site.call(verb, machine=machine)
        with pytest.raises(Conflict) as caught:
            await publish(site, machine)
        assert caught.value.details["state"] == state
    with pytest.raises(NotFound):
        await publish(site, new_id("sbx"))


async def test_a_machine_that_is_started_meanwhile_waits(site: Site) -> None:
    machine = await worked(site)
    with (disk(site, machine) / "long").open("wb") as file:
        file.truncate(1 << 29)
    published = asyncio.ensure_future(publish(site, machine))
    started_again = asyncio.ensure_future(site.call("start", machine=machine))
    done, _ = await asyncio.wait([published, started_again], return_when=asyncio.FIRST_COMPLETED)
    assert done == {published}
    await started_again
    assert await site.state(machine) == "running"


HOSTILE = {
    "device-in-template": "import os; os.mknod('/device', 0o666 | 0o020000, os.makedev(1, 3))",
    "template-too-large": "open('/huge', 'wb').truncate(1 << 50)",
    "template-unfit": "import os; os.rmdir('/tmp/.X11-unix'); os.rmdir('/tmp'); os.symlink('/etc', '/tmp')",
}


@pytest.mark.parametrize("code", HOSTILE)
async def test_what_cannot_be_a_template_is_refused_and_leaves_nothing(broker: Separate, site: Site, code: str) -> None:
    """F4: what is in a guest's tree is the guest's."""
    before = stored(broker)
    machine = await worked(site, code="pass")
    with_root(disk(site, machine), HOSTILE[code])
    for _ in range(2):
        with pytest.raises(InvalidRequest) as caught:
            await publish(site, machine)
        assert caught.value.code == code
        assert stored(broker) == before
    await site.call("start", machine=machine)
    assert await site.state(machine) == "running"


def with_root(root: Path, code: str) -> None:
    """Do to a tree what its guest could do, or could not."""
    pid = os.fork()
    if pid == 0:
        try:
            os.chroot(root)
            exec(code, {})
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0


async def test_a_template_in_use_is_not_dropped_and_says_by_how_many(site: Site) -> None:
    made = (await publish(site, await worked(site)))["digest"]
    machine, name = await boot(site, made), new_id("snp")
    for verb in (None, "suspend", "start", "stop"):
        if verb:
            await site.call(verb, machine=machine)
        with pytest.raises(Conflict) as caught:
            await site.call("drop-template", template=made)
        assert (caught.value.code, caught.value.details["machines"]) == ("template-in-use", 1)
    await site.call("snapshot", machine=machine, snapshot=name, kind="disk")
    await site.call("destroy", machine=machine)
    with pytest.raises(Conflict) as caught:
        await site.call("drop-template", template=made)
    assert (caught.value.details["machines"], caught.value.details["snapshots"]) == (0, 1)
    copy = await boot(site, made, snapshot=name)
    assert python(site, copy, "print(open('/work/kept').read())") == "kept\n"
    await site.call("destroy", machine=copy)
    await site.call("drop-snapshot", snapshot=name)
    for _ in range(2):
        await site.call("drop-template", template=made)
    assert made not in {row["digest"] for row in await site.call("templates")}
    with pytest.raises(NotFound):
        await boot(site, made)


async def test_scratch_is_not_dropped_and_dropping_what_is_not_there_succeeds(site: Site) -> None:
    with pytest.raises(Conflict) as caught:
        await site.call("drop-template", template=await scratch(site))
    assert caught.value.code == "template-in-use"
    await site.call("drop-template", template=UNKNOWN)


async def test_of_a_drop_and_many_boots_at_once_either_all_have_their_template_or_nobody(site: Site) -> None:
    made = (await publish(site, await worked(site)))["digest"]
    boots = [asyncio.ensure_future(boot(site, made)) for _ in range(4)]
    dropped = asyncio.ensure_future(site.call("drop-template", template=made))
    results = await asyncio.gather(*boots, dropped, return_exceptions=True)
    machines = [one for one in results[:-1] if isinstance(one, str)]
    assert all(isinstance(one, str | NotFound) for one in results[:-1]), results
    assert isinstance(results[-1], Conflict) == bool(machines), results
    for machine in machines:
        assert python(site, machine, LOOK) == SEEN


async def test_what_many_publish_at_once_is_there_for_all(broker: Separate, site: Site) -> None:
    machines = [await worked(site) for _ in range(4)]
    made = await asyncio.gather(*(publish(site, machine) for machine in machines))
    assert len({one["digest"] for one in made}) == 1
    assert stored(broker) == recorded(broker)


async def test_a_half_made_template_is_named_and_then_removed(broker: Separate, site: Site) -> None:
    left = broker.settings.broker_dir / "disks/templates/.publish-0123456789abcdef"
    copy_subvolume(disk(site, await worked(site)), left)
    found = {"kind": "template", "name": left.name}
    for dry_run, removed in ((True, False), (False, True)):
        assert await site.call("gc", dry_run=dry_run) == {"strays": [{**found, "removed": removed}]}
        assert left.exists() != removed


async def test_an_import_of_what_was_published_gives_it_a_name(broker: Separate, site: Site) -> None:
    root = disk(site, await worked(site))
    tree = broker.directory / "published"
    made = await publish(site, root.name, {})
    copied = await asyncio.create_subprocess_exec(
        "cp",
        "-a",
        str(site.settings.broker_dir / "disks/templates" / made["digest"].removeprefix("sha256:")),
        str(tree),
    )
    assert await copied.wait() == 0
    named = await setup.import_template(broker.settings, tree, "mine", "latest", Defaults())
    assert (named.digest, named.bytes) == (made["digest"], made["bytes"])
    row = next(row for row in await site.call("templates") if row["digest"] == made["digest"])
    assert (row["name"], row["tag"]) == ("mine", "latest")
    await site.call("destroy", machine=root.name)
    await site.call("drop-template", template=made["digest"])


async def test_a_record_that_is_damaged_says_so_and_breaks_no_other(broker: Separate, site: Site) -> None:
    made = (await publish(site, await worked(site)))["digest"]
    record = broker.settings.broker_dir / "templates" / f"{made.removeprefix('sha256:')}.json"
    whole = json.loads(record.read_text())
    record.write_text("{")
    with pytest.raises(HostError) as caught:
        await boot(site, made)
    assert caught.value.code == "template-damaged"
    listed = {row["digest"] for row in await site.call("templates")}
    assert site.template in listed
    assert made not in listed
    assert await site.call("gc", dry_run=False) == {"strays": []}
    assert python(site, await boot(site, site.template), "print('up')") == "up\n"
    record.write_text(json.dumps(whole))


# --- layers of images in a machine


UNPACK = (*GUEST_PYTHON[:-1], "/.space/agent.pyz", "unpack-layer")


def unpack(site: Site, machine: str, *entries: Entry) -> Result:
    with site.peer(machine) as peer:
        command = peer.start(*UNPACK, stdin=True)
        peer.feed(command.streams["stdin"], tar(entries), end=True)
        return peer.finish(command)


def unpacked(site: Site, machine: str, *entries: Entry) -> dict[str, int]:
    done = unpack(site, machine, *entries)
    assert (done.exit["kind"], done.exit["code"], done.stderr) == ("exited", 0, b"")
    return json.loads(done.stdout)


LOWER = [
    *(directory("./", mode=0o755), directory("etc"), file("etc/passwd", "root:x:0:0::/:/bin/sh\n")),
    *(directory("usr/bin"), symlink("bin", "usr/bin"), file("bin/tool", "tool", mode=0o4755, uid=0, gid=42)),
    *(directory("opt", mode=0o1777), file("opt/one", "1", uid=1000, gid=1000), file("opt/sub/two", "2")),
    *(link("opt/again", "opt/one"), file(os.fsdecode(b"opt/\xff\n"), "odd"), file("gone", "x")),
    *(directory("proc"), file("proc/version", "x"), file("dev/shm/x", "x"), directory("sys"), file("run/pid", "1")),
]
UPPER = [
    *(file("opt/three", "3"), file("opt/.wh..wh..opq"), file(".wh.gone"), file(".wh.proc"), file("usr/bin/.wh.none")),
    *(link("usr/bin/same", "usr/bin/tool"), symlink("etc/link", "/bin/tool"), file("etc/link", "a file")),
]
FOUND = """
import os
for top, names, files in os.walk(b'/'):
    names[:] = sorted(name for name in names if name not in (b'proc', b'sys', b'dev', b'.space'))
    for name in sorted(files):
        path = os.path.join(top, name)
        status = os.lstat(path)
        print(path, oct(status.st_mode), status.st_uid, status.st_gid, status.st_nlink, int(status.st_mtime))
"""
MTIME = 1_700_000_000


async def test_layers_unpacked_in_a_machine_of_scratch_are_a_template(site: Site) -> None:
    builder = await boot(site, await scratch(site))
    told = unpacked(site, builder, *LOWER)
    assert told == {"entries": len(LOWER), "bytes": 32, "hidden": 0, "skipped": 5, "xattrs_left_out": 0}
    told = unpacked(site, builder, *UPPER)
    assert (told["hidden"], told["skipped"]) == (5, 1)
    await site.call("stop", machine=builder)
    made = await publish(site, builder)
    seen = python(site, await boot(site, made["digest"]), FOUND).splitlines()
    assert [line for line in seen if not line.startswith("b'/etc/") or "link" in line or "passwd" in line] == [
        f"b'/etc/link' 0o100644 0 0 1 {MTIME}",
        f"b'/etc/passwd' 0o100644 0 0 1 {MTIME}",
        f"b'/opt/three' 0o100644 0 0 1 {MTIME}",
        f"b'/usr/bin/same' 0o104755 0 42 2 {MTIME}",
        f"b'/usr/bin/tool' 0o104755 0 42 2 {MTIME}",
    ]


async def test_two_builders_of_the_same_layers_make_one_template(site: Site) -> None:
    digests = set()
    for hostname in ("one", "other"):
        builder = await boot(site, await scratch(site), hostname=hostname)
        unpacked(site, builder, *LOWER)
        unpacked(site, builder, *UPPER)
        await site.call("stop", machine=builder)
        digests.add((await publish(site, builder))["digest"])
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (file(".space/agent.pyz", "x"), "unsafe-path"),
        (file("../x", "x"), "unsafe-path"),
        (entry("dev/sda", tarfile.BLKTYPE, devmajor=8), "device-in-template"),
        (link("x", "proc/1/exe"), "unsafe-path"),
        (file("big", bytes(80 << 20)), "disk-full"),
    ],
    ids=["runtime", "upwards", "device", "link-out", "full"],
)
async def test_a_layer_that_would_go_where_it_may_not_is_refused_in_the_machine(
    site: Site, bad: Entry, code: str
) -> None:
    builder = await boot(site, await scratch(site))
    done = unpack(site, builder, file("first", "x"), bad)
    assert (done.exit["kind"], done.exit["code"], done.stdout) == ("exited", 3, b"")
    told = json.loads(done.stderr)
    assert (told["code"], set(told)) == (code, {"code", "message", "path"})
    assert python(site, builder, "print(open('/first').read())") == "x\n"
