"""What is kept of a virtual machine on the host, and whose user it is."""

import os
import shutil
from pathlib import Path

import pytest

from space.drivers import processes
from space.drivers.vm import users
from space.drivers.vm.bundles import Bundle, Bundles


def bundle(directory: Path) -> Path:
    directory.mkdir(parents=True)
    return directory


def test_no_two_machines_of_any_installation_or_driver_have_one_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two numbers for four machines: each finds one that is free, or is not served by another's."""
    monkeypatch.setattr(users, "COUNT", 2)
    taken = tmp_path / "taken"
    first, second = bundle(tmp_path / "one/qemu/a"), bundle(tmp_path / "two/firecracker/a")
    assert {users.take(first, taken), users.take(second, taken)} == {users.FIRST, users.FIRST + 1}
    assert users.of(first) != users.of(second)
    third = bundle(tmp_path / "two/qemu/b")
    users.give_back(second, taken)
    users.give_back(second, taken)
    assert users.take(third, taken) == users.of(second)


def test_what_another_machine_has_is_not_given_back(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    first, other = bundle(tmp_path / "first"), bundle(tmp_path / "other")
    user = users.take(first, taken)
    # As one that was written down and then found to be taken, by a process that was killed just then.
    (other / "user").write_text(str(user))
    users.give_back(other, taken)
    assert (taken / str(user)).readlink() == first
    users.give_back(bundle(tmp_path / "none"), taken)


def test_users_of_an_installation_that_was_taken_down_are_anybodys_again(tmp_path: Path) -> None:
    taken, lives, gone = tmp_path / "taken", bundle(tmp_path / "lives"), bundle(tmp_path / "gone")
    for machine in (lives, gone):
        users.take(machine, taken)
    shutil.rmtree(gone)
    users.forget_lost(taken)
    assert [path.readlink() for path in taken.iterdir()] == [lives]
    users.forget_lost(tmp_path / "none")


def test_a_machine_that_takes_a_user_again_gives_back_its_first(tmp_path: Path) -> None:
    taken, machine = tmp_path / "taken", bundle(tmp_path / "machine")
    for _ in range(3):
        users.take(machine, taken)
    assert [path.name for path in taken.iterdir()] == [str(users.of(machine))]


def test_a_process_is_the_machines_as_long_as_it_lives_and_never_another_of_its_number(tmp_path: Path) -> None:
    one = Bundle(bundle(tmp_path / "machine"))
    assert one.process() is None
    here = processes.identify(os.getpid())
    assert here
    one.note_process(here)
    assert one.process() == here
    one.note_process(processes.Process(here.pid, here.start_ticks - 1, here.boot_id))
    assert one.process() is None
    (one.path / "process.json").write_text('{"pid": 1')
    assert one.process() is None


def test_bundles_are_found_by_a_new_process(tmp_path: Path) -> None:
    assert Bundles(tmp_path / "none").all() == []
    bundle(tmp_path / "all/a")
    assert [one.machine_id for one in Bundles(tmp_path / "all").all()] == ["a"]
    found = Bundles(tmp_path / "all").of("a")
    found.note_standing(still=True)
    assert Bundle(found.path).standing
    found.note_standing(still=False)
    found.note_standing(still=False)
    assert not Bundle(found.path).standing
