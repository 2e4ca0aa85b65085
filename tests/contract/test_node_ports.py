"""Requests to ports of sandboxes through a node with a real agent, and who may make them."""

import contextlib
import socket
import threading
import time
from contextlib import closing

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from space.node.http_ports import SUBPROTOCOL
from tests.node_host import wait_until
from tests.port_servers import BLOCK, MIB, echo_server, raw_server, read_head
from tests.previews import DOMAIN, echo, expose, headers_of, page, port, preview, token_for

__all__ = ["echo", "page", "port"]


# --- requests


def test_a_request_reaches_the_server_as_it_was_made(page):
    answer = page.post("/a%20b//c%2Fd?x=1&y=%2F", content=b"hello", headers={"x-mine": "yes", "cookie": "a=1; b=2"})
    assert answer.status_code == 201
    assert answer.headers["x-powered-by"] == "tests"
    said = answer.json()
    assert (said["method"], said["path"], said["body"]) == ("POST", "/a%20b//c%2Fd?x=1&y=%2F", "hello")
    assert headers_of(answer)["x-mine"] == "yes"
    assert headers_of(answer)["cookie"] == "a=1; b=2"


@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_every_method_passes(page, method):
    assert page.request(method, "/").json()["method"] == method


def test_an_answer_to_head_has_a_length_and_no_body(page):
    answer = page.head("/")
    assert answer.headers["content-length"] == "12345"
    assert answer.content == b""
    assert page.get("/").status_code == 200


def test_the_server_learns_who_asks_and_for_which_host(host, box, port, page):
    said = headers_of(page.get("/", headers={"x-forwarded-for": "203.0.113.9", "x-forwarded-proto": "https"}))
    assert said["host"] == f"{port}-{box}.{DOMAIN}:{host.port}"
    assert said["x-forwarded-host"] == said["host"]
    assert said["x-forwarded-for"] == "203.0.113.9, 127.0.0.1"
    assert said["x-forwarded-proto"] == "https"


def test_the_host_that_the_server_sees_can_be_another(host, box, port, page):
    expose(host, box, port, host="localhost:${PORT}")
    try:
        assert headers_of(page.get("/"))["host"] == f"localhost:{port}"
    finally:
        host.local.delete(f"/machines/{box}/ports/{port}")


def test_nothing_of_the_platforms_reaches_the_server(host, box, port):
    token = token_for(host, box, port)
    sent = {
        "x-space-token": token,
        "authorization": f"Bearer {host.token(box)}",
        "cookie": f"space_preview={token}; theirs=1",
        "x-space-operation": "op",
        "connection": "keep-alive, x-hop",
        "x-hop": "1",
        "te": "trailers",
        "keep-alive": "timeout=5",
        "proxy-authorization": "Basic x",
    }
    with preview(host, box, port) as client:
        answer = client.get(f"/?space_token={token}&q=1", headers=sent)
    assert answer.json()["path"] == "/?q=1"
    said = headers_of(answer)
    assert said["cookie"] == "theirs=1"
    assert token not in answer.text
    assert not {"x-space-token", "authorization", "x-space-operation", "x-hop", "te", "keep-alive"} & set(said)
    assert "proxy-authorization" not in said


def test_the_servers_own_authorization_passes_and_an_api_key_does_not(page):
    assert headers_of(page.get("/", headers={"authorization": "Basic dTpw"}))["authorization"] == "Basic dTpw"
    assert "authorization" not in headers_of(page.get("/", headers={"authorization": "Bearer sk_secret"}))


def test_a_large_answer_streams_in_flat_memory(host, page):
    host.memory_kib()
    assert page.get("/large?1").status_code == 200
    before, count = host.memory_kib(), 0
    with page.stream("GET", "/large?100") as answer:
        assert answer.headers["content-length"] == str(100 * MIB)
        for chunk in answer.iter_raw():
            count += len(chunk)
    assert count == 100 * MIB
    assert host.memory_kib() - before < 16 * 1024


def test_a_large_body_streams_in_flat_memory(host, page):
    assert page.post("/", content=BLOCK).json()["count"] == len(BLOCK)
    before = host.memory_kib()
    blocks = 50 * MIB // len(BLOCK)
    assert page.post("/", content=(BLOCK for _ in range(blocks))).json()["count"] == 50 * MIB
    assert host.memory_kib() - before < 16 * 1024


