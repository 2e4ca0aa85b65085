"""What a policy says: to a host, to a request, to a connection, and why."""

import ipaddress
import time
from typing import Any

import pytest

from space.egress.decide import (
    Asked,
    Decision,
    HostDecision,
    decide,
    decide_host,
    decide_network,
    explain,
    may_answer,
    may_resolve,
)
from space.model.policy import Policy, parse_policy

READ_ONLY = parse_policy(
    {
        "rules": [
            {"name": "no-admin", "action": "deny", "hosts": ["*.good.example"], "paths": ["/admin/**"]},
            {
                "name": "read",
                "hosts": ["api.good.example"],
                "methods": ["GET", "HEAD"],
                "paths": ["/repos/*/*", "/user"],
            },
            {"name": "upload", "hosts": ["api.good.example"], "ports": [8443], "methods": ["PUT"]},
            {"name": "pinned", "hosts": ["pinned.example"], "tls": "passthrough"},
        ]
    }
)


def policy(*rules: dict[str, Any]) -> Policy:
    return parse_policy({"rules": [{"hosts": ["good.example"], **rule} for rule in rules]})


def asked(host: str = "api.good.example", path: str = "/user", method: str = "GET", port: int = 443) -> Asked:
    return Asked(host, port, method, path)


@pytest.mark.parametrize(
    ("request_", "rule"),
    [
        (asked(), "read"),
        (asked(host="API.Good.Example."), "read"),
        (asked(path="/user?x=/../admin"), "read"),
        (asked(path="/%75ser"), "read"),
        (asked(path="/repos/a/b", method="HEAD"), "read"),
        (asked(method="get"), "read"),
        (asked(port=80), "read"),
        (asked(port=8443, method="PUT", path="/anything"), "upload"),
    ],
)
def test_a_request_that_a_rule_is_for_is_allowed_by_it(request_: Asked, rule: str):
    assert decide(READ_ONLY, request_) == Decision(allowed=True, rule=rule, reason="rule")


@pytest.mark.parametrize(
    ("request_", "decision"),
    [
        (asked(path="/admin"), ("no-admin", "rule")),
        (asked(path="/%61dmin/x"), ("no-admin", "rule")),
        (asked(path="/repos/a"), (None, "default-deny")),
        (asked(method="DELETE"), (None, "default-deny")),
        (asked(port=8080), (None, "default-deny")),
        (asked(host="evil.example"), (None, "default-deny")),
        (asked(host="api.good.example.evil.example"), (None, "default-deny")),
        (asked(host="good.example"), (None, "default-deny")),
        (asked(path="/repos/a/../../admin"), ("no-admin", "ambiguous-path")),
        (asked(path="/user/%2e%2e/admin"), ("no-admin", "ambiguous-path")),
        (asked(path="//admin"), ("no-admin", "ambiguous-path")),
        (asked(path="/x%2f..%2fadmin"), ("no-admin", "ambiguous-path")),
        (asked(path="/admin;x"), ("no-admin", "ambiguous-path")),
        (asked(path="*", method="OPTIONS"), ("no-admin", "ambiguous-path")),
        (asked(path=""), ("no-admin", "ambiguous-path")),
        (asked(path="http://api.good.example/user"), ("no-admin", "ambiguous-path")),
        (asked(host="1.2.3.4"), (None, "invalid-host")),
        (asked(host="api.good.example:443"), (None, "invalid-host")),
        (asked(host="api.good.example\0.evil.example"), (None, "invalid-host")),
        (asked(host=""), (None, "invalid-host")),
        (asked(method=""), (None, "invalid-method")),
        (asked(method="G ET"), (None, "invalid-method")),
        (asked(method="GET\r\nX: y"), (None, "invalid-method")),
        (asked(method="ge\u017ft"), (None, "invalid-method")),
        (asked(method="A" * 65), (None, "invalid-method")),
    ],
)
def test_what_no_rule_is_for_or_may_be_read_in_two_ways_is_denied(request_: Asked, decision: tuple[str | None, str]):
    assert decide(READ_ONLY, request_) == Decision(allowed=False, rule=decision[0], reason=decision[1])


@pytest.mark.parametrize("path", ["/a/../b", "//", "/a%2fb", "*", ""])
def test_a_path_does_not_matter_where_no_rule_for_the_request_has_paths(path: str):
    rules = policy(
        {"hosts": ["*"], "paths": ["/x"], "methods": ["POST"]}, {"hosts": ["other.example"], "paths": ["/x"]}, {}
    )
    assert decide(rules, asked("good.example", path)).allowed
    assert decide(rules, asked("good.example", path, "POST")).reason == "ambiguous-path"


