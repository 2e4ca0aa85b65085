"""The installation's certificate authority: made once, whole, its key for one user alone."""

import datetime as dt
import os
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from space import authority

OWNER = (os.geteuid(), os.getegid())


def made(directory: Path) -> tuple[bytes, bytes]:
    authority.ensure(directory, "space", *OWNER)
    return (directory / authority.KEY).read_bytes(), (directory / authority.CERTIFICATE).read_bytes()


def modes(directory: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}


def test_only_the_certificate_can_be_read_by_others_and_nothing_else_is_left(tmp_path: Path) -> None:
    made(tmp_path)
    assert modes(tmp_path) == {"ca.key": 0o600, "ca.crt": 0o644}


def test_it_is_made_once(tmp_path: Path) -> None:
    assert made(tmp_path) == made(tmp_path)


@pytest.mark.parametrize("lost", [authority.KEY, authority.CERTIFICATE])
def test_half_of_it_is_replaced_as_a_whole(tmp_path: Path, lost: str) -> None:
    before = made(tmp_path)
    (tmp_path / lost).unlink()
    key, certificate = made(tmp_path)
    assert key != before[0]
    assert certificate != before[1]


def test_what_was_cut_off_while_being_written_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / ".ca.key.new").write_bytes(b"half")
    made(tmp_path)
    assert set(modes(tmp_path)) == {"ca.key", "ca.crt"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_the_key_is_the_users_and_the_certificate_roots(tmp_path: Path) -> None:
    authority.ensure(tmp_path, "space", 12345, 12346)
    key, certificate = ((tmp_path / name).stat() for name in (authority.KEY, authority.CERTIFICATE))
    assert (key.st_uid, key.st_gid, certificate.st_uid) == (12345, 12346, 0)
    authority.ensure(tmp_path, "space", 12347, 12346)
    assert (tmp_path / authority.KEY).stat().st_uid == 12347


def test_it_may_sign_servers_and_no_other_authority_and_holds_for_clocks_that_are_behind(tmp_path: Path) -> None:
    key_pem, certificate_pem = made(tmp_path)
    key = serialization.load_pem_private_key(key_pem, None)
    certificate = x509.load_pem_x509_certificate(certificate_pem)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert certificate.public_key() == key.public_key()
    certificate.verify_directly_issued_by(certificate)
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert (constraints.critical, constraints.value.ca, constraints.value.path_length) == (True, True, 0)
    usage = certificate.extensions.get_extension_for_class(x509.KeyUsage).value
    assert (usage.key_cert_sign, usage.digital_signature) == (True, False)
    now = dt.datetime.now(dt.UTC)
    assert certificate.not_valid_before_utc < now - dt.timedelta(days=1)
    assert certificate.not_valid_after_utc > now + dt.timedelta(days=3600)


def test_two_installations_have_authorities_of_different_names(tmp_path: Path) -> None:
    subjects = set()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        subjects.add(x509.load_pem_x509_certificate(made(tmp_path / name)[1]).subject)
    assert len(subjects) == 2
