"""Forks, snapshots and the keeper's subcommands as a process, against a scripted server on loopback."""

import json
from typing import Any

from tests.command_line import ID, server, space
from tests.scripted_server import ScriptedServer, error, operation, sandbox, snapshot

__all__ = ["server"]

FORK = f"POST /v1/sandboxes/{ID}/fork"
FORKS = ["sbxbbbbbbbbbbbbbbbb", "sbxcccccccccccccccc"]
SNAPSHOT = snapshot(name="ready")
PROJECT = {
    "id": "prj1",
    "name": "default",
    "quota": {"sandboxes": 10, "cpus": None, "memory_mib": 4096, "disk_mib": None},
    "used": {"sandboxes": 1, "cpus": 0.5, "memory_mib": 1024, "disk_mib": 4096},
    "created_at": "2026-01-02T03:04:05Z",
}


def rows(output: bytes) -> list[list[str]]:
    return [line.split() for line in output.decode().splitlines()]


def test_fork_prints_an_id_a_line_and_deletes_nothing(server: ScriptedServer) -> None:
    made = [sandbox(id=one, forked_from=ID) for one in FORKS]
    server.on(FORK, {"sandboxes": made, "operation": operation(kind="fork")})
    done = space(server, "fork", "demo", "--count", "2", "--name", "try", "-e", "N=1", "-m", "for=x")
    assert done.stdout.decode().split() == FORKS
    assert server.requests(FORK)[0].json == {"count": 2, "name": "try", "metadata": {"for": "x"}, "env": {"N": "1"}}
    assert json.loads(space(server, "fork", ID, "--json").stdout) == made
    assert server.requests(FORK)[1].json == {"count": 1}
    assert not [seen for seen in server.seen if seen.method == "DELETE"]
    assert space(server, "fork", ID, "--count", "0").returncode == 2


def test_a_fork_that_is_refused_has_status_1_and_says_what_helps(server: ScriptedServer) -> None:
    server.on(FORK, error(429, "quota-exceeded", "The project may have 2 sandboxes.", quota="sandboxes"))
    done = space(server, "fork", ID)
    assert done.returncode == 1
    assert b"space project" in done.stderr


def test_snapshots_are_made_listed_shown_and_deleted_by_id_or_name(server: ScriptedServer) -> None:
    one = f"/v1/snapshots/{SNAPSHOT['id']}"
    server.on(f"POST /v1/sandboxes/{ID}/snapshots", {"snapshot": SNAPSHOT, "operation": operation()})
    server.on("GET /v1/snapshots", {"items": [SNAPSHOT], "next_cursor": None})
    server.on(f"GET {one}", SNAPSHOT)
    server.on(f"DELETE {one}", {})
    done = space(server, "snapshot", "create", "demo", "ready", "--kind", "disk")
    assert done.stdout.decode() == f"{SNAPSHOT['id']}\n"
    assert server.requests(f"POST /v1/sandboxes/{ID}/snapshots")[0].json == {"name": "ready", "kind": "disk"}
    heading, row = rows(space(server, "snapshot", "ls").stdout)
    assert heading == ["SNAPSHOT", "NAME", "KIND", "STATE", "SIZE", "SANDBOX", "CREATED"]
    assert row[:7] == [SNAPSHOT["id"], "ready", "full", "ready", "12.0", "MiB", ID]
    for name in ("ready", SNAPSHOT["id"], f"snapshot:{SNAPSHOT['id']}"):
        assert json.loads(space(server, "snapshot", "inspect", name, "--json").stdout) == SNAPSHOT
    assert space(server, "snapshot", "rm", "ready", SNAPSHOT["id"]).returncode == 0
    assert len(server.requests(f"DELETE {one}")) == 2


