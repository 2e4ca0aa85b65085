"""How the processes of a sandbox are divided among its commands, where the kernel limits each group by itself."""

from pathlib import Path

from space.guest import shares
from space.guest.shares import GRANT_MIN, LIMIT_MIN, Shares


def group(directory: Path, name: str, count: int, limit: str = "max") -> Path:
    """A group as the kernel shows it: its files say what there is, and take what is written."""
    path = directory / name
    path.mkdir(exist_ok=True)
    (path / "pids.current").write_text(f"{count}\n")
    (path / "pids.max").write_text(limit)
    return path


def limit(path: Path) -> int:
    # Only a kernel takes every write for the whole value; here the rest of a longer one stays.
    return int((path / "pids.max").read_text().split()[0])


def test_one_command_alone_may_have_everything(tmp_path: Path) -> None:
    alone = group(tmp_path, "c1", 40)
    divided = Shares(str(tmp_path), 1000)
    divided.divide()
    assert limit(alone) == 1000
    assert divided.again_s is None


def test_several_that_grow_as_fast_as_they_can_stay_within_the_whole_together(tmp_path: Path) -> None:
    groups = [group(tmp_path, f"c{n}", 1) for n in range(1, 5)]
    divided = Shares(str(tmp_path), 1000)
    for _ in range(20):
        divided.divide()
        for path in groups:
            (path / "pids.current").write_text(str(limit(path)))
    counted = sum(limit(path) for path in groups)
    assert 1000 <= counted < 1000 + len(groups) * GRANT_MIN


def test_a_new_command_can_be_started_although_nothing_is_free(tmp_path: Path) -> None:
    group(tmp_path, "c1", 1000)
    divided = Shares(str(tmp_path), 1000)
    divided.divide()
    new = group(tmp_path, "c2", 0)
    divided.add("c2")
    assert limit(new) == LIMIT_MIN
    assert divided.again_s == shares.AGAIN_S


def test_a_group_that_is_being_killed_is_given_nothing(tmp_path: Path) -> None:
    killed, other = group(tmp_path, "c1", 10), group(tmp_path, "c2", 10)
    divided = Shares(str(tmp_path), 100)
    divided.divide()
    (killed / "pids.max").write_text("0")
    (other / "pids.current").write_text("50")
    divided.divide()
    assert limit(killed) == 0
    assert 50 < limit(other) <= 100


def test_what_one_gives_back_the_others_may_have(tmp_path: Path) -> None:
    first, second = group(tmp_path, "c1", 50), group(tmp_path, "c2", 50)
    divided = Shares(str(tmp_path), 100)
    divided.divide()
    assert (limit(first), limit(second)) == (50, 50)
    (first / "pids.current").write_text("0")
    divided.divide()
    assert limit(second) == 100


def test_it_is_looked_at_less_often_while_nothing_changes(tmp_path: Path) -> None:
    paths = [group(tmp_path, f"c{n}", 5) for n in (1, 2)]
    divided = Shares(str(tmp_path), 100)
    for _ in range(10):
        divided.divide()
    assert divided.again_s == shares.AGAIN_S_MAX
    (paths[0] / "pids.current").write_text("6")
    divided.divide()
    assert divided.again_s == shares.AGAIN_S
