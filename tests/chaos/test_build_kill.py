"""SIGKILL while a template is built: the build goes on or says that it was interrupted, and nothing half-made is to be had."""

import time
from typing import Any

import httpx

from tests.client import Api, error_code, wait_until
from tests.installation import Installation

SLOW = {"name": "slow", "source": {"kind": "template", "template": "base"}, "no_cache": True}


def begin(api: Api, seconds: int) -> str:
    """Begin a build whose step takes so long, and return its id once that runs."""
    step = f"echo begun; sleep {seconds}; date +%s%N > /home/user/when"
    build = str(api.call("POST", "/v1/templates/builds", json={**SLOW, "steps": [{"run": step}]}).json()["id"])
    wait_until(lambda: "begun\\n" in log(api, build) or '"begun"' in log(api, build), 60, "the step to run")
    return build


def log(api: Api, build: str) -> str:
    answer = api.http.get(f"/v1/builds/{build}/log")
    return answer.text if answer.is_success else ""


def ended(api: Api, build: str) -> dict[str, Any]:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        found: dict[str, Any] = api.call("GET", f"/v1/builds/{build}", params={"wait_s": 20}).json()
        if found["state"] not in {"pending", "running"}:
            return found
    raise AssertionError("the build did not end")


def test_an_api_that_is_killed_during_a_build_publishes_it_when_it_is_back(
    api: Api, installation: Installation
) -> None:
    build = begin(api, 3)
    installation.kill("api")
    installation.wait_ready()
    found = ended(api, build)
    assert found["state"] == "succeeded", found
    assert '"type": "end"' in log(api, build)
    sandbox = api.create(template="slow")
    assert api.get(sandbox)["template_digest"] == found["digest"]
    api.delete(sandbox)
    api.call("DELETE", f"/v1/templates/{found['digest']}")


def test_a_node_that_is_killed_during_a_build_interrupts_it_and_another_can_be_built(
    api: Api, installation: Installation
) -> None:
    build = begin(api, 60)
    installation.kill("node")
    installation.wait_ready()
    found = ended(api, build)
    assert (found["state"], found["failure"]["code"]) == ("failed", "build-interrupted")
    assert api.http.get("/v1/templates/slow").status_code == httpx.codes.NOT_FOUND
    used = api.call("GET", "/v1/project").json()["used"]
    assert used["sandboxes"] == 0, used
    digest = ended(api, begin(api, 0))["digest"]
    assert api.call("GET", "/v1/templates/slow").json()["digest"] == digest
    api.call("DELETE", f"/v1/templates/{digest}")


def test_both_killed_at_once_leave_one_story(api: Api, installation: Installation) -> None:
    build = begin(api, 60)
    installation.kill("node")
    installation.kill("api")
    installation.wait_ready()
    assert ended(api, build)["failure"]["code"] == "build-interrupted"
    again = api.http.post("/v1/builds/" + build + "/cancel")
    assert again.json()["state"] == "failed"
    refused = api.http.post("/v1/sandboxes", json={"template": "slow"})
    assert error_code(refused) == "unknown-template"
