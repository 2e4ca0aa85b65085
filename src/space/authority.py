"""The certificate authority of one installation, which its sandboxes trust and its gateway signs with: made once.

Two files: the key, which the gateway's user alone may read, and the certificate, which is everybody's. Whoever has the
key can read what sandboxes send; nothing outside sandboxes trusts it.
"""

import datetime as dt
import os
import secrets
from pathlib import Path

KEY, CERTIFICATE = "ca.key", "ca.crt"
VALID = dt.timedelta(days=3652)
BACKDATED = dt.timedelta(days=2)
"""A guest's clock may be behind."""


def ensure(directory: Path, instance: str, uid: int, gid: int) -> None:
    """Make the authority in ``directory``, which is root's, unless it is there; the key for ``uid`` alone.

    Never half of it: without its certificate a key is of no use to anybody, and is replaced.
    """
    key, certificate = directory / KEY, directory / CERTIFICATE
    if not (key.exists() and certificate.exists()):
        certificate.unlink(missing_ok=True)
        key_pem, certificate_pem = _make(instance)
        _put(key, key_pem, 0o600, (uid, gid))
        _put(certificate, certificate_pem, 0o644, (0, 0))
    # SAFETY: the directory is root's, so nobody else can have put a link there. The user may have got another number.
    os.chown(key, uid, gid, follow_symlinks=False)


def _make(instance: str) -> tuple[bytes, bytes]:
    # Here, as it takes a while to import, and is of use once.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    # A name of its own: stores name files after it, and a disk may carry the certificate of another installation.
    common_name = f"SPACE {instance} {secrets.token_hex(4)}"
    name = x509.Name(
        [x509.NameAttribute(NameOID.ORGANIZATION_NAME, "SPACE"), x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
    )
    now = dt.datetime.now(dt.UTC)
    signing = x509.KeyUsage(
        key_cert_sign=True,
        crl_sign=True,
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + VALID)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(signing, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    key_pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return key_pem, certificate.public_bytes(serialization.Encoding.PEM)


def _put(path: Path, data: bytes, mode: int, owner: tuple[int, int]) -> None:
    """Let a file be there whole or not at all, and never readable by more than it is meant for."""
    draft = path.with_name(f".{path.name}.new")
    draft.unlink(missing_ok=True)
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(file, "wb") as out:
        # SAFETY: a file that was just made here, in root's own directory.
        os.fchown(file, *owner)
        os.fchmod(file, mode)
        out.write(data)
        out.flush()
        os.fsync(file)
    draft.rename(path)
