"""What the node remembers of commands: bounded, swept in time, and whole after its death."""

import time
from dataclasses import replace

import pytest

from space.errors import Conflict, HostFull, LimitExceeded, NotFound
from space.model.command import CommandSpec, CommandState, Exit, ExitKind, Tty
from space.model.ids import new_id
from space.node import commands as commands_module
from space.node import records as records_module
from space.node.commands import Commands
from space.node.machine import Machine
from space.node.machines import Machines
from space.node.places import Places
from space.node.pool import Pool
from space.node.records import TOKENS_MAX, CommandRecord, CommandRecords
from space.node.tasks import Tasks
from space.node.trust import Trust
from space.settings import Settings

SPEC = CommandSpec(argv=("true",))
SANDBOX = new_id("sbx")


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "commands"


@pytest.fixture
def commands(directory):
    return load(directory)


def load(directory, replay_s: float = 3600) -> Commands:
    return Commands(CommandRecords(directory), Tasks(), replay_s)


def create_running(commands: Commands, sandbox_id: str = SANDBOX):
    session = commands.create(sandbox_id, SPEC, None)
    session.record.numbers = {"stdout": 1, "stderr": 2}
    session.record.state = CommandState.RUNNING
    session._save()
    return session


def end(session) -> None:
    session.record.state = CommandState.RUNNING
    session.finish(Exit(ExitKind.EXITED, 0))


def test_a_record_comes_back_as_it_was(directory):
    record = CommandRecord(
        id=new_id("cmd"),
        sandbox_id=SANDBOX,
        spec=CommandSpec(("a", "b\nc"), {"X": "\udc80 $Y"}, "/tmp", "user", stdin=True, tty=Tty(5, 7), timeout_s=1.5),
        created_at=time.time(),
        state=CommandState.ENDED,
        numbers={"tty": 7, "stdin": 7},
        boot_id="boot",
        started_at=1.0,
        ended_at=2.0,
        exit=Exit(ExitKind.SIGNALED, None, 9),
        produced={"tty": 5},
        tokens=["f" * 64],
    )
    CommandRecords(directory).save(record)
    assert list(CommandRecords(directory).load()) == [record]


def test_what_is_not_whole_is_removed_and_harms_nothing_else(directory):
    records = CommandRecords(directory)
    good = CommandRecord(new_id("cmd"), SANDBOX, SPEC, created_at=1.0)
    records.save(good)
    (directory / new_id("cmd")).mkdir()
    for content in ("", "[]", "{}", '{"id": 5', "\0"):
        broken = directory / new_id("cmd")
        broken.mkdir()
        (broken / "record.json").write_text(content)
    damaged = CommandRecord(new_id("cmd"), SANDBOX, SPEC, created_at=1.0)
    records.save(damaged)
    records.spool_path(damaged.id, "stdout").write_bytes(b"not a spool")
    commands = load(directory)
    assert [session.id for session in commands.of(SANDBOX)] == [good.id]
    assert [path.name for path in directory.iterdir()] == [good.id]


def test_a_sandbox_is_remembered_a_bounded_number_of_commands(commands, directory, monkeypatch):
    monkeypatch.setattr(commands_module, "SESSIONS_MAX", 3)
    oldest, kept, _ = [commands.create(SANDBOX, SPEC, None) for _ in range(3)]
    with pytest.raises(LimitExceeded):
        commands.create(SANDBOX, SPEC, None)
    commands.create(new_id("sbx"), SPEC, None)
    end(kept)
    end(oldest)
    commands.create(SANDBOX, SPEC, None)
    with pytest.raises(NotFound):
        commands.get(oldest.id)
    assert commands.get(kept.id) is kept
    assert not (directory / oldest.id).exists()


def test_a_sandbox_is_kept_a_bounded_amount_of_output(directory, monkeypatch):
    """F10: the oldest that has ended makes room; what still runs and finds none is lost, and says so."""
    monkeypatch.setattr(commands_module, "KEPT_BYTES_MAX", 1000)
    oldest, newer, running = [create_running(load(directory)) for _ in range(3)]
    neighbour = create_running(load(directory), new_id("sbx"))
    commands = load(directory)  # what earlier processes kept counts, too
    oldest, newer, running, neighbour = [commands.get(one.id) for one in (oldest, newer, running, neighbour)]
    for session in (oldest, newer, running, neighbour):
        session.on_data(1, 0, b"x" * 400)
        if session in (oldest, newer):
            session.finish(Exit(ExitKind.EXITED, 0))
    with pytest.raises(NotFound):
        commands.get(oldest.id)
    assert not (directory / oldest.id).exists()
    assert (newer.kept_bytes, running.kept_bytes) == (400, 400)
    running.on_data(2, 0, b"x" * 500)
    with pytest.raises(NotFound):
        commands.get(newer.id)
    assert running.failure() is None
    running.on_data(2, 500, b"x" * 101)
    assert isinstance(running.failure(), LimitExceeded)
    assert running.ending().exit.kind is ExitKind.LOST
    assert neighbour.failure() is None


def test_the_sweep_forgets_what_ended_long_ago_and_what_was_never_used(directory):
    commands = load(directory, replay_s=100)
    ended, running, unused, fresh, watched = [commands.create(SANDBOX, SPEC, None) for _ in range(5)]
    for session in (ended, watched):
        end(session)
        session.record.ended_at = time.time() - 101
    running.record.state = CommandState.RUNNING
    for session in (running, unused):
        session.record.created_at = time.time() - 10_000
    reader = watched.read_from({})
    commands.sweep()
    assert {session.id for session in commands.of(SANDBOX)} == {running.id, fresh.id, watched.id}
    reader.close()
    commands.sweep()
    assert {session.id for session in commands.of(SANDBOX)} == {running.id, fresh.id}


