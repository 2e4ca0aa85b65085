"""Grants: what they cover, what they may say, and that their values are never shown."""

import traceback
from typing import Any

import pytest

from space.model.grant import (
    PLACEHOLDER,
    VALUE_CHARS_MAX,
    Grant,
    SecretValue,
    check_grant,
    check_value,
    new_placeholder,
    parse_grant,
    parse_value,
    render_grant,
)
from space.model.policy_fields import PolicyInvalid

VALUE = "hunter2-hunter2"
TEXT = {"kind": "text", "value": VALUE}
BASIC = {"kind": "basic", "username": "me", "password": VALUE}
AWS = {"kind": "aws", "access_key_id": "AKIDEXAMPLE", "secret_access_key": VALUE}


def document(**fields: Any) -> dict[str, Any]:
    return {
        "id": "gnt1",
        "secret": "token",
        "hosts": ["api.good.example"],
        "placement": "bearer",
        "value": TEXT,
        **fields,
    }


def covers(grant: Grant, **fields: Any) -> bool:
    asked: dict[str, Any] = {
        "scheme": "https",
        "host": "api.good.example",
        "port": 443,
        "method": "GET",
        "target": "/a?b",
        **fields,
    }
    return grant.covers(**asked)


def test_placeholders_have_one_form_and_are_never_the_same():
    made = {new_placeholder() for _ in range(100)}
    assert len(made) == 100
    assert all(PLACEHOLDER.fullmatch(one) for one in made)


@pytest.mark.parametrize(
    "given",
    [
        document(),
        document(ports=[8443, 443], methods=["get"], paths=["/a/**"], cleartext=True, scrub=False, expires_at=1e9),
        document(placement="header", name="X-Api-Key", template="key {}"),
        document(placement="basic", value=BASIC, placeholder=new_placeholder()),
        document(placement="basic", template="x-access-token:{}"),
        document(placement="query", name="key"),
        document(placement="aws-sigv4", value=AWS | {"session_token": "tok-en"}, region="eu-central-1", service="s3"),
        document(placement="placeholder", placeholder=new_placeholder()),
    ],
)
def test_a_grant_survives_being_told(given: dict[str, Any]):
    grant = parse_grant(given)
    assert parse_grant(render_grant(grant)) == grant
    assert render_grant(parse_grant(render_grant(grant))) == render_grant(grant)


def test_a_grant_is_for_verified_tls_unless_it_says_otherwise():
    assert covers(parse_grant(document()))
    assert not covers(parse_grant(document(ports=[80, 443])), scheme="http", port=80)
    assert covers(parse_grant(document(ports=[80, 443], cleartext=True)), scheme="http", port=80)
    assert not covers(parse_grant(document(cleartext=True)), scheme="http", port=80)


@pytest.mark.parametrize(
    ("fields", "covered"),
    [
        ({}, True),
        ({"method": "get"}, True),
        ({"method": "POST"}, False),
        ({"port": 8443}, False),
        ({"host": "good.example"}, False),
        ({"host": "a.api.good.example"}, False),
        ({"host": "api.good.example.evil.example"}, False),
        ({"target": "/a/b"}, True),
        ({"target": "/a/b?c=/../.."}, True),
        ({"target": "/%61/b"}, True),
        ({"target": "/b"}, False),
        ({"target": "/a/../b"}, False),
        ({"target": "/a/%2e%2e/b"}, False),
        ({"target": "//a"}, False),
        ({"target": "/a%2fb"}, False),
    ],
)
def test_a_grant_covers_its_hosts_ports_methods_and_paths(fields: dict[str, Any], covered: bool):
    grant = parse_grant(document(methods=["GET"], paths=["/a/**"]))
    assert covers(grant, **fields) is covered


