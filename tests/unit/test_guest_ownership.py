"""Files that the agent makes as root for somebody else, what it tells of them, and commands that wait for their output."""

import json
import os
import pwd
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent import Agent, Peer, Refusal

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="needs root")
OWNER = pwd.getpwnam("nobody")


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    one = Agent(tmp_path_factory.mktemp("agent") / "channel")
    yield one
    one.stop()


@pytest.fixture
def peer(agent: Agent) -> Iterator[Peer]:
    one = agent.peer()
    yield one
    one.close()


def test_what_is_made_for_an_owner_is_the_owners_with_every_new_directory(peer: Peer, tmp_path: Path):
    path = tmp_path / "new/dir/file"
    assert peer.put("file-write", b"x", path=str(path), owner="nobody") == {
        "size": 1,
        "created": True,
        "full_path": str(path),
    }
    assert peer.call("mkdir", path=str(tmp_path / "a/b"), owner="nobody")["created"]
    made = [path, path.parent, path.parent.parent, tmp_path / "a", tmp_path / "a/b"]
    assert {(one.stat().st_uid, one.stat().st_gid) for one in made} == {(OWNER.pw_uid, OWNER.pw_gid)}
    assert tmp_path.stat().st_uid == 0


def test_relative_paths_and_the_tilde_begin_in_the_owners_home(peer: Peer):
    for path in (".", "~", "a/..", "~/b/.."):
        assert peer.call("stat", path=path, owner="root")["full_path"] == pwd.getpwnam("root").pw_dir
    assert "full_path" not in {name for name, value in peer.call("stat", path=".").items() if value is not None}
    with pytest.raises(Refusal, match="no-such-user"):
        peer.call("stat", path=".", owner="nobody-of-that-name")


def test_a_link_is_told_with_what_it_leads_to(peer: Peer, tmp_path: Path):
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "file").chmod(0o640)
    (tmp_path / "near").symlink_to("file")
    (tmp_path / "far").symlink_to("near")
    (tmp_path / "nowhere").symlink_to("gone")
    told = {line["name"]: line.get("leads_to") for line in peer.lines("list-dir", path=str(tmp_path), owner="root")}
    end = {"path": str(tmp_path / "file"), "type": "file", "mode": 0o640}
    assert told == {"file": None, "near": end, "far": end, "nowhere": None}


def test_moving_makes_the_directories_above_and_never_for_what_is_not_there(peer: Peer, tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(Refusal, match="not-found"):
        peer.call("move", source=str(tmp_path / "gone"), target=str(tmp_path / "x/y"), parents=True, owner="nobody")
    assert not (tmp_path / "x").exists()
    peer.call("move", source=str(tmp_path / "file"), target=str(tmp_path / "x/y"), parents=True, owner="nobody")
    assert (tmp_path / "x/y").exists()
    assert (tmp_path / "x").stat().st_uid == OWNER.pw_uid


def test_metadata_is_replaced_as_a_whole_within_its_namespace(peer: Peer, tmp_path: Path):
    path = tmp_path / "file"
    peer.put("file-write", b"x", path=str(path), namespace="ours", metadata={"a": "1", "b": "2"})
    os.setxattr(path, "user.other", b"stays")
    assert peer.call("stat", path=str(path), namespace="ours")["metadata"] == {"a": "1", "b": "2"}
    peer.put("file-write", b"x", path=str(path), namespace="ours", metadata={"b": "3"})
    assert sorted(os.listxattr(path)) == ["user.other", "user.ours.b"]
    assert [line["metadata"] for line in peer.lines("list-dir", path=str(tmp_path), namespace="ours")] == [{"b": "3"}]


def test_a_mark_comes_after_all_that_happened_before_it_was_asked_for(agent: Agent, tmp_path: Path):
    peer = agent.peer()
    number, silent = peer.channel.new_number(), peer.channel.new_number()
    for stream, marks in ((number, True), (silent, False)):
        peer.channel.open_receive(stream)
        peer.call("watch", path=str(tmp_path), stream=stream, marks=marks)
    for turn in range(20):
        (tmp_path / f"f{turn}").touch()
        peer.call("watch-mark", mark=f"m{turn}")
        lines = [json.loads(line) for line in bytes(peer.data[number]).splitlines()]
        assert (lines[-1]["event"], lines[-1]["path"]) == ("mark", f"m{turn}")
        assert ("create", f"f{turn}") in {(line["event"], line["path"]) for line in lines}
    peer.until(lambda: b"f19" in bytes(peer.data.get(silent, b"")))
    assert b"mark" not in bytes(peer.data[silent])


def test_an_upload_for_an_owner_is_three_events_in_order(agent: Agent, tmp_path: Path):
    peer = agent.peer()
    number = peer.channel.new_number()
    peer.channel.open_receive(number)
    peer.call("watch", path=str(tmp_path), stream=number, marks=True)
    peer.put("file-write", b"x" * 1000, path=str(tmp_path / "f"), owner="nobody", namespace="e2b", metadata={})
    peer.call("watch-mark", mark="m")
    events = [json.loads(line)["event"] for line in bytes(peer.data[number]).splitlines()]
    assert events == ["create", "attributes", "modify", "mark"]


def test_a_command_that_waits_for_its_output_ends_with_the_last_writer(peer: Peer):
    script = "(sleep 0.3; echo late) & echo early"
    assert peer.sh(script, wait_output=True).stdout == b"early\nlate\n"
    assert peer.sh(script).stdout == b"early\n"


@pytest.mark.parametrize("number", [9, 15])
def test_a_command_that_is_told_to_end_is_not_waited_for_by_what_it_left_running(peer: Peer, number: int):
    command = peer.start("sh", "-c", "setsid sleep 60 & echo $!; exec sleep 60", wait_output=True)
    peer.until(lambda: b"\n" in bytes(peer.data.get(command.streams["stdout"], b"")))
    peer.call("signal", id=command.id, signal=number, tree=False)
    result = peer.finish(command)
    os.kill(int(result.stdout), 9)
    assert result.exit["signal"] == number


def test_what_is_configured_of_the_default_user_is_not_told_to_programs_of_others(agent: Agent):
    peer = agent.peer()
    peer.call("configure", env={"HOME": "/elsewhere", "COLOR": "blue"}, user="nobody")
    script = "echo $HOME $COLOR"
    assert peer.sh(script, cwd="/").stdout == b"/elsewhere blue\n"
    assert peer.sh(script, cwd="/", user="root").stdout == f"{pwd.getpwnam('root').pw_dir} blue\n".encode()
