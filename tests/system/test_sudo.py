"""``sudo`` inside a sandbox: ``user`` may become root without a password, whatever the kernel makes of set-uid bits."""

import threading
import time
from collections.abc import Callable

from space import Sandbox, Tty
from tests.client import Api, wait_until
from tests.installation import Installation, gvisor_alone, patient, usual_driver

# In virtual machines the template's own sudo works, and is used.
OURS = usual_driver() == "gvisor"
CALLER = "[.]space/sudo" if OURS else "sudo[.]real"


def test_user_becomes_root_and_root_becomes_user(api: Api, shared: str) -> None:
    assert api.output(shared, "id -u; sudo id -u; sudo -n id -un; sudo -u user id -un") == "1000\n0\nroot\nuser\n"
    assert api.output(shared, "sudo id -u; sudo -u user id -un", user="root") == "0\nuser\n"
    assert api.output(shared, "sudo sudo -u user sudo id -u") == "0\n"


def test_everyday_uses_work(api: Api, shared: str) -> None:
    assert api.output(shared, "sudo apt-get --version").startswith("apt ")
    assert api.output(shared, "echo x | sudo tee /etc/x") == "x\n"
    assert api.read(shared, "/etc/x") == b"x\n"
    assert api.output(shared, "sudo -i pwd; sudo -s 'echo $0'; cd /usr && sudo pwd").split()[0] == "/root"
    assert api.output(shared, "cd /home/user && sudo -u nobody pwd", user="root") == "/home/user\n"


def test_status_and_signal_pass(api: Api, shared: str) -> None:
    result = api.exec(shared, ["sudo", "sh", "-c", "echo out; echo err >&2; exit 42"])
    assert (result["stdout"], result["stderr"], result["exit"]["code"]) == ("out\n", "err\n", 42)
    assert api.exec(shared, ["sudo", "sh", "-c", "kill -TERM $$"])["exit"] == {
        "kind": "signaled",
        "code": None,
        "signal": 15,
    }
    missing = api.exec(shared, ["sudo", "no-such-program"])
    assert (missing["exit"]["code"], missing["stderr"][:6]) == (1, "sudo: ")


def test_bytes_go_through_the_callers_own_descriptors(api: Api, shared: str) -> None:
    assert api.output(shared, "head -c 50000000 /dev/zero | sudo cat | sudo wc -c").strip() == "50000000"


def test_the_environment_is_reset(api: Api, shared: str) -> None:
    env = {"SECRET": "s", "LD_LIBRARY_PATH": "/nowhere", "PATH": "/home/user/bin:/usr/bin", "LC_ALL": "C.UTF-8"}
    lines = api.output(shared, ["sudo", "env"], env=env).splitlines()
    found = dict(line.split("=", 1) for line in lines)
    assert not {"SECRET", "LD_LIBRARY_PATH"} & found.keys()
    assert (found["HOME"], found["USER"], found["SUDO_USER"], found["LC_ALL"]) == ("/root", "root", "user", "C.UTF-8")
    assert "/home/user" not in found["PATH"]
    assert api.output(shared, "sudo -E sh -c 'echo $SECRET'; sudo A=1 sh -c 'echo $A'", env=env) == "s\n1\n"


def test_a_user_outside_the_group_is_refused(api: Api, sandbox: str) -> None:
    api.output(sandbox, "useradd --create-home bob", user="root")
    result = api.exec(sandbox, "sudo id -u", user="bob", cwd="/")
    assert (result["exit"]["code"], result["stdout"]) == (1, "")
    assert ("not in the group sudo" if OURS else "sudo: ") in result["stderr"]
    pretended = api.exec(sandbox, "unshare --user --map-root-user sh -c 'id -u; sudo id -u'", user="bob", cwd="/")
    assert (pretended["exit"]["code"], pretended["stdout"]) == (1, "0\n")
    api.output(sandbox, "usermod --append --groups sudo bob", user="root")
    assert api.output(sandbox, "sudo id -u", user="bob", cwd="/") == "0\n"


