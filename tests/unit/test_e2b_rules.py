"""E2B's network rules: what they place where, what policy comes of a configuration, and what can be neither."""

from collections.abc import Mapping
from typing import Any

import pytest

from space.e2b import network, rules
from space.e2b.bodies import Network
from space.errors import InvalidRequest, RequestError


def config(**fields: Any) -> Network:
    return Network.model_validate(fields)


def placing(*hosts: str, **headers: str) -> Network:
    return config(rules={host: [{"transform": {"headers": headers}}] for host in hosts})


def test_rules_place_headers_by_host_and_port_and_the_later_of_two_holds() -> None:
    given = {
        "A.example": [
            {"transform": {"headers": {"X-Key": "1", "x-other": "2"}}},
            {"transform": {"headers": {"x-key": "third"}}},
        ],
        "*.b.example:8443": [{"transform": {"headers": {"x-key": "Bearer ${e2b.secrets.mine}"}}}, {}],
        "c.example": [{"transform": {}}],
    }
    found = rules.parse(config(rules=given).rules)
    assert [(one.host, one.port, one.header, one.value, one.secret, one.template) for one in found] == [
        ("a.example", 443, "x-key", "third", None, "{}"),
        ("a.example", 443, "x-other", "2", None, "{}"),
        ("*.b.example", 8443, "x-key", "", "mine", "Bearer {}"),
    ]
    assert "third" not in repr(found[0])


@pytest.mark.parametrize(
    ("hosts", "headers", "words"),
    [
        pytest.param(["192.0.2.1"], {"x": "1"}, "hosts that are named", id="address"),
        pytest.param(["192.0.2.0/24"], {"x": "1"}, "hosts that are named", id="network"),
        pytest.param(["*"], {"x": "1"}, "hosts that are named", id="everything"),
        pytest.param(["*.com"], {"x": "1"}, "too wide", id="too-wide"),
        pytest.param(["a.example"], {"host": "b"}, "the connection's own", id="host"),
        pytest.param(["a.example"], {"x y": "1"}, "must be the name", id="no-name"),
        pytest.param(["a.example"], {"x": ""}, "1 to 8192 characters", id="empty"),
        pytest.param(["a.example"], {"x": "a\r\nb"}, "ASCII", id="line-break"),
        pytest.param(["a.example"], {"x": "${e2b.identity.tokens.t}"}, "no identities", id="identity"),
        pytest.param(["a.example"], {"x": "${e2b.secrets.a}${e2b.secrets.b}"}, "one", id="two-secrets"),
        pytest.param(["a.example"], {"x": "{} ${e2b.secrets.a}"}, "once", id="braces"),
        pytest.param(["a.example"], {f"x-{number}": "1" for number in range(65)}, "at most 64", id="too-many"),
        pytest.param(["*.a.example", "b.a.example"], {"x": "1"}, "too", id="two-rules-for-one"),
    ],
)
def test_rules_that_cannot_hold_are_refused_without_their_values(
    hosts: list[str], headers: Mapping[str, str], words: str
) -> None:
    with pytest.raises((InvalidRequest, ValueError), match=words) as refused:
        rules.parse(placing(*hosts, **headers).rules)
    assert "a\r\nb" not in str(refused.value)


def test_what_is_kept_of_rules_tells_which_grants_came_with_them_and_no_value() -> None:
    given = placing("a.example:8443", **{"X-Key": "very-secret"})
    [placed] = rules.parse(given.rules)
    kept = rules.hidden(given)
    assert "very-secret" not in str(kept)
    assert rules.ends(kept, placed.terms)
    for other in (
        {"hosts": ["b.example"]},
        {"ports": [443]},
        {"name": "x-other"},
        {"placement": "bearer"},
        {"scrub": True},
    ):
        assert not rules.ends(kept, {**placed.terms, **other})
    assert not rules.ends({}, placed.terms)


def test_a_host_with_a_port_of_its_own_is_reached_where_all_is_and_where_it_is_allowed() -> None:
    """Placing a header allows nothing by itself: among what is denied a host must be in ``allowOut``."""
    given = placing("a.example:8443", "b.example", x="1")
    placed = rules.parse(given.rules)
    more = [{"name": "allow-out-8443", "hosts": ["a.example"], "ports": [8443]}]
    assert network.policy(given, placed, allow=None) == {"preset": "public-internet", "rules": more, "networks": []}
    assert network.policy(given, placed, allow=False) == "none"
    closed = config(allowOut=["a.example:8443", "c.example"], denyOut=["0.0.0.0/0"])
    assert network.policy(closed, placed, allow=None) == {
        "preset": "none",
        "rules": [*more, {"name": "allow-out", "hosts": ["c.example"]}],
        "networks": [],
    }


def test_what_the_gateway_cannot_do_is_refused_by_name_and_what_asks_for_nothing_is_not() -> None:
    for fields in ({"egressProxy": {"address": "proxy.example:1080"}}, {"dnsServers": ["192.0.2.1"]}):
        with pytest.raises(RequestError, match=f"network.{next(iter(fields))} is not supported here") as refused:
            network.check(config(**fields))
        assert refused.value.code == "unimplemented"
    network.check(config(egressProxy=None, dnsServers=[]))


def test_only_a_secure_sandbox_can_be_closed_to_the_public() -> None:
    with pytest.raises(InvalidRequest, match="secure"):
        network.check(config(allowPublicTraffic=False), secure=False)
    network.check(config(allowPublicTraffic=False))
    network.check(config(allowPublicTraffic=True), secure=False)
