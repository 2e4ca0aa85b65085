"""What a sandbox used is kept in the store: a restart of the api loses nothing, and a question is bounded."""

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from space.control import usage
from space.control.reaper import sample_usage, sweep
from space.model.usage import sample
from tests.control_host import Host, control_over, hosting
from tests.stores import NOW


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    async with hosting(tmp_path) as one:
        yield one


async def history(host: Host, sandbox: str, **query: Any) -> list[dict[str, Any]]:
    answer = await host.http.get(f"/v1/sandboxes/{sandbox}/metrics", params=query)
    assert answer.status_code == httpx.codes.OK, answer.text
    return answer.json()["history"]


async def sampled(host: Host, times: int, every_s: float = 15) -> None:
    for _ in range(times):
        await sample_usage(host.control)
        host.clock.move(every_s)


async def test_what_was_sampled_before_a_restart_of_the_api_is_still_told(host: Host) -> None:
    sandbox = await host.create()
    await sampled(host, 3)
    async with control_over(host.settings, host.clock) as restarted:
        await sample_usage(restarted)
        found = await usage.history(restarted, sandbox, None, None, 15)
    assert [taken.memory_mib for taken in found] == [40] * 4
    assert len(await history(host, sandbox)) == 4


async def test_two_processes_that_look_at_once_keep_one_sample(host: Host) -> None:
    sandbox = await host.create()
    at = host.clock()
    async with control_over(host.settings, lambda: at) as one, control_over(host.settings, lambda: at) as two:
        await sample_usage(one)
        await sample_usage(two)
        assert len(await usage.history(one, sandbox, None, at, 15)) == 1


async def test_a_sandbox_that_does_not_run_is_not_sampled(host: Host) -> None:
    sandbox = await host.create()
    await host.verb(sandbox, "suspend")
    await sampled(host, 2)
    assert await history(host, sandbox) == []


async def test_a_time_and_a_step_can_be_asked_for(host: Host) -> None:
    sandbox = await host.create()
    began = host.clock()
    await sampled(host, 40)
    assert len(await history(host, sandbox)) == 40
    cut = {"from": (began + timedelta(seconds=150)).isoformat(), "to": (began + timedelta(seconds=300)).isoformat()}
    found = await history(host, sandbox, **cut)
    assert len(found) == 10
    assert all(cut["from"] <= taken["at"].replace("Z", "+00:00") <= cut["to"] for taken in found)
    assert len(await history(host, sandbox, step_s=150)) in {4, 5}


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"step_s": 1}, "step_s"),
        ({"step_s": "nan"}, "step_s"),
        ({"step_s": 10**9}, "step_s"),
        ({"from": "2030-01-01T00:00:00"}, "from"),
        ({"to": "yesterday"}, "to"),
        ({"from": "2000-01-01T00:00:00Z", "step_s": 15}, "step_s"),
    ],
)
async def test_a_question_without_bounds_is_refused(host: Host, query: dict[str, Any], field: str) -> None:
    sandbox = await host.create()
    answer = await host.http.get(f"/v1/sandboxes/{sandbox}/metrics", params=query)
    assert answer.status_code == 422, answer.text
    assert answer.json()["error"]["details"]["field"] == field


async def test_older_samples_are_thinned_out_and_after_a_day_gone(host: Host) -> None:
    sandbox = await host.create()
    began = host.clock()
    await sampled(host, 40)
    host.clock.move(3600 + 300)
    await sweep(host.control)
    sparse = await history(host, sandbox, **{"from": began.isoformat(), "step_s": 15})
    assert 2 <= len(sparse) <= 3
    host.clock.move(24 * 3600)
    await sweep(host.control)
    assert await history(host, sandbox, **{"from": began.isoformat()}) == []


async def test_a_metrics_question_of_the_distant_past_is_answered_with_what_there_is(host: Host) -> None:
    host.clock.move(300 - host.clock().timestamp() % 300)  # both samples are of the same five minutes
    sandbox = await host.create()
    await sampled(host, 2)
    assert len(await history(host, sandbox, **{"from": "0001-01-01T00:00:00Z", "step_s": 300})) == 1
    assert await history(host, sandbox, to="0001-01-01T00:00:00Z") == []


def test_usage_that_is_none_is_no_sample() -> None:
    assert sample(None, NOW) is None
    assert sample({"cpu_s": "much"}, NOW) is None
    taken = sample({"cpu_s": 1, "pids": 3.0, "oom_kills": 2, "more": 1}, NOW)
    assert taken is not None
    assert (taken.cpu_s, taken.pids, taken.oom_kills, taken.memory_mib) == (1, 3, 2, None)
    assert type(taken.pids) is int