def test_events_arrive_one_by_one(echo, page):
    with page.stream("GET", "/events") as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        lines = answer.iter_lines()
        for number in range(3):
            echo.may_send.release()
            assert next(line for line in lines if line) == f"data: {number}"


def test_a_client_that_goes_takes_its_connection_with_it(host, box, page, echo):
    gone = threading.Event()

    def handle(connection: socket.socket) -> None:
        read_head(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while connection.recv(1024):
            pass
        gone.set()

    with raw_server(handle) as port, preview(host, box, port, token_for(host, box, port)) as client:
        with client.stream("GET", "/") as answer:
            assert answer.status_code == 200
        assert gone.wait(10)


def test_a_body_is_asked_for_only_when_the_server_wants_it(host, box):
    def handle(connection: socket.socket) -> None:
        head = read_head(connection).lower()
        assert b"expect: 100-continue" in head
        if b"get-it" in head:
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            assert connection.recv(5) == b"hello"
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        else:
            connection.sendall(b"HTTP/1.1 413 No\r\ncontent-length: 0\r\n\r\n")

    with raw_server(handle) as port:
        token = token_for(host, box, port)
        for path, wanted in (("get-it", True), ("refuse", False)):
            with closing(socket.create_connection(("127.0.0.1", host.port))) as client:
                client.settimeout(10)
                client.sendall(
                    f"POST /{path} HTTP/1.1\r\nhost: {port}-{box}.{DOMAIN}\r\nx-space-token: {token}\r\n"
                    "content-length: 5\r\nexpect: 100-continue\r\n\r\n".encode()
                )
                first = read_head(client)
                assert first.startswith(b"HTTP/1.1 100" if wanted else b"HTTP/1.1 413")
                if wanted:
                    client.sendall(b"hello")
                    assert read_head(client).startswith(b"HTTP/1.1 200")
                else:
                    assert b"connection: close" in first.lower()


def test_a_server_that_closes_each_connection_is_asked_on_a_fresh_one(host, box):
    """N14"""
    asked: list[bytes] = []

    def handle(connection: socket.socket) -> None:
        asked.append(read_head(connection))
        # It says that it keeps the connection, and does not.
        connection.sendall(b"HTTP/1.1 200 OK\r\nconnection: keep-alive\r\ncontent-length: 2\r\n\r\nok")

    with raw_server(handle) as port, preview(host, box, port, token_for(host, box, port)) as client:
        for _ in range(5):
            assert client.post("/", content=b"once").text == "ok"
    assert len(asked) == 5


@pytest.mark.parametrize("address", ["::1", "127.0.0.2"])
def test_a_server_is_found_wherever_in_the_sandbox_it_listens(host, box, address):
    with echo_server(address) as server:
        token = token_for(host, box, server.server_port)
        with preview(host, box, server.server_port, token) as client:
            assert client.get("/").status_code == 200


def test_a_server_that_is_just_starting_is_waited_for(host, box):
    answers: list[str] = []
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]

        def ask() -> None:
            with preview(host, box, port, token_for(host, box, port)) as client:
                answers.append(client.get("/").text)

        thread = threading.Thread(target=ask)
        thread.start()
        wait_until(lambda: host.local.get(f"/machines/{box}").json()["clients"] >= 1, "the request to come")
        server.listen()
        server.settimeout(10)
        connection, _ = server.accept()
        with connection:
            read_head(connection)
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            thread.join()
    assert answers == ["ok"]


# --- what goes wrong


def test_a_port_that_nobody_listens_on_is_a_502(host, box):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        with preview(host, box, port, token_for(host, box, port)) as client:
            answer = client.get("/")
    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "port-closed"
    assert answer.json()["error"]["details"]["port"] == port


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 999 What\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000,
        b"HTTP/1.1 200 OK\r\nbad name: y\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: a\x00b\r\n\r\n",
    ],
)
def test_an_answer_that_is_no_http_is_a_502(host, box, answer):
    def handle(connection: socket.socket) -> None:
        read_head(connection)
        connection.sendall(answer)

    with raw_server(handle) as port, preview(host, box, port, token_for(host, box, port)) as client:
        refused = client.get("/")
    assert refused.status_code == 502
    assert refused.json()["error"]["code"] == "bad-answer"


