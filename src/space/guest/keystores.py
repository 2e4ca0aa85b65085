"""Java's stores of whom to trust, changed without Java: its own format (JKS), and PKCS #12 as newer ones have it.

Both are only handled as far as they hold certificates alone and are sealed with the password that everybody uses, or
with none. ``None`` for all others: they are somebody's own.
"""

from __future__ import annotations

import binascii
import hashlib
import struct

ALIAS = "space-egress"
_JKS = b"\xfe\xed\xfe\xed\x00\x00\x00\x02"
_SEAL = "changeit".encode("utf-16-be") + b"Mighty Aphrodite"
_SEAL_BYTES = 20
_TRUSTED = 2
_PARTS_MAX = 256
# Object identifiers, as they are encoded (RFC 7292, RFC 2985; the attribute by which Java knows what it may trust).
_DATA = bytes.fromhex("06092a864886f70d010701")
_CERT_BAG = bytes.fromhex("060b2a864886f70d010c0a0103")
_X509 = bytes.fromhex("060a2a864886f70d01091601")
_FRIENDLY_NAME = bytes.fromhex("06092a864886f70d010914")
_TRUSTED_KEY_USAGE = bytes.fromhex("060c6086480186f966adca7b0101")
_ANY_USAGE = bytes.fromhex("0604551d2500")
_SEQUENCE, _SET, _OCTETS, _EXPLICIT, _BMP = 0x30, 0x31, 0x04, 0xA0, 0x1E


def der(pem: str) -> bytes:
    """Return the bytes of a certificate. Raises ``ValueError``."""
    body = pem.partition("-----BEGIN CERTIFICATE-----")[2].partition("-----END CERTIFICATE-----")[0]
    return binascii.a2b_base64("".join(body.split()), strict_mode=True)


def add(store: bytes, certificate: bytes) -> bytes | None:
    """Return the store with a certificate that is trusted; None where that cannot be."""
    if store.startswith(_JKS):
        entries = _jks_entries(store)
        if entries is None:
            return None
        if any(_jks_certificate(entry) == certificate for entry in entries):
            return store
        return _jks([*entries, _jks_entry(certificate)])
    parts = _pkcs12_parts(store)
    if parts is None:
        return None
    mine = _pkcs12_part(certificate)
    return store if mine in parts else _pkcs12([*parts, mine])


def remove(store: bytes, certificate: bytes) -> bytes | None:
    """Return the store without that certificate, whatever it is called there; None where that cannot be."""
    if store.startswith(_JKS):
        entries = _jks_entries(store)
        return None if entries is None else _jks([one for one in entries if _jks_certificate(one) != certificate])
    parts, mine = _pkcs12_parts(store), _pkcs12_part(certificate)
    return None if parts is None else _pkcs12([part for part in parts if part != mine])


# --- JKS: a count, entries one after the other, and a digest over a password and all of it


def _jks(entries: list[bytes]) -> bytes:
    whole = _JKS + struct.pack(">I", len(entries)) + b"".join(entries)
    return whole + _sealed(whole)


def _sealed(whole: bytes) -> bytes:
    return hashlib.sha1(_SEAL + whole, usedforsecurity=False).digest()


def _jks_entries(store: bytes) -> list[bytes] | None:
    whole, seal = store[:-_SEAL_BYTES], store[-_SEAL_BYTES:]
    if len(store) < len(_JKS) + 4 + _SEAL_BYTES or _sealed(whole) != seal:
        return None
    (count,) = struct.unpack_from(">I", whole, len(_JKS))
    place, entries = len(_JKS) + 4, list[bytes]()
    try:
        for _ in range(count):
            begin = place
            kind, alias = struct.unpack_from(">IH", whole, place)
            if kind != _TRUSTED:
                return None
            place += 6 + alias + 8
            (name,) = struct.unpack_from(">H", whole, place)
            place += 2 + name
            (size,) = struct.unpack_from(">I", whole, place)
            place += 4 + size
            entries.append(whole[begin:place])
    except struct.error:
        return None
    return entries if place == len(whole) else None


def _jks_entry(certificate: bytes) -> bytes:
    alias, name = ALIAS.encode(), b"X.509"
    head = struct.pack(">IH", _TRUSTED, len(alias)) + alias + bytes(8)
    return head + struct.pack(">H", len(name)) + name + struct.pack(">I", len(certificate)) + certificate


def _jks_certificate(entry: bytes) -> bytes:
    (alias,) = struct.unpack_from(">H", entry, 4)
    (name,) = struct.unpack_from(">H", entry, 6 + alias + 8)
    return entry[6 + alias + 8 + 2 + name + 4 :]


# --- PKCS #12 without encryption and seal: version, then data in data in data, the innermost a list of certificates


def _pkcs12(parts: list[bytes]) -> bytes:
    return _wrapped(_SEQUENCE, b"\x02\x01\x03" + _content(_wrapped(_SEQUENCE, b"".join(parts))))


def _pkcs12_parts(store: bytes) -> list[bytes] | None:
    try:
        kind, whole, rest = _taken(store)
        version, content = whole[:3], whole[3:]
        if (kind, rest, version) != (_SEQUENCE, b"", b"\x02\x01\x03"):
            return None
        _, inside, sealed = _taken(content)
        if sealed or not inside.startswith(_DATA):
            return None
        _, octets, _ = _taken(inside[len(_DATA) :])
        _, listed, _ = _taken(octets)
        kind, body, rest = _taken(listed)
        if kind != _SEQUENCE or rest:
            return None
        parts: list[bytes] = []
        while body:
            before = body
            _, _, body = _taken(before)
            parts.append(before[: len(before) - len(body)])
            if len(parts) > _PARTS_MAX:
                return None
    except (IndexError, ValueError):
        return None
    return parts


def _pkcs12_part(certificate: bytes) -> bytes:
    held = _wrapped(_SEQUENCE, _X509 + _wrapped(_EXPLICIT, _wrapped(_OCTETS, certificate)))
    name = _wrapped(_SEQUENCE, _FRIENDLY_NAME + _wrapped(_SET, _wrapped(_BMP, ALIAS.encode("utf-16-be"))))
    usage = _wrapped(_SEQUENCE, _TRUSTED_KEY_USAGE + _wrapped(_SET, _ANY_USAGE))
    bag = _wrapped(_SEQUENCE, _CERT_BAG + _wrapped(_EXPLICIT, held) + _wrapped(_SET, name + usage))
    return _content(_wrapped(_SEQUENCE, bag))


def _content(data: bytes) -> bytes:
    return _wrapped(_SEQUENCE, _DATA + _wrapped(_EXPLICIT, _wrapped(_OCTETS, data)))


def _wrapped(tag: int, data: bytes) -> bytes:
    if len(data) < 0x80:
        return bytes((tag, len(data))) + data
    size = len(data).to_bytes((len(data).bit_length() + 7) // 8, "big")
    return bytes((tag, 0x80 | len(size))) + size + data


def _taken(data: bytes) -> tuple[int, bytes, bytes]:
    """Return the tag and the content of what comes first, and what follows."""
    size, begin = data[1], 2
    if size & 0x80:
        count = size & 0x7F
        if not 0 < count <= 4:
            raise ValueError("length")
        begin += count
        size = int.from_bytes(data[2:begin], "big")
    if begin + size > len(data):
        raise ValueError("cut off")
    return data[0], data[begin : begin + size], data[begin + size :]
