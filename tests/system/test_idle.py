"""Deadlines and idleness on a real installation: what ends a sandbox that nobody ends, and what wakes it."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from space import Client, Conflict, Sandbox
from tests.client import Api, wait_until
from tests.installation import Installation, patient

IDLE_S = 5.0
LATE_S = patient(2)


@pytest.fixture(scope="module")
def client(installation: Installation) -> Iterator[Client]:
    with Client(installation.url, installation.key) as client:
        yield client


def entered(client: Client, sandbox: Sandbox, state: str, *, within_s: float) -> float:
    """Wait until the sandbox is in a state; return when that was seen (monotonic). Looking is no activity."""
    wait_until(lambda: client.sandbox_info(sandbox.id).state == state, within_s, state)
    return time.monotonic()


def test_a_silent_command_keeps_a_sandbox_from_being_idle(client: Client) -> None:
    """A `sleep 600` without output is at work; when it has ended, the sandbox is idle from then on."""
    with Sandbox.create("base", client=client, idle_timeout_s=IDLE_S, on_idle="suspend") as busy:
        command = busy.start(["sleep", "600"])
        command.detach()
        for _ in range(2):  # An empty one of the same kind tells when the time has come.
            with Sandbox.create("base", client=client, idle_timeout_s=IDLE_S, on_idle="suspend") as empty:
                entered(client, empty, "suspended", within_s=IDLE_S + 10)
            assert client.sandbox_info(busy.id).state == "running"
        busy.command(command.id).kill()
        entered(client, busy, "suspended", within_s=IDLE_S + LATE_S + 3)


def test_an_empty_sandbox_is_suspended_within_two_seconds_of_its_time(client: Client) -> None:
    with Sandbox.create("base", client=client, idle_timeout_s=IDLE_S, on_idle="suspend") as sandbox:
        sandbox.run("true", check=True)
        last = datetime.now(UTC)
        entered(client, sandbox, "suspended", within_s=IDLE_S + LATE_S + 20)
        (suspend,) = [one for one in client.operations.list(sandbox_id=sandbox.id) if one.kind == "suspend"]
        assert suspend.created_at is not None
        assert IDLE_S - 0.5 <= (suspend.created_at - last).total_seconds() <= IDLE_S + LATE_S


@pytest.mark.parametrize(
    ("on_idle", "state"), [("pause", "paused"), ("suspend", "suspended"), ("stop", "stopped"), ("delete", None)]
)
def test_what_happens_to_an_idle_sandbox_is_its_owners_choice(
    client: Client, api: Api, on_idle: str, state: str | None
) -> None:
    sandbox = Sandbox.create("base", client=client, idle_timeout_s=1, on_idle=on_idle)  # type: ignore[arg-type]
    if state is None:
        gone = f"/v1/sandboxes/{sandbox.id}"
        wait_until(lambda: api.http.get(gone).status_code == 404, 20, "deletion")
    else:
        entered(client, sandbox, state, within_s=20)
        sandbox.delete()


def test_an_attached_terminal_and_a_transfer_are_activity(client: Client) -> None:
    with Sandbox.create("base", client=client, idle_timeout_s=2, on_idle="suspend") as sandbox:
        sandbox.run("true", check=True)

        def slowly() -> Iterator[bytes]:
            until = time.monotonic() + 6
            while time.monotonic() < until:
                yield b"x" * 1000
                sandbox.client.sandbox_info(sandbox.id)

        sandbox.files.write_stream("/home/user/slow", slowly())
        assert client.sandbox_info(sandbox.id).state == "running"


def test_never_is_a_choice_and_can_be_made_later(client: Client) -> None:
    with Sandbox.create("base", client=client, idle_timeout_s=IDLE_S, timeout_s=600) as sandbox:
        changed = sandbox.update(idle_timeout_s=None, timeout_s=None)
        assert (changed.idle_timeout_s, changed.timeout_s, changed.deadline_at) == (None, None, None)
        with Sandbox.create("base", client=client, idle_timeout_s=IDLE_S) as other:
            entered(client, other, "suspended", within_s=IDLE_S + 10)
        assert client.sandbox_info(sandbox.id).state == "running"


def test_a_deadline_comes_whatever_runs_and_can_be_moved(client: Client) -> None:
    """L8"""
    with Sandbox.create("base", client=client, timeout_s=2, on_timeout="suspend") as sandbox:
        sandbox.start(["sleep", "600"]).detach()
        for _ in range(5):
            deadline_at = sandbox.update(timeout_s=2).deadline_at
            assert deadline_at is not None
            assert deadline_at > datetime.now(UTC)
        entered(client, sandbox, "suspended", within_s=20)
        (suspend,) = [one for one in client.operations.list(sandbox_id=sandbox.id) if one.kind == "suspend"]
        assert suspend.created_at is not None
        assert 0 <= (suspend.created_at - deadline_at).total_seconds() <= LATE_S


def test_deadlines_and_idleness_hold_across_a_restart_of_the_api(client: Client, installation: Installation) -> None:
    """L8"""
    with (
        Sandbox.create("base", client=client, timeout_s=8, on_timeout="suspend") as timed,
        Sandbox.create("base", client=client, idle_timeout_s=4, on_idle="suspend") as idle,
    ):
        installation.kill("api")
        installation.wait_ready()
        entered(client, timed, "suspended", within_s=20)
        entered(client, idle, "suspended", within_s=20)


# Waking on request


def test_a_request_wakes_a_sandbox_that_sleeps(client: Client) -> None:
    with Sandbox.create("base", client=client, wake_on_request=True) as sandbox:
        for verb in ("pause", "suspend", "stop"):
            getattr(sandbox, verb)()
            assert sandbox.run("echo awake", check=True).stdout == "awake\n"
            getattr(sandbox, verb)()
            sandbox.files.write("/home/user/file", verb)
            assert sandbox.files.read_text("/home/user/file") == verb
            getattr(sandbox, verb)()
            assert sandbox.start(["echo", "started"]).result().stdout == "started\n"


def test_an_idle_sandbox_answers_an_exec_as_if_it_had_run_all_the_time(client: Client) -> None:
    with Sandbox.create("base", client=client, idle_timeout_s=1, wake_on_request=True) as sandbox:
        for _ in range(3):
            entered(client, sandbox, "suspended", within_s=20)
            assert sandbox.run("echo awake", check=True).stdout == "awake\n"


def test_a_request_that_arrives_while_it_is_being_suspended_is_answered(client: Client) -> None:
    """The request waits for the suspend to end, and wakes the sandbox: no error, whenever it comes."""
    with Sandbox.create("base", client=client, wake_on_request=True) as sandbox:
        sandbox.run("head -c 25000000 /dev/urandom >/dev/shm/fill", check=True)
        for delay_s in (0, 0.02, 0.05, 0.1, 0.2):
            suspending = sandbox.suspend(wait_s=None)
            client.operations.get(suspending.id, wait_s=delay_s)
            assert sandbox.run("echo awake", check=True).stdout == "awake\n"
            assert client.sandbox_info(sandbox.id).state == "running"


def test_without_that_choice_a_request_to_a_sleeping_sandbox_is_a_conflict(client: Client) -> None:
    with Sandbox.create("base", client=client) as sandbox:
        sandbox.suspend()
        with pytest.raises(Conflict) as caught:
            sandbox.run("true")
        assert caught.value.code == "wrong-state"
        assert client.sandbox_info(sandbox.id).state == "suspended"