def test_the_first_rule_that_matches_decides():
    assert not decide(policy({"action": "deny"}, {}), asked("good.example")).allowed
    assert decide(policy({}, {"action": "deny"}), asked("good.example")).allowed
    assert not decide(Policy(), asked("good.example")).allowed


@pytest.mark.parametrize(
    ("host", "port", "decision"),
    [
        ("api.good.example", 443, HostDecision(possible=True, passthrough=False, rule="read")),
        ("API.good.example.", 443, HostDecision(possible=True, passthrough=False, rule="read")),
        ("api.good.example", 8443, HostDecision(possible=True, passthrough=False, rule="upload")),
        ("pinned.example", 443, HostDecision(possible=True, passthrough=True, rule="pinned")),
        ("pinned.example", 8443, HostDecision(possible=False, passthrough=False, rule=None)),
        ("other.good.example", 443, HostDecision(possible=False, passthrough=False, rule=None)),
        ("1.2.3.4", 443, HostDecision(possible=False, passthrough=False, rule=None)),
        ("", 443, HostDecision(possible=False, passthrough=False, rule=None)),
    ],
)
def test_of_a_host_it_can_be_said_whether_any_request_could_be_allowed(host: str, port: int, decision: HostDecision):
    assert decide_host(READ_ONLY, host, port) == decision
    assert may_resolve(READ_ONLY, host) is any(decide_host(READ_ONLY, host, p).possible for p in (80, 443, 8443))


def test_a_connection_does_not_pass_through_where_a_rule_must_see_its_requests():
    passing = {"tls": "passthrough"}
    assert decide_host(policy(passing), "good.example", 443).passthrough
    assert not decide_host(policy({"action": "deny", "methods": ["PUT"]}, passing), "good.example", 443).passthrough
    assert not decide_host(policy({"action": "deny", "paths": ["/x"]}, passing), "good.example", 443).passthrough
    assert not decide_host(policy({"methods": ["GET"]}, passing), "good.example", 443).passthrough
    assert not decide_host(policy({"action": "deny"}, passing), "good.example", 443).possible
    assert decide_host(policy({"action": "deny", "hosts": ["other.example"]}, passing), "good.example", 443).passthrough


def test_a_name_is_resolved_if_on_some_port_something_could_be_allowed():
    denied_on_one = policy({"action": "deny", "ports": [80]}, {"ports": [80, 443]})
    denied_on_all = policy({"action": "deny", "ports": [80]}, {"action": "deny", "ports": [443]}, {"ports": [80, 443]})
    assert may_resolve(denied_on_one, "good.example")
    assert not may_resolve(denied_on_all, "good.example")
    assert not may_resolve(policy({"action": "deny"}), "good.example")
    assert not may_resolve(Policy(), "good.example")
    assert not may_resolve(policy({}), "data.evil.example")
    assert not may_resolve(policy({"hosts": ["*"]}), "127.1")


NETWORKS = parse_policy(
    {
        "networks": [
            {"name": "not-that-one", "action": "deny", "networks": ["10.1.2.9"]},
            {"name": "database", "networks": ["10.1.2.0/24", "fd00::/8"], "ports": [5432, "8000-8100"]},
            {"name": "rest", "networks": ["11.0.0.0/8"]},
        ]
    }
)


@pytest.mark.parametrize(
    ("address", "port", "allowed", "rule"),
    [
        ("10.1.2.3", 5432, True, "database"),
        ("10.1.2.3", 8100, True, "database"),
        ("fd00::7", 8000, True, "database"),
        ("::ffff:10.1.2.3", 5432, True, "database"),
        ("11.1.1.1", 22, True, "rest"),
        ("10.1.2.9", 5432, False, "not-that-one"),
        ("::ffff:10.1.2.9", 5432, False, "not-that-one"),
        ("10.1.2.3", 8101, False, None),
        ("10.1.3.3", 5432, False, None),
        ("::10.1.2.3", 5432, False, None),
        ("64:ff9b::a01:203", 5432, False, None),
    ],
)
def test_connections_to_addresses_have_rules_of_their_own(address: str, port: int, allowed: bool, rule: str | None):
    decision = decide_network(NETWORKS, ipaddress.ip_address(address), port)
    assert (decision.allowed, decision.rule) == (allowed, rule)
    assert decision.reason == ("rule" if rule else "default-deny")


