"""What is easily got wrong for E2B's clients, a test each; seen through a client where it shows there, else on the wire."""

import asyncio
import base64
import os
import re
import socket
import time
from urllib.parse import urlsplit

import httpx
import pytest
from e2b import AsyncSandbox, CommandExitException, Sandbox, SandboxQuery
from e2b.exceptions import (
    AuthenticationException,
    FileNotFoundException,
    InvalidArgumentException,
    SandboxException,
    SandboxNotFoundException,
    SandboxNotRunningException,
    TimeoutException,
)

from tests.client import Api, wait_until
from tests.e2b.conftest import Origin, framed, frames, token
from tests.installation import Installation, usual_driver

STREAM = {"content-type": "application/connect+json", "connect-protocol-version": "1"}


@pytest.fixture(scope="module")
def wire(origin: Origin, box: Sandbox) -> httpx.Client:
    """Requests to the shared sandbox with its token, as they are."""
    named = {"e2b-sandbox-id": box.sandbox_id, "e2b-sandbox-port": "49983", "x-access-token": token(box)}
    return httpx.Client(base_url=origin.url, headers=named, timeout=30, trust_env=False)


def control(origin: Origin, method: str, path: str, **options: object) -> httpx.Response:
    headers = {"x-api-key": origin.api_key}
    return httpx.request(method, origin.url + path, headers=headers, timeout=60, trust_env=False, **options)


def drain(connection: socket.socket) -> None:
    """Read until the other side has closed in good order."""
    while connection.recv(65536):
        pass


# --- the numbered ones


def test_1_a_port_of_a_running_sandbox_that_nobody_listens_on_is_502_and_says_so(origin: Origin, box: Sandbox) -> None:
    """get_host(), hence every test of a port, ignores E2B_SANDBOX_URL: a port is found by the host's name alone."""
    headers = {"host": box.get_host(39999)}
    answer = httpx.get(origin.url, headers=headers, timeout=30, trust_env=False)
    assert answer.status_code == 502
    assert answer.json() == {
        "code": 502,
        "message": "The sandbox is running but port is not open",
        "sandboxId": box.sandbox_id,
        "port": 39999,
    }


def test_2_a_signed_url_that_names_no_sandbox_finds_the_one_whose_token_signed_it(origin: Origin, box: Sandbox) -> None:
    """A signed URL of a file carries no sandbox's id where all sandboxes have one URL."""
    other = Sandbox.create(timeout=60, **origin.options)
    try:
        for one, content in ((box, "one's"), (other, "other's")):
            one.files.write("signed.txt", content)
            url = one.download_url("signed.txt")
            assert box.sandbox_id not in url
            assert httpx.get(url, trust_env=False).text == content
            upload = httpx.post(one.upload_url("up.txt"), files={"file": ("up.txt", b"up")}, trust_env=False)
            assert upload.json() == [{"path": "/home/user/up.txt", "name": "up.txt", "type": "file"}]
    finally:
        other.kill()


def test_2_a_signature_for_another_path_user_or_operation_opens_nothing(box: Sandbox) -> None:
    """A signed URL of a file carries no sandbox's id: what finds the sandbox must not open another's files."""
    url = box.download_url("signed.txt")
    for wrong in (
        url.replace("signed.txt", "other.txt"),
        url + "&username=root",
        url + "x",
        url.split("&signature")[0],
    ):
        answer = httpx.get(wrong, headers={"e2b-sandbox-id": box.sandbox_id}, trust_env=False)
        assert answer.status_code == 401
        assert set(answer.json()) == {"code", "message"}
    assert httpx.post(url, content=b"x", trust_env=False).status_code == 401


def test_4_a_metadata_filter_is_unescaped_three_times(origin: Origin, box: Sandbox) -> None:
    """The filter for metadata is escaped three times."""
    odd = Sandbox.create(timeout=60, metadata={"a b": "c&d=%", "ü": "x y"}, **origin.options)
    try:
        for metadata, expected in (({"a b": "c&d=%"}, 1), ({"a b": "c&d=%", "ü": "x y"}, 1), ({"a b": "c"}, 0)):
            found = Sandbox.list(query=SandboxQuery(metadata=metadata), **origin.options).next_items()
            assert [one.sandbox_id for one in found] == [odd.sandbox_id] * expected
    finally:
        odd.kill()