def test_an_id_that_is_taken_is_given_to_nobody_else(commands):
    session = commands.create(SANDBOX, SPEC, None)
    assert commands.create(SANDBOX, SPEC, session.id) is session
    for sandbox, spec in ((new_id("sbx"), SPEC), (SANDBOX, replace(SPEC, argv=("false",)))):
        with pytest.raises(Conflict):
            commands.create(sandbox, spec, session.id)


def test_tokens_are_remembered_as_fingerprints_and_not_without_end(commands, directory):
    session = commands.create(SANDBOX, SPEC, None)
    for number in range(TOKENS_MAX + 5):
        session.remember_token(f"{number}")
    again = load(directory).get(session.id)
    assert not again.attached_with("4")
    assert again.attached_with("5")
    assert again.attached_with(str(TOKENS_MAX + 4))


def test_readers_of_one_command_are_bounded(commands):
    session = commands.create(SANDBOX, SPEC, None)
    readers = [session.read_from({}) for _ in range(32)]
    with pytest.raises(Conflict):
        session.read_from({})
    readers[0].close()
    session.read_from({}).close()


async def test_a_deleted_sandbox_is_told_to_those_who_read(commands):
    session = commands.create(SANDBOX, SPEC, None)
    session.record.state = CommandState.RUNNING
    reader = session.read_from({})
    commands.forget_sandbox(SANDBOX)
    with pytest.raises(NotFound) as caught:
        await reader.next()
    assert caught.value.code == "sandbox-deleted"


def test_a_machine_with_clients_is_counted_as_in_use(tmp_path, commands):
    settings = Settings(data_dir=tmp_path, run_dir=tmp_path, driver="fake")
    pool = Pool(None, settings, Tasks(), Trust())
    machines = Machines(
        broker=None,
        places=Places.of(settings),
        commands=commands,
        tasks=Tasks(),
        events=None,
        pool=pool,
        trust=Trust(),
    )
    machine = machines._machines[SANDBOX] = Machine(SANDBOX)
    machine.active_at = 0
    with machines.in_use(SANDBOX), machines.in_use(SANDBOX), machines.in_use("unknown"):
        assert machines._describe({"machine": SANDBOX, "state": "running"})["clients"] == 2
    assert machine.clients == 0
    assert time.time() - machine.active_at < 5


def test_the_last_of_the_hosts_disk_is_not_for_output(commands, monkeypatch):
    """F10"""
    running = commands.create(SANDBOX, SPEC, None)
    running.record.numbers = {"stdout": 1, "stderr": 2}
    running.record.state = CommandState.RUNNING
    monkeypatch.setattr(records_module, "FREE_BYTES_MIN", 1 << 60)
    monkeypatch.setattr(records_module, "FREE_LOOK_S", 0)
    with pytest.raises(HostFull):
        commands.create(SANDBOX, SPEC, None)
    running.on_data(1, 0, b"output that has no place")
    assert isinstance(running.failure(), HostFull)
    assert running.ending().exit.kind is ExitKind.LOST
    assert running.produced == {"stdout": 0, "stderr": 0}


def listed(command_id: str, *, state: str = "running", **numbers: int) -> dict:
    places = {name: {"number": number, "acked": 5, "produced": 9, "ended": False} for name, number in numbers.items()}
    return {"id": command_id, "pid": 7, "state": state, "exit": None, "streams": places}


@pytest.mark.parametrize(
    "lie",
    [
        listed(new_id("cmd"), stdout=1, stderr=2),
        listed("ORIGIN", stdout=1),
        listed("ORIGIN", stdout=1, stderr=1),
        listed("ORIGIN", stdout=1, stderr=2, tty=3),
        listed("ORIGIN", tty=3),
        listed("ORIGIN", state="ended", stdout=1, stderr=2),
    ],
    ids=["unknown", "without-stderr", "one-number-twice", "one-too-many", "another-kind", "ended"],
)
def test_of_what_a_copied_guest_says_only_what_can_be_true_goes_on(commands, lie):
    origin = commands.create(new_id("sbx"), SPEC, None).record
    welcome = {"boot_id": "b", "commands": [{**lie, "id": origin.id if lie["id"] == "ORIGIN" else lie["id"]}]}
    assert commands.inherit(SANDBOX, {origin.id: origin}, welcome) == {}
    assert commands.of(SANDBOX) == []


def test_a_copied_command_has_its_own_id_and_begins_where_the_guest_is(commands):
    origins = [commands.create(new_id("sbx"), SPEC, None).record for _ in range(2)]
    first, second = (origin.id for origin in origins)
    streams = {"stdout": 1, "stderr": 2}
    welcome = {"boot_id": "b", "commands": [listed(first, **streams), listed(second, **streams)]}
    names = commands.inherit(SANDBOX, {origin.id: origin for origin in origins}, welcome)
    assert list(names) == [first], "two commands cannot be on the same streams"
    copy = commands.get(names[first])
    assert (copy.record.forked_from, copy.record.sandbox_id, copy.record.spec) == (first, SANDBOX, SPEC)
    assert copy.produced == {"stdout": 5, "stderr": 5}
    assert commands.running(SANDBOX) == 1
