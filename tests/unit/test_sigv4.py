"""Signatures for AWS: the same that AWS's own library makes, and those that AWS publishes."""

import datetime as dt
import hashlib
import re
from typing import Any
from urllib.parse import urlsplit

import botocore.auth
import pytest
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from space.egress.inject import Misplaced, RequestHead, inject
from space.egress.sigv4 import EMPTY_SHA256, UNSIGNED, Signing
from space.model.grant import Grant, SecretValue, parse_grant

AT = dt.datetime(2015, 8, 30, 12, 36, 0, tzinfo=dt.UTC)
NOW = AT.timestamp()
KEYS = {"access_key_id": "AKIDEXAMPLE", "secret_access_key": "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"}
DUMMY = "AWS4-HMAC-SHA256 Credential={}/20150830/{}/{}/aws4_request, SignedHeaders=host;x-amz-date, Signature=0123"


def head(url: str, *headers: tuple[str, str], method: str = "GET") -> RequestHead:
    parts = urlsplit(url)
    assert parts.hostname
    port = parts.port or {"https": 443, "http": 80}[parts.scheme]
    target = url.split(parts.netloc, 1)[1] or "/"
    return RequestHead(
        method, parts.scheme, parts.hostname, port, target, [(n.encode(), v.encode()) for n, v in headers]
    )


def value(injected: RequestHead, name: str) -> list[str]:
    return [found.decode() for key, found in injected.headers if key == name.encode()]


def granted(**fields: Any) -> Grant:
    keys = fields.pop("keys", KEYS)
    terms = {"id": "gnt1", "secret": "cloud", "hosts": ["*.aws.example"], "placement": "aws-sigv4"}
    return parse_grant({**terms, "value": {"kind": "aws", **keys}, **fields})


def test_the_signature_is_the_one_that_aws_publishes_for_its_example():
    """``get-vanilla`` of the test suite for Signature Version 4: the canonical request has the host and date alone."""
    keys = SecretValue("aws", KEYS)
    signed = Signing(keys, "us-east-1", "service", None).sign(head("https://example.amazonaws.com/"), NOW, EMPTY_SHA256)
    assert value(signed, "x-amz-date") == ["20150830T123600Z"]
    assert value(signed, "authorization")[0] == (
        "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20150830/us-east-1/service/aws4_request, SignedHeaders=host;x-amz-date, "
        "Signature=5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"
    )


def test_the_key_is_derived_as_aws_publishes_it():
    signing = Signing(SecretValue("aws", KEYS), "us-east-1", "iam", None)
    assert signing._key("20150830").hex() == "c4afb1cc5771d871763a393e44b703571b55cc28424d1a5e86da6ed3c154a4b9"


REQUESTS = {
    "plain": ("GET", "https://sts.aws.example/", [], b""),
    "query": ("GET", "https://ec2.aws.example/?Version=2016-11-15&Action=DescribeRegions&Empty=&A=%20b%2Fc", [], b""),
    "same names": ("GET", "https://ec2.aws.example/?b=2&b=1&B=3&a", [], b""),
    "form": ("POST", "https://sts.aws.example/", [("content-type", "application/x-www-form-urlencoded")], b"Action=GetCallerIdentity"),
    "json": ("POST", "https://dynamodb.aws.example/", [("x-amz-target", "DynamoDB_20120810.ListTables"), ("content-type", "application/x-amz-json-1.0")], b"{}"),
    "spaces in headers": ("POST", "https://kms.aws.example/", [("x-amz-meta-a", "  a   b  "), ("content-type", "a;  b")], b"x"),
    "port": ("GET", "https://sts.aws.example:8443/", [], b""),
    "cleartext": ("GET", "http://sts.aws.example/", [], b""),
    "escaped path": ("GET", "https://lambda.aws.example/2015-03-31/functions/arn%3Aaws%3Alambda/x%20y", [], b""),
    "path with dots": ("GET", "https://execute-api.aws.example/a/../b//c/./d/", [], b""),
}  # fmt: skip
S3_REQUESTS = {
    "object": ("GET", "https://bucket.s3.aws.example/photos/2006/a%20b%2B%C3%BC.jpg", [], b""),
    "list": ("GET", "https://bucket.s3.aws.example/?list-type=2&prefix=a%2Fb&delimiter=%2F", [], b""),
    "subresource": ("GET", "https://bucket.s3.aws.example/?acl", [], b""),
    "put": ("PUT", "https://bucket.s3.aws.example/a//b/../c", [("content-type", "text/plain"), ("content-md5", "XrY7u+Ae7tCTyyK7j1rNww=="), ("x-amz-acl", "private")], b"hello"),
}  # fmt: skip


