"""Laws of policies: what is true of every policy and every request, of which the tests of single cases are examples."""

import ipaddress
import itertools
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from space.egress.decide import Asked, decide, decide_host, decide_network, explain, may_resolve
from space.egress.suggest import suggest
from space.model.hosts import normalise_host, normalise_pattern
from space.model.paths import canonical_path, glob_matches, normalise_glob
from space.model.policy import Action, Policy, Rule, parse_policy, render_policy
from space.model.policy_fields import PolicyInvalid

LAWS = settings(
    deadline=None,
    max_examples=50,
    database=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow],
)

# Few names, so that rules and requests meet.
HOSTS = ("a.example", "c.b.a.example", "other.example")
PATTERNS = (*HOSTS, "*", "*.a.example", "*.example")
GLOBS = ("/", "/a", "/a/*", "/a/**", "/**", "/**/z", "/*", "/a/*/z", "/a*z")
PATHS = ("/", "/a", "/a/b", "/a/b/z", "/az", "/%61", "/a/../b", "/a%2fb", "")
PORTS = (80, 443)
METHODS = ("GET", "PUT")


def some(values: tuple[Any, ...], least: int = 0) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.sampled_from(values), min_size=least, max_size=3)


@st.composite
def rule(draw: st.DrawFn) -> dict[str, Any]:
    made: dict[str, Any] = {
        "hosts": [draw(st.sampled_from(PATTERNS))],
        "ports": draw(st.sampled_from(([443], [80, 443]))),
    }
    made["action"] = draw(st.sampled_from(("allow", "deny")))
    if made["action"] == "allow" and draw(st.booleans()):
        return {**made, "tls": "passthrough"}
    methods, paths = st.sampled_from(([], ["GET"])), st.sampled_from([[], *([glob] for glob in GLOBS)])
    return {**made, "methods": draw(methods), "paths": draw(paths)}


networks = st.fixed_dictionaries(
    {
        "action": st.sampled_from(("allow", "deny")),
        "networks": some(("10.0.0.0/8", "10.1.0.0/16", "10.1.2.3", "::/0", "fd00::/8", "0.0.0.0/0"), 1),
        "ports": some((22, "20-80", "443", "1-65535")),
    }
)
documents = st.fixed_dictionaries(
    {
        "preset": st.sampled_from(("none", "public-internet", "package-registries")),
        "rules": st.lists(rule(), max_size=5),
        "networks": st.lists(networks, max_size=3),
    }
)
policies = documents.map(lambda document: parse_policy(document, ("a.example", "other.example:8443")))
REQUESTS = [Asked(*each) for each in itertools.product(HOSTS, PORTS, METHODS, PATHS)]
"""Every policy is asked all of these."""
rules = rule().map(lambda made: replace(parse_policy({"rules": [made]}).rules[0], name="new"))
addresses = st.sampled_from(("10.1.2.3", "10.2.0.1", "::ffff:10.1.2.3", "fd00::1", "1.1.1.1")).map(ipaddress.ip_address)


def with_rule(policy: Policy, at: int, new: Rule) -> Policy:
    return replace(policy, rules=(*policy.rules[:at], new, *policy.rules[at:]))


@LAWS
@given(policies)
def test_what_is_told_of_a_policy_is_read_as_the_same_policy(policy: Policy):
    assert parse_policy(render_policy(policy)) == policy


@LAWS
@given(policies, rules)
def test_a_deny_in_front_never_allows_more(policy: Policy, new: Rule):
    denying = with_rule(policy, 0, replace(new, action=Action.DENY))
    for asked in REQUESTS:
        before, after = decide(policy, asked), decide(denying, asked)
        assert before.allowed or not after.allowed
        assert after == before or after.rule == "new"


@LAWS
@given(policies, rules, st.integers(0, 8))
def test_an_allow_never_allows_less_but_where_its_paths_are_asked_about_one_with_two_meanings(
    policy: Policy, new: Rule, at: int
):
    allowing = with_rule(policy, at, replace(new, action=Action.ALLOW))
    for asked in REQUESTS:
        after = decide(allowing, asked)
        ambiguous = (after.rule, after.reason) == ("new", "ambiguous-path")
        assert after.allowed or not decide(policy, asked).allowed or ambiguous


@LAWS
@given(policies)
def test_a_path_with_two_meanings_is_allowed_only_where_every_path_is(policy: Policy):
    for asked in REQUESTS:
        if canonical_path(asked.path) is None and decide(policy, asked).allowed:
            assert all(decide(policy, replace(asked, path=path)).allowed for path in PATHS)


@LAWS
@given(policies, rules, st.randoms(use_true_random=False))
def test_what_comes_behind_the_rule_that_decides_never_matters(policy: Policy, new: Rule, random: Any):
    names = [one.name for one in policy.rules]
    for first in range(1, len(names) + 1):
        rest = [*policy.rules[first:], new]
        random.shuffle(rest)
        other = replace(policy, rules=(*policy.rules[:first], *rest))
        for asked in REQUESTS:
            decision = decide(policy, asked)
            assert decide(other, asked) == decision or decision.rule not in names[:first]