def test_5_the_last_page_of_a_list_has_no_token_also_when_it_is_full(origin: Origin) -> None:
    """x-next-token is absent on the last page."""
    made = [Sandbox.create(timeout=60, metadata={"page": "5"}, **origin.options) for _ in range(3)]
    try:
        for order in ("desc", "asc"):
            ids, query = [], {"metadata": "page=5", "limit": "2", "order": order}
            first = control(origin, "GET", "/v2/sandboxes", params=query)
            ids += [one["sandboxID"] for one in first.json()]
            second = control(
                origin, "GET", "/v2/sandboxes", params={**query, "nextToken": first.headers["x-next-token"]}
            )
            ids += [one["sandboxID"] for one in second.json()]
            assert "x-next-token" not in second.headers
            expected = [one.sandbox_id for one in made]
            assert ids == (expected if order == "asc" else expected[::-1])
        full = control(origin, "GET", "/v2/sandboxes", params={"metadata": "page=5", "limit": "3"})
        assert len(full.json()) == 3
        assert "x-next-token" not in full.headers
        since = control(
            origin, "GET", "/v2/sandboxes", params={"metadata": "page=5", "startedAfter": full.json()[0]["startedAt"]}
        )
        assert [one["sandboxID"] for one in since.json()] == [made[2].sandbox_id], "inclusive, to the microsecond"
        assert control(origin, "GET", "/v2/sandboxes", params={"template": "nothing-of-that-name"}).json() == []
    finally:
        for one in made:
            one.kill()