def test_a_timeout_kills_what_runs_through_sudo(api: Api, sandbox: str) -> None:
    """E13"""
    result = api.exec(
        sandbox, "sudo sleep 300 & sudo setsid --wait sh -c 'trap : TERM HUP; sleep 301; sleep 302'", timeout_s=2
    )
    assert result["exit"]["kind"] == "timed-out"
    assert api.exec(sandbox, "pgrep -f 'sleep 30[0-9]'", user="root")["exit"]["code"] == 1


@gvisor_alone("the template's own sudo is used, whose program goes on when it is killed")
def test_killing_the_caller_ends_the_program(api: Api, sandbox: str) -> None:
    script = "sudo sleep 303 & caller=$!; until pgrep -x sleep >/dev/null; do :; done; kill -9 $caller; wait; echo over"
    assert "over" in api.output(sandbox, ["sh", "-c", script])
    wait_until(lambda: api.exec(sandbox, "pgrep -x sleep")["exit"]["code"] == 1, what="the program ended")


def test_sudo_works_after_suspend_and_wake(api: Api, sandbox: str) -> None:
    api.exec(sandbox, ": >/tmp/out; sudo sh -c 'echo 1; until test -e /tmp/go; do sleep 0.1; done; id -u' >/tmp/out &")
    wait_until(lambda: api.read(sandbox, "/tmp/out") == b"1\n", what="the program runs")
    api.verb(sandbox, "suspend")
    api.verb(sandbox, "wake")
    assert int(api.output(sandbox, f"pgrep -c -f '{CALLER}'")) == 1 or not OURS
    assert api.output(sandbox, "sudo touch /tmp/go; sudo id -u") == "0\n"
    wait_until(lambda: api.read(sandbox, "/tmp/out") == b"1\n0\n", what="the program went on")
    wait_until(lambda: api.exec(sandbox, f"pgrep -f '{CALLER}'")["exit"]["code"] == 1, what="its caller ended")


def test_sudo_works_after_stop_and_start(api: Api, sandbox: str) -> None:
    api.verb(sandbox, "stop")
    api.verb(sandbox, "start")
    assert api.output(sandbox, "sudo id -u") == "0\n"


def test_a_hundred_calls_leave_nothing(api: Api, sandbox: str) -> None:
    count = "ls /proc/1/fd | wc -l; ps -e -o stat= | grep -c Z; set -- /proc/[0-9]*; echo $#"

    def counted() -> str:
        return str(api.exec(sandbox, count, user="root")["stdout"])

    api.output(sandbox, "sudo true")
    looks = [counted()]

    def settled() -> bool:
        looks.append(counted())
        return looks[-1] == looks[-2]

    wait_until(settled, what="two looks that agree")
    before = looks[-1]
    assert api.output(
        sandbox, 'for i in $(seq 100); do sudo sh -c "echo $i" || exit 1; done', timeout_s=100
    ).split() == [str(n) for n in range(1, 101)]
    wait_until(lambda: counted() == before, what="as much as before")


def test_many_calls_at_once_all_succeed(api: Api, shared: str) -> None:
    script = 'for i in $(seq 20); do sudo sh -c "echo $i" & done; wait'
    assert sorted(map(int, api.output(shared, script, timeout_s=60).split())) == list(range(1, 21))


def test_a_root_shell_on_a_terminal_can_be_typed_into(installation: Installation, shared: str) -> None:
    sandbox = Sandbox.connect(shared, url=installation.url, api_key=installation.key)
    command = sandbox.start(["sudo", "-i"], tty=Tty(rows=30, cols=90))
    seen: list[bytes] = []

    def read() -> None:
        seen.extend(event.data for event in command if event.stream == "tty")

    reader = threading.Thread(target=read, daemon=True)
    reader.start()

    def shows(what: bytes) -> Callable[[], bool]:
        return lambda: what in b"".join(seen)

    wait_until(shows(b"# "), what="a prompt")
    command.stdin.write("echo uid=$(id -u) $(tty)\n")
    wait_until(shows(b"uid=0 /dev/pts/"), what="an answer")
    command.stdin.write("sleep 300\n")
    wait_until(shows(b"sleep 300\r\n"))
    time.sleep(0.3)  # for the shell to have started it; ^C before would do as well
    command.stdin.write("\x03")
    command.stdin.write("echo still $((6*7)); exit 3\n")
    wait_until(shows(b"still 42"), what="the shell outlives ^C")
    reader.join(patient(20))
    assert command.wait().code == 3
