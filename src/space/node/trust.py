"""The authority that guests are told to trust: that of this installation, whose certificate anybody may read."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from cryptography import x509

from space.errors import SpaceError
from space.node.guests import Guest

log = structlog.get_logger(__name__)

TELL_S = 20.0
_OID, _UTF8, _SEQUENCE, _SET = 0x06, 0x0C, 0x30, 0x31


@dataclass(frozen=True, slots=True)
class Trust:
    """A certificate (PEM), and the hash under which OpenSSL looks for it; None where there is none."""

    certificate: str | None = None
    subject_hash: str | None = None

    @classmethod
    def load(cls, path: Path) -> Trust:
        """Read the certificate; an installation without one has nothing to be trusted."""
        try:
            pem = path.read_bytes()
            return cls(pem.decode("ascii"), subject_hash(x509.load_pem_x509_certificate(pem)))
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError) as error:
            log.warning("authority-not-read", path=str(path), error=type(error).__name__)
            return cls()

    async def tell(self, guest: Guest) -> None:
        """Have a guest trust it. One that already does has nothing to do; one that cannot goes on all the same."""
        if self.certificate is not None and self.certificate != guest.trusted:
            await _tell(guest, {"certificate": self.certificate, "subject_hash": self.subject_hash})
            guest.trusted = self.certificate

    async def take_back(self, guest: Guest) -> None:
        """Have a guest's disk as if it had never been told. Raises what keeps it from that."""
        if self.certificate is not None:
            guest.trusted = None
            await guest.request("trust", {"certificate": None}, timeout_s=TELL_S)


async def _tell(guest: Guest, fields: dict[str, Any]) -> None:
    try:
        await guest.request("trust", fields, timeout_s=TELL_S)
    except SpaceError as error:
        # A guest from before an upgrade does not know how. What it runs trusts nobody then, which is no danger.
        log.warning("trust-not-told", machine=guest.machine, code=error.code)


def subject_hash(certificate: x509.Certificate) -> str:
    """Return what ``openssl x509 -subject_hash`` prints: of the names in lower case, without the list around them."""
    names = b"".join(
        _wrapped(_SET, b"".join(_wrapped(_SEQUENCE, _name(one)) for one in several))
        for several in certificate.subject.rdns
    )
    return hashlib.sha1(names, usedforsecurity=False).digest()[3::-1].hex()


def _name(attribute: x509.NameAttribute[str | bytes]) -> bytes:
    words = str(attribute.value).lower().split()
    return _oid(attribute.oid.dotted_string) + _wrapped(_UTF8, " ".join(words).encode())


def _oid(dotted: str) -> bytes:
    first, second, *rest = (int(part) for part in dotted.split("."))
    body = bytes((first * 40 + second,))
    for number in rest:
        groups = [number >> shift & 0x7F for shift in range(0, max(number.bit_length(), 1), 7)][::-1]
        body += bytes([*(group | 0x80 for group in groups[:-1]), groups[-1]])
    return _wrapped(_OID, body)


def _wrapped(tag: int, data: bytes) -> bytes:
    """Encode in DER."""
    size = len(data)
    if size < 0x80:
        return bytes((tag, size)) + data
    length = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes((tag, 0x80 | len(length))) + length + data