def test_a_snapshot_that_is_not_there_keeps_no_other_from_being_deleted(server: ScriptedServer) -> None:
    both = {"items": [SNAPSHOT, {**SNAPSHOT, "id": "snp2"}], "next_cursor": None}
    server.on("GET /v1/snapshots", {"items": [], "next_cursor": None}, both)
    server.on(f"GET /v1/snapshots/{SNAPSHOT['id']}", SNAPSHOT)
    server.on(f"DELETE /v1/snapshots/{SNAPSHOT['id']}", {})
    done = space(server, "snapshot", "rm", "other", "ready", SNAPSHOT["id"])
    assert done.returncode == 1
    assert b"no snapshot 'other'" in done.stderr
    assert b"snp2" in done.stderr
    assert len(server.requests(f"DELETE /v1/snapshots/{SNAPSHOT['id']}")) == 1


def test_create_takes_a_snapshot_and_what_is_to_happen_when_idle(server: ScriptedServer) -> None:
    words = ["--idle-timeout", "60", "--on-idle", "pause", "--wake-on-request"]
    assert space(server, "create", f"snapshot:{SNAPSHOT['id']}", *words).returncode == 0
    assert server.requests("POST /v1/sandboxes")[0].json == {
        "template": f"snapshot:{SNAPSHOT['id']}",
        "idle_timeout_s": 60.0,
        "on_idle": "pause",
        "wake_on_request": True,
    }


def test_the_pool_is_a_row_for_each_shape(server: ScriptedServer) -> None:
    shape: dict[str, Any] = {"template_digest": "sha256:" + "0" * 64, "driver": "gvisor", "memory_mib": 1024}
    shape |= {"warm": True, "idle": 2, "filling": 1, "target": 3, "claims": 10, "restores": 4, "boots": 5}
    answer = {"memory_mib": 80, "memory_max_mib": 1024, "shapes": [shape]}
    server.on("GET /v1/pool", answer)
    heading, row, memory = rows(space(server, "pool").stdout)
    assert heading[4:] == ["IDLE", "TARGET", "FILLING", "CLAIMS", "RESTORES", "BOOTS"]
    assert row == ["sha256:000000000000", "gvisor", "1024", "MiB", "yes", "2", "3", "1", "10", "4", "5"]
    assert memory == ["memory:", "80", "of", "at", "most", "1024", "MiB"]
    assert json.loads(space(server, "pool", "--json").stdout) == answer


def test_strays_are_shown_and_are_no_failure(server: ScriptedServer) -> None:
    strays = [{"kind": "cgroup", "name": "sbx1", "removed": False}]
    server.on("POST /v1/gc", {"strays": strays})
    done = space(server, "gc", "--dry-run")
    assert done.returncode == 0
    assert rows(done.stdout) == [["KIND", "NAME", "REMOVED"], ["cgroup", "sbx1", "no"]]
    assert json.loads(space(server, "gc", "--json").stdout) == strays
    assert [seen.json for seen in server.requests("POST /v1/gc")] == [{"dry_run": True}, {"dry_run": False}]


def test_a_project_is_shown_with_its_limits_which_an_admin_sets(server: ScriptedServer) -> None:
    server.on("GET /v1/project", PROJECT)
    server.on("GET /v1/project/policy", {"source": "installation", "policy": None, "document": "none"})
    server.on("PATCH /v1/projects/prj1", PROJECT)
    shown = rows(space(server, "project").stdout)
    assert shown == [
        ["default", "prj1"],
        ["LIMIT", "USED", "QUOTA"],
        ["sandboxes", "1", "10"],
        ["cpus", "0.5", "-"],
        ["memory_mib", "1024", "4096"],
        ["disk_mib", "4096", "-"],
        ["policy", "none", "(of", "the", "installation)"],
    ]
    assert space(server, "project", "--set", "cpus=8", "--set", "memory_mib=none").returncode == 0
    assert server.requests("PATCH /v1/projects/prj1")[0].json == {"quota": {"cpus": 8.0, "memory_mib": None}}
    assert space(server, "project", "--set", "speed=1").returncode == 2
    server.on("PATCH /v1/projects/prj1", error(403, "forbidden", "That takes an admin's key."))
    assert space(server, "project", "--set", "cpus=8").returncode == 1
