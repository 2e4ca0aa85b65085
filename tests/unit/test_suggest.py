"""Rules that are proposed from what was denied."""

from typing import Any

import pytest

from space.egress.suggest import PATHS_KEPT, RULES_MAX, suggest
from space.model.policy import parse_policy


def denied(host: str = "api.example", **fields: Any) -> dict[str, Any]:
    first = {"kind": "http", "decision": "deny", "reason": "default-deny", "port": 443, "method": "GET", "path": "/a"}
    return {**first, "host": host, **fields}


def test_a_host_is_proposed_with_the_methods_and_paths_that_were_asked_for():
    found = suggest([denied(), denied(method="post"), denied(path="/b"), denied()])
    assert found == {
        "rules": [{"hosts": ["api.example"], "methods": ["GET", "POST"], "paths": ["/a", "/b"]}],
        "networks": [],
    }


def test_many_paths_become_what_they_begin_with():
    paths = [f"/repos/{owner}/{repo}/issues/{n}" for owner in "ab" for repo in "xy" for n in range(5)]
    (rule,) = suggest(denied(path=path) for path in paths)["rules"]
    assert rule["paths"] == ["/repos/a/x/**", "/repos/a/y/**", "/repos/b/x/**", "/repos/b/y/**"]
    (rule,) = suggest(denied(path=f"/repos/{n}/x/{n}") for n in range(100))["rules"]
    assert rule["paths"] == ["/repos/**"]
    (rule,) = suggest(denied(path=f"/{n}/{n}") for n in range(100))["rules"]
    assert "paths" not in rule
    (rule,) = suggest(denied(path=f"/{n}") for n in range(PATHS_KEPT))["rules"]
    assert len(rule["paths"]) == PATHS_KEPT


def test_a_host_that_was_only_looked_up_is_proposed_for_any_request():
    seen = [denied(kind="dns", port=53, method=None, path=None)]
    assert suggest(seen) == {"rules": [{"hosts": ["api.example"]}], "networks": []}
    assert suggest([*seen, denied()])["rules"] == [{"hosts": ["api.example"], "methods": ["GET"], "paths": ["/a"]}]


def test_ports_are_named_where_they_are_not_the_usual_ones():
    (rule,) = suggest([denied(port=8443), denied(kind="tls", port=443, method=None, path=None)])["rules"]
    assert rule["ports"] == [443, 8443]


def test_connections_to_addresses_become_rules_for_networks():
    seen = [
        denied(host=None, kind="tcp", reason="direct-address", address="10.1.2.3", port=port, method=None, path=None)
        for port in (5432, 22, 22)
    ]
    assert suggest(seen) == {"rules": [], "networks": [{"networks": ["10.1.2.3"], "ports": [22, 5432]}]}
    by_name = denied(kind="tls", reason="direct-address", address="1.1.1.1", method=None, path=None)
    assert suggest([by_name])["networks"] == [{"networks": ["1.1.1.1"], "ports": [443]}]


@pytest.mark.parametrize(
    "address", ["169.254.169.254", "100.100.100.200", "168.63.129.16", "127.0.0.1", "::1", "fe80::1", "0.0.0.0"]
)
def test_a_clouds_own_addresses_and_a_hosts_are_never_proposed(address: str):
    seen = [denied(host=None, kind="tcp", reason="direct-address", address=address, port=80)]
    assert suggest(seen) == {"rules": [], "networks": []}


def test_what_was_denied_on_purpose_or_not_denied_is_not_proposed():
    seen = [
        denied(reason="rule"),
        denied(reason="placeholder-misplaced"),
        denied(decision="allow"),
        denied(host="1.2.3.4"),
        {},
    ]
    assert suggest(seen) == {"rules": [], "networks": []}


def test_a_path_that_servers_read_differently_is_not_made_a_rule_of():
    assert suggest([denied(path="/a/../b"), denied()])["rules"] == [{"hosts": ["api.example"]}]


def test_hosts_asked_for_most_often_come_first_and_there_is_an_end_to_them():
    seen = [denied(host=f"h{n}.example") for n in range(1000)] + [denied(host="often.example")] * 2
    rules = suggest(seen)["rules"]
    assert rules[0]["hosts"] == ["often.example"]
    assert len(rules) == RULES_MAX
    assert parse_policy({"rules": rules})
