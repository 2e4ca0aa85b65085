"""What a watch in a guest says when it cannot see everything."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from space.guest import watches
from space.guest.system import Identity
from space.guest.watches import Watch


@dataclass
class Everything:
    """A channel that takes all it is given, and a loop that tells of nothing."""

    lines: list[dict] = field(default_factory=list)

    def open_send(self, number: int) -> None:
        pass

    def room(self, number: int) -> int:
        return 1 << 20

    def send(self, number: int, data: bytes) -> None:
        self.lines.append(json.loads(data))

    def watch(self, fd: int, events: int, on_ready: object) -> None:
        pass

    def forget(self, fd: int) -> None:
        pass


@pytest.mark.parametrize("when", ["before", "afterwards"])
def test_directories_beyond_the_limit_are_told_of_once_and_not_left_out_in_silence(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F8"""
    monkeypatch.setattr(watches, "_DIRECTORIES_MAX", 3)

    def make() -> None:
        (tmp_path / "a/b/c/d").mkdir(parents=True)
        (tmp_path / "a/b/c/d/x").touch()

    if when == "before":
        make()
    watch, told = Watch(str(tmp_path), Identity(0, 0, (0,), "root", "/root", "/bin/sh"), recursive=True), Everything()
    watch.attach(1, told, told, lambda: None)
    if when == "afterwards":
        make()
    watch.mark("m")
    limits = [line for line in told.lines if line["event"] == "limit"]
    assert [(line["path"], line["directory"]) for line in limits] == [("a/b/c", True)]
    watch.close()
