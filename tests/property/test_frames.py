"""The channel under every way of cutting, delaying and losing bytes that a restart can bring about."""

import itertools
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from space.protocol.channel import Channel
from space.protocol.events import Ended, Greeted, Happened, OutOfStep, Received, Requested, WasReset, Welcomed
from space.protocol.frames import PAYLOAD_BYTES_MAX, Decoder, Frame, FrameType, encode
from space.protocol.guest import GuestChannel
from space.protocol.host import HostChannel
from space.protocol.streams import WINDOW_BYTES

LIMITS = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
OUT, IN = 1001, 1002

payloads = st.binary(max_size=2000) | st.sampled_from(
    [b"\0" * 5000, b"SP\x01\0" * 100, b"\xa5ECP" * 50, bytes(PAYLOAD_BYTES_MAX)]
)
frames = st.builds(
    lambda kind, stream, payload: (kind, stream, payload),
    st.sampled_from([FrameType.REQUEST, FrameType.REPLY, FrameType.EVENT, FrameType.DATA, FrameType.RESET]),
    st.integers(0, 2**32 - 1),
    payloads,
)


def cut(data: bytes, points: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(point % (len(data) + 1) for point in points)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


@LIMITS
@given(st.lists(frames, max_size=6), st.lists(st.integers(0, 2**30), max_size=20))
def test_frames_survive_any_cutting_into_chunks(sent: list[tuple[FrameType, int, bytes]], points: list[int]):
    stream = b"".join(b"".join(encode(*frame)) for frame in sent)
    decoder = Decoder(FrameType.HELLO)
    found = []
    for chunk in cut(stream, points):
        decoder.feed(chunk)
        while (frame := decoder.next_frame()) is not None:
            found.append(frame)
    assert found == [Frame(*frame) for frame in sent]
    assert not decoder.hunting


@LIMITS
@given(st.binary(max_size=4000), st.lists(st.integers(0, 4000), max_size=8), st.booleans())
def test_no_bytes_whatever_make_either_end_raise(noise: bytes, points: list[int], greeted: bool):
    for channel in (HostChannel(), GuestChannel()):
        if greeted and isinstance(channel, HostChannel):
            channel.hello()
        for chunk in cut(noise, points):
            channel.feed(chunk)
            while channel.next_event() is not None:
                pass


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@LIMITS
@given(
    st.sampled_from(["start", "signal", "file-read", "configure", "watch", "nonsense"]),
    st.dictionaries(st.text(max_size=8), json_values, max_size=5),
)
def test_whatever_a_request_holds_it_is_either_checked_or_refused(op: str, fields: dict[str, Any]):
    import json

    wire = Wire()
    wire.greet()
    payload = json.dumps({"op": op, **fields}).encode()
    wire.guest.feed(b"".join(b"".join(buffers) for buffers in [encode(FrameType.REQUEST, 77, payload)]))
    event = wire.guest.next_event()
    if event is None:
        assert wire.guest.outgoing()  # a refusal
    else:
        assert isinstance(event, Requested)
        assert event.op == op


@dataclass
class Wire:
    """A host and a guest with one command, joined by pipes that lose what a host's death loses."""

    host: HostChannel = field(default_factory=HostChannel)
    guest: GuestChannel = field(default_factory=GuestChannel)
    up: bytearray = field(default_factory=bytearray)
    down: bytearray = field(default_factory=bytearray)
    stored: bytearray = field(default_factory=bytearray)
    taken: bytearray = field(default_factory=bytearray)
    welcomed: bool = False
    opened: bool = False
    ended: bool = False
    exits: int = 0
    received_by_host: int = 0

    def open_command(self) -> None:
        self.guest.open_send(OUT, durable=True)
        self.guest.open_receive(IN, durable=True)
        self.host.open_receive(OUT, durable=True)
        self.host.open_send(IN, durable=True)
        self.opened = True

    def greet(self) -> None:
        self.host.hello()
        self.settle()
        assert self.welcomed

    def restart_host(self, kept_of_write: int, kept_of_read: int) -> None:
        """The host is killed: a frame is cut short on its way to the guest, what it had read and not stored is lost."""
        half = b"".join(self.host.outgoing())
        self.down += half[: kept_of_write % (len(half) + 1)]
        del self.up[: kept_of_read % (len(self.up) + 1)]
        self.host = HostChannel()
        self.welcomed = self.ended = False
        self.host.hello()

    def record(self) -> dict[str, Any]:
        acked, produced, ended = self.guest.place(OUT)
        streams = {"stdout": {"number": OUT, "acked": acked, "produced": produced, "ended": ended}}
        if self.guest.receives(IN):
            acked, produced, ended = self.guest.taken(IN)
            streams["stdin"] = {"number": IN, "acked": acked, "produced": produced, "ended": ended}
        return {"id": "c", "pid": 2, "state": "running", "exit": None, "streams": streams}

    def report_exit(self) -> None:
        if self.guest.place(OUT)[2]:
            fields = {
                "event": "exit",
                "id": "c",
                "kind": "exited",
                "code": 0,
                "produced": {"stdout": self.guest.place(OUT)[1]},
            }
            self.guest.event(fields, after=[OUT])

    def on_host(self, event: Any) -> None:
        if isinstance(event, Welcomed):
            self.welcomed = True
            for command in event.welcome["commands"]:
                places = command["streams"]
                if not self.host.receives(OUT):
                    self.host.open_receive(OUT, durable=True, offset=len(self.stored))
                if "stdin" in places:
                    place = places["stdin"]
                    self.host.resume_send(IN, place["acked"], place["produced"], ended=place["ended"])
        elif isinstance(event, Received):
            assert event.number == OUT
            assert event.offset == len(self.stored)
            self.stored += event.data
            self.host.ack(OUT, len(self.stored))
        elif isinstance(event, Ended):
            self.ended = True
        elif isinstance(event, Happened):
            assert event.name == "exit"
            assert event.fields["produced"]["stdout"] == len(self.stored), "the exit came before the output"
            self.exits += 1
        else:
            assert not isinstance(event, (WasReset, OutOfStep)), event

    def on_guest(self, event: Any) -> None:
        if isinstance(event, Greeted):
            self.guest.welcome("boot", 1, [self.record()] if self.opened else [])
            if self.opened:
                self.report_exit()
        elif isinstance(event, Received):
            assert event.offset == len(self.taken)
            self.taken += event.data
            self.guest.ack(IN, len(self.taken))
        else:
            assert not isinstance(event, WasReset), event

    def step(self, count: int) -> bool:
        """Move up to ``count`` bytes each way; False when there was nothing to move."""
        moved = False
        for channel, pipe, other, react in (
            (self.host, self.down, self.guest, self.on_guest),
            (self.guest, self.up, self.host, self.on_host),
        ):
            moved |= fill(channel, pipe, count)
            chunk = bytes(pipe[:count])
            del pipe[:count]
            other.feed(chunk)
            while (event := other.next_event()) is not None:
                react(event)
            moved |= bool(chunk)
        return moved

    def settle(self) -> None:
        for _ in range(5000):
            if not self.step(1 << 20):
                return
        raise AssertionError("never quiet")


def fill(channel: Channel, pipe: bytearray, count: int) -> bool:
    room = min(count, (1 << 20) - len(pipe))
    buffers = channel.outgoing()
    data = b"".join(buffers)[: max(0, room)]
    pipe += data
    channel.written(len(data))
    return bool(data)


steps = st.one_of(
    st.tuples(st.just("produce"), st.integers(1, 400_000)),
    st.tuples(st.just("type"), st.integers(1, 100_000)),
    st.tuples(st.just("move"), st.integers(1, 700_000)),
    st.tuples(st.just("restart"), st.integers(0, 2**20)),
    st.tuples(st.just("hello"), st.integers(0, 2**20)),
    st.tuples(st.just("finish"), st.integers(0, 1)),
)


@settings(LIMITS, max_examples=80)
@given(st.lists(steps, max_size=25))
def test_output_is_neither_lost_nor_doubled_however_often_the_host_is_killed(script: list[tuple[str, int]]):
    wire = Wire()
    wire.greet()
    wire.open_command()
    produced, typed = bytearray(), bytearray()
    for verb, amount in script:
        if verb == "produce" and not wire.guest.place(OUT)[2]:
            size = min(amount, wire.guest.room(OUT))
            data = bytes((len(produced) + i) % 253 for i in range(size))
            wire.guest.send(OUT, data)
            produced += data
        elif verb == "type" and wire.welcomed:
            size = min(amount, wire.host.room(IN))
            data = bytes((len(typed) + i) % 241 for i in range(size))
            wire.host.send(IN, data)
            typed += data
        elif verb == "move":
            wire.step(amount)
        elif verb == "restart":
            wire.restart_host(amount, amount * 7)
            # What the host had of the input and the guest had not is gone with it; its client sends that again.
            wire.settle()
            typed = typed[: len(wire.taken)]
        elif verb == "hello":
            wire.host.hello()
            wire.welcomed = False
        elif verb == "finish" and not wire.guest.place(OUT)[2]:
            wire.guest.end(OUT)
            wire.report_exit()
        acked, sent_at_most, _ = wire.guest.place(OUT)
        assert sent_at_most <= acked + WINDOW_BYTES
        assert len(wire.stored) <= len(produced)
    wire.settle()
    assert wire.welcomed
    assert wire.stored == produced
    assert wire.taken == typed
    if wire.guest.place(OUT)[2]:
        assert wire.ended
        assert wire.exits >= 1
