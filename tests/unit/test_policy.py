"""Documents of policies: what they mean, and what is wrong with those that are none."""

from typing import Any

import pytest

from space.model.policy import (
    HOSTS_TOTAL_MAX,
    PATHS_TOTAL_MAX,
    RULES_MAX,
    Action,
    NetworkRule,
    Policy,
    Rule,
    Tls,
    parse_policy,
    render_policy,
)
from space.model.policy_fields import HOSTS_MAX, METHODS_MAX, PATHS_MAX, PORTS_MAX, PolicyInvalid

REGISTRIES = ("packages.example", "Files.Packages.example.", "mirror.example:8081", "other.example:8081")


def rule(**fields: Any) -> dict[str, Any]:
    return {"rules": [{"hosts": ["good.example"], **fields}]}


def network(**fields: Any) -> dict[str, Any]:
    return {"networks": [{"networks": ["10.1.2.0/24"], **fields}]}


def test_nothing_said_is_nothing_allowed():
    assert parse_policy({}) == parse_policy("none") == parse_policy({"preset": "none"}) == Policy()


def test_a_rule_allows_on_the_usual_ports_unless_it_says_otherwise():
    assert parse_policy(rule()) == Policy((Rule("rule-1", Action.ALLOW, ("good.example",), (80, 443)),))


def test_everything_of_a_rule_has_one_form():
    policy = parse_policy(
        rule(
            name="Api:v1",
            action="deny",
            hosts=["Good.Example.", "*.GOOD.example", "good.example"],
            ports=[8443, 443, 443],
            methods=["get", "Post"],
            paths=["/%61/*", "/b/**"],
        )
    )
    assert policy.rules == (
        Rule(
            "Api:v1",
            Action.DENY,
            ("good.example", "*.good.example"),
            (443, 8443),
            ("GET", "POST"),
            ("/a/*", "/b/**"),
        ),
    )


def test_networks_have_ports_in_ranges():
    policy = parse_policy(network(networks=["10.1.2.0/24", "10.9.9.9", "FD00::/8"], ports=["8000-8100", 5432, "22"]))
    assert policy.networks == (
        NetworkRule(
            "network-1",
            Action.ALLOW,
            ("10.1.2.0/24", "10.9.9.9/32", "fd00::/8"),
            ((22, 22), (5432, 5432), (8000, 8100)),
        ),
    )


def test_own_rules_come_before_those_of_the_preset():
    policy = parse_policy({"preset": "public-internet", **rule(action="deny"), **network(action="deny")})
    assert [one.name for one in policy.rules] == ["rule-1", "preset:public-internet"]
    assert [one.name for one in policy.networks] == ["network-1", "preset:public-internet"]
    assert policy.rules[1].hosts == ("*",)
    assert policy.rules[1].ports == (80, 443)
    assert policy.networks[1].networks == ("0.0.0.0/0", "::/0")


def test_package_registries_are_those_of_the_installation_and_each_on_its_own_port():
    policy = parse_policy("package-registries", REGISTRIES)
    assert policy.networks == ()
    assert policy.rules == (
        Rule("preset:package-registries", Action.ALLOW, ("packages.example", "files.packages.example")),
        Rule("preset:package-registries-8081", Action.ALLOW, ("mirror.example", "other.example"), (8081,)),
    )


@pytest.mark.parametrize(
    "registries", [(), ("10.0.0.1",), ("https://a.example",), ("a.example:0",), ("a.example:x",), ("a.example:99999",)]
)
def test_registries_that_there_are_not_or_that_are_no_hosts_are_said_to_be_the_installations_fault(registries):
    with pytest.raises(PolicyInvalid, match="installation") as caught:
        parse_policy("package-registries", registries)
    assert caught.value.field == "preset"
    assert parse_policy("public-internet", registries).rules


@pytest.mark.parametrize(
    "document",
    [
        "none",
        "public-internet",
        "package-registries",
        rule(methods=["GET"], paths=["/a/**"], ports=[1, 65535]),
        rule(tls="passthrough"),
        network(ports=["1-65535"], action="deny"),
        {"preset": "public-internet", **rule(action="deny", name="no"), **network(name="no")},
    ],
)
def test_a_policy_survives_being_told(document: Any):
    policy = parse_policy(document, REGISTRIES)
    assert parse_policy(render_policy(policy)) == policy
    assert render_policy(parse_policy(render_policy(policy))) == render_policy(policy)


