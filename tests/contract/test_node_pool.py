"""The warm pool, with real agents behind a scripted broker: what is claimed is nobody else's, and used once."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from space.model.ids import new_id
from space.node.warm import SIZES_MAX
from tests.node_host import DIGEST, NodeHost, machine_request, node_host, wait_until

OTHER = "sha256:" + "1" * 64
REFUSED = {"code": "claim-failed", "message": "No.", "kind": "HostError", "details": {}}
MEMORY_MIB = 1024
"""What a sandbox has that is not told otherwise: of these some wait from the start."""


@pytest.fixture
def pooled(tmp_path: Path) -> Iterator[NodeHost]:
    with node_host(tmp_path, pool_max="3") as one:
        wait_for_idle(one)
        yield one


def pool(host: NodeHost) -> dict[str, Any]:
    return host.local.get("/pool").json()


def shape(host: NodeHost, memory_mib: int = MEMORY_MIB, digest: str = DIGEST) -> dict[str, Any]:
    for one in pool(host)["shapes"]:
        if (one["memory_mib"], one["template_digest"]) == (memory_mib, digest):
            return one
    return {"idle": 0, "filling": 0, "target": 0, "claims": 0, "restores": 0, "boots": 0, "warm": False}


def wait_for_idle(host: NodeHost, count: int = 1, **of: Any) -> None:
    wait_until(lambda: shape(host, **of)["idle"] >= count and not shape(host, **of)["filling"], "spares to wait")


def request(memory_mib: int = MEMORY_MIB, cpus: float = 1.0, disk_mib: int = 512, **fields: Any) -> dict[str, Any]:
    resources = {"cpus": cpus, "memory_mib": memory_mib, "disk_mib": disk_mib, "pids": 256}
    return machine_request(resources=resources, **fields)


def boot(host: NodeHost, sandbox: str | None = None, **fields: Any) -> tuple[str, dict[str, Any]]:
    sandbox = sandbox or new_id("sbx")
    answer = host.local.put(f"/machines/{sandbox}", json=request(**fields))
    assert answer.status_code == 200, answer.text
    assert answer.json()["ready"] is True
    return sandbox, answer.json()["timings"]


def test_a_claimed_machine_is_the_sandbox_in_every_respect(pooled):
    assert pool(pooled)["shapes"][0]["warm"] is True
    sandbox, timings = boot(pooled, env={"FROM_SANDBOX": "claimed"})
    assert "claim" in timings
    assert "boot" not in timings
    assert shape(pooled)["claims"] == 1
    assert pooled.exec(sandbox, command="echo $FROM_SANDBOX $FROM_TEMPLATE; pwd")["stdout"] == "claimed 1\n/tmp\n"
    seen = pooled.local.get(f"/machines/{sandbox}").json()
    assert (seen["machine"], seen["state"], seen["spare"]) == (sandbox, "running", False)
    assert seen["body"] != sandbox
    claim = next(one for one in pooled.broker.requests if one["verb"] == "claim")
    assert claim["resources"] == request()["resources"]
    assert claim["hostname"] == "test-box"
    pooled.kill_node()
    pooled.start_node()
    assert pooled.exec(sandbox, command="echo $FROM_SANDBOX")["stdout"] == "claimed\n"
    for verb in ("pause", "resume", "suspend", "wake", "stop", "start"):
        assert pooled.local.post(f"/machines/{sandbox}/{verb}", json={}).status_code == 200, verb
    assert pooled.exec(sandbox, command="echo $FROM_SANDBOX")["stdout"] == "claimed\n"
    assert pooled.local.delete(f"/machines/{sandbox}").status_code == 200
    assert sandbox not in pooled.broker.states


def test_a_node_that_is_still_looking_for_its_machines_knows_the_body_of_one_it_is_asked_about(pooled):
    sandbox, _ = boot(pooled)
    assert pooled.local.post(f"/machines/{sandbox}/suspend", json={}).status_code == 200
    pooled.kill_node()
    release = pooled.broker.holding["machines"] = threading.Event()
    try:
        pooled.start_node(until="/healthz")
        woken = pooled.local.post(f"/machines/{sandbox}/wake", json={})
        assert woken.status_code == 200, woken.text
        assert woken.json()["ready"] is True
    finally:
        release.set()
    wait_until(lambda: pooled.local.get("/readyz").status_code == 200, "the node to have found its machines")
    assert pooled.exec(sandbox, command="echo on")["stdout"] == "on\n"


def made_of(host: NodeHost, machine: str) -> tuple[float, int, int, str | None]:
    """With which processors, memory, disk and snapshot the body of a machine was made."""
    body = host.local.get(f"/machines/{machine}").json()["body"]
    made = next(one for one in host.broker.requests if (one["verb"], one.get("machine")) == ("boot", body))
    resources = made["resources"]
    return (resources["cpus"], resources["memory_mib"], resources["disk_mib"], made.get("snapshot"))


def test_where_machines_keep_their_hardware_a_spare_stands_in_for_those_of_its_own_size_alone(pooled):
    pooled.broker.driver["keeps_hardware"] = True
    pooled.kill_node()
    pooled.start_node()
    sizes = [{"cpus": 1.5, "disk_mib": 512}, {"cpus": 1.0, "disk_mib": 512}, {"cpus": 2.0, "disk_mib": 1024}]
    found = []
    for size in sizes:
        first, _ = boot(pooled, **size)
        assert made_of(pooled, first) == (size["cpus"], MEMORY_MIB, size["disk_mib"], None)
    idle = lambda: [one["idle"] > 0 for one in pool(pooled)["shapes"]]  # noqa: E731 - the usual size is always wanted, too
    wait_until(lambda: idle() == [True] * (len(sizes) + 1), "spares of each size")
    for size in sizes:
        second, timings = boot(pooled, **size)
        assert "claim" in timings
        found.append(made_of(pooled, second))
    assert [one[:3] for one in found] == [(2, MEMORY_MIB, 512), (1, MEMORY_MIB, 512), (2, MEMORY_MIB, 1024)]
    snapshots = [one[3] for one in found]
    assert len({*snapshots}) == len(sizes)
    models = {one["snapshot"]: one["machine"] for one in pooled.broker.requests if one["verb"] == "snapshot"}
    for size, snapshot in zip(found, snapshots, strict=True):
        model = next(one for one in pooled.broker.requests if one.get("machine") == models[snapshot])["resources"]
        assert (model["cpus"], model["memory_mib"], model["disk_mib"]) == size[:3]


def test_of_sizes_that_machines_keep_not_many_are_kept_ready(pooled):
    pooled.broker.driver["keeps_hardware"] = True
    pooled.kill_node()
    pooled.start_node()
    for disk_mib in range(512, 512 + 6):
        boot(pooled, disk_mib=disk_mib)
    made = lambda: sum(verb == "snapshot" for verb in pooled.broker.verbs)  # noqa: E731
    wait_until(lambda: made() >= 7, "a snapshot of each size")
    wait_until(lambda: len(pooled.broker.snapshots) == SIZES_MAX, "the oldest to go")


def test_spares_are_never_listed_as_machines(pooled):
    assert pooled.broker.spares
    assert pooled.local.get("/machines").json() == {"machines": []}
    assert pooled.local.get("/machines/activity").json() == {"machines": {}}
    assert pooled.local.get("/snapshots").json() == {"snapshots": []}
    own = next(iter(pooled.broker.snapshots))
    assert pooled.local.delete(f"/snapshots/{own}").status_code == 404
    spare = next(iter(pooled.broker.spares))
    assert pooled.local.post(f"/v1/sandboxes/{spare}/exec", json={"command": "true"}).status_code == 404


def test_claims_at_once_never_get_one_spare(pooled):
    for _ in range(3):
        boot(pooled)
    wait_for_idle(pooled, 3)
    ids = [new_id("sbx") for _ in range(6)]

    def ask(sandbox: str) -> None:
        with httpx.Client(transport=httpx.HTTPTransport(uds=pooled.socket), base_url="http://node", timeout=60) as one:
            assert one.put(f"/machines/{sandbox}", json=request(env={"WHO": sandbox})).json()["ready"] is True

    threads = [threading.Thread(target=ask, args=(sandbox,)) for sandbox in ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [pooled.exec(one, command="echo $WHO")["stdout"].strip() for one in ids] == ids
    bodies = [pooled.broker.bodies.get(one, one) for one in ids]
    assert len(set(bodies)) == len(ids)
    counts = shape(pooled)
    assert counts["claims"] >= 4
    assert counts["claims"] + counts["restores"] + counts["boots"] == 9


def test_the_stock_follows_what_is_asked_for_within_its_bounds(pooled):
    assert shape(pooled)["target"] == 1
    boot(pooled)
    wait_for_idle(pooled, 2)
    for _ in range(4):
        boot(pooled)
    wait_for_idle(pooled, 3)
    assert shape(pooled)["target"] == 3
    assert len(pooled.broker.spares) == 3


def test_the_stock_stays_within_its_memory(tmp_path):
    with node_host(tmp_path, pool_max="8", pool_memory_mib="70") as host:
        wait_for_idle(host)
        for _ in range(4):
            boot(host)
        wait_for_idle(host, 2)  # The scripted broker says that each takes 30 MiB.
        assert shape(host)["target"] == 2
        assert pool(host) | {"shapes": None} == {"memory_mib": 60, "memory_max_mib": 70, "shapes": None}


def test_another_shape_boots_or_restores_first_and_is_in_stock_afterwards(pooled):
    _, timings = boot(pooled, memory_mib=512)
    assert "boot" in timings
    assert shape(pooled, memory_mib=512)["restores"] == 1, "the warm snapshot is the template's, whatever the memory"
    wait_for_idle(pooled, memory_mib=512)
    _, timings = boot(pooled, memory_mib=512)
    assert "claim" in timings


def test_the_warm_snapshot_is_made_once_and_kept_for_the_next_node(pooled):
    assert len(pooled.broker.snapshots) == 1
    for _ in range(3):
        boot(pooled)
    wait_for_idle(pooled, 3)
    pooled.kill_node()
    spares = set(pooled.broker.spares)
    foreign = new_id("snp")
    pooled.broker.snapshots[foreign] = {"machine": new_id("sbx"), "kind": "full", "bytes": 1}
    pooled.start_node()
    wait_for_idle(pooled)
    assert not spares & set(pooled.broker.states), "what a former node had waiting is ended"
    made = [one for one in pooled.broker.requests if one["verb"] == "snapshot"]
    assert len(made) == 1
    assert foreign in pooled.broker.snapshots, "the api's are left alone"
    restored = [one for one in pooled.broker.requests if one["verb"] == "boot" and one.get("spare")]
    assert [one.get("snapshot") for one in restored].count(None) == 1


def test_a_warm_snapshot_that_was_not_finished_is_dropped_by_the_next_node(pooled):
    pooled.kill_node()
    notes = pooled.data_dir / "node" / "warm.json"
    notes.write_text(notes.read_text().replace('"made": true', '"made": false'))
    before = next(iter(pooled.broker.snapshots))
    pooled.start_node()
    wait_for_idle(pooled)
    assert before not in pooled.broker.snapshots
    assert len(pooled.broker.snapshots) == 1


def test_when_the_template_changes_spares_and_warm_snapshot_of_the_old_one_go(tmp_path):
    with node_host(tmp_path, pool_max="2") as host:
        wait_for_idle(host)
        old, spares = next(iter(host.broker.snapshots)), set(host.broker.spares)
        host.broker.templates = [{**host.broker.templates[0], "digest": OTHER}]
        wait_until(lambda: not spares & set(host.broker.states), "the old spares to be gone", 30)
        wait_until(lambda: old not in host.broker.snapshots, "the old warm snapshot to be gone")
        wait_for_idle(host, digest=OTHER)
        _, timings = boot(host, template_digest=OTHER)
        assert "claim" in timings


@pytest.mark.parametrize("broken", ["claim", "configure"])
def test_a_claim_that_fails_destroys_the_spare_and_the_sandbox_comes_up_otherwise(pooled, broken):
    spare = next(iter(pooled.broker.spares))
    if broken == "claim":
        pooled.broker.failing["claim"] = REFUSED
        sandbox, timings = boot(pooled)
    else:
        # The guest refuses: it has no such thing as a process that it could leave for this.
        agent = pooled.broker.agents[spare]
        agent.process.kill()
        agent.process.wait()
        sandbox, timings = boot(pooled)
    assert "boot" in timings
    assert pooled.broker.bodies.get(sandbox, sandbox) == sandbox
    wait_until(lambda: spare not in pooled.broker.states, "the spare to be gone")
    assert pooled.exec(sandbox, command="echo on")["stdout"] == "on\n"


def test_a_spare_that_dies_is_replaced(pooled):
    spare = next(iter(pooled.broker.spares))
    agent = pooled.broker.agents[spare]
    for holding in agent.holds:
        os.close(holding)
    agent.holds.clear()
    agent.process.kill()
    agent.process.wait()
    wait_until(lambda: spare not in pooled.broker.states, "it to be cleared away")
    wait_for_idle(pooled)
    _, timings = boot(pooled)
    assert "claim" in timings


def test_a_spare_that_the_broker_does_not_end_at_once_is_ended_later(pooled):
    spare = next(iter(pooled.broker.spares))
    pooled.broker.failing["destroy"] = {"code": "internal", "message": "No.", "kind": "HostError", "details": {}}
    agent = pooled.broker.agents[spare]
    for holding in agent.holds:
        os.close(holding)
    agent.holds.clear()
    agent.process.kill()
    agent.process.wait()
    wait_until(lambda: "destroy" not in pooled.broker.failing, "it to be asked for")
    wait_until(lambda: spare not in pooled.broker.states, "it to be asked for again")
    wait_for_idle(pooled)


def test_a_spare_that_cannot_be_measured_is_not_left_behind(pooled):
    pooled.kill_node()
    pooled.broker.failing["inspect"] = {"code": "internal", "message": "No.", "kind": "HostError", "details": {}}
    pooled.start_node()
    wait_for_idle(pooled)
    assert "inspect" not in pooled.broker.failing
    assert len(pooled.broker.spares) == shape(pooled)["idle"]


def test_a_full_host_gets_its_spares_back(pooled):
    spares = set(pooled.broker.spares)
    pooled.broker.failing["boot"] = {"code": "host-full", "message": "Full.", "kind": "HostFull", "details": {}}
    sandbox, _ = boot(pooled, memory_mib=512)
    assert pooled.exec(sandbox, command="echo on")["stdout"] == "on\n"
    assert not spares & set(pooled.broker.states)
    for _ in range(10):  # longer than the pool waits for others to be served
        assert shape(pooled)["filling"] == 0
        assert not pooled.broker.spares, "nothing is added to a host that is full"
        time.sleep(0.05)


def test_a_warm_snapshot_that_does_not_do_is_replaced(pooled):
    before = next(iter(pooled.broker.snapshots))
    pooled.broker.failing["boot"] = {"code": "image-damaged", "message": "No.", "kind": "HostError", "details": {}}
    sandbox, _ = boot(pooled, memory_mib=512)
    assert pooled.exec(sandbox, command="echo on")["stdout"] == "on\n"
    assert shape(pooled, memory_mib=512)["boots"] == 1
    wait_until(lambda: before not in pooled.broker.snapshots, "the snapshot to be dropped")
    wait_for_idle(pooled)
    assert shape(pooled)["warm"] is True


def test_the_pool_can_be_turned_off(host):
    sandbox, timings = boot(host)
    assert "boot" in timings
    assert pool(host)["shapes"] == []
    assert not host.broker.spares
    assert "snapshot" not in host.broker.asked
    host.local.delete(f"/machines/{sandbox}")


def test_a_boot_that_was_cut_short_by_the_nodes_death_is_finished_with_the_machine_there_is(pooled):
    """L12"""
    release = pooled.broker.holding["claim"] = threading.Event()
    sandbox = new_id("sbx")
    with (
        httpx.Client(transport=httpx.HTTPTransport(uds=pooled.socket), base_url="http://node", timeout=0.5) as local,
        pytest.raises(httpx.TimeoutException),
    ):
        local.put(f"/machines/{sandbox}", json=request())
    pooled.kill_node()
    release.set()
    wait_until(lambda: sandbox in pooled.broker.states, "the claim to be carried out")
    pooled.start_node()
    body = pooled.broker.bodies[sandbox]
    boot(pooled, sandbox)
    assert pooled.broker.bodies[sandbox] == body
    assert pooled.exec(sandbox, command="echo $FROM_SANDBOX")["stdout"] == "2\n"


def test_what_the_pool_does_is_counted(pooled):
    boot(pooled)
    wait_for_idle(pooled, 2)
    text = pooled.local.get("/metrics").text
    assert 'space_node_boots_total{way="claims"} 1.0' in text
    assert 'space_node_pool_spares{is="idle"} 2.0' in text
    assert "space_node_pool_claim_seconds_count 1.0" in text


def test_a_claim_waits_for_nothing(pooled):
    """The node's own part, which is milliseconds: the scripted broker and the agent answer at once."""
    times = []
    for _ in range(10):
        wait_for_idle(pooled)
        began = time.perf_counter()
        _, timings = boot(pooled)
        times.append(time.perf_counter() - began)
        assert "claim" in timings
    print(f"claim through the node: {sorted(times)[5] * 1e3:.1f} ms")
    assert sorted(times)[5] < 0.5
