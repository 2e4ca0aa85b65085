"""What code in a sandbox can see and reach."""

import pytest

from tests.client import Api
from tests.installation import Installation


def test_guest_finds_no_key_token_or_host_path(api: Api, shared: str, installation: Installation) -> None:
    api.command(shared, ["sleep", "1"])
    look = (
        "cat /proc/*/environ /proc/*/cmdline /proc/*/mountinfo /proc/mounts /proc/cmdline /etc/hosts /etc/resolv.conf "
        "/proc/net/* /run/space/* 2>/dev/null | tr '\\0' '\\n'; find /.space /run -type f 2>/dev/null | head -5000; env; hostname"
    )
    seen = api.output(shared, look, user="root", output_mib=16)
    forbidden = [
        installation.key,
        installation.other_key,
        "sk_",
        "eyJ",
        str(installation.settings.data_dir),
        str(installation.settings.run_dir),
        "/opt/space",
        "/var/lib",
        "prj",
        "127.0.0.1:" + str(installation.settings.api_port),
    ]
    assert [word for word in forbidden if word in seen] == []


def test_guest_root_cannot_change_the_runtime(api: Api, shared: str) -> None:
    tries = "echo x > /.space/bin/python3; rm -f /.space/agent.pyz; touch /.space/new; mount -o remount,rw /.space; echo x > /.space/new"
    assert api.exec(shared, tries, user="root")["exit"]["code"] != 0
    assert api.exec(shared, "test -e /.space/new")["exit"]["code"] == 1


def test_guest_sees_one_interface_beside_loopback_and_reaches_nothing(api: Api, shared: str) -> None:
    script = (
        "import socket,sys\n"
        "def reach(host, port):\n"
        "  s = socket.socket(); s.settimeout(1.5)\n"
        "  try: s.connect((host, port)); return 'open'\n"
        "  except OSError as e: return type(e).__name__\n"
        "for a in sys.argv[1:]:\n"
        "  h, p = a.rsplit(':', 1); print(a, reach(h, int(p)))\n"
    )
    gateway = api.output(shared, "ip -4 route | awk '/default/ {print $3}'", user="root").strip()
    targets = ["169.254.169.254:80", "10.0.0.1:80", "192.168.0.1:80", "100.64.0.1:80", "8.8.8.8:53"]
    targets += [f"{gateway}:{port}" for port in (22, 53, 80, 8700, 8701)] if gateway else []
    lines = api.output(shared, ["python3", "-c", script, *targets], timeout_s=60).splitlines()
    assert len(lines) == len(targets)
    assert [line for line in lines if line.endswith("open")] == []


def test_guest_cannot_reach_its_neighbour(api: Api, shared: str) -> None:
    neighbour = api.create()
    try:
        api.exec(neighbour, "python3 -m http.server 8000 --bind 0.0.0.0 >/dev/null 2>&1 &")
        address = api.output(neighbour, "ip -4 -o addr | awk '!/ lo / {print $4}' | cut -d/ -f1", user="root").strip()
        assert address
        local = "import urllib.request as u,time\nfor i in range(50):\n try: u.urlopen('http://127.0.0.1:8000', timeout=2); break\n except OSError: time.sleep(.1)\nelse: raise SystemExit(1)"
        api.output(neighbour, ["python3", "-c", local])
        probe = f"import socket; s=socket.socket(); s.settimeout(2); s.connect(('{address}', 8000))"
        assert api.exec(shared, ["python3", "-c", probe])["exit"]["code"] != 0
    finally:
        api.delete(neighbour)


@pytest.mark.parametrize("path", ["/proc/1/mem", "/proc/1/io", "/proc/1/cwd", "/proc/1/exe", "/proc/1/root/"])
def test_an_ordinary_user_cannot_look_into_the_agent(api: Api, shared: str, path: str) -> None:
    look = f"cat {path} >/dev/null || ls {path}" if path.endswith("/") else f"cat {path} || readlink {path}"
    assert api.exec(shared, look)["exit"]["code"] != 0
    assert api.exec(shared, "sleep 0.5; kill -9 1")["exit"]["code"] != 0
    assert api.output(shared, ["echo", "alive"]) == "alive\n"


def test_an_ordinary_user_cannot_open_the_agents_channel(api: Api, shared: str) -> None:
    """The FIFOs are among the agent's descriptors, which gVisor lets everyone list, but not open."""
    script = (
        "import os, stat\n"
        "pipes = opened = 0\n"
        "for name in os.listdir('/proc/1/fd'):\n"
        "  path = '/proc/1/fd/' + name\n"
        "  try: mode = os.stat(path).st_mode\n"
        "  except FileNotFoundError: continue\n"
        "  pipes += stat.S_ISFIFO(mode)\n"
        "  for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):\n"
        "    try: os.open(path, flags | os.O_NONBLOCK)\n"
        "    except OSError: continue\n"
        "    opened += stat.S_ISFIFO(mode)\n"
        "print(pipes >= 2, opened)\n"
    )
    assert api.output(shared, ["python3", "-c", script]) == "True 0\n"


def test_the_agents_environment_says_nothing(api: Api, shared: str) -> None:
    """gVisor shows everyone's to everyone, so there must be nothing in it."""
    names = [line.partition("=")[0] for line in api.output(shared, "tr '\\0' '\\n' </proc/1/environ").splitlines()]
    assert set(names) <= {"PATH", "HOME"}


def test_loopback_inside_works(api: Api, sandbox: str) -> None:
    api.exec(sandbox, "python3 -m http.server 8080 --bind 127.0.0.1 >/dev/null 2>&1 &")
    probe = "for i in 1 2 3 4 5 6 7 8 9 10; do curl -s -o /dev/null -w '%{http_code}' http://127.0.0.1:8080/ && exit 0; sleep 0.3; done; exit 1"
    assert api.output(sandbox, probe).endswith("200")