def test_an_answer_cut_short_is_never_taken_for_whole(host, box):
    def handle(connection: socket.socket) -> None:
        head = read_head(connection)
        if b"/chunked" in head:
            connection.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n")
        else:
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhello")

    with raw_server(handle) as port, preview(host, box, port, token_for(host, box, port)) as client:
        for path in ("/chunked", "/plain"):
            with pytest.raises(httpx.RemoteProtocolError):
                client.get(path)


def test_a_server_cannot_answer_the_next_request_as_well(host, box, page):
    def handle(connection: socket.socket) -> None:
        read_head(connection)
        connection.sendall(
            b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokHTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"
        )

    with raw_server(handle) as port, preview(host, box, port, host.token(box)) as client:
        assert client.get("/").text == "ok"
        assert client.get("/", headers={"host": page.headers["host"]}).json()["path"] == "/"


def test_a_request_whose_length_is_given_twice_is_refused(host, box, port):
    token = token_for(host, box, port)
    with closing(socket.create_connection(("127.0.0.1", host.port))) as client:
        client.settimeout(10)
        client.sendall(
            f"POST / HTTP/1.1\r\nhost: {port}-{box}.{DOMAIN}\r\nx-space-token: {token}\r\n"
            "content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\nGET /smuggled HTTP/1.1\r\n\r\n".encode()
        )
        assert client.recv(100).startswith(b"HTTP/1.1 400")


def test_tiny_chunks_leave_time_for_everybody_else(host, box, page):
    chunk = b"1\r\nx\r\n" * 4000

    def handle(connection: socket.socket) -> None:
        read_head(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            connection.sendall(chunk)

    with (
        raw_server(handle) as port,
        preview(host, box, port, token_for(host, box, port)) as client,
        client.stream("GET", "/") as flood,
    ):
        taken = flood.iter_raw()
        for _ in range(5):
            next(taken)
            began = time.monotonic()
            assert page.get("/").status_code == 200
            assert time.monotonic() - began < 2


@pytest.mark.parametrize(("heads", "status"), [(5, 200), (100_000, 502)])
def test_a_server_says_only_so_much_before_its_answer(host, box, heads: int, status: int):
    def handle(connection: socket.socket) -> None:
        read_head(connection)
        with contextlib.suppress(OSError):  # It is cut off.
            connection.sendall(b"HTTP/1.1 103 Early Hints\r\n\r\n" * heads)
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    with raw_server(handle) as port, preview(host, box, port, token_for(host, box, port)) as client:
        assert client.get("/").status_code == status


# --- who may


def test_without_a_token_nothing_is_answered(host, box, port):
    with preview(host, box, port) as client:
        answer = client.get("/")
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "token-needed")
    with preview(host, box.translate(str.maketrans("234567", "765432")), port) as client:
        assert client.get("/").status_code == 401  # what there is not looks the same


def test_a_token_of_the_sandbox_opens_its_ports_and_a_ports_token_only_that(host, box, port):
    with preview(host, box, port, host.token(box)) as client:
        assert client.get("/").status_code == 200
    token = token_for(host, box, port)
    with preview(host, box, port + 1 if port < 65535 else 1, token) as client:
        answer = client.get("/")
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "wrong-token")
    for what in ("exec", "commands"):
        assert host.client(token).post(f"/v1/sandboxes/{box}/{what}", json={"argv": ["id"]}).status_code == 404
    assert host.client(token).get(f"/v1/sandboxes/{box}/files", params={"path": "/etc/passwd"}).status_code == 404
    with pytest.raises(InvalidStatus, match="404"):
        connect(
            f"ws://127.0.0.1:{host.port}/v1/sandboxes/{box}/tunnels/{port}?token={token}", subprotocols=[SUBPROTOCOL]
        )


def test_an_expired_and_another_sandboxs_token_are_refused(host, box, port):
    other = host.boot()
    for token, status, code in (
        (token_for(host, box, port, lasts_s=-60), 401, "token-expired"),
        (token_for(host, other, port), 403, "wrong-token"),
        (host.token(other), 403, "wrong-token"),
        (token_for(host, box, port, key="0" * 16), 403, "wrong-token"),
    ):
        with preview(host, box, port, token) as client:
            answer = client.get("/")
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    host.local.delete(f"/machines/{other}")