def test_8_a_stream_whose_sandbox_is_killed_is_reset(origin: Origin) -> None:
    """RST, and not FIN, when a sandbox is killed: the older client tells its end by that."""
    victim = Sandbox.create(timeout=60, **origin.options)
    url = urlsplit(origin.url)
    body = framed({"process": {"cmd": "sleep", "args": ["60"]}})
    head = (
        f"POST /process.Process/Start HTTP/1.1\r\nHost: x\r\nE2b-Sandbox-Id: {victim.sandbox_id}\r\n"
        f"X-Access-Token: {token(victim)}\r\nContent-Type: application/connect+json\r\n"
        f"Connect-Protocol-Version: 1\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((url.hostname, url.port), timeout=30) as connection:
        connection.sendall(head.encode() + body)
        received = b""
        while b'"pid"' not in received:
            received += connection.recv(65536)
        victim.kill()
        with pytest.raises(ConnectionResetError):
            drain(connection)


def test_9_a_sandbox_that_is_paused_or_killed_is_502_on_the_data_plane_and_404_on_the_other(origin: Origin) -> None:
    """502, and not 404, on the data plane for sandboxes that are gone or paused."""
    one = Sandbox.create(timeout=60, **origin.options)
    assert one.pause() is True
    assert one.pause() is False, "409 the second time"
    assert one.is_running() is False
    with pytest.raises(SandboxNotRunningException):
        one.commands.run("true")
    with pytest.raises(SandboxNotRunningException):
        one.files.read("x")
    assert one.get_info().state.value == "paused"
    assert one.kill() is True, "paused ones, too"
    assert one.kill() is False
    assert one.is_running() is False
    for call in (one.get_info, one.pause, one.connect, lambda: one.set_timeout(10)):
        with pytest.raises(SandboxNotFoundException):
            call()


def test_10_a_new_file_is_three_events_in_order_and_the_next_question_knows_them(box: Sandbox) -> None:
    """Exactly three inotify events for a new file."""
    box.files.make_dir("watched")
    for octets in (False, True):
        watcher = box.files.watch_dir("watched", include_entry=True)
        for turn in range(5):
            box.files.write(f"watched/{octets}-{turn}", "x" * 1000, use_octet_stream=octets)
            events = watcher.get_new_events()
            assert [event.type.value for event in events] == ["create", "chmod", "write"]
            assert {event.name for event in events} == {f"{octets}-{turn}"}
            assert {event.entry.path for event in events} == {f"/home/user/watched/{octets}-{turn}"}
        watcher.stop()
        with pytest.raises(SandboxException):
            watcher.get_new_events()


def test_10_files_in_directories_made_in_one_go_are_seen(box: Sandbox) -> None:
    """F8"""
    box.files.make_dir("deep")
    watcher = box.files.watch_dir("deep", recursive=True)
    box.commands.run("mkdir -p deep/a/b/c/d && touch deep/a/b/c/d/x")
    assert "a/b/c/d/x" in [event.name for event in watcher.get_new_events()]
    watcher.stop()


def test_11_files_of_proc_are_read_to_their_end_although_their_size_is_0(box: Sandbox) -> None:
    """Files of /proc have the size 0."""
    assert re.fullmatch(r"[0-9a-f-]{36}\n", box.files.read("/proc/sys/kernel/random/boot_id"))


def test_12_access_to_the_internet_is_snake_case_in_and_camel_case_out(origin: Origin) -> None:
    """allow_internet_access is asked for, allowInternetAccess is told."""
    for allowed in (True, False):
        body = {"templateID": "base", "timeout": 60, "allow_internet_access": allowed}
        made = control(origin, "POST", "/v2/sandboxes", json=body)
        assert made.status_code == 201
        detail = control(origin, "GET", f"/sandboxes/{made.json()['sandboxID']}").json()
        assert detail["allowInternetAccess"] is allowed
        assert "allow_internet_access" not in detail
        control(origin, "DELETE", f"/sandboxes/{detail['sandboxID']}")


def test_13_stdin_that_nothing_is_said_of_is_there_and_false_is_dev_null(wire: httpx.Client, box: Sandbox) -> None:
    """Without a word on stdin it is there; the clients say false."""
    process = {"cmd": "/bin/bash", "args": ["-c", "[ -p /dev/stdin ] && echo pipe || echo none"]}
    for body, expected in (({"process": process}, b"pipe\n"), ({"process": process, "stdin": False}, b"none\n")):
        told = frames(wire.post("/process.Process/Start", content=framed(body), headers=STREAM).content)
        assert told[0] == (0, {"event": {"start": {"pid": told[0][1]["event"]["start"]["pid"]}}})
        assert base64.b64decode(told[1][1]["event"]["data"]["stdout"]) == expected
        assert told[2] == (0, {"event": {"end": {"exitCode": 0, "exited": True, "status": "exit status 0"}}})
        assert told[3:] == [(2, {})]


def test_14_an_authorization_selects_a_user_and_is_no_credential(
    wire: httpx.Client, origin: Origin, box: Sandbox
) -> None:
    """A Basic authorization selects a user and proves nothing."""
    assert box.commands.run("id -un; echo $HOME", user="root").stdout == "root\n/root\n"
    with pytest.raises(AuthenticationException, match="invalid username: 'nobody-of-that-name'"):
        box.commands.run("true", user="nobody-of-that-name")
    with pytest.raises(AuthenticationException, match="invalid username"):
        box.files.read("x", user="nobody-of-that-name")
    root = {"authorization": "Basic " + base64.b64encode(b"root:").decode(), "e2b-sandbox-id": box.sandbox_id}
    for named in (root, {**root, "x-access-token": "0" * 64}):
        answer = httpx.post(f"{origin.url}/process.Process/List", json={}, headers=named, trust_env=False)
        assert answer.status_code == 401


def test_15_an_idle_connection_is_kept_longer_than_the_clients_keep_theirs() -> None:
    """Connections are kept at least 310 s."""
    from space.e2b import server

    assert server.KEEP_ALIVE_S > 310


def test_16_a_key_in_the_older_form_is_the_same_key(origin: Origin, installation: Installation) -> None:
    """The older client checks the form of the API key."""
    assert re.fullmatch(r"e2b_[0-9a-f]+", origin.api_key)
    for key, status in ((origin.api_key, 200), (installation.key, 200), ("e2b_" + "0" * 64, 401), ("", 401)):
        answer = httpx.get(f"{origin.url}/v2/sandboxes", headers={"x-api-key": key}, trust_env=False)
        assert answer.status_code == status
        if status == 401:
            assert answer.json()["code"] == 401


def test_17_what_will_not_pass_is_not_tried_again(origin: Origin, api: Api) -> None:
    """The newer client repeats 503, 502, 429 and 504 of the control plane three times."""
    quota = api.call("GET", "/v1/project").json()
    used = quota["used"]["sandboxes"]
    api.call("PATCH", f"/v1/projects/{quota['id']}", json={"quota": {"sandboxes": used}})
    try:
        answer = control(origin, "POST", "/v2/sandboxes", json={"templateID": "base", "timeout": 60})
        assert answer.status_code == 429
        assert answer.headers["should-retry"] == "false"
        began = time.monotonic()
        with pytest.raises(SandboxException):
            Sandbox.create(timeout=60, **origin.options)
        assert time.monotonic() - began < 5
    finally:
        api.call("PATCH", f"/v1/projects/{quota['id']}", json={"quota": {"sandboxes": None}})


# --- wrong input


def test_wrong_input_is_refused_in_the_words_that_the_clients_know(box: Sandbox) -> None:
    with pytest.raises(FileNotFoundException):
        box.files.read("nothing-here")
    with pytest.raises(InvalidArgumentException, match="is a directory"):
        box.files.read("/home/user")
    with pytest.raises(InvalidArgumentException, match="cwd '/nowhere' does not exist"):
        box.commands.run("true", cwd="/nowhere")
    with pytest.raises(FileNotFoundException):
        box.files.list("/nowhere")
    with pytest.raises(FileNotFoundException):
        box.files.rename("nothing-here", "there")
    box.files.write("plain", "x")
    with pytest.raises(InvalidArgumentException):
        box.files.list("plain")
    with pytest.raises(InvalidArgumentException):
        box.files.make_dir("plain")
    with pytest.raises(FileNotFoundException):
        box.files.watch_dir("/nowhere")
    with pytest.raises(TimeoutException):
        box.commands.run("sleep 30", timeout=0.5)


def test_nothing_of_another_project_is_there(origin: Origin, installation: Installation, box: Sandbox) -> None:
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/pause"), ("POST", "/fork"), ("GET", "/metrics")):
        url = f"{origin.url}/sandboxes/{box.sandbox_id}{path}"
        answer = httpx.request(method, url, headers={"x-api-key": installation.other_key}, trust_env=False)
        assert answer.status_code == 404
    other = httpx.get(f"{origin.url}/v2/sandboxes", headers={"x-api-key": installation.other_key}, trust_env=False)
    assert other.json() == []


def test_malformed_requests_are_refused_and_nothing_breaks(wire: httpx.Client, origin: Origin, box: Sandbox) -> None:
    start = "/process.Process/Start"
    for body in (
        b"",
        b"\0\0\0\0\x05{",
        b"\0\xff\xff\xff\xff",
        framed([]),
        framed({"process": {"cmd": 5}}),
        b"\1\0\0\0\0",
    ):
        told = frames(wire.post(start, content=body, headers=STREAM).content)
        assert told[-1][0] == 2
        assert told[-1][1]["error"]["code"] in {"invalid_argument", "resource_exhausted"}
    for body in (b"{", b"[]", b'"x"', b"\xff"):
        headers = {"content-type": "application/json", "connect-protocol-version": "1"}
        assert wire.post("/filesystem.Filesystem/Stat", content=body, headers=headers).status_code == 400
    assert wire.post("/process.Process/Nothing", json={}).status_code == 501
    for body in (
        {"templateID": 5},
        {},
        {"templateID": "base", "timeout": -1},
        {"templateID": "base", "metadata": {"a": 1}},
    ):
        answer = control(origin, "POST", "/v2/sandboxes", json=body)
        assert answer.status_code == 400
        assert set(answer.json()) == {"code", "message"}
    assert wire.get("/health").status_code == 204
    assert httpx.get(f"{origin.url}/health", headers={"e2b-sandbox-id": "../x"}, trust_env=False).status_code == 502


# --- names, links, attributes, environments


@pytest.mark.parametrize(
    "name", ["🤣.txt", "あ.txt", "a b+%20.txt", "line\nbreak.txt", 'qu"ote\\s.txt', "semi;colon=.txt"]
)
def test_any_name_comes_back_as_it_went(box: Sandbox, name: str) -> None:
    """F1"""
    box.files.write_files([{"path": f"names/{name}", "data": name}, {"path": "names/beside", "data": "x"}])
    assert box.files.read(f"names/{name}") == name
    box.files.write(f"names/{name}", b"again")
    assert box.files.read(f"names/{name}") == "again"
    assert name in [entry.name for entry in box.files.list("names")]
    box.files.remove(f"names/{name}")
    box.files.remove(f"names/{name}")


def test_a_large_file_goes_both_ways_zipped_or_not(box: Sandbox) -> None:
    data = os.urandom(1 << 20) * 8
    for zipped in (False, True):
        box.files.write("large", data, gzip=zipped)
        assert box.files.read("large", format="bytes", gzip=zipped) == data
    assert b"".join(box.files.read("large", format="stream")) == data


def test_files_go_where_only_root_may_and_belong_to_the_user(box: Sandbox) -> None:
    box.files.write("/opt/made/for/me.txt", "x")
    entries = box.files.list("/opt/made", depth=3)
    assert [(entry.path, entry.owner, entry.permissions) for entry in entries] == [
        ("/opt/made/for", "user", "drwxr-xr-x"),
        ("/opt/made/for/me.txt", "user", "-rw-r--r--"),
    ]


def test_a_link_is_told_as_what_it_leads_to(box: Sandbox) -> None:
    box.files.write("end.txt", "x")
    box.commands.run("ln -sf end.txt link && ln -sf /nowhere dangling")
    info = box.files.get_info("link")
    assert (info.type.value, info.symlink_target, info.path) == ("file", "/home/user/end.txt", "/home/user/link")
    names = [entry.name for entry in box.files.list(".")]
    assert "link" in names
    assert "dangling" not in names


def test_metadata_are_extended_attributes_of_the_file(box: Sandbox) -> None:
    # gVisor takes them in memory alone, Linux of virtual machines on disks alone.
    path = "/dev/shm/tagged" if usual_driver() == "gvisor" else "tagged"
    box.files.write(path, "x", metadata={"kind": "note"})
    assert box.files.get_info(path).metadata == {"kind": "note"}
    box.commands.run(f"python3 -c \"import os; os.setxattr('{path}', 'user.e2b.more', b'yes')\"")
    assert box.files.get_info(path).metadata == {"kind": "note", "more": "yes"}
    box.files.write(path, "y")
    assert not box.files.get_info(path).metadata


@pytest.mark.parametrize("directory", ["/home/user", "/tmp"])
def test_metadata_is_kept_on_disks_too_until_the_file_is_another(box: Sandbox, directory: str) -> None:
    one, other = f"{directory}/tagged", f"{directory}/moved"
    for octets in (False, True):
        wrote = box.files.write(one, "x", metadata={"kind": "note"}, use_octet_stream=octets)
        assert wrote.metadata == box.files.get_info(one).metadata == {"kind": "note"}
    assert {entry.path: entry.metadata for entry in box.files.list(directory)}[one] == {"kind": "note"}
    assert box.files.rename(one, other).metadata == {"kind": "note"}
    box.files.write(other, "x")
    assert not box.files.get_info(other).metadata
    box.files.write(one, "x", metadata={"kind": "note"})
    box.commands.run(f"echo more >> {one}")
    # Attributes of a disk belong to the file, and a record beside all files to its content.
    assert bool(box.files.get_info(one).metadata) is (usual_driver() != "gvisor")


def test_envs_and_metrics_of_envd_need_the_token(wire: httpx.Client, origin: Origin, box: Sandbox) -> None:
    envs = wire.get("/envs").json()
    assert (envs["COLOR"], envs["E2B_SANDBOX"], envs["E2B_SANDBOX_ID"]) == ("blue", "true", box.sandbox_id)
    assert wire.get("/metrics").json()["mem_total"] > 0
    for path in ("/envs", "/metrics"):
        answer = httpx.get(origin.url + path, headers={"e2b-sandbox-id": box.sandbox_id}, trust_env=False)
        assert answer.status_code == 401
        assert "blue" not in answer.text


# --- lifecycle


def test_what_runs_survives_a_pause_and_the_token_stays(origin: Origin) -> None:
    one = Sandbox.create(timeout=120, **origin.options)
    try:
        pid, before = one.commands.run("sleep 600", background=True).pid, token(one)
        boot = one.files.read("/proc/sys/kernel/random/boot_id")
        one.pause()
        again = Sandbox.connect(one.sandbox_id, **origin.options)
        assert token(again) == before
        assert one.commands.run(f"kill -0 {pid} && echo alive").stdout == "alive\n"
        assert one.files.read("/proc/sys/kernel/random/boot_id") == boot
        one.files.write("kept", "x")
        one.pause(keep_memory=False)
        one.connect()
        assert one.files.read("/proc/sys/kernel/random/boot_id") != boot
        assert one.files.read("kept") == "x"
        assert pid not in [process.pid for process in one.commands.list()]
    finally:
        one.kill()


def test_a_deadline_pauses_where_it_should_and_traffic_wakes(origin: Origin) -> None:
    lifecycle = {"on_timeout": "pause", "auto_resume": True}
    one = Sandbox.create(timeout=120, lifecycle=lifecycle, **origin.options)
    try:
        one.files.write("kept", "x")
        one.set_timeout(0)
        assert one.get_info().state.value == "paused"
        assert one.files.read("kept") == "x"
        assert one.get_info().state.value == "running"
    finally:
        one.kill()


def test_connecting_makes_a_running_sandboxs_time_longer_and_never_shorter(origin: Origin) -> None:
    one = Sandbox.create(timeout=600, **origin.options)
    try:
        long = one.get_info().end_at
        one.connect(timeout=60)
        assert one.get_info().end_at == long
        one.connect(timeout=1200)
        assert one.get_info().end_at > long
        one.set_timeout(1)
        wait_until(lambda: one.is_running() is False, 20, "the end of its time")
    finally:
        one.kill()


def test_forks_go_on_from_the_source_and_are_no_part_of_it(origin: Origin, box: Sandbox) -> None:
    pid = box.commands.run("sleep 600", background=True).pid
    box.files.write("from", "source")
    forks = box.fork(count=2, timeout=60)
    try:
        assert len({one.sandbox_id for one in [*forks, box]}) == 3
        for one in forks:
            assert pid in [process.pid for process in one.commands.list()]
            one.files.write("from", "fork")
            assert one.commands.run("echo $E2B_SANDBOX_ID").stdout == f"{one.sandbox_id}\n"
        assert box.files.read("from") == "source"
    finally:
        for one in forks:
            one.kill()
        box.commands.kill(pid)


def test_snapshots_are_templates_by_id_and_by_name_until_they_are_deleted(origin: Origin, box: Sandbox) -> None:
    box.files.write("kept", "in the snapshot")
    kept = box.create_snapshot(name="kept")
    assert [one.snapshot_id for one in Sandbox.list_snapshots(**origin.options).next_items()] == [kept.snapshot_id]
    for name in (kept.snapshot_id, "kept", *kept.names):
        made = Sandbox.create(name, timeout=60, **origin.options)
        assert made.files.read("kept") == "in the snapshot"
        made.kill()
    assert Sandbox.delete_snapshot(kept.snapshot_id, **origin.options) is True
    assert Sandbox.delete_snapshot(kept.snapshot_id, **origin.options) is False
    with pytest.raises(SandboxException, match="404"):
        Sandbox.create("kept", timeout=60, **origin.options)


def test_secrets_are_kept_and_their_values_are_in_no_answer(origin: Origin) -> None:
    made = control(
        origin, "POST", "/secrets", json={"name": "token", "value": "very-secret-value", "metadata": {"for": "ci"}}
    )
    assert (made.status_code, made.json()["currentVersion"]) == (201, 1)
    path = f"/secrets/{made.json()['secretID']}"
    changed = control(origin, "POST", path, json={"value": "another-secret-value"})
    assert changed.json()["currentVersion"] == 2
    assert (made.json()["metadata"], changed.json()["metadata"]) == ({"for": "ci"}, {"for": "ci"})
    noted = control(origin, "POST", path, json={"value": "another-secret-value", "metadata": {}}).json()
    assert (noted["metadata"], noted["currentVersion"]) == ({}, 3)
    told = made.text + changed.text + control(origin, "GET", "/secrets").text + control(origin, "GET", path).text
    assert "secret-value" not in told
    wrong = control(origin, "POST", path, json={"value": 5, "metadata": "another-secret-value"})
    assert wrong.status_code == 400
    assert "secret-value" not in wrong.text
    assert control(origin, "DELETE", path).status_code == 204
    assert control(origin, "GET", path).status_code == 404


def test_what_cannot_be_had_is_refused_and_not_left_out(origin: Origin) -> None:
    for network, status in (
        ({"egressProxy": {"address": "x:1"}}, 501),
        ({"dnsServers": ["192.0.2.1"]}, 501),
        ({"rules": {"x.test": [{"transform": {"headers": {"x": "${e2b.secrets.nothing-of-that-name}"}}}]}}, 400),
    ):
        body = {"templateID": "base", "timeout": 60, "network": network}
        answer = control(origin, "POST", "/v2/sandboxes", json=body)
        assert (answer.status_code, answer.json()["code"]) == (status, status)
        assert f"network.{next(iter(network))}" in answer.json()["message"]
    # Whether there is such a volume is no matter where machines mount none.
    no_volume = 400 if usual_driver() == "gvisor" else 409
    for field, status in (
        ({"volumeMounts": [{"name": "v", "path": "/v"}]}, no_volume),
        ({"iam": {"tokens": {"t": {"audience": "x"}}}}, 400),
    ):
        body = {"templateID": "base", "timeout": 60, **field}
        assert control(origin, "POST", "/v2/sandboxes", json=body).status_code == status


def test_what_may_leave_becomes_a_policy(origin: Origin, api: Api) -> None:
    network = {"allowOut": ["a.test", "192.0.2.0/24"], "denyOut": ["0.0.0.0/0"]}
    made = control(origin, "POST", "/v2/sandboxes", json={"templateID": "base", "timeout": 60, "network": network})
    found = made.json()["sandboxID"]
    try:
        policy = api.call("GET", f"/v1/sandboxes/{found}/policy").json()["policy"]
        assert [rule["hosts"] for rule in policy["rules"]] == [["a.test"]]
        assert [rule["networks"] for rule in policy["networks"]] == [["192.0.2.0/24"]]
        assert control(origin, "PUT", f"/sandboxes/{found}/network", json={}).status_code == 204
        assert api.call("GET", f"/v1/sandboxes/{found}/policy").json()["policy"] == "public-internet"
        for wrong in ({"denyOut": ["a.test"]}, {"allowOut": ["a.test"]}):
            assert control(origin, "PUT", f"/sandboxes/{found}/network", json=wrong).status_code == 400
    finally:
        control(origin, "DELETE", f"/sandboxes/{found}")


def test_a_creation_that_is_repeated_is_one_and_another_header_is_another(origin: Origin) -> None:
    def create(value: str) -> httpx.Response:
        network = {"rules": {"a.example": [{"transform": {"headers": {"x-key": value}}}]}}
        body = {"templateID": "base", "timeout": 60, "network": network}
        named = {"x-api-key": origin.api_key, "idempotency-key": key}
        return httpx.post(f"{origin.url}/v2/sandboxes", json=body, headers=named, timeout=60, trust_env=False)

    key = os.urandom(8).hex()
    first, again, other = create("one"), create("one"), create("other")
    assert (first.status_code, again.status_code, other.status_code) == (201, 201, 409)
    assert first.json()["sandboxID"] == again.json()["sandboxID"]
    control(origin, "DELETE", f"/sandboxes/{first.json()['sandboxID']}")


# --- the client without blocking


async def test_the_async_client_runs_watches_and_is_cut_off(origin: Origin) -> None:
    one = await AsyncSandbox.create(timeout=120, **origin.options)
    results = await asyncio.gather(*(one.commands.run(f"echo {turn}") for turn in range(8)))
    assert [result.stdout for result in results] == [f"{turn}\n" for turn in range(8)]
    events: asyncio.Queue = asyncio.Queue()
    watcher = await one.files.watch_dir(".", on_event=events.put_nowait)
    await one.files.write("new", "x")
    async with asyncio.timeout(20):
        seen = [(await events.get()).type.value for _ in range(3)]
    assert seen == ["create", "chmod", "write"]
    await watcher.stop()
    with pytest.raises(CommandExitException):
        await one.commands.run("exit 1")
    handle = await one.commands.run("sleep 60", background=True)
    await one.kill()
    with pytest.raises(SandboxNotRunningException):
        await handle.wait()
