"""AWS Signature Version 4 in the header ``Authorization``, as AWS publishes it (``AWS4-HMAC-SHA256``). Pure.

What the guest signed with keys of no worth is signed again with the true ones: in the region and for the service that
the guest named, unless the grant names others.
"""

import dataclasses
import hashlib
import hmac
import re
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote_to_bytes

from space.model.grant import Grant, SecretValue

if TYPE_CHECKING:
    from space.egress.inject import RequestHead

UNSIGNED = "UNSIGNED-PAYLOAD"
EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()

_ALGORITHM = b"AWS4-HMAC-SHA256"
_SCOPE = re.compile(
    rb"AWS4-HMAC-SHA256 +Credential=[^/\s,]{1,128}/[0-9]{8}/([a-z0-9-]{1,63})/([a-z0-9-]{1,63})/aws4_request"
)
_SHA256 = re.compile(r"[0-9a-f]{64}")
# These take paths as they are, and want the header with the hash of the body.
_S3 = frozenset(("s3", "s3-object-lambda", "s3-outposts"))
_OWN = (b"authorization", b"x-amz-date", b"x-amz-security-token", b"x-amz-content-sha256")


class Unsignable(Exception):
    """A request that is signed in a way that cannot be done again here."""


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Signing:
    """How a request is to be signed. ``payload`` is what stands for its body; None: its SHA-256 is needed."""

    keys: SecretValue
    region: str
    service: str
    payload: str | None

    def sign(self, head: "RequestHead", now: float, body_sha256: str | None = None) -> "RequestHead":
        """Return the head with its signature, which holds for some minutes around ``now``.

        ``body_sha256`` (hexadecimal) is needed where ``payload`` is None.
        """
        payload = self.payload or body_sha256
        if payload is None:
            raise ValueError("the hash of the body is needed")
        at = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
        headers = [(name, value) for name, value in head.headers if name not in _OWN]
        headers.append((b"x-amz-date", at.encode()))
        if self.payload is not None:
            headers.append((b"x-amz-content-sha256", payload.encode()))
        token = self.keys.fields.get("session_token")
        if token:
            headers.append((b"x-amz-security-token", token.encode()))
        signed, names = _canonical_headers([(b"host", head.authority), *headers])
        path, _, query = head.target.partition("?")
        request = b"\n".join(
            (
                head.method.encode(),
                self._canonical_path(path),
                _canonical_query(query),
                signed,
                names,
                payload.encode(),
            )
        )
        scope = f"{at[:8]}/{self.region}/{self.service}/aws4_request".encode()
        text = b"\n".join((_ALGORITHM, at.encode(), scope, hashlib.sha256(request).hexdigest().encode()))
        signature = hmac.new(self._key(at[:8]), text, "sha256").hexdigest().encode()
        credential = self.keys.fields["access_key_id"].encode() + b"/" + scope
        value = b"%b Credential=%b, SignedHeaders=%b, Signature=%b" % (_ALGORITHM, credential, names, signature)
        return dataclasses.replace(head, headers=[*headers, (b"authorization", value)])

    def _key(self, day: str) -> bytes:
        key = b"AWS4" + self.keys.fields["secret_access_key"].encode()
        for part in (day, self.region, self.service, "aws4_request"):
            key = hmac.digest(key, part.encode(), "sha256")
        return key

    def _canonical_path(self, path: str) -> bytes:
        if self.service in _S3:
            return quote(unquote_to_bytes(path), safe="/-_.~").encode()
        return quote(_without_dots(path), safe="/-_.~").encode()


def signing(head: "RequestHead", grant: Grant) -> Signing | None:
    """Say how a request that a grant covers is signed; None where it is not to be.

    That is one which nobody said a region and service for, or which has its signature in its query: that was signed by
    somebody else. Raises ``Unsignable``.
    """
    asked = [value for name, value in head.headers if name == b"authorization"]
    if any(value.startswith(b"AWS4-ECDSA") for value in asked):
        raise Unsignable("It is signed by AWS4-ECDSA-P256-SHA256; requests signed for one region can be signed here.")
    if re.search(r"[?&]x-amz-signature=", head.target, re.IGNORECASE):
        return None
    scope = _SCOPE.match(asked[0]) if len(asked) == 1 else None
    region = grant.region or (scope[1].decode() if scope else None)
    service = grant.service or (scope[2].decode() if scope else None)
    if region is None or service is None:
        return None
    return Signing(grant.value, region, service, _payload(head, service))


def _payload(head: "RequestHead", service: str) -> str | None:
    said = [value.decode("latin-1") for name, value in head.headers if name == b"x-amz-content-sha256"]
    if len(said) == 1 and (_SHA256.fullmatch(said[0]) or said[0] in {UNSIGNED, "STREAMING-UNSIGNED-PAYLOAD-TRAILER"}):
        return said[0]
    if any(value.startswith("STREAMING-") for value in said):
        raise Unsignable(
            "Each chunk of its body is signed. Clients do without where they are told not to sign bodies, or to send "
            "them in one piece."
        )
    return UNSIGNED if service in _S3 else None


def _canonical_headers(headers: Iterable[tuple[bytes, bytes]]) -> tuple[bytes, bytes]:
    """Return the headers that are signed, a line each, and their names."""
    found: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        if name in {b"host", b"content-type", b"content-md5"} or name.startswith(b"x-amz-"):
            found.setdefault(name, []).append(b" ".join(value.split()))
    lines = [b"%b:%b\n" % (name, b",".join(found[name])) for name in sorted(found)]
    return b"".join(lines), b";".join(sorted(found))


def _canonical_query(query: str) -> bytes:
    pairs: list[tuple[str, str]] = []
    for part in query.split("&") if query else ():
        name, _, value = part.partition("=")
        pairs.append((_once_more(name), _once_more(value)))
    return "&".join(f"{name}={value}" for name, value in sorted(pairs)).encode()


def _once_more(text: str) -> str:
    return quote(unquote_to_bytes(text.replace("+", " ")), safe="-_.~")


def _without_dots(path: str) -> str:
    kept: list[str] = []
    for segment in path.split("/"):
        if segment == "..":
            kept = kept[:-1]
        elif segment not in {"", "."}:
            kept.append(segment)
    return "/" + "/".join(kept) + ("/" if kept and path.endswith("/") else "")
