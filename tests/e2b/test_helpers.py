"""What E2B's clients do by themselves with what a sandbox has: MCP, git, input by a stream; and the calls of E2B's
command line.
"""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from e2b import PtySize, Sandbox
from e2b.exceptions import GitAuthException, GitUpstreamException, SandboxException

from tests.client import wait_until
from tests.e2b.conftest import Origin
from tests.e2b.test_domain import certify

MCP = {"github": {"token": "not-a-token"}}
GATEWAY = """#!/bin/sh
[ "$1" = --config ] && [ "$(id -u)" = 0 ] || exit 3
mkdir -p /etc/mcp-gateway
printf %s "$GATEWAY_ACCESS_TOKEN" >/etc/mcp-gateway/.token
chmod 600 /etc/mcp-gateway/.token
printf %s "$2" >/tmp/config
"""
REPOSITORY = """
git init -q -b main /srv/repo && cd /srv/repo && git config user.email a@b.test && git config user.name a
echo content >file && git add file && git commit -qm first && git branch other
git daemon --base-path=/srv --export-all --listen=127.0.0.1 --detach
"""


def control(origin: Origin, method: str, path: str, **options: object) -> httpx.Response:
    headers = {"x-api-key": origin.api_key}
    return httpx.request(method, origin.url + path, headers=headers, timeout=60, trust_env=False, **options)


def test_a_sandbox_whose_mcp_gateway_does_not_start_is_killed(origin: Origin) -> None:
    with pytest.raises(SandboxException, match="Failed to start MCP gateway"):
        Sandbox.create("base", mcp=MCP, timeout=60, metadata={"for": "mcp"}, **origin.options)
    assert control(origin, "GET", "/v2/sandboxes", params={"metadata": "for=mcp"}).json() == []


def test_an_mcp_gateway_gets_its_configuration_and_its_token_is_read_again(origin: Origin) -> None:
    with Sandbox.create(timeout=60, **origin.options) as one:
        one.files.write("/usr/local/bin/mcp-gateway", GATEWAY, user="root")
        one.commands.run("chmod 755 /usr/local/bin/mcp-gateway", user="root")
        one.create_snapshot(name="mcp-gateway")
    # The client's own name for a template with a gateway: it is what is asked for where none is named.
    with Sandbox.create(mcp=MCP, timeout=60, **origin.options) as made:
        assert made.files.read("/tmp/config") == '{"github": {"token": "not-a-token"}}'
        again = Sandbox.connect(made.sandbox_id, **origin.options)
        assert again.get_mcp_token() == made.get_mcp_token()
        assert len(again.get_mcp_token()) == 36
        assert made.get_mcp_url() == f"https://50005-{made.sandbox_id}.{made.sandbox_domain}/mcp"
    Sandbox.delete_snapshot("mcp-gateway", **origin.options)


def test_the_git_helper_clones_from_a_daemon_commits_and_asks_for_no_password(box: Sandbox) -> None:
    box.commands.run(REPOSITORY, user="root")

    def cloned() -> bool:
        # The daemon may not listen yet.
        with contextlib.suppress(SandboxException):
            box.git.clone("git://127.0.0.1/repo", "cloned", branch="main")
            return True
        return False

    wait_until(cloned, 20, "the daemon")
    assert box.files.read("cloned/file") == "content\n"
    assert box.git.status("cloned").current_branch == "main"
    box.files.write("cloned/more", "x")
    box.git.add("cloned")
    box.git.commit("cloned", "second", author_name="a", author_email="a@b.test")
    assert box.git.status("cloned").ahead == 1
    with pytest.raises(GitAuthException):
        box.git.clone("git://127.0.0.1/nothing", "nowhere")
    box.commands.run("pkill git-daemon", user="root")


def test_the_git_helper_branches_undoes_pushes_and_pulls(box: Sandbox) -> None:
    git = box.git
    git.configure_user("a", "a@b.test")
    assert (git.get_config("user.name"), git.get_config("user.nothing")) == ("a", None)
    git.init("origin.git", bare=True, initial_branch="main")
    git.init("work", initial_branch="main")
    git.set_config("pull.rebase", "true", scope="local", path="work")
    assert git.get_config("pull.rebase", scope="local", path="work") == "true"
    git.remote_add("work", "origin", "/home/user/nowhere.git")
    git.remote_add("work", "origin", "/home/user/origin.git", overwrite=True)
    assert git.remote_get("work", "origin") == "/home/user/origin.git"
    box.files.write("work/file", "first")
    git.add("work")
    git.commit("work", "first")
    with pytest.raises(GitUpstreamException):
        git.pull("work")
    git.push("work", "origin", "main")
    git.create_branch("work", "other")
    git.checkout_branch("work", "main")
    assert (sorted(git.branches("work").branches), git.branches("work").current_branch) == (["main", "other"], "main")
    git.delete_branch("work", "other", force=True)
    box.files.write("work/file", "second")
    git.add("work", files=["file"])
    assert git.status("work").has_staged
    git.restore("work", ["file"], staged=True)
    git.restore("work", ["file"])
    assert (git.status("work").is_clean, box.files.read("work/file")) == (True, "first")
    git.clone("/home/user/origin.git", "elsewhere")
    box.files.write("elsewhere/more", "x")
    git.add("elsewhere")
    git.commit("elsewhere", "second")
    git.push("elsewhere")
    git.pull("work")
    assert box.files.read("work/more") == "x"
    git.reset("work", mode="hard", target="HEAD~1")
    assert (box.files.exists("work/more"), git.status("work").behind) == (False, 1)


