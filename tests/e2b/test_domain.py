"""Clients that know only a domain: TLS with an authority of one's own, and each port of each sandbox by its name."""

import datetime as dt
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from tests import installation as installations
from tests.e2b.conftest import e2b_key, node_argv
from tests.e2b.test_clients import NEWEST, NPM, OLDER, SCRIPTS, check

NAME = "sbx.test"


@dataclass(frozen=True)
class Domain:
    """An installation that is found by its domain alone, and what a client of it needs."""

    environment: dict[str, str]

    def run(self, argv: list[str | Path], cwd: Path) -> dict:
        """Return what a script saw, which it prints last; the file of hosts that it writes is its own."""
        hosts = cwd / "hosts"
        hosts.write_text("127.0.0.1 localhost\n")
        mount = 'mount --bind "$0" /etc/hosts && exec "$@"'
        done = subprocess.run(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", mount, hosts, *argv],
            env=self.environment,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout.splitlines()[-1])


def certify(directory: Path, domain: str) -> None:
    """Make an authority, ``ca.pem``, and the certificate and key that it gives for all names of a domain."""
    now = dt.datetime.now(dt.UTC)
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])

    def build(subject: x509.Name, public: object) -> x509.CertificateBuilder:
        made = x509.CertificateBuilder().subject_name(subject).issuer_name(ca_name).public_key(public)
        made = made.serial_number(x509.random_serial_number()).not_valid_before(now - dt.timedelta(hours=1))
        return made.not_valid_after(now + dt.timedelta(days=1))

    ca = build(ca_name, ca_key.public_key()).add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    names = x509.SubjectAlternativeName([x509.DNSName(f"api.{domain}"), x509.DNSName(f"*.{domain}")])
    leaf = build(x509.Name([]), key.public_key()).add_extension(names, critical=True)
    (directory / "ca.pem").write_bytes(ca.sign(ca_key, hashes.SHA256()).public_bytes(Encoding.PEM))
    (directory / "certificate.pem").write_bytes(leaf.sign(ca_key, hashes.SHA256()).public_bytes(Encoding.PEM))
    (directory / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


@pytest.fixture(scope="module")
def domain() -> Iterator[Domain]:
    if reason := installations.unfit():
        pytest.skip(reason)
    directory = Path(tempfile.mkdtemp(prefix="space-domain-"))
    try:
        directory.chmod(0o755)  # The api's user reads the key, which is worth nothing.
        certify(directory, NAME)
        (port,) = installations.free_ports(1)
        files = {"e2b_tls_certificate": directory / "certificate.pem", "e2b_tls_key": directory / "key.pem"}
        with installations.running(e2b_port=port, e2b_domain=f"{NAME}:{port}", **files) as one:
            environment = {
                "E2B_DOMAIN": f"{NAME}:{port}",
                "E2B_API_KEY": e2b_key(one.key),
                "SSL_CERT_FILE": str(directory / "ca.pem"),
                "NODE_EXTRA_CA_CERTS": str(directory / "ca.pem"),
                "NO_PROXY": "*",
                "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
            }
            yield Domain(environment)
    finally:
        shutil.rmtree(directory)


EVERYTHING_BY_NAME = {"host": True, "url": True, "port": "a page", "volume": ["kept", True]}


@pytest.mark.parametrize("which", ["newest", "older"])
@pytest.mark.parametrize("script", ["session", "session_async"])
def test_a_session_of_python_with_a_domain_alone_sees_what_it_does_with_urls_and_finds_everything_by_name(
    script: str, which: str, domain: Domain, clients: Path, tmp_path: Path
) -> None:
    python = sys.executable if which == "newest" else clients / "older/bin/python"
    seen = domain.run([python, SCRIPTS / "domain.py", script], tmp_path)
    check(seen.pop("session"), NEWEST if which == "newest" else OLDER)
    assert seen == EVERYTHING_BY_NAME


def test_a_session_of_javascript_with_a_domain_alone_sees_what_it_does_with_urls_and_finds_everything_by_name(
    domain: Domain, clients: Path, tmp_path: Path
) -> None:
    seen = domain.run(node_argv(SCRIPTS / "domain.mjs", clients, tmp_path), tmp_path)
    check(seen.pop("session"), NPM)
    assert seen == EVERYTHING_BY_NAME
