"""The program that looks at what is in a volume, in a directory of the test's own, and what is made of its answers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from space.e2b import content, volume_program
from space.e2b.keys import Tokens
from space.e2b.volume_program import carry_out
from space.errors import GuestError, InvalidRequest, NotFound, SandboxError, Unauthenticated


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    (tmp_path / "b").mkdir()
    (tmp_path / "b/inner").write_text("12345")
    (tmp_path / "a").symlink_to("/etc/passwd")
    return tmp_path


def ask(volume: Path, operation: str, path: str, **fields: Any) -> Any:
    return carry_out(operation, {"root": str(volume), "path": path, **fields})


def test_a_link_is_told_of_as_itself(volume: Path) -> None:
    told = ask(volume, "stat", "/a")["ok"]
    assert (told["type"], told["target"], told["name"], told["path"]) == ("symlink", "/etc/passwd", "a", "/a")


def test_a_directory_is_listed_to_a_depth_each_followed_by_what_is_in_it(volume: Path) -> None:
    assert [one["path"] for one in ask(volume, "list", "/", depth=1)["ok"]] == ["/a", "/b"]
    assert [one["path"] for one in ask(volume, "list", "/", depth=2)["ok"]] == ["/a", "/b", "/b/inner"]
    assert ask(volume, "list", "/b/inner", depth=1) == {"error": "ENOTDIR"}


def test_a_list_has_an_end(volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volume_program, "_ENTRIES_MAX", 2)
    assert ask(volume, "list", "/", depth=2) == {"error": "E2BIG"}


def test_directories_above_are_made_only_when_asked_for(volume: Path) -> None:
    me = {"uid": os.geteuid(), "gid": os.getegid()}
    assert ask(volume, "make", "/x/y", force=False, **me) == {"error": "ENOENT"}
    assert ask(volume, "make", "/x/y", force=True, mode=0o700, **me)["ok"]["mode"] == 0o700
    assert ask(volume, "make", "/x/y", force=False, **me)["ok"]["type"] == "directory"
    assert ask(volume, "make", "/b/inner", force=False, **me) == {"error": "EEXIST"}


def test_what_lies_too_deep_for_any_path_is_left_out_of_a_list(volume: Path) -> None:
    fd = os.open(volume / "b", os.O_RDONLY)
    for _ in range(30):
        os.mkdir("d" * 200, dir_fd=fd)
        above, fd = fd, os.open("d" * 200, os.O_RDONLY, dir_fd=fd)
        os.close(above)
    os.close(fd)
    listed = [one["path"] for one in ask(volume, "list", "/b", depth=64)["ok"]]
    assert listed[-1] == "/b/inner"
    assert 10 < len(listed) < 30


def test_the_mode_of_what_a_link_leads_to_stays(volume: Path) -> None:
    (volume / "to").symlink_to(volume / "b/inner")
    before = (volume / "b/inner").stat().st_mode
    assert ask(volume, "change", "/to", mode=0o777)["ok"]["type"] == "symlink"
    assert (volume / "b/inner").stat().st_mode == before
    assert ask(volume, "change", "/b/inner", mode=0o600)["ok"]["mode"] == 0o600


def test_it_runs_as_a_program_without_anything_of_ours(volume: Path) -> None:
    fields = json.dumps({"root": str(volume), "path": "/b/inner"})
    words = [sys.executable, "-I", "-S", "-c", content._program(), "stat", fields]
    done = subprocess.run(words, capture_output=True, check=True, text=True, timeout=30)
    entry = content._entry(json.loads(done.stdout)["ok"])
    assert (entry["size"], entry["type"], entry["mtime"].endswith("Z")) == (5, "file", True)


@pytest.mark.parametrize("told", [None, [], {}, {"name": "x"}, {"name": 1, "type": "file"}], ids=repr)
def test_an_answer_that_makes_no_sense_is_the_guests_fault(told: Any) -> None:
    with pytest.raises(GuestError):
        content._entry(told)


def test_a_time_that_no_calendar_has_is_no_error(volume: Path) -> None:
    told = ask(volume, "stat", "/b")["ok"]
    assert content._entry({**told, "times": [2**70, 0, 0]})["atime"] == "1970-01-01T00:00:00Z"


@pytest.mark.parametrize(
    ("given", "path"),
    [("", "/"), ("/", "/"), ("a", "/a"), ("/a/../../b", "/b"), ("//a//b/", "/a/b"), ("..", "/"), ("./~", "/~")],
)
def test_a_path_is_within_the_volume(given: str, path: str) -> None:
    assert content._path(given) == path


def test_a_path_has_an_end_and_no_nul() -> None:
    for wrong in ("a\0", "a" * 5000):
        with pytest.raises(InvalidRequest):
            content._path(wrong)


def test_what_the_guests_kernel_refuses_is_told_by_its_kind() -> None:
    found = {name: type(content._refused(name, "/a")) for name in ("ENOENT", "EDQUOT", "ENOTDIR")}
    assert found == {"ENOENT": NotFound, "EDQUOT": SandboxError, "ENOTDIR": InvalidRequest}


def test_tokens_of_volumes_sandboxes_and_ports_are_none_of_the_others() -> None:
    tokens = Tokens(b"k" * 32)
    one = "vol" + "a" * 16
    assert tokens.check_volume(one, tokens.volume("key1", one)) == "key1"
    of_key = tokens.volume("key1", one).removeprefix("key1")
    for wrong in (tokens.volume("key1", "vol" + "b" * 16), tokens.access(one), f"key2{of_key}", of_key, "key1", ""):
        with pytest.raises(Unauthenticated):
            tokens.check_volume(one, wrong)