def test_input_streams_to_a_program_and_to_a_terminal(box: Sandbox) -> None:
    reading = box.commands.run("head -c 600000 | wc -c", background=True, stdin=True)
    box.commands.stream_input(reading.pid, (b"x" * 100_000 for _ in range(6)))
    assert reading.wait().stdout == "600000\n"
    terminal = box.pty.create(PtySize(rows=24, cols=80))
    box.pty.stream_input(terminal.pid, [b"echo $((40 + 2))-typed; ", b"exit\n"])
    seen: list[bytes] = []
    terminal.wait(on_pty=seen.append)
    assert b"42-typed" in b"".join(seen)


def test_sandboxes_are_refreshed_and_measured_together(origin: Origin, box: Sandbox) -> None:
    with Sandbox.create(timeout=30, **origin.options) as one:
        path, ends = f"/sandboxes/{one.sandbox_id}/refreshes", one.get_info().end_at
        assert control(origin, "POST", path, json={"duration": 1}).status_code == 204
        assert one.get_info().end_at == ends, "never shorter"
        assert control(origin, "POST", path, json={"duration": 600}).status_code == 204
        assert one.get_info().end_at > ends
        assert control(origin, "POST", path, json={"duration": -1}).status_code == 400
        asked = {"sandbox_ids": f"{box.sandbox_id},{one.sandbox_id},sbx{'a' * 16}"}
        measured = control(origin, "GET", "/sandboxes/metrics", params=asked).json()["sandboxes"]
        assert set(measured) == {box.sandbox_id, one.sandbox_id}
        assert measured[box.sandbox_id]["memTotal"] > 0
    assert control(origin, "GET", "/sandboxes/metrics").status_code == 400


def test_19_a_proxy_that_the_environment_names_is_kept_from_this_machines_addresses(origin: Origin) -> None:
    """HTTP_PROXY applies to loopback addresses, too: NO_PROXY must name them, as the guide says."""
    program = "from e2b import Sandbox; Sandbox.list().next_items(); print('answered')"
    proxied = {**origin.environment, "HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=proxied, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "answered\n"
    guide = (Path(__file__).parents[2] / "docs/how-to/e2b.md").read_text()
    assert "set `NO_PROXY=127.0.0.1`" in guide


def test_18_what_a_client_reaches_by_default_follows_from_the_domain_alone() -> None:
    """Tests that assert default URLs fail where URLs are overridden: a domain overrides none."""
    from e2b.connection_config import ConnectionConfig

    environment = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("E2B_")}
    try:
        config = ConnectionConfig(domain="sbx.test:8443", api_key="e2b_00")
        assert config.api_url == "https://api.sbx.test:8443"
        assert config.get_sandbox_url("sbxa", "sbx.test:8443") == "https://49983-sbxa.sbx.test:8443"
    finally:
        os.environ.update(environment)


def test_a_port_that_speaks_tls_is_asked_by_tls_and_its_certificate_is_nobodys(origin: Origin, tmp_path: Path) -> None:
    certify(tmp_path, "localhost.test")
    server = (
        "import http.server, ssl\n"
        "server = http.server.ThreadingHTTPServer(('127.0.0.1', 8443), http.server.SimpleHTTPRequestHandler)\n"
        "context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)\n"
        "context.load_cert_chain('certificate.pem', 'key.pem')\n"
        "server.socket = context.wrap_socket(server.socket, server_side=True)\n"
        "server.serve_forever()\n"
    )
    with Sandbox.create(timeout=60, network={"https_ports": [8443]}, **origin.options) as one:
        for name in ("certificate.pem", "key.pem"):
            one.files.write(name, (tmp_path / name).read_bytes())
        one.files.write("server.py", server)
        one.commands.run("python3 server.py", background=True)
        host = {"host": f"8443-{one.sandbox_id}.sbx.test"}

        def ask() -> httpx.Response:
            return httpx.get(f"{origin.url}/server.py", headers=host, trust_env=False, timeout=30)

        wait_until(lambda: ask().status_code == 200, 20, "the server in the sandbox")
        assert ask().text == server
        assert one.get_info().network["https_ports"] == [8443]
    body = {"templateID": "base", "timeout": 60, "network": {"httpsPorts": [70000]}}
    assert control(origin, "POST", "/v2/sandboxes", json=body).status_code == 400
