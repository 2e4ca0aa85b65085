"""Limits as the files of either version of cgroups want them, and usage as those files tell it."""

from pathlib import Path

import pytest

from space.broker.cgroups import Cgroups, Usage, is_version_2
from space.drivers.base import HostLimits
from space.errors import HostError

MACHINE = "sbxabcdefgh234567ab"
LIMITS = HostLimits(cpus=1.5, memory_mib=100, pids=77)
MIB = 1 << 20


class Tree:
    """Files that a test lays out as the kernel would."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str = "") -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def read(self, path: str) -> str:
        return (self.root / path).read_text()


@pytest.fixture
def unified(tmp_path: Path) -> Tree:
    tree = Tree(tmp_path)
    for directory in ("", "space/"):
        tree.write(f"{directory}cgroup.controllers", "cpuset cpu io memory hugetlb pids rdma")
        tree.write(f"{directory}cgroup.subtree_control")
    tree.write(f"space/{MACHINE}/memory.swap.max", "max")
    return tree


@pytest.fixture
def hybrid(tmp_path: Path) -> Tree:
    tree = Tree(tmp_path)
    tree.write("unified/cgroup.controllers", "hugetlb")
    for controller in ("cpu", "cpuacct", "memory", "pids", "blkio"):
        tree.write(f"{controller}/cgroup.procs")
    tree.write(f"memory/space/{MACHINE}/memory.memsw.limit_in_bytes", "-1")
    return tree


def test_the_version_is_that_of_the_memory_controller(unified: Tree, tmp_path: Path) -> None:
    assert is_version_2(unified.root)
    assert not is_version_2(tmp_path / "nothing here")


def test_hybrid_hosts_are_version_1(hybrid: Tree) -> None:
    assert not is_version_2(hybrid.root)


def test_version_2_gets_every_limit_and_one_group_to_join(unified: Tree) -> None:
    joined = Cgroups("space", unified.root).create(MACHINE, LIMITS)
    assert joined == (unified.root / "space" / MACHINE / "cgroup.procs",)
    assert unified.read("cgroup.subtree_control") == "+cpu +memory +pids +io"
    assert unified.read("space/cgroup.subtree_control") == "+cpu +memory +pids +io"
    found = {
        name: unified.read(f"space/{MACHINE}/{name}")
        for name in ("cpu.max", "memory.max", "memory.swap.max", "pids.max")
    }
    assert found == {
        "cpu.max": "150000 100000",
        "memory.max": str(100 * MIB),
        "memory.swap.max": "0",
        "pids.max": "77",
    }


def test_version_2_tells_usage_without_file_cache_that_can_be_dropped(unified: Tree) -> None:
    group = f"space/{MACHINE}"
    unified.write(f"{group}/cpu.stat", "usage_usec 2500000\nuser_usec 1\n")
    unified.write(f"{group}/memory.current", str(50 * MIB))
    unified.write(f"{group}/memory.stat", f"anon 1\ninactive_file {20 * MIB}\n")
    unified.write(f"{group}/memory.peak", str(60 * MIB))
    unified.write(f"{group}/pids.current", "12")
    assert Cgroups("space", unified.root).usage(MACHINE) == Usage(2.5, 30.0, 60.0, 12)


def test_version_2_kernels_without_a_peak_tell_what_is_used_now(unified: Tree) -> None:
    group = f"space/{MACHINE}"
    for name, text in {
        "cpu.stat": "usage_usec 0",
        "memory.current": str(MIB),
        "memory.stat": "",
        "pids.current": "1",
    }.items():
        unified.write(f"{group}/{name}", text)
    assert Cgroups("space", unified.root).usage(MACHINE).memory_peak_mib == 1.0


@pytest.mark.parametrize("kills", [0, 2])
def test_version_2_tells_how_often_memory_ran_out(unified: Tree, kills: int) -> None:
    unified.write(f"space/{MACHINE}/memory.events", f"low 0\noom 5\noom_kill {kills}\n")
    assert Cgroups("space", unified.root).oom_kills(MACHINE) == kills


def test_version_1_gets_every_limit_and_one_group_per_controller_to_join(hybrid: Tree) -> None:
    joined = Cgroups("space", hybrid.root).create(MACHINE, LIMITS)
    assert set(joined) == {
        hybrid.root / name / "space" / MACHINE / "cgroup.procs"
        for name in ("cpu", "cpuacct", "memory", "pids", "blkio")
    }
    assert hybrid.read(f"cpu/space/{MACHINE}/cpu.cfs_period_us") == "100000"
    assert hybrid.read(f"cpu/space/{MACHINE}/cpu.cfs_quota_us") == "150000"
    assert hybrid.read(f"memory/space/{MACHINE}/memory.limit_in_bytes") == str(100 * MIB)
    assert hybrid.read(f"memory/space/{MACHINE}/memory.memsw.limit_in_bytes") == str(100 * MIB)
    assert hybrid.read(f"pids/space/{MACHINE}/pids.max") == "77"


def test_version_1_joins_controllers_that_share_a_hierarchy_once(hybrid: Tree) -> None:
    (hybrid.root / "cpuacct/cgroup.procs").unlink()
    (hybrid.root / "cpuacct").rmdir()
    (hybrid.root / "cpu").rename(hybrid.root / "cpu,cpuacct")
    for name in ("cpu", "cpuacct"):
        (hybrid.root / name).symlink_to("cpu,cpuacct")
    joined = Cgroups("space", hybrid.root).create(MACHINE, LIMITS)
    assert len(joined) == len(set(joined)) == 4


def test_version_1_tells_usage(hybrid: Tree) -> None:
    hybrid.write(f"cpuacct/space/{MACHINE}/cpuacct.usage", "1500000000")
    hybrid.write(f"memory/space/{MACHINE}/memory.usage_in_bytes", str(50 * MIB))
    hybrid.write(f"memory/space/{MACHINE}/memory.stat", f"cache 1\ntotal_inactive_file {10 * MIB}\n")
    hybrid.write(f"memory/space/{MACHINE}/memory.max_usage_in_bytes", str(70 * MIB))
    hybrid.write(f"pids/space/{MACHINE}/pids.current", "9")
    assert Cgroups("space", hybrid.root).usage(MACHINE) == Usage(1.5, 40.0, 70.0, 9)


@pytest.mark.parametrize("kills", [0, 1])
def test_version_1_tells_how_often_memory_ran_out(hybrid: Tree, kills: int) -> None:
    hybrid.write(f"memory/space/{MACHINE}/memory.oom_control", f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
    assert Cgroups("space", hybrid.root).oom_kills(MACHINE) == kills


def test_a_machine_without_a_group_uses_nothing(hybrid: Tree) -> None:
    groups = Cgroups("space", hybrid.root)
    assert groups.usage("sbx" + "a" * 16) == Usage()
    assert groups.oom_kills("sbx" + "a" * 16) == 0


async def test_removing_a_group_that_is_not_there_succeeds(unified: Tree) -> None:
    await Cgroups("space", unified.root).remove("sbx" + "a" * 16)


def test_a_limit_that_cannot_be_set_is_an_error_and_names_no_path(hybrid: Tree) -> None:
    (hybrid.root / "cpu/space" / MACHINE / "cpu.cfs_quota_us").mkdir(parents=True)
    with pytest.raises(HostError) as caught:
        Cgroups("space", hybrid.root).create(MACHINE, LIMITS)
    assert str(hybrid.root) not in caught.value.message


def test_known_groups_are_those_of_this_installation(hybrid: Tree) -> None:
    groups = Cgroups("space", hybrid.root)
    groups.create(MACHINE, LIMITS)
    (hybrid.root / "memory/other/sbxother").mkdir(parents=True)
    assert groups.known() == {MACHINE}
