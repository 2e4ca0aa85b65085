"""The journal: what was written is read back, and what was cut short or damaged does no harm."""

import json
from pathlib import Path

import pytest

from space.broker.journal import Entry, Journal, Phase
from space.drivers.processes import Process
from space.model.ids import new_id
from space.model.sandbox import Resources

PROCESS = Process(4711, 99, "boot")


def entry(**changes: object) -> Entry:
    first = Entry(
        machine=new_id("sbx"),
        driver="fake",
        template="sha256:" + "0" * 64,
        hostname="h",
        resources=Resources(1.5, 2, 3, 4),
        phase=Phase.RUNNING,
        link=7,
        process=PROCESS,
        cause=None,
    )
    return first.to(first.phase, **changes)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    one = Journal(tmp_path / "machines")
    one.open()
    return one


@pytest.mark.parametrize("phase", list(Phase))
def test_what_was_written_is_read_back(journal: Journal, phase: Phase) -> None:
    written = entry().to(phase, was_paused=True, cause="oom-killed")
    journal.write(written)
    assert journal.read_all().entries == {written.machine: written}


def test_the_last_entry_written_holds(journal: Journal) -> None:
    first = entry()
    journal.write(first)
    journal.write(first.to(Phase.STOPPED, process=None, link=None))
    assert journal.read_all().entries[first.machine].phase is Phase.STOPPED
    assert journal.read_all().entries[first.machine].process is None


def test_a_removed_entry_is_gone_and_may_be_removed_again(journal: Journal) -> None:
    one = entry()
    journal.write(one)
    journal.remove(one.machine)
    journal.remove(one.machine)
    assert journal.read_all().entries == {}


def test_an_entry_whose_writing_was_cut_short_leaves_the_one_before(journal: Journal, tmp_path: Path) -> None:
    one = entry()
    journal.write(one)
    (tmp_path / "machines" / one.machine / "journal.json.tmp").write_text('{"machine": "sb')
    assert journal.read_all().entries == {one.machine: one}


def test_a_first_entry_that_was_cut_short_is_as_if_nothing_had_been(journal: Journal, tmp_path: Path) -> None:
    directory = tmp_path / "machines" / new_id("sbx")
    directory.mkdir()
    (directory / "journal.json.tmp").write_text("{")
    found = journal.read_all()
    assert (found.entries, found.damaged) == ({}, frozenset())
    assert not directory.exists()


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "not json", '{"machine": 1}', "\udcff".encode("utf-8", "surrogateescape").decode("latin-1")],
)
def test_a_damaged_entry_is_named_and_kept(journal: Journal, tmp_path: Path, text: str) -> None:
    one = entry()
    journal.write(one)
    path = tmp_path / "machines" / one.machine / "journal.json"
    path.write_text(text)
    found = journal.read_all()
    assert (found.entries, found.damaged) == ({}, frozenset({one.machine}))
    assert path.exists()


def test_an_entry_under_another_machines_name_is_damage(journal: Journal, tmp_path: Path) -> None:
    one = entry()
    journal.write(one)
    other = new_id("sbx")
    (tmp_path / "machines" / one.machine).rename(tmp_path / "machines" / other)
    assert journal.read_all().damaged == {other}


def test_an_entry_with_a_field_of_a_newer_version_is_not_half_understood(journal: Journal, tmp_path: Path) -> None:
    one = entry()
    journal.write(one)
    path = tmp_path / "machines" / one.machine / "journal.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "from_the_future": 1}))
    assert journal.read_all().damaged == {one.machine}


def test_a_claim_is_one_write_after_which_the_spare_is_no_more(journal: Journal, tmp_path: Path) -> None:
    """L12: at no moment two owners of one body, or none."""
    spare = entry(spare=True)
    journal.write(spare)
    claimed = spare.to(Phase.RUNNING, machine=new_id("sbx"), spare=False)
    journal.write(claimed)
    assert journal.read_all().entries == {claimed.machine: claimed}
    assert [path.name for path in (tmp_path / "machines").iterdir()] == [spare.machine]
    journal.remove(claimed.body)
    assert journal.read_all().entries == {}


def test_an_entry_from_before_there_were_bodies_is_read_with_the_machines_own(journal: Journal, tmp_path: Path) -> None:
    one = entry()
    journal.write(one)
    path = tmp_path / "machines" / one.machine / "journal.json"
    newer = ("body", "spare", "snapshot", "restored", "template_bytes", "former_links")
    path.write_text(
        json.dumps({name: value for name, value in json.loads(path.read_text()).items() if name not in newer})
    )
    assert journal.read_all().entries == {one.machine: one}


@pytest.mark.parametrize("body", ["../../etc", "sbx", "SBXABCDEFGH234567AB"])
def test_a_body_that_is_no_id_is_damage(journal: Journal, tmp_path: Path, body: str) -> None:
    one = entry()
    journal.write(one)
    path = tmp_path / "machines" / one.machine / "journal.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "body": body}))
    assert journal.read_all().damaged == {one.machine}
