"""The host's end of a channel against guests that lie, flood, stall and die: typed ends, bounded time, bounded memory."""

import asyncio
import fcntl
import json
import os
import struct
import termios
import time

import pytest

from space.errors import GuestError, MachineLost, OutcomeUnknown, Unavailable
from space.model.command import CommandSpec, CommandState, ExitKind
from space.model.ids import new_id
from space.node import guests
from space.node.commands import Commands
from space.node.guests import Guest
from space.node.records import CommandRecords
from space.node.runs import Run
from space.node.tasks import Tasks
from space.protocol.frames import FRAME_BYTES_MAX, HEADER, TRAILER, FrameType

OFFSET = struct.Struct(">Q")
PATIENCE_S = 10


def frame(kind: FrameType, stream: int, payload: bytes, /) -> bytes:
    return HEADER.pack(b"SP", kind, 0, stream, len(payload)) + payload + TRAILER


def message(frame_type: FrameType, stream: int, /, **fields) -> bytes:
    return frame(frame_type, stream, json.dumps(fields).encode())


class ScriptedGuest:
    """The other end of the FIFOs: reads what the host says, frame by frame, and writes whatever a test wants."""

    def __init__(self, directory):
        directory.mkdir(parents=True, exist_ok=True)
        for name in ("in", "out"):
            os.mkfifo(directory / name)
        self.directory = directory
        self.reads = os.open(directory / "in", os.O_RDWR | os.O_NONBLOCK)
        self.writes = os.open(directory / "out", os.O_RDWR | os.O_NONBLOCK)
        self.buffer = bytearray()

    def close(self):
        for descriptor in (self.reads, self.writes):
            if descriptor >= 0:
                os.close(descriptor)
        self.reads = self.writes = -1

    async def next(self, wanted: FrameType) -> tuple[int, bytes]:
        """Return stream and payload of the next frame of that kind, dropping others and padding."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                start = self.buffer.find(b"SP")
                if start >= 0 and len(self.buffer) >= start + HEADER.size:
                    _, kind, _, stream, size = HEADER.unpack_from(self.buffer, start)
                    end = start + HEADER.size + size + len(TRAILER)
                    if len(self.buffer) >= end:
                        payload = bytes(self.buffer[start + HEADER.size : end - len(TRAILER)])
                        del self.buffer[:end]
                        if kind == wanted:
                            return stream, payload
                        continue
                await self._readable()

    async def _readable(self):
        try:
            self.buffer += os.read(self.reads, 1 << 20)
        except BlockingIOError:
            await asyncio.sleep(0)

    async def write(self, data: bytes):
        view = memoryview(data)
        async with asyncio.timeout(60):
            while view:
                try:
                    view = view[os.write(self.writes, view) :]
                except BlockingIOError:
                    await asyncio.sleep(0)

    async def welcome(self, commands=(), number=0):
        _, payload = await self.next(FrameType.HELLO)
        nonce = json.loads(payload)["nonce"]
        fields = {"version": 1, "nonce": nonce, "boot_id": "boot", "pid": 1, "number": number}
        await self.write(message(FrameType.WELCOME, 0, **fields, commands=list(commands)))

    async def request(self) -> tuple[int, dict]:
        number, payload = await self.next(FrameType.REQUEST)
        return number, json.loads(payload)


class Owner:
    """Owns a guest the way machines do, with commands of its own."""

    def __init__(self, commands: Commands):
        self.commands = commands
        self.lost: list[str] = []
        self.kind = ExitKind.LOST

    def on_welcome(self, guest, welcome):
        self.commands.on_welcome(guest, welcome)

    def on_exit(self, guest, fields):
        self.commands.on_exit(guest, fields)

    def on_lost(self, guest, cause):
        self.lost.append(cause)
        self.commands.machine_lost(guest.machine, self.kind)


@pytest.fixture
async def tasks():
    tasks = Tasks()
    yield tasks
    await tasks.close()


@pytest.fixture
def commands(tmp_path, tasks):
    return Commands(CommandRecords(tmp_path / "commands"), tasks, 3600)


@pytest.fixture
def scripted(tmp_path):
    scripted = ScriptedGuest(tmp_path / "channel")
    yield scripted
    scripted.close()


@pytest.fixture
async def guest(scripted, commands):
    guest = Guest(new_id("sbx"), scripted.directory, Owner(commands))
    await asyncio.gather(guest.greet(), scripted.welcome())
    yield guest
    guest.detach()


async def eventually(condition):
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0)


async def test_requests_are_answered_by_number_and_failures_are_typed(guest, scripted):
    asked = [asyncio.ensure_future(guest.request("activity")) for _ in range(2)]
    numbers = [(await scripted.request())[0] for _ in range(2)]
    wire = {"code": "os-error", "message": "odd", "errno": 5}
    await scripted.write(message(FrameType.REPLY, numbers[1], error=wire))
    await scripted.write(message(FrameType.REPLY, numbers[0], ok={"commands": 1}))
    assert (await asked[0])["commands"] == 1
    with pytest.raises(GuestError) as caught:
        await asked[1]
    assert caught.value.details == {"guest_code": "os-error", "errno": 5}


@pytest.mark.parametrize("said_since", [False, True])
async def test_a_greeting_fills_up_a_cut_frame_only_where_there_may_be_one(guest, scripted, said_since):
    asked = asyncio.ensure_future(guest.request("quiesce", {"event": "suspend"}))
    number, _ = await scripted.request()
    await scripted.write(message(FrameType.REPLY, number, ok={"hooks": []}))
    await asked
    if said_since:
        guest.tell("activity")
    for greeted_before in (False, True):
        guest.detach()
        before = Guest.traffic["sent"]
        await asyncio.gather(guest.greet(), scripted.welcome())
        assert (Guest.traffic["sent"] - before > FRAME_BYTES_MAX) == (said_since or greeted_before)


async def test_answers_that_nobody_asked_for_change_nothing(guest, scripted):
    for number in (5000, 7000, 2**32 - 1):
        await scripted.write(message(FrameType.REPLY, number, ok={}))
        await scripted.write(message(FrameType.EVENT, number, event="exit", id="x", kind="exited", produced={}))
        await scripted.write(message(FrameType.EVENT, number, event="surprise"))
        await scripted.write(frame(FrameType.DATA, number, b"x" * 1000))
        await scripted.write(frame(FrameType.ACK, number, OFFSET.pack(2**63)))
        await scripted.write(frame(FrameType.EOF, number, OFFSET.pack(2**63)))
        await scripted.write(message(FrameType.RESET, number, code="no", message="no"))
    asked = asyncio.ensure_future(guest.request("activity"))
    number, _ = await scripted.request()
    await scripted.write(message(FrameType.REPLY, number, ok={"commands": 0}))
    assert (await asked)["commands"] == 0


async def test_a_guest_that_never_answers_is_given_up(scripted, commands):
    guest = Guest(new_id("sbx"), scripted.directory, Owner(commands))
    with pytest.raises(MachineLost) as caught:
        await guest.greet(timeout_s=0.05)
    assert caught.value.code == "guest-unresponsive"
    guest.detach()


async def test_no_channel_is_a_lost_machine(tmp_path, commands):
    with pytest.raises(MachineLost):
        await Guest(new_id("sbx"), tmp_path / "none", Owner(commands)).greet()


async def test_the_end_of_the_channel_is_the_end_of_the_machine(guest, scripted):
    asked = asyncio.ensure_future(guest.request("activity"))
    await scripted.request()
    scripted.close()
    with pytest.raises(MachineLost):
        await asked
    assert guest._owner.lost == ["machine-exited"]
    with pytest.raises(MachineLost):
        await guest.request("activity")


async def test_a_request_that_is_not_answered_has_an_unknown_outcome(guest):
    with pytest.raises(OutcomeUnknown):
        await guest.request("activity", timeout_s=0.05)
    assert not guest._answers


async def test_noise_between_frames_costs_a_greeting_and_repeated_noise_the_channel(guest, scripted):
    for _ in range(guests.OUT_OF_STEP_MAX):
        await scripted.write(b"noise" * 100)
        await scripted.welcome()
        await eventually(lambda: guest.connected)
    await scripted.write(b"noise" * 100)
    await eventually(lambda: guest._owner.lost)
    assert guest._owner.lost == ["protocol-violation"]
    assert not guest.connected


async def test_a_flood_of_tiny_frames_leaves_time_for_everybody_else(guest, scripted):
    """Between two beats of the same event loop it works for a fraction of a second at most, however busy the machine."""
    late = [0.0]
    done = asyncio.Event()

    async def beat():
        while not done.is_set():
            before = time.thread_time()
            await asyncio.sleep(0.01)
            late[0] = max(late[0], time.thread_time() - before)

    beating = asyncio.ensure_future(beat())
    tiny = message(FrameType.EVENT, 0, event="x") * 2000
    for _ in range(20):
        await scripted.write(tiny)
    await eventually(lambda: _unread(scripted.writes) == 0)
    done.set()
    await beating
    assert late[0] < 0.25
    assert guest.connected


def _unread(descriptor: int) -> int:
    return struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))[0]


async def test_a_guest_that_does_not_read_is_not_asked_without_end(guest):
    with pytest.raises(Unavailable) as caught:
        _ask_without_end(guest)
    assert caught.value.code == "guest-busy"
    held = guest._channel._control_bytes + guest._channel._pending_bytes
    assert held < 3 * 1024 * 1024


def _ask_without_end(guest: Guest) -> None:
    while True:
        guest.ask("stat", {"path": "/" + "x" * 4000})


async def start(guest, scripted, commands, **spec):
    """Start a session and answer for the guest; return it."""
    session = commands.create(guest.machine, CommandSpec(argv=("x",), **spec), None)
    starting = asyncio.ensure_future(commands.start(session, guest))
    number, asked = await scripted.request()
    assert asked["op"] == "start"
    await scripted.write(message(FrameType.REPLY, number, ok={"pid": 5}))
    await starting
    return session


async def test_output_beyond_the_window_loses_the_command_and_nothing_else(guest, scripted, commands):
    session = await start(guest, scripted, commands)
    reader = session.read_from({})
    stdout = session.record.numbers["stdout"]
    for _ in range(20):
        await scripted.write(frame(FrameType.DATA, stdout, b"x" * 256 * 1024))
    await scripted.next(FrameType.RESET)
    exited = {"event": "exit", "id": session.id, "kind": "exited", "code": 0, "produced": {"stdout": 5, "stderr": 0}}
    await scripted.write(message(FrameType.EVENT, 0, **exited))
    await eventually(lambda: session.ended)
    assert session.record.exit.kind is ExitKind.LOST
    assert session.produced["stdout"] <= 3 * 1024 * 1024
    assert guest.connected
    reader.close()


async def test_nothing_is_acknowledged_that_an_attached_reader_has_not_taken(guest, scripted, commands):
    """E3: the guest may be one window ahead of what was acknowledged, and that is one read-ahead ahead of the reader."""
    session = await start(guest, scripted, commands)
    reader = session.read_from({})
    stdout = session.record.numbers["stdout"]
    for _ in range(8):
        await scripted.write(frame(FrameType.DATA, stdout, b"x" * 256 * 1024))
        await eventually(lambda: _unread(scripted.writes) == 0)
    acked = 0
    while session.produced["stdout"] > acked and acked < 1024 * 1024:
        acked = OFFSET.unpack((await scripted.next(FrameType.ACK))[1])[0]
    assert acked == 1024 * 1024
    taken = 0
    while taken < 2 * 1024 * 1024:
        taken += len((await reader.next()).data)
    reader.close()
    while acked < 2 * 1024 * 1024:
        acked = OFFSET.unpack((await scripted.next(FrameType.ACK))[1])[0]
    assert session.output("stdout").acked == 2 * 1024 * 1024


async def test_a_guest_cannot_end_the_commands_of_another(guest, scripted, commands):
    session = await start(guest, scripted, commands)
    other = Guest(new_id("sbx"), scripted.directory, Owner(commands))
    commands.on_exit(other, {"id": session.id, "kind": "exited", "code": 0, "signal": None, "produced": {}})
    assert not session.ended
    welcome = {"version": 1, "nonce": "", "boot_id": "b", "pid": 1, "number": 0, "commands": []}
    commands.on_welcome(other, welcome)
    assert session.record.state is CommandState.RUNNING


async def test_a_welcome_that_lies_about_stdin_closes_it_and_grows_nothing(guest, scripted, commands):
    session = await start(guest, scripted, commands, stdin=True)
    numbers = session.record.numbers
    place = {"number": 1, "acked": 2**62, "produced": 0, "ended": False}
    streams = {name: {**place, "number": number} for name, number in numbers.items()}
    listed = {"id": session.id, "pid": 5, "state": "running", "exit": None, "streams": streams}
    greeting = asyncio.ensure_future(guest.greet())
    await scripted.welcome([listed], number=100)
    await greeting
    assert guest.room(numbers["stdin"]) == 0
    assert await session.feed(b"x" * 100_000) == 100_000
    assert guest._channel._pending_bytes + guest._channel._control_bytes < 1024


async def test_a_welcome_without_a_command_that_ran_makes_it_lost(guest, scripted, commands):
    session = await start(guest, scripted, commands)
    greeting = asyncio.ensure_future(guest.greet())
    await scripted.welcome()
    await greeting
    assert session.record.exit.kind is ExitKind.LOST


async def test_a_start_that_the_guest_never_saw_may_be_made_again(guest, scripted, commands):
    session = commands.create(guest.machine, CommandSpec(argv=("x",)), None)
    starting = asyncio.ensure_future(commands.start(session, guest))
    await scripted.request()
    greeting = asyncio.ensure_future(guest.greet())
    await scripted.welcome()
    await greeting
    with pytest.raises(OutcomeUnknown):
        await starting
    assert session.record.state is CommandState.CREATED


async def test_unknown_commands_of_a_guest_are_killed_and_forgotten(guest, scripted):
    listed = [{"id": "cmdleft", "pid": 5, "state": "running", "exit": None, "streams": {}}]
    greeting = asyncio.ensure_future(guest.greet())
    await scripted.welcome(listed, number=50)
    await greeting
    _, signal = await scripted.request()
    _, forget = await scripted.request()
    assert (signal["op"], signal["id"], signal["signal"], signal["tree"]) == ("signal", "cmdleft", 9, True)
    assert (forget["op"], forget["id"]) == ("forget", "cmdleft")


async def test_a_run_whose_output_was_torn_is_lost(guest, scripted, commands):
    run = Run(guest, CommandSpec(argv=("x",)), None, lambda *_: True)
    commands.add_run(run)
    starting = asyncio.ensure_future(run.start())
    number, asked = await scripted.request()
    await scripted.write(message(FrameType.REPLY, number, ok={"pid": 5}))
    await starting
    await scripted.write(message(FrameType.RESET, asked["streams"]["stdout"], code="broken", message=""))
    exited = {"event": "exit", "id": run.id, "kind": "exited", "code": 0, "produced": {}}
    await scripted.write(message(FrameType.EVENT, 0, **exited))
    assert (await run.wait()).kind is ExitKind.LOST


async def test_a_run_whose_machine_is_gone_ends_as_its_owner_finds_out(guest, scripted, commands):
    """E18: the machine may have been killed for want of memory, and its broken output does not hide that."""
    run = Run(guest, CommandSpec(argv=("x",)), None, lambda *_: True)
    commands.add_run(run)
    starting = asyncio.ensure_future(run.start())
    number, _ = await scripted.request()
    await scripted.write(message(FrameType.REPLY, number, ok={"pid": 5}))
    await starting
    guest._owner.kind = ExitKind.OOM_KILLED
    scripted.close()
    assert (await run.wait()).kind is ExitKind.OOM_KILLED