def test_a_grant_ends_at_the_second_it_says():
    grant = parse_grant(document(expires_at=100))
    assert not grant.expired(99.9)
    assert grant.expired(100)
    assert not parse_grant(document()).expired(1e12)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (document(hosts=["*"]), "hosts[0]"),
        (document(hosts=["*.example"]), "hosts[0]"),
        (document(hosts=[]), "hosts"),
        (document(hosts=["1.2.3.4"]), "hosts[0]"),
        (document(ports=[0]), "ports[0]"),
        (document(methods=["G T"]), "methods[0]"),
        (document(paths=["a"]), "paths[0]"),
        (document(placement="cookie"), "placement"),
        (document(placement="bearer", value=BASIC), "placement"),
        (document(placement="bearer", value=AWS), "placement"),
        (document(placement="aws-sigv4"), "placement"),
        (document(placement="header"), "name"),
        (document(placement="query"), "name"),
        (document(name="x"), "name"),
        (document(placement="header", name="x y"), "name"),
        (document(placement="header", name="x:"), "name"),
        (document(placement="header", name="x\r\ny"), "name"),
        (document(placement="header", name="Host"), "name"),
        (document(placement="header", name="Content-Length"), "name"),
        (document(placement="header", name="Transfer-Encoding"), "name"),
        (document(placement="header", name="Connection"), "name"),
        (document(placement="header", name="Proxy-Authorization"), "name"),
        (document(placement="header", name="Sec-WebSocket-Protocol"), "name"),
        (document(placement="header", name="Accept-Encoding"), "name"),
        (document(placement="header", name="x", template="token"), "template"),
        (document(placement="header", name="x", template="{}{}"), "template"),
        (document(placement="header", name="x", template="{}\r\ny: z"), "template"),
        (document(placement="header", name="x", template="tökën {}"), "template"),
        (document(placement="header", name="x", template=" {}"), "template"),
        (document(template="Token {}"), "template"),
        (document(placement="placeholder"), "placeholder"),
        (document(placeholder="ghp_mine"), "placeholder"),
        (document(placeholder="space-placeholder-" + "a" * 27), "placeholder"),
        (document(expires_at="tomorrow"), "expires_at"),
        (document(expires_at=True), "expires_at"),
        (document(cleartext="yes"), "cleartext"),
        (document(scrub=0), "scrub"),
        (document(region="EU/../x"), "region"),
        (document(service="s3 "), "service"),
        (document(id=""), "id"),
        (document(id=7), "id"),
        (document(secret="a\nb"), "secret"),
        (document(more=1), "grant"),
        ({key: value for key, value in document().items() if key != "secret"}, "secret"),
    ],
)
def test_what_is_no_grant_says_which_field_it_is(given: dict[str, Any], field: str):
    with pytest.raises(PolicyInvalid) as caught:
        parse_grant(given)
    assert caught.value.field == field
    kind = given["value"]["kind"]
    with pytest.raises(PolicyInvalid) as caught:
        check_grant(given, kind)
    assert caught.value.field == field


def test_a_grant_can_be_checked_before_its_value_is_known():
    check_grant({key: value for key, value in document().items() if key != "value"}, "text")


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (None, "value"),
        (VALUE, "value"),
        ({}, "value.kind"),
        ({"kind": "password"}, "value.kind"),
        ({"kind": ["text"]}, "value.kind"),
        ({"kind": "text"}, "value.value"),
        ({"kind": "text", "value": 7}, "value.value"),
        ({"kind": "text", "value": ""}, "value.value"),
        ({"kind": "text", "value": f"{VALUE}\n"}, "value.value"),
        ({"kind": "text", "value": f"{VALUE}\r\nx: y"}, "value.value"),
        ({"kind": "text", "value": f"{VALUE}\0"}, "value.value"),
        ({"kind": "text", "value": f" {VALUE}"}, "value.value"),
        ({"kind": "text", "value": f"{VALUE}ü"}, "value.value"),
        ({"kind": "text", "value": f"{VALUE}{'x' * VALUE_CHARS_MAX}"}, "value.value"),
        ({"kind": "text", "value": VALUE, "password": VALUE}, "value"),
        ({"kind": "text", "value": VALUE, VALUE[:5]: VALUE}, "value"),
        ({"kind": "basic", "username": "a:b", "password": VALUE}, "value.username"),
        ({"kind": "basic", "username": "a"}, "value.password"),
        ({"kind": "aws", "access_key_id": "AKID"}, "value.secret_access_key"),
        (AWS | {"session_token": 7}, "value.session_token"),
    ],
)
def test_what_is_no_value_says_which_field_it_is_and_never_shows_it(value: Any, field: str):
    with pytest.raises(PolicyInvalid) as caught:
        parse_value(value)
    assert caught.value.field == field
    assert VALUE not in str(caught.value)


def test_nothing_that_is_printed_of_a_grant_has_its_value():
    grant = parse_grant(document())
    bad = document(placement="header", name="Host")
    with pytest.raises(PolicyInvalid) as caught:
        parse_grant(bad)
    shown = [repr(grant), str(grant), f"{grant}", repr(grant.value), repr([grant]), str({"a": grant.value})]
    shown += traceback.format_exception(caught.value)
    assert all(VALUE not in text for text in shown)


def test_a_value_that_did_not_come_from_a_document_can_be_checked():
    check_value(SecretValue("text", {"value": VALUE}))
    with pytest.raises(PolicyInvalid):
        check_value(SecretValue("text", {"value": "a\nb"}))
