"""How QEMU is had to run its machine, told by what its monitor says."""

import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from space.drivers.qemu import launch

GREETING = b'{"QMP": {"version": {}}}\n'
DONE = b'{"return": {}}\n'


@pytest.fixture
def program() -> Iterator[int]:
    with subprocess.Popen(["sleep", "600"]) as running:
        yield running.pid
        running.kill()


def state(word: bytes) -> bytes:
    return b'{"return": {"status": "%s", "running": false}}\n' % word


def started(program: int, where: Path, *answers: bytes, last_words: bytes = b"") -> tuple[bool, bytes]:
    """Have a program run its machine whose monitor gives these answers, one each time that it is asked anything. With
    ``last_words`` it complains of that, and is gone.
    """
    complaints, complain = os.pipe()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(where))
        listening.listen(1)
        listening.settimeout(30)

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.settimeout(30)
                connection.sendall(GREETING)
                for one in answers:
                    connection.recv(4096)
                    connection.sendall(one)
                if last_words:
                    os.write(complain, last_words)
            if last_words:
                os.close(complain)

        answering = threading.Thread(target=answer)
        answering.start()
        try:
            return launch._started(program, {"listen": str(where), "patience_s": 5.0}, complaints)
        finally:
            answering.join()
            os.close(complaints)
            if not last_words:
                os.close(complain)


def test_what_a_program_complains_of_when_it_ends_is_told(program: int, tmp_path: Path) -> None:
    words = b"the image is of another kind"
    for number, answers in enumerate(((), (DONE + state(b"paused"),), (DONE + state(b"inmigrate"),))):
        told = started(program, tmp_path / str(number), *answers, last_words=words)
        assert told == (False, words), answers


def test_a_machine_is_told_to_go_on_once_its_memory_is_loaded(program: int, tmp_path: Path) -> None:
    answers = (DONE + state(b"inmigrate"), state(b"inmigrate"), state(b"paused"), DONE + state(b"running"))
    assert started(program, tmp_path / "monitor", *answers) == (True, b"")


def test_a_machine_that_may_not_go_on_is_given_up_at_once_and_says_why(program: int, tmp_path: Path) -> None:
    refused = b'{"error": {"class": "GenericError", "desc": "Its disk is in use"}}\n'
    found = started(program, tmp_path / "monitor", DONE + state(b"prelaunch"), refused + state(b"prelaunch"))
    assert found == (False, b"Its disk is in use")
