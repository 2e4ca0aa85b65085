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


MORE = HostLimits(cpus=0.5, memory_mib=200, pids=99, io_weight=700)


def test_every_limit_can_be_changed_while_the_machine_runs_on_version_2(unified: Tree) -> None:
    groups, group = Cgroups("space", unified.root), f"space/{MACHINE}"
    unified.write(f"{group}/io.weight", "default 100")
    groups.create(MACHINE, LIMITS)
    groups.limit(MACHINE, MORE)
    names = ("cpu.max", "memory.max", "pids.max", "io.weight")
    assert [unified.read(f"{group}/{name}") for name in names] == ["50000 100000", str(200 * MIB), "99", "default 700"]


def test_every_limit_can_be_changed_while_the_machine_runs_on_version_1(hybrid: Tree) -> None:
    groups = Cgroups("space", hybrid.root)
    groups.create(MACHINE, LIMITS)
    groups.limit(MACHINE, MORE)
    assert hybrid.read(f"memory/space/{MACHINE}/memory.limit_in_bytes") == str(200 * MIB)
    assert hybrid.read(f"memory/space/{MACHINE}/memory.memsw.limit_in_bytes") == str(200 * MIB)
    assert hybrid.read(f"cpu/space/{MACHINE}/cpu.cfs_quota_us") == "50000"
    assert hybrid.read(f"pids/space/{MACHINE}/pids.max") == "99"


def test_version_2_memory_in_use_is_not_taken_away_and_nothing_else_changed(unified: Tree) -> None:
    """The kernel would end the machine; what it caches of files can be dropped and does not count."""
    groups, group = Cgroups("space", unified.root), f"space/{MACHINE}"
    groups.create(MACHINE, MORE)
    unified.write(f"{group}/memory.stat", f"active_file {20 * MIB}\ninactive_file {20 * MIB}\n")
    unified.write(f"{group}/memory.current", str(150 * MIB))
    with pytest.raises(HostError) as caught:
        groups.limit(MACHINE, LIMITS)
    assert caught.value.code == "cgroup-busy"
    assert (unified.read(f"{group}/memory.max"), unified.read(f"{group}/pids.max")) == (str(200 * MIB), "99")
    unified.write(f"{group}/memory.current", str(130 * MIB))
    groups.limit(MACHINE, LIMITS)
    assert unified.read(f"{group}/memory.max") == str(100 * MIB)


@pytest.mark.parametrize("kind", ["unified", "hybrid"])
def test_memory_alone_can_be_limited_anew_and_where_it_cannot_that_is_told(
    kind: str, request: pytest.FixtureRequest
) -> None:
    tree: Tree = request.getfixturevalue(kind)
    groups = Cgroups("space", tree.root)
    groups.create(MACHINE, LIMITS)
    limit = f"space/{MACHINE}/memory.max" if kind == "unified" else f"memory/space/{MACHINE}/memory.limit_in_bytes"
    assert groups.limit_memory(MACHINE, 400)
    assert tree.read(limit) == str(400 * MIB)
    assert not groups.limit_memory("sbx" + "a" * 16, 400)
    if kind == "unified":
        tree.write(f"space/{MACHINE}/memory.stat", "inactive_file 0\n")
        tree.write(f"space/{MACHINE}/memory.current", str(300 * MIB))
        assert not groups.limit_memory(MACHINE, 100)
        assert tree.read(limit) == str(400 * MIB)


def test_limits_of_a_machine_that_has_no_group_are_an_error(unified: Tree) -> None:
    with pytest.raises(HostError):
        Cgroups("space", unified.root).limit("sbx" + "a" * 16, LIMITS)


@pytest.mark.parametrize("file", ["blkio.bfq.weight", "blkio.weight"])
def test_version_1_weighs_where_the_kernel_can_and_makes_do_where_it_cannot(hybrid: Tree, file: str) -> None:
    groups, weight = Cgroups("space", hybrid.root), f"blkio/space/{MACHINE}/{file}"
    groups.create(MACHINE, MORE)
    assert not (hybrid.root / weight).exists()
    hybrid.write(weight, "100")
    groups.limit(MACHINE, MORE)
    assert hybrid.read(weight) == "700"


def test_version_2_ends_a_machine_as_a_whole_when_its_memory_is_used_up(unified: Tree) -> None:
    unified.write(f"space/{MACHINE}/memory.oom.group", "0")
    Cgroups("space", unified.root).create(MACHINE, LIMITS)
    assert unified.read(f"space/{MACHINE}/memory.oom.group") == "1"
