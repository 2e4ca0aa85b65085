"""What a template starts in a fresh machine: once, in the machine that spares are copied from, and at a plain boot."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from space.model.ids import new_id
from tests.node_host import DIGEST, NodeHost, machine_request, node_host, wait_until


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """Where the guest's programs, processes of this host, leave word."""
    directory = tmp_path / "notes"
    directory.mkdir(mode=0o777)
    return directory


def defaults(notes: Path, **entry: Any) -> dict[str, Any]:
    start = f"echo $GREETING $PWD >>{notes}/started; exec sleep 600"
    wanted = {"start": start, "ready": f"test -s {notes}/started", "timeout_s": 20, **entry}
    return {"env": {"GREETING": "hello"}, "workdir": "/tmp", "user": "root", "entry": wanted}


def put(host: NodeHost, sandbox: str, **fields: Any) -> Any:
    return host.local.put(f"/machines/{sandbox}", json=machine_request(**fields))


@pytest.fixture
def host(tmp_path: Path) -> Iterator[NodeHost]:
    with node_host(tmp_path) as one:
        yield one


def test_a_machine_that_is_booted_has_what_its_template_starts_and_is_ready_once_that_is_up(
    host: NodeHost, notes: Path
) -> None:
    sandbox = new_id("sbx")
    answer = put(host, sandbox, template_defaults=defaults(notes))
    assert answer.status_code == 200, answer.text
    assert answer.json()["ready"] is True
    assert "entry" in answer.json()["timings"]
    assert (notes / "started").read_text() == "hello /tmp\n"
    shown = host.local.get(f"/machines/{sandbox}").json()
    assert shown["commands_running"] == 0, "what the template starts is no command of anybody's"
    assert "sleep 600" in host.exec(sandbox, command="ps -eo args")["stdout"]
    # Asked again, and after the node's death, it is not started a second time; a boot afresh starts it again.
    assert put(host, sandbox, template_defaults=defaults(notes)).status_code == 200
    host.kill_node()
    host.start_node()
    assert host.exec(sandbox, command="true")["exit"]["code"] == 0
    assert (notes / "started").read_text() == "hello /tmp\n"
    for verb in ("suspend", "wake"):
        assert host.local.post(f"/machines/{sandbox}/{verb}", json={}).status_code == 200
    assert (notes / "started").read_text() == "hello /tmp\n"
    for verb in ("stop", "start"):
        assert host.local.post(f"/machines/{sandbox}/{verb}", json={}).status_code == 200
    assert (notes / "started").read_text() == "hello /tmp\n" * 2


def test_what_has_ended_is_started_again_once_for_all_who_ask_and_what_runs_is_not(host: NodeHost, notes: Path) -> None:
    sandbox, unchecked = new_id("sbx"), new_id("sbx")
    put(host, sandbox, template_defaults=defaults(notes))

    def ask(_: int = 0) -> Any:
        return host.local.post(f"/machines/{sandbox}/entry").json()["started"]

    assert ask() is False
    (notes / "started").unlink()
    with ThreadPoolExecutor(5) as together:
        assert sorted(together.map(ask, range(5))) == [False] * 4 + [True]
    assert (notes / "started").read_text() == "hello /tmp\n"
    assert put(host, unchecked, template_defaults=defaults(notes, ready=None)).status_code == 200
    assert host.local.post(f"/machines/{unchecked}/entry").json() == {"started": None}
    unknown = host.local.post(f"/machines/{new_id('sbx')}/entry")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "sandbox-not-found")


@pytest.mark.parametrize(
    "wrong", [{"ready": "false", "timeout_s": 0.5}, {"start": ["/nonexistent"]}, {"ready": ["/nonexistent"]}]
)
def test_a_template_whose_start_does_not_come_up_fails_the_boot_and_says_so(
    host: NodeHost, notes: Path, wrong: dict[str, Any]
) -> None:
    answer = put(host, new_id("sbx"), template_defaults=defaults(notes, **wrong))
    assert answer.json()["error"]["code"] == "entry-failed"


@pytest.mark.parametrize("wrong", ["sleep", {}, {"start": []}, {"start": [1]}, {"start": "x", "timeout_s": -1}])
def test_an_entry_that_is_none_is_refused(host: NodeHost, wrong: Any) -> None:
    answer = put(host, new_id("sbx"), template_defaults={"entry": wrong})
    assert answer.status_code == 422
    assert answer.json()["error"]["details"]["field"].startswith("template_defaults.entry")


def test_what_comes_from_the_pool_has_it_running_and_it_was_started_once_for_all(tmp_path: Path, notes: Path) -> None:
    # The scripted broker's snapshots hold nothing: what counts here is who is told to start it, and how often.
    with node_host(tmp_path, pool_max="0") as host:
        host.broker.templates[0]["defaults"] = defaults(notes)
        host.broker.templates[0]["defaults"] = defaults(notes)
        host.kill_node()
        host.environment["SPACE_POOL_MAX"] = "2"
        host.start_node()
        wait_until(lambda: any(one["idle"] for one in host.local.get("/pool").json()["shapes"]), "a spare")
        assert (notes / "started").read_text() == "hello /tmp\n"
        resources = {"cpus": 1.0, "memory_mib": 1024, "disk_mib": 512, "pids": 256}
        answer = put(
            host, new_id("sbx"), template_digest=DIGEST, template_defaults=defaults(notes), resources=resources
        )
        assert "claim" in answer.json()["timings"]
        assert "entry" not in answer.json()["timings"]
        assert (notes / "started").read_text() == "hello /tmp\n"


def test_a_template_is_prepared_once_for_all_who_ask_with_what_it_starts(tmp_path: Path, notes: Path) -> None:
    digest = "sha256:" + "2" * 64
    with node_host(tmp_path, pool_max="2") as host:
        # As the broker lists what was built: by digest alone.
        host.broker.templates.append({"digest": digest, "bytes": 1})
        body = {"template_defaults": defaults(notes), "driver": None, "memory_mib": 512}
        with ThreadPoolExecutor(5) as together:
            answers = list(together.map(lambda _: host.local.post(f"/templates/{digest}/warm", json=body), range(5)))
        assert {answer.status_code for answer in answers} == {200}, [answer.text for answer in answers]
        assert (notes / "started").read_text() == "hello /tmp\n"
        taken = [request for request in host.broker.requests if request["verb"] == "snapshot"]
        assert len(taken) == 2, "one of the base, one of this"
        failing = {**body, "template_defaults": defaults(notes, ready="false", timeout_s=0.5), "memory_mib": 600}
        assert host.local.post(f"/templates/{digest}/warm", json=failing).status_code == 200, "it is prepared already"
        unknown = host.local.post(f"/templates/sha256:{'3' * 64}/warm", json=body)
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "template-not-found")


def test_a_template_that_does_not_come_up_is_told_to_who_had_it_prepared(host: NodeHost, tmp_path: Path) -> None:
    body = {"template_defaults": {}, "driver": None, "memory_mib": 512}
    off = host.local.post(f"/templates/{DIGEST}/warm", json=body)
    assert (off.status_code, off.json()["error"]["code"]) == (409, "pool-off")
    with node_host(tmp_path / "other", pool_max="2") as pooled:
        digest = "sha256:" + "2" * 64
        pooled.broker.templates.append({"digest": digest, "bytes": 1})
        wrong = {**body, "template_defaults": {"entry": {"start": "true", "ready": "false", "timeout_s": 0.5}}}
        failed = pooled.local.post(f"/templates/{digest}/warm", json=wrong)
        assert failed.json()["error"]["code"] == "entry-failed"