@LAWS
@given(policies)
def test_what_is_allowed_is_possible_and_what_is_possible_may_be_resolved(policy: Policy):
    for asked in REQUESTS:
        assert decide_host(policy, asked.host, asked.port).possible or not decide(policy, asked).allowed
    for host in HOSTS:
        possible = [decide_host(policy, host, port).possible for port in (*PORTS, 8443)]
        assert may_resolve(policy, host) == any(possible)


@LAWS
@given(policies)
def test_what_passes_through_unseen_would_be_allowed_whatever_it_is(policy: Policy):
    for asked in REQUESTS:
        assert decide(policy, asked).allowed or not decide_host(policy, asked.host, asked.port).passthrough


@LAWS
@given(policies, st.booleans(), st.booleans(), st.text(max_size=20))
def test_how_host_and_method_are_written_and_what_is_in_the_query_never_matters(
    policy: Policy, dot: bool, small: bool, query: str
):
    for asked in REQUESTS:
        host = asked.host.title() + ("." if dot else "")
        method = asked.method.lower() if small else asked.method
        assert decide(policy, Asked(host, asked.port, method, f"{asked.path}?{query}")) == decide(policy, asked)
        assert decide_host(policy, host, asked.port) == decide_host(policy, asked.host, asked.port)


@LAWS
@given(policies)
def test_an_explanation_names_the_rule_that_decides_and_no_other(policy: Policy):
    for asked in REQUESTS[::5]:
        steps = explain(policy, asked)
        assert [step["rule"] for step in steps] == [one.name for one in policy.rules]
        decision = decide(policy, asked)
        deciding = [step["rule"] for step in steps if step["decides"]]
        assert deciding == ([decision.rule] if decision.rule else [])
        if decision.reason == "rule":
            assert next(step["rule"] for step in steps if step["matches"]) == decision.rule


@LAWS
@given(policies, addresses, st.sampled_from((22, 443, 5432)))
def test_a_network_that_is_denied_in_front_never_allows_more(policy: Policy, address: Any, port: int):
    deny = parse_policy({"networks": [{"name": "new", "action": "deny", "networks": ["10.1.0.0/16"]}]}).networks
    before = decide_network(policy, address, port)
    after = decide_network(replace(policy, networks=deny + policy.networks), address, port)
    assert before.allowed or not after.allowed
    assert after in (before, replace(after, allowed=False, rule="new"))


@LAWS
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=8), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(("rules", "networks", "preset", "hosts", "name", "ports", "x")), inner, max_size=4)))  # fmt: skip
def test_any_json_is_a_policy_or_refused_as_none(document: Any):
    try:
        policy = parse_policy(document)
    except PolicyInvalid:
        return
    assert parse_policy(render_policy(policy)) == policy


@LAWS
@given(st.text(max_size=40) | st.text(alphabet="aA0.-_x%*:[]", max_size=12))
def test_whatever_is_normalised_stays_as_it_is(text: str):
    for normalise in (normalise_host, normalise_pattern, normalise_glob, canonical_path):
        once = normalise(text)
        assert once is None or normalise(once) == once
    host = normalise_host(text)
    assert host is None or normalise_pattern(text) == host


@LAWS
@given(st.text(alphabet="/.%2eE5cCfF;a*\\", max_size=16).map(lambda text: f"/{text}"))
def test_a_path_with_one_meaning_leads_up_for_nobody(target: str):
    path = canonical_path(target)
    if path is not None:
        assert not {".", "..", ""} & set(path.lower().replace("%2e", ".").split("/")[1:-1])
        assert path.rsplit("/", 1)[1] not in {".", ".."}
        assert glob_matches("/**", path)


requests = st.fixed_dictionaries(
    {
        "decision": st.just("deny"),
        "reason": st.just("default-deny"),
        "kind": st.just("http"),
        "host": st.sampled_from(HOSTS[:2]),
        "port": st.sampled_from((*PORTS, 8443)),
        "method": st.sampled_from(METHODS),
        "path": st.sampled_from(PATHS),
    }
)
records = requests | st.fixed_dictionaries(
    {},
    optional={
        "decision": st.sampled_from(("deny", "allow", None)),
        "reason": st.sampled_from(("default-deny", "rule")),
        "kind": st.sampled_from(("http", "dns", "tls", "tcp", None)),
        "host": st.sampled_from(HOSTS) | st.text(max_size=5) | st.none(),
        "port": st.sampled_from(PORTS) | st.none() | st.integers(),
        "method": st.sampled_from(METHODS) | st.text(max_size=3) | st.none(),
        "path": st.sampled_from(PATHS) | st.text(max_size=8).map(lambda t: f"/{t}") | st.none(),
        "address": st.sampled_from(("1.1.1.1", "fd00::1", "", None)),
    },
)


@LAWS
@given(st.lists(records, max_size=12))
def test_what_is_suggested_is_a_policy_that_allows_what_was_denied(seen: list[dict[str, Any]]):
    policy = parse_policy(suggest(seen))
    for one in seen:
        if one.keys() >= {"path", "kind"} and one["kind"] == "http" and "address" not in one:
            asked = Asked(one.get("host") or "", one.get("port") or 0, one.get("method") or "", one["path"] or "")
            wanted = (one.get("decision"), one.get("reason")) == ("deny", "default-deny")
            if wanted and asked.host in HOSTS and asked.port in (*PORTS, 8443) and asked.method in METHODS:
                assert decide(policy, asked).allowed
