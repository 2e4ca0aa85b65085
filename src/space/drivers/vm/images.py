"""Images of disks for machines with a kernel of their own: of a tree, never written again; or empty, to be written.

Root reads no guest's bytes here. The program that reads a tree runs without any privilege but that of reading it, and
sees nothing of the host besides.
"""

import os
import shutil
import stat
from pathlib import Path

from space.drivers import programs
from space.errors import HostError, HostFull, InvalidRequest

BUILD_S = 900.0
FORMAT_S = 60.0
MEASURE_S = 300.0
HOLES_MIB_MAX = 1024
"""How much larger an image may be than twice what its files take: holes are zeros in it, and a file that is nothing but
a hole can be larger than the store.
"""
NO_SPACE = "No space left"
"""In the complaint of a program that found its file system full."""
_MIB = 1 << 20
OVERHEAD_MIB = 32
"""What ext4 keeps for itself on a small image, its journal included."""
# Times of files are kept, as programs compare them; later ones are cut to this. It is also the time of the image
# itself, so that the same tree gives the same image.
_LATEST_TIME = 4102444800  # 2100-01-01
_UUID = "00000000-0000-0000-0000-000000000000"
_MENDED = 1
"""What e2fsck returns when it has mended what a power cut leaves."""
_DIGITS_MAX = 18


async def write_tree(tree: Path, image: Path) -> None:
    """Write the tree as a read-only file system (erofs). There already: nothing to do, as it never changes.

    The same tree (names, contents, owners, modes, times, attributes) gives the same bytes.
    """
    if image.exists():  # noqa: ASYNC240 a local directory
        return
    work = image.with_name(f".{image.name}")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(mode=0o700, parents=True)
    try:
        # SAFETY: `mkfs.erofs` reads names and contents of a tree that a guest may have made. It runs in namespaces of
        # its own, without network, with the tree read-only, one empty directory to write to, the programs of the host,
        # and no capability but to read what modes forbid. Nothing of the tree is executed, and links are not followed.
        finished = await programs.run(_jailed(tree, work), timeout_s=BUILD_S)
        if finished.status:
            if NO_SPACE in finished.complaint:
                raise HostFull("There is no room for the template's disk image.", code="disk-store-full")
            raise HostError("The template's disk image could not be made.", code="image-not-made")
        _accept(work / "image")
        (work / "image").rename(image)
    finally:
        shutil.rmtree(work, ignore_errors=True)


async def measure_tree(tree: Path) -> int:
    """Return how many bytes an image of the tree will have, about. Raise `InvalidRequest` when that is out of
    proportion to what its files take.
    """
    taken, whole = [await _sum(tree, *how) for how in ((), ("--apparent-size",))]
    if whole > 2 * taken + HOLES_MIB_MAX * _MIB:
        raise InvalidRequest(
            "The template's files have holes that would be full of zeros on a virtual machine's disk: make the files "
            "smaller, or use driver gvisor.",
            code="template-too-large",
            needed_mib=whole // _MIB,
        )
    return whole


def layer_mib(layer: Path) -> int:
    """Return the `disk_mib` that a layer was made with, or grown to."""
    return layer.stat().st_size // _MIB - OVERHEAD_MIB


async def make_layer(layer: Path, disk_mib: int) -> None:
    """Make a machine's own, empty layer, of which the guest can use about `disk_mib`. It takes no space yet."""
    descriptor = os.open(layer, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.truncate(descriptor, (disk_mib + OVERHEAD_MIB) * _MIB)
    finally:
        os.close(descriptor)
    # SAFETY: a file just made, in a directory of root's alone: nothing of a guest's is read.
    words = [
        "mke2fs",
        "-q",
        "-F",
        "-t",
        "ext4",
        "-m",
        "0",
        "-J",
        "size=8",
        "-E",
        "lazy_itable_init=1,lazy_journal_init=1",
    ]
    await programs.check([*words, str(layer)], timeout_s=FORMAT_S)


async def grow_layer(layer: Path, disk_mib: int) -> None:
    """Let a layer that no machine uses have `disk_mib`. A guest has written it; one that makes no sense is refused."""
    os.truncate(layer, (disk_mib + OVERHEAD_MIB) * _MIB)
    # They want to see that nobody has it mounted.
    jail = [*_jail(), "--proc", "/proc", "--symlink", "/proc/self/mounts", "/etc/mtab"]
    jail += ["--dev-bind", "/dev/null", "/dev/null", "--bind", str(layer), "/layer", "--chdir", "/", "--"]
    for words, fine in ((["e2fsck", "-f", "-p"], {0, _MENDED}), (["resize2fs"], {0})):
        # SAFETY: these read a file system that a guest has made. They run in a jail as the one above, without any
        # capability, and this one file is all of the host's that they see and can write.
        finished = await programs.run([*jail, f"/usr/sbin/{words[0]}", *words[1:], "/layer"], timeout_s=BUILD_S)
        if finished.status not in fine:
            raise HostError("The disk's file system is damaged: it cannot be made larger.", code="disk-damaged")


def _accept(written: Path) -> None:
    """Let a file that a program without rights has written be read by everybody, and written by nobody."""
    try:
        # SAFETY: the program has read what a guest has made: were it taken over, this could be a link, or a pipe.
        descriptor = os.open(written, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise HostError("The template's disk image could not be made.", code="image-not-made") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise HostError("The template's disk image could not be made.", code="image-not-made")
        os.fchmod(descriptor, 0o444)
    finally:
        os.close(descriptor)


async def _sum(tree: Path, *how: str) -> int:
    # SAFETY: `du` looks at names and numbers alone, in the same jail; what it says is taken for a number or nothing.
    words = [*_reading(tree), "--chdir", "/", "--", "/usr/bin/du", "--summarize", "--block-size=1", *how, "/tree"]
    finished = await programs.run(words, timeout_s=MEASURE_S)
    size = finished.output.split(b"\t", 1)[0]
    if finished.status or not size.isdigit() or len(size) > _DIGITS_MAX:
        raise HostError("The template's files could not be measured.", code="image-not-made")
    return int(size)


def _jailed(tree: Path, work: Path) -> list[str]:
    jail = [*_reading(tree), "--setenv", "SOURCE_DATE_EPOCH", str(_LATEST_TIME)]
    jail += ["--bind", str(work), "/out", "--chdir", "/", "--"]
    return [*jail, "/usr/bin/mkfs.erofs", "-d0", "-U", _UUID, "/out/image", "/tree"]


def _reading(tree: Path) -> list[str]:
    return [*_jail(), "--cap-add", "CAP_DAC_READ_SEARCH", "--ro-bind", str(tree), "/tree"]


def _jail() -> list[str]:
    # Every namespace but that of users, in which other owners' files could not be read.
    jail = ["bwrap", *(f"--unshare-{kind}" for kind in ("ipc", "pid", "net", "uts")), "--unshare-cgroup-try"]
    jail += ["--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv", "--ro-bind", "/usr", "/usr"]
    for name in ("lib", "lib64"):
        jail += ["--symlink", f"usr/{name}", f"/{name}"]
    return jail