@pytest.mark.parametrize(
    ("document", "field", "message"),
    [
        ([], "policy", "object"),
        (7, "policy", "object"),
        ({"rule": []}, "policy", "no field 'rule'"),
        ("everything", "preset", "public-internet"),
        ({"preset": 1}, "preset", "public-internet"),
        ({"preset": None}, "preset", "public-internet"),
        ({"rules": {}}, "rules", "list"),
        ({"rules": "good.example"}, "rules", "list"),
        ({"rules": ["good.example"]}, "rules[0]", "object"),
        ({"rules": [{}]}, "rules[0].hosts", "at least one"),
        (rule(host="x"), "rules[0]", "no field 'host'"),
        (rule(hosts="good.example"), "rules[0].hosts", "list"),
        (rule(hosts=[]), "rules[0].hosts", "at least one"),
        (rule(hosts=["a.example", 7]), "rules[0].hosts[1]", "text"),
        (rule(hosts=["1.2.3.4"]), "rules[0].hosts[0]", "networks"),
        (rule(hosts=["[::1]"]), "rules[0].hosts[0]", "networks"),
        (rule(hosts=["0x7f.1"]), "rules[0].hosts[0]", "neither"),
        (rule(hosts=["https://good.example"]), "rules[0].hosts[0]", "scheme"),
        (rule(hosts=["good.example:8443"]), "rules[0].hosts[0]", "ports"),
        (rule(hosts=["good.example/a"]), "rules[0].hosts[0]", "path"),
        (rule(hosts=["*good.example"]), "rules[0].hosts[0]", "suffix"),
        (rule(hosts=["bücher.example"]), "rules[0].hosts[0]", "'xn--bcher-kva.example'"),
        (rule(hosts=["ü" * 200]), "rules[0].hosts[0]", "ASCII"),
        (rule(hosts=["a" * 10_000]), "rules[0].hosts[0]", "at most 253"),
        (rule(ports=[0]), "rules[0].ports[0]", "1 to 65535"),
        (rule(ports=[65536]), "rules[0].ports[0]", "1 to 65535"),
        (rule(ports=[True]), "rules[0].ports[0]", "1 to 65535"),
        (rule(ports=["443"]), "rules[0].ports[0]", "1 to 65535"),
        (rule(ports=443), "rules[0].ports", "list"),
        (rule(methods=["GET POST"]), "rules[0].methods[0]", "GET"),
        (rule(methods=["*"]), "rules[0].methods[0]", "is for all"),
        (rule(methods=["straße"]), "rules[0].methods[0]", "GET"),
        (rule(methods=["po\u017ft"]), "rules[0].methods[0]", "GET"),
        (rule(paths=["a"]), "rules[0].paths[0]", "begins with `/`"),
        (rule(paths=["/a/../b"]), "rules[0].paths[0]", "segments"),
        (rule(paths=[None]), "rules[0].paths[0]", "begins with `/`"),
        (rule(action="block"), "rules[0].action", "allow, deny"),
        (rule(action=["allow"]), "rules[0].action", "allow, deny"),
        (rule(tls="none"), "rules[0].tls", "terminate, passthrough"),
        (rule(tls="passthrough", paths=["/a"]), "rules[0].tls", "no methods or paths"),
        (rule(tls="passthrough", methods=["GET"]), "rules[0].tls", "no methods or paths"),
        (rule(tls="passthrough", action="deny"), "rules[0].tls", "cannot deny"),
        (rule(name=""), "rules[0].name", "1 to 63"),
        (rule(name="a\nb"), "rules[0].name", "1 to 63"),
        (rule(name="a" * 64), "rules[0].name", "1 to 63"),
        ({"rules": [{"hosts": ["*"], "name": "a"}] * 2}, "rules[1].name", "'a'"),
        (network(networks=["good.example"]), "networks[0].networks[0]", "no network"),
        (network(networks=["10.1.2.3/24"]), "networks[0].networks[0]", "'10.1.2.0/24'"),
        (network(networks=["10.1"]), "networks[0].networks[0]", "no network"),
        (network(networks=["10.1.2.0/33"]), "networks[0].networks[0]", "no network"),
        (network(networks=["::ffff:10.0.0.0/104"]), "networks[0].networks[0]", "IPv4"),
        (network(networks=["fe80::1%eth0"]), "networks[0].networks[0]", "text such as"),
        (network(networks=[167772160]), "networks[0].networks[0]", "text"),
        (network(ports=["90-80"]), "networks[0].ports[0]", "above"),
        (network(ports=["0-80"]), "networks[0].ports[0]", "1 to 65535"),
        (network(ports=["80-99999"]), "networks[0].ports[0]", "1 to 65535"),
        (network(ports=["http"]), "networks[0].ports[0]", "1 to 65535"),
        (network(ports=["-1"]), "networks[0].ports[0]", "1 to 65535"),
        (network(ports=["٨٠"]), "networks[0].ports[0]", "1 to 65535"),
        (network(tls="terminate"), "networks[0]", "no field 'tls'"),
    ],
)  # fmt: skip
def test_what_is_no_policy_says_where_and_what_would_do(document: Any, field: str, message: str):
    with pytest.raises(PolicyInvalid) as caught:
        parse_policy(document)
    assert caught.value.field == field
    assert message in caught.value.message
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "document",
    [
        {"rules": [{"hosts": ["*"]}] * (RULES_MAX + 1)},
        {"preset": "public-internet", "rules": [{"hosts": ["*"]}] * RULES_MAX},
        {"networks": [{"networks": ["::/0"]}] * (RULES_MAX + 1)},
        rule(hosts=[f"h{n}.example" for n in range(HOSTS_MAX + 1)]),
        rule(ports=list(range(1, PORTS_MAX + 2))),
        rule(methods=[f"M{n}" for n in range(METHODS_MAX + 1)]),
        rule(paths=[f"/{n}" for n in range(PATHS_MAX + 1)]),
        {"rules": [{"hosts": [f"h{n}.example" for n in range(HOSTS_MAX)]}] * (HOSTS_TOTAL_MAX // HOSTS_MAX + 1)},
        {"rules": [{"hosts": ["*"], "paths": [f"/{n}" for n in range(PATHS_MAX)]}] * (PATHS_TOTAL_MAX // PATHS_MAX + 1)},
        {"networks": [{"networks": [f"10.0.{n}.0/24" for n in range(HOSTS_MAX)]}] * (HOSTS_TOTAL_MAX // HOSTS_MAX + 1)},
    ],
    ids=["rules", "with-preset", "networks", "hosts", "ports", "methods", "paths", "all-hosts", "all-paths", "all-networks"],
)  # fmt: skip
def test_everything_in_a_policy_is_bounded(document: Any):
    with pytest.raises(PolicyInvalid):
        parse_policy(document)


def test_a_policy_may_have_as_much_as_is_said():
    document = {"rules": [{"hosts": ["*"]}] * RULES_MAX}
    assert len(parse_policy(document).rules) == RULES_MAX
    assert parse_policy(rule(tls="passthrough")).rules[0].tls is Tls.PASSTHROUGH
