"""Certificates for the names that guests ask for, signed by the installation's own authority, which they trust.

One key serves all of them; a certificate is made in a fraction of a millisecond and kept with its TLS context.
"""

from __future__ import annotations

import datetime as dt
import os
import ssl
from collections import OrderedDict
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

KEPT = 1024
BACKDATED = dt.timedelta(days=2)
"""Guests' clocks, and those of machines that were asleep, may be behind."""
VALID = dt.timedelta(days=30)
RENEWED = dt.timedelta(days=7)
"""A certificate that is kept is made anew so long before it ends."""
_COMMON_NAME_CHARS_MAX = 64


class Authority:
    """The installation's certificate authority, and TLS contexts for names under it."""

    def __init__(self, key_pem: bytes, certificate_pem: bytes) -> None:
        key = serialization.load_pem_private_key(key_pem, password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise TypeError("the authority's key is not an elliptic-curve one")
        self._key = key
        self.pem = certificate_pem
        self._certificate = x509.load_pem_x509_certificate(certificate_pem)
        self._leaf = ec.generate_private_key(ec.SECP256R1())
        self._leaf_pem = self._leaf.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        self._identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        self._contexts: OrderedDict[str, tuple[dt.datetime, ssl.SSLContext]] = OrderedDict()

    @classmethod
    def load(cls, key: Path, certificate: Path) -> Authority:
        return cls(key.read_bytes(), certificate.read_bytes())

    def context(self, host: str) -> ssl.SSLContext:
        """Return the server's TLS context for a normalised host name."""
        now = dt.datetime.now(dt.UTC)
        kept = self._contexts.get(host)
        if kept is not None and now < kept[0]:
            self._contexts.move_to_end(host)
            return kept[1]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["h2", "http/1.1"])
        self._load(context, self._leaf_pem + self._mint(host, now) + self.pem)
        self._contexts[host] = (now + VALID - RENEWED, context)
        while len(self._contexts) > KEPT:
            self._contexts.popitem(last=False)
        return context

    def _mint(self, host: str, now: dt.datetime) -> bytes:
        # A longer name does not fit in a common name (RFC 5280, appendix A.1); clients look at the alternative name.
        subject = host if len(host) <= _COMMON_NAME_CHARS_MAX else "sandbox egress"
        public = self._leaf.public_key()
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
            .issuer_name(self._certificate.subject)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - BACKDATED)
            .not_valid_after(now + VALID)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(self._identifier, critical=False)
        )
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    @staticmethod
    def _load(context: ssl.SSLContext, pem: bytes) -> None:
        """Give a context its key and certificates, which it takes from files alone: one that is in memory only."""
        file = os.memfd_create("leaf", os.MFD_CLOEXEC)
        try:
            os.write(file, pem)
            context.load_cert_chain(f"/proc/self/fd/{file}")
        finally:
            os.close(file)


def upstream_context(ca_file: Path | None) -> ssl.SSLContext:
    """Return the client's TLS context for servers outside: the system's roots, and the operator's own besides."""
    context = ssl.create_default_context()
    if ca_file is not None:
        context.load_verify_locations(cafile=str(ca_file))
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