def test_rules_for_hosts_say_nothing_of_addresses_nor_the_other_way_round():
    assert not decide_network(policy({"hosts": ["*"]}), ipaddress.ip_address("1.1.1.1"), 443).allowed
    assert not decide(NETWORKS, asked("10.1.2.3", port=5432)).allowed


def test_an_explanation_goes_through_every_rule_and_says_which_decides():
    steps = explain(READ_ONLY, asked(path="/repos/a/b"))
    assert [step["rule"] for step in steps] == ["no-admin", "read", "upload", "pinned"]
    assert [step["matches"] for step in steps] == [False, True, False, False]
    assert [step["decides"] for step in steps] == [False, True, False, False]
    assert "/admin/**" in steps[0]["why"]
    assert "8443" in steps[2]["why"]
    assert "pinned.example" in steps[3]["why"]


def test_an_explanation_tells_an_ambiguous_path_from_one_that_does_not_match():
    steps = explain(READ_ONLY, asked(path="/user/../admin"))
    assert [step["decides"] for step in steps] == [True, False, False, False]
    assert "different ways" in steps[0]["why"]


def test_an_explanation_says_what_a_rule_before_decided_already():
    steps = explain(policy({}, {"action": "deny"}), asked("good.example"))
    assert [(step["matches"], step["decides"]) for step in steps] == [(True, True), (True, False)]


@pytest.mark.parametrize("host", ["10.1.2.3", "::ffff:10.1.2.3", "[fd00::1]"])
def test_an_explanation_of_an_address_is_of_the_rules_for_networks(host: str):
    steps = explain(NETWORKS, asked(host, port=5432))
    assert [step["rule"] for step in steps] == ["not-that-one", "database", "rest"]
    assert [step["decides"] for step in steps] == [False, True, False]


@pytest.mark.parametrize("request_", [asked("a b"), asked(method="\0"), asked(path="")])
def test_an_explanation_can_be_had_of_anything(request_: Asked):
    assert len(explain(READ_ONLY, request_)) == 4


def test_the_largest_policy_is_decided_on_in_milliseconds():
    hosts = [f"*.h{n}.example" for n in range(16)]
    paths = [f"/a/**/{'*a' * 50}{n}" for n in range(4)]
    largest = parse_policy({"rules": [{"hosts": [*hosts[:15], "*"], "paths": paths} for _ in range(256)]})
    began = time.thread_time()
    assert not decide(largest, asked(path="/a" * 2000 + "/" + "a" * 4000)).allowed
    assert time.thread_time() - began < 0.5


@pytest.mark.parametrize(
    ("networks", "allowed"),
    [
        ([], False),
        ([{"networks": ["203.0.113.0/24"], "ports": ["8000-9000"]}], True),
        ([{"networks": ["198.51.100.0/24"]}], False),
        ([{"action": "deny", "networks": ["203.0.113.7"]}, {"networks": ["203.0.113.0/24"]}], False),
        ([{"action": "deny", "networks": ["203.0.113.7"], "ports": [22]}, {"networks": ["203.0.113.0/24"]}], True),
        ([{"networks": ["203.0.113.0/24"]}, {"action": "deny", "networks": ["203.0.113.7"]}], True),
    ],
)
def test_an_address_is_told_where_a_connection_to_it_could_be_allowed(
    networks: list[dict[str, object]], *, allowed: bool
) -> None:
    assert may_answer(parse_policy({"networks": networks}), ipaddress.ip_address("203.0.113.7")) is allowed


def test_the_largest_policy_is_held_against_an_address_in_no_time() -> None:
    ports = [
        {"action": "deny", "networks": ["10.0.0.0/8"], "ports": [*range(i * 64 + 1, i * 64 + 65)]} for i in range(255)
    ]
    many = [{"networks": [f"10.{i}.{j}.0/24" for j in range(16)]} for i in range(256)]
    address = ipaddress.ip_address("203.0.113.7")
    for rules in ([*ports, {"networks": ["11.0.0.0/8"]}], many):
        largest = parse_policy({"networks": rules})
        began = time.thread_time()
        for _ in range(50):
            assert not may_answer(largest, address)
            assert not decide_network(largest, address, 443).allowed
        assert time.thread_time() - began < 1