def theirs(
    kind: Any, keys: dict[str, str], service: str, request: tuple[str, str, list[tuple[str, str]], bytes]
) -> str:
    """Have AWS's own library sign the same, at the same time."""
    method, url, headers, body = request
    asked = AWSRequest(method=method, url=url, headers=dict(headers), data=body)
    signer = kind(
        Credentials(keys["access_key_id"], keys["secret_access_key"], keys.get("session_token")),
        service,
        "eu-central-1",
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("botocore.auth.get_current_datetime", lambda: AT.replace(tzinfo=None))
        signer.add_auth(asked)
    assert re.search("[0-9a-f]{64}", asked.headers["Authorization"])
    return asked.headers["Authorization"]


@pytest.mark.parametrize("keys", [KEYS, {**KEYS, "session_token": "FwoGZXIvYXdzE/token+=="}], ids=["keys", "session"])
@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS.keys())
def test_a_request_is_signed_as_awss_own_library_signs_it(request_: Any, keys: dict[str, str]):
    method, url, headers, body = request_
    signing = Signing(SecretValue("aws", keys), "eu-central-1", "any", None)
    signed = signing.sign(head(url, *headers, method=method), NOW, hashlib.sha256(body).hexdigest())
    assert value(signed, "authorization") == [theirs(botocore.auth.SigV4Auth, keys, "any", request_)]
    assert value(signed, "x-amz-security-token") == ([keys["session_token"]] if "session_token" in keys else [])


@pytest.mark.parametrize("request_", S3_REQUESTS.values(), ids=S3_REQUESTS.keys())
def test_a_request_to_s3_is_signed_as_awss_own_library_signs_it(request_: Any):
    method, url, headers, body = request_
    sha256 = hashlib.sha256(body).hexdigest()
    signing = Signing(SecretValue("aws", KEYS), "eu-central-1", "s3", sha256)
    signed = signing.sign(head(url, *headers, method=method), NOW)
    assert value(signed, "authorization") == [theirs(botocore.auth.S3SigV4Auth, KEYS, "s3", request_)]
    assert value(signed, "x-amz-content-sha256") == [sha256]


def test_what_the_guest_signed_is_signed_anew_in_its_region_for_its_service():
    given = head(
        "https://sqs.aws.example/",
        ("authorization", DUMMY.format("FAKE", "eu-west-1", "sqs")),
        ("x-amz-date", "20000101T000000Z"),
        ("x-amz-security-token", "fake"),
        ("x-amz-target", "t"),
    )
    injected = inject(given, [granted()], NOW)
    assert injected.secrets == ("cloud",)
    assert injected.sign is not None
    assert injected.sign.payload is None
    with pytest.raises(ValueError, match="hash"):
        injected.sign.sign(injected.head, NOW)
    signed = injected.sign.sign(injected.head, NOW, EMPTY_SHA256)
    (authorization,) = value(signed, "authorization")
    assert "Credential=AKIDEXAMPLE/20150830/eu-west-1/sqs/aws4_request" in authorization
    assert "SignedHeaders=host;x-amz-date;x-amz-target" in authorization
    assert value(signed, "x-amz-date") == ["20150830T123600Z"]
    assert value(signed, "x-amz-security-token") == []
    assert "wJalr" not in repr(injected) + repr(injected.sign) + repr(signed)


