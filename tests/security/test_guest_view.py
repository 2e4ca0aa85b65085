"""What code in a sandbox can see and reach."""

import httpx
import pytest

from tests.client import Api
from tests.installation import Installation


def test_guest_finds_no_key_token_or_host_path(api: Api, shared: str, installation: Installation) -> None:
    api.command(shared, ["sleep", "1"])
    look = (
        "cat /proc/*/environ /proc/*/cmdline /proc/*/mountinfo /proc/mounts /proc/cmdline /etc/hosts /etc/resolv.conf "
        "/proc/net/* $(find /run -type f ! -name 'ca*.pem') 2>/dev/null | tr '\\0' '\\n'; find /.space /run -type f 2>/dev/null | head -5000; env; hostname"
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


# Says of each address what comes back for an HTTP request: the gateway's refusal, or nothing.
REACH = """
import socket, sys
for target in sys.argv[1:]:
    host, _, port = target.rpartition(":")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as one:
        one.settimeout(5)
        try:
            one.connect((host, int(port)))
            one.sendall(f"GET /healthz HTTP/1.1\\r\\nHost: {host}\\r\\n\\r\\n".encode())
            print(target, one.recv(100).decode(errors="replace").partition("\\r")[0])
        except OSError:
            print(target)
"""


def reached(api: Api, sandbox: str, *targets: str) -> list[str]:
    """What of these can be reached beyond the gateway, which refuses all of them."""
    lines = api.output(sandbox, ["python3", "-c", REACH, *targets], timeout_s=100).splitlines()
    assert [line.split()[0] for line in lines] == list(targets)
    return [line for line in lines if line.split()[1:] not in ([], ["HTTP/1.1", "403"], ["HTTP/1.1", "400"])]


def test_guest_sees_one_interface_beside_loopback_and_reaches_nothing(
    api: Api, shared: str, installation: Installation
) -> None:
    gateway = api.output(shared, "ip -4 route | awk '/default/ {print $3}'", user="root").strip()
    assert gateway
    interfaces = api.output(shared, "ls /sys/class/net || ip -o link | cut -d: -f2", user="root").split()
    assert set(interfaces) <= {"lo", "eth0"}
    settings = installation.settings
    ports = (22, 53, 80, settings.api_port, settings.node_port, settings.gateway_port, settings.gateway_dns_port)
    targets = ["169.254.169.254:80", "10.0.0.1:80", "192.168.0.1:80", "100.64.0.1:80", "8.8.8.8:53", "1.1.1.1:853"]
    assert reached(api, shared, *targets, *(f"{gateway}:{port}" for port in ports)) == []
    # Reached they would answer: on the host they do.
    assert httpx.get(f"{installation.url}/healthz", timeout=5).is_success


def test_guest_cannot_reach_its_neighbour(api: Api, shared: str) -> None:
    neighbour = api.create()
    try:
        api.exec(neighbour, "python3 -m http.server 8000 --bind :: >/dev/null 2>&1 &")
        shown = "ip -o addr show scope global | awk '!/ lo / {print $4}' | cut -d/ -f1"
        addresses = api.output(neighbour, shown, user="root").split()
        assert len(addresses) == 2
        local = "import urllib.request as u,time\nfor i in range(50):\n try: u.urlopen('http://127.0.0.1:8000', timeout=2); break\n except OSError: time.sleep(.1)\nelse: raise SystemExit(1)"
        api.output(neighbour, ["python3", "-c", local])
        assert reached(api, shared, *(f"{address}:8000" for address in addresses)) == []
        assert reached(api, neighbour, "127.0.0.1:8000") != []
    finally:
        api.delete(neighbour)


@pytest.mark.parametrize("path", ["/proc/1/mem", "/proc/1/io", "/proc/1/cwd", "/proc/1/exe", "/proc/1/root/"])
def test_an_ordinary_user_cannot_look_into_the_agent(api: Api, shared: str, path: str) -> None:
    look = f"cat {path} >/dev/null || ls {path}" if path.endswith("/") else f"cat {path} || readlink {path}"
    assert api.exec(shared, look)["exit"]["code"] != 0
    assert api.exec(shared, "sleep 0.5; kill -9 1")["exit"]["code"] != 0
    assert api.output(shared, ["echo", "alive"]) == "alive\n"


def test_an_ordinary_user_cannot_open_the_agents_channel(api: Api, shared: str) -> None:
    """The channel is among the agent's descriptors, which gVisor lets everyone list, but not open."""
    script = (
        "import os, stat\n"
        "pipes = opened = 0\n"
        "try: names = os.listdir('/proc/1/fd')\n"
        "except PermissionError: names, pipes = [], 2\n"
        "for name in names:\n"
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
    shown = api.output(shared, "tr '\\0' '\\n' </proc/1/environ", user="root")
    names = [line.partition("=")[0] for line in shown.splitlines()]
    assert set(names) <= {"PATH", "HOME"}


def test_loopback_inside_works(api: Api, sandbox: str) -> None:
    api.exec(sandbox, "python3 -m http.server 8080 --bind 127.0.0.1 >/dev/null 2>&1 &")
    probe = "for i in $(seq 100); do curl -s -o /dev/null -w '%{http_code}' http://127.0.0.1:8080/ && exit 0; sleep 0.3; done; exit 1"
    assert api.output(sandbox, probe).endswith("200")
