"""Retained output: what is counted can be read, whatever was dropped in between."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from space.errors import HostError
from space.node import spool as spool_module
from space.node.spool import APPEND_BYTES_MAX, TAIL_BYTES_MIN, Spool

MIB = 1024 * 1024


def read_all(spool: Spool, offset: int = 0) -> bytes:
    out = bytearray()
    while piece := spool.read(offset, 65536):
        out += piece
        offset += len(piece)
    return bytes(out)


def pattern(start: int, size: int) -> bytes:
    return b"".join(n.to_bytes(8, "big") for n in range(start // 8, (start + size) // 8 + 1))[
        start % 8 : start % 8 + size
    ]


def test_everything_is_kept_while_it_fits(tmp_path):
    spool = Spool(tmp_path / "s", 2 * MIB)
    spool.append(b"hello ")
    spool.append(memoryview(b"world"))
    assert spool.total == 11
    assert read_all(spool) == b"hello world"
    assert spool.read(6, 3) == b"wor"
    assert spool.read(11, 10) == b""


def test_no_file_appears_before_the_first_byte(tmp_path):
    spool = Spool(tmp_path / "s", 2 * MIB)
    assert spool.read(0, 10) == b""
    assert not (tmp_path / "s").exists()


def test_head_and_tail_survive_when_the_middle_is_dropped(tmp_path):
    spool = Spool(tmp_path / "s", 2 * MIB)
    size = 13 * MIB + 5
    data = pattern(0, size)
    for start in range(0, size, 300_000):
        spool.append(data[start : start + 300_000])
    head = MIB
    assert spool.read(0, head + 99) == data[:head]
    resumes = spool.kept_from(head)
    assert head < resumes
    assert resumes == size - TAIL_BYTES_MIN
    assert read_all(spool, resumes) == data[resumes:]
    assert spool.read(resumes - 1, 10) == b""


def test_another_object_on_the_same_file_goes_on_where_the_dead_one_was(tmp_path):
    first = Spool(tmp_path / "s", 2 * MIB)
    first.append(pattern(0, 3 * MIB))
    second = Spool(tmp_path / "s", 64 * MIB)
    assert second.total == 3 * MIB
    second.append(pattern(3 * MIB, MIB))
    assert read_all(second) == pattern(0, 4 * MIB)


def test_death_between_data_and_count_keeps_every_counted_byte_readable(tmp_path):
    """The ring has room for one append more than it promises, so half an append damages nothing that is counted."""
    spool = Spool(tmp_path / "s", 2 * MIB)
    size = 9 * MIB
    spool.append(pattern(0, size))
    with (tmp_path / "s").open("rb") as file:
        counted = file.read(spool_module.HEADER.size)
    spool.append(b"\xff" * APPEND_BYTES_MAX)
    with (tmp_path / "s").open("r+b") as file:
        file.write(counted)
    after_death = Spool(tmp_path / "s", 2 * MIB)
    assert after_death.total == size
    resumes = after_death.kept_from(MIB)
    assert read_all(after_death, resumes) == pattern(resumes, size - resumes)


def test_a_foreign_file_is_refused(tmp_path):
    (tmp_path / "s").write_bytes(b"not a spool at all, whatever it may say")
    with pytest.raises(HostError):
        Spool(tmp_path / "s", MIB)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(min_value=0, max_value=700), max_size=40),
    probe=st.integers(min_value=0, max_value=20_000),
)
def test_any_sequence_of_appends_reads_back_as_the_stream_minus_one_gap(tmp_path_factory, sizes, probe):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spool_module, "TAIL_BYTES_MIN", 1)
        patch.setattr(spool_module, "APPEND_BYTES_MAX", 256)
        spool = Spool(tmp_path_factory.mktemp("spool") / "s", 2000)
        data = pattern(0, sum(sizes))
        at = 0
        for size in sizes:
            spool.append(data[at : at + size])
            at += size
        assert spool.total == len(data)
        assert read_all(spool)[:1000] == data[:1000]
        start = spool.kept_from(probe)
        assert start >= min(probe, len(data))
        assert read_all(spool, start) == data[start:] or start < 1000 < spool.kept_from(1000)
        assert len(data) - spool.kept_from(1000) >= min(1000, max(0, len(data) - 1000))
        spool.close()


@pytest.mark.parametrize("start", [1, 10 * MIB, 2**40])
def test_a_stream_that_goes_on_from_anothers_has_a_gap_before_its_first_byte(tmp_path, start):
    spool = Spool(tmp_path / "s", 2 * MIB, start)
    assert (spool.total, spool.kept_bytes, spool.kept_from(0)) == (start, 0, start)
    spool.close()
    again = Spool(tmp_path / "s", 2 * MIB)
    assert again.total == start, "also when nothing was ever written"
    again.append(b"hello")
    assert (again.kept_from(0), again.kept_bytes) == (start, 5)
    assert again.read(0, 10) == b""
    assert read_all(again, start) == b"hello"
    again.append(pattern(5, 9 * MIB))
    assert again.kept_from(0) >= start
    assert read_all(again, again.total - 1000) == pattern(5, 9 * MIB)[-1000:]


def test_a_spool_of_before_there_were_such_streams_is_read(tmp_path):
    old = tmp_path / "s"
    old.write_bytes(spool_module.struct.pack(">8sQQQ", spool_module.MAGIC, MIB, TAIL_BYTES_MIN, 0))
    spool = Spool(old, 2 * MIB)
    spool.append(b"hello")
    assert (spool.kept_from(0), read_all(Spool(old, 2 * MIB))) == (0, b"hello")