def test_a_grant_says_which_region_and_service_it_is_for():
    given = head("https://sqs.aws.example/", ("authorization", DUMMY.format("FAKE", "eu-west-1", "sqs")))
    sign = inject(given, [granted(region="us-east-2", service="kms")], NOW).sign
    assert sign is not None
    assert (sign.region, sign.service) == ("us-east-2", "kms")
    unsigned = inject(head("https://sqs.aws.example/"), [granted(region="us-east-2", service="kms")], NOW).sign
    assert unsigned == sign


@pytest.mark.parametrize(
    ("said", "payload"),
    [
        ([EMPTY_SHA256], EMPTY_SHA256),
        ([UNSIGNED], UNSIGNED),
        (["STREAMING-UNSIGNED-PAYLOAD-TRAILER"], "STREAMING-UNSIGNED-PAYLOAD-TRAILER"),
        ([], UNSIGNED),
        (["anything"], UNSIGNED),
        ([EMPTY_SHA256, UNSIGNED], UNSIGNED),
    ],
)
def test_what_stands_for_the_body_of_an_object_is_what_the_guest_said_or_nothing(said: list[str], payload: str):
    scope = ("authorization", DUMMY.format("FAKE", "eu-west-1", "s3"))
    given = head("https://b.s3.aws.example/o", scope, *(("x-amz-content-sha256", one) for one in said), method="PUT")
    injected = inject(given, [granted()], NOW)
    assert injected.sign is not None
    assert injected.sign.payload == payload
    assert value(injected.sign.sign(injected.head, NOW), "x-amz-content-sha256") == [payload]


@pytest.mark.parametrize(
    "headers",
    [
        [("authorization", DUMMY.format("FAKE", "eu-west-1", "s3")), ("x-amz-content-sha256", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD")],
        [("authorization", DUMMY.format("FAKE", "eu-west-1", "s3").replace("HMAC-SHA256", "ECDSA-P256-SHA256"))],
    ],
    ids=["each chunk signed", "for many regions"],
)  # fmt: skip
def test_what_cannot_be_signed_anew_is_refused(headers: list[tuple[str, str]]):
    with pytest.raises(Misplaced) as caught:
        inject(head("https://b.s3.aws.example/o", *headers, method="PUT"), [granted()], NOW)
    assert (caught.value.reason, caught.value.secret) == ("not-signable", "cloud")


@pytest.mark.parametrize(
    "given",
    [
        head("https://sqs.aws.example/"),
        head("https://sqs.aws.example/", ("authorization", "Bearer x")),
        head("https://sqs.aws.example/", ("authorization", DUMMY.format("FAKE", "EU/../x", "s3"))),
        head("https://b.aws.example/o?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Signature=01"),
        head("https://sqs.aws.example/", *[("authorization", DUMMY.format("F", r, "s3")) for r in ("a", "b")]),
    ],
    ids=["unsigned", "signed otherwise", "no scope", "signed in its query", "two scopes"],
)
def test_what_nobody_signed_for_a_region_is_left_as_it_is(given: RequestHead):
    injected = inject(given, [granted()], NOW)
    assert injected.head == given
    assert (injected.sign, injected.secrets) == (None, ())


def test_keys_have_one_place_with_other_secrets_for_authorization():
    bearer = parse_grant(
        {"id": "g", "secret": "token", "hosts": ["*.aws.example"], "value": {"kind": "text", "value": "abcdefgh"}}
    )
    given = head("https://sqs.aws.example/", ("authorization", DUMMY.format("FAKE", "eu-west-1", "sqs")))
    injected = inject(given, [bearer, granted()], NOW)
    assert (injected.sign, injected.secrets) == (None, ("token",))


def test_a_host_is_named_with_its_port_where_it_is_not_the_schemes():
    assert head("https://a.aws.example/").authority == b"a.aws.example"
    assert head("https://a.aws.example:80/").authority == b"a.aws.example:80"
    assert head("http://a.aws.example/").authority == b"a.aws.example"