def test_a_hidden_ports_tokens_are_void_at_once(host, box):
    with echo_server() as server:
        port = server.server_port
        token = token_for(host, box, port)
        with preview(host, box, port, token) as client:
            assert client.get("/").status_code == 200
            assert host.local.delete(f"/machines/{box}/ports/{port}").status_code == 200
            assert client.get("/").status_code == 403
            expose(host, box, port)
            assert client.get("/").status_code == 403


def test_a_public_port_is_everybodys_on_its_own_host_alone(host, box):
    with echo_server() as server:
        port = server.server_port
        expose(host, box, port, public=True)
        with preview(host, box, port) as client:
            assert client.get("/").status_code == 200
        assert host.client().get(f"/v1/sandboxes/{box}/ports/{port}/").status_code == 401
        expose(host, box, port, public=False)
        with preview(host, box, port) as client:
            assert client.get("/").status_code == 401


def test_a_token_in_the_address_is_a_cookie_from_then_on(host, box, port):
    token = token_for(host, box, port)
    with preview(host, box, port, accept="text/html") as browser:
        answer = browser.get(f"{host.url}//a?x=1&space_token={token}")
        assert answer.status_code == 302
        assert answer.headers["location"] == "/a?x=1"
        fresh = answer.headers["set-cookie"]
        assert "HttpOnly" in fresh
        assert "SameSite=Lax" in fresh
        assert "domain" not in fresh.lower()
        kept = {"cookie": fresh.partition(";")[0]}
        assert browser.get("/", headers=kept).status_code == 200
        # Others may have set some of the same name for all hosts of the domain.
        assert browser.get("/", headers={"cookie": f"space_preview=x.y.z; {kept['cookie']}"}).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}, 200),
        ({"origin": "http://8000-sbxaaaaaaaaaaaaaaaa.sandboxes.localhost"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://["}, 403),
        ({"origin": "http://OWN"}, 200),
        ({"origin": "http://1-BOX.sandboxes.localhost"}, 200),
    ],
)
def test_a_page_of_another_sandbox_cannot_use_ones_cookie(host, box, port, headers, status):
    own = f"{port}-{box}.{DOMAIN}:{host.port}"
    headers = {name: value.replace("OWN", own).replace("BOX", box) for name, value in headers.items()}
    with preview(host, box, port) as browser:
        cookie = {"cookie": f"space_preview={token_for(host, box, port)}"}
        assert browser.get("/", headers={**headers, **cookie}).status_code == status


def test_a_server_sets_cookies_for_its_own_host_alone(page):
    answer = page.get("/cookies")
    assert answer.headers.get_list("set-cookie") == ["a=1; Path=/", "b=2; HttpOnly"]


def test_by_path_there_are_no_cookies_and_nothing_acts_as_a_page(host, box, port):
    with host.client(token_for(host, box, port)) as client:
        base = f"/v1/sandboxes/{box}/ports/{port}"
        answer = client.get(f"{base}/x?y=1", headers={"cookie": "a=1"})
        assert answer.json()["path"] == "/x?y=1"
        assert headers_of(answer)["host"] == f"localhost:{port}"
        assert not {"cookie", "authorization"} & set(headers_of(answer))
        assert answer.headers["content-security-policy"].startswith("sandbox")
        assert "set-cookie" not in client.get(f"{base}/cookies").headers
        assert client.get(f"/v1/sandboxes/{box}/ports/0/").status_code == 404
        assert client.get(f"/v1/sandboxes/{box}/ports/65536/").status_code == 404


def test_exposed_ports_outlive_the_node_and_go_with_the_machine(fresh):
    box = fresh.boot()
    with echo_server() as server:
        token = token_for(fresh, box, server.server_port)
        fresh.kill_node()
        fresh.start_node()
        with preview(fresh, box, server.server_port, token) as client:
            assert client.get("/").status_code == 200
    assert fresh.local.get(f"/machines/{box}/ports").json()["ports"][0]["port"] == server.server_port
    fresh.local.delete(f"/machines/{box}")
    assert fresh.local.get(f"/machines/{box}/ports").status_code == 404
