"""What a sandbox trusts and whom it asks for names, in real machines; and that none of it goes into templates."""

import json
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509

from space.guest.identity import NAME_SERVER
from space.guest.trust import NAME
from tests.client import WAIT, Api
from tests.installation import Installation, gvisor_alone, patient

pytestmark = pytest.mark.machine

# Whether each way in which programs find whom to trust leads to a certificate of that common name.
LOOK = """
import json, os, ssl, subprocess, sys
def names(path):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cafile=path)
    return [dict(pair for part in one["subject"] for pair in part).get("commonName") for one in context.get_ca_certs()]
default = ssl.create_default_context()
found = {name: sys.argv[1] in names(path) for name, path in os.environ.items() if path.endswith((".crt", ".pem"))}
found["python"] = sys.argv[1] in [
    dict(pair for part in one["subject"] for pair in part).get("commonName") for one in default.get_ca_certs()]
for name in list(os.environ):
    if name in found:
        del os.environ[name]
shown = subprocess.run(["openssl", "x509", "-noout", "-subject_hash", "-in", "/run/space/ca.pem"], capture_output=True, text=True)
found["hashed"] = os.path.exists(f"/etc/ssl/certs/{shown.stdout.strip()}.0") if shown.returncode == 0 else None
found["system"] = sys.argv[1] in names("/etc/ssl/certs/ca-certificates.crt")
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def api(installation: Installation) -> Iterator[Api]:
    with Api(installation.url, installation.key) as one:
        yield one


def common_name(installation: Installation) -> str:
    certificate = x509.load_pem_x509_certificate((installation.settings.gateway_dir / "ca.crt").read_bytes())
    return str(certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)[0].value)


def look(api: Api, sandbox: str, name: str, **fields: object) -> dict[str, bool | None]:
    return json.loads(api.output(sandbox, ["python3", "-c", LOOK, name], **fields))


def missed(found: dict[str, bool | None]) -> list[str]:
    assert len(found) > 10
    return [name for name, there in found.items() if there is False]


def test_every_way_to_look_for_whom_to_trust_leads_to_the_installations_authority(
    api: Api, installation: Installation, shared: str
) -> None:
    name = common_name(installation)
    assert missed(look(api, shared, name)) == []
    assert missed(look(api, shared, name, user="root")) == []
    assert set(missed(look(api, shared, "Another"))) >= {"python", "system", "SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS"}


def test_what_the_caller_or_the_sandbox_says_wins(api: Api, shared: str) -> None:
    assert api.output(shared, "echo $SSL_CERT_FILE", env={"SSL_CERT_FILE": "/mine"}) == "/mine\n"
    sandbox = api.create(env={"REQUESTS_CA_BUNDLE": "/its", "NODE_EXTRA_CA_CERTS": ""})
    try:
        assert api.output(sandbox, "echo $REQUESTS_CA_BUNDLE-$NODE_EXTRA_CA_CERTS-") == "/its--\n"
        assert api.output(sandbox, "echo $SSL_CERT_FILE") == "/etc/ssl/certs/ca-certificates.crt\n"
    finally:
        api.delete(sandbox)


@pytest.mark.parametrize("verbs", [("suspend", "wake"), ("stop", "start"), ("pause", "resume")])
def test_it_is_trusted_after_whatever_happened_to_the_machine(
    api: Api, installation: Installation, sandbox: str, verbs: tuple[str, str]
) -> None:
    for verb in verbs:
        api.verb(sandbox, verb)
    assert missed(look(api, sandbox, common_name(installation))) == []
    assert f"nameserver {NAME_SERVER}\n" in api.output(sandbox, "cat /etc/resolv.conf")


def test_forks_trust_it_too(api: Api, installation: Installation, sandbox: str) -> None:
    made = api.call("POST", f"/v1/sandboxes/{sandbox}/fork", json={"count": 2}, headers=WAIT).json()["sandboxes"]
    for fork in made:
        assert missed(look(api, fork["id"], common_name(installation))) == []
        api.delete(fork["id"])


def test_a_name_server_is_named_and_one_of_the_users_own_stays(api: Api, sandbox: str) -> None:
    assert api.output(sandbox, "cat /etc/resolv.conf") == f"nameserver {NAME_SERVER}\n"
    api.write(sandbox, "/etc/resolv.conf", b"nameserver 8.8.8.8\n", user="root")
    for verb in ("stop", "start", "suspend", "wake"):
        api.verb(sandbox, verb)
    assert api.output(sandbox, "cat /etc/resolv.conf") == "nameserver 8.8.8.8\n"


def test_a_new_authority_is_trusted_once_a_sandbox_wakes_and_the_old_one_no_longer(
    api: Api, installation: Installation, sandbox: str
) -> None:
    old, asleep = common_name(installation), api.create()
    api.verb(sandbox, "stop")
    api.verb(asleep, "suspend")
    kept = {path: path.read_bytes() for path in installation.settings.gateway_dir.glob("ca.*")}
    try:
        installation.stop()
        for path in kept:
            path.unlink()
        installation.run_supervisor()
        new = common_name(installation)
        assert new != old
        for one, verb in ((sandbox, "start"), (asleep, "wake")):
            api.verb(one, verb)
            assert missed(look(api, one, new)) == []
            assert {"system", "SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS"} <= set(missed(look(api, one, old)))
    finally:
        api.delete(asleep)


@gvisor_alone("no template can be made of a virtual machine's disk")
def test_nothing_of_it_is_in_a_template_made_of_a_sandbox(api: Api, installation: Installation, sandbox: str) -> None:
    kept = api.call("POST", f"/v1/sandboxes/{sandbox}/snapshots", json={"kind": "disk"}, headers=WAIT).json()[
        "snapshot"
    ]
    body = {"name": "kept", "source": {"kind": "snapshot", "snapshot": kept["id"]}}
    built = api.call("POST", "/v1/templates/builds", json=body, headers={"Prefer": "wait=110"}).json()
    assert built["state"] == "succeeded", built
    root = next((installation.settings.broker_dir / "disks/templates").glob(f"*{built['digest'].split(':')[1]}*"))
    assert [path for path in root.rglob("*") if NAME in path.name] == []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cafile=str(root / "etc/ssl/certs/ca-certificates.crt"))
    assert common_name(installation) not in str(context.get_ca_certs())
    assert (root / "etc/resolv.conf").read_bytes() == b""
    api.call("DELETE", f"/v1/snapshots/{kept['id']}")
    api.call("DELETE", "/v1/templates/kept")


def test_a_guest_that_set_traps_in_its_stores_comes_up_all_the_same(api: Api, sandbox: str) -> None:
    """Whoever is root there may make them what he likes; the agent neither hangs on it nor writes through it."""
    traps = (
        "cd /etc/ssl/certs && rm ca-certificates.crt space-egress.pem && ln -s /dev/zero ca-certificates.crt && "
        "ln -s /dev/zero space-egress.pem && rm -rf /usr/local/share/ca-certificates && "
        "echo mine > /srv/mine && ln -s /srv /usr/local/share/ca-certificates && ln -s /srv/mine /srv/space-egress.crt"
    )
    api.output(sandbox, traps, user="root")
    api.verb(sandbox, "stop")
    began = time.monotonic()
    api.verb(sandbox, "start")
    assert time.monotonic() - began < patient(10)
    assert api.output(sandbox, "cat /srv/mine; test -L /etc/ssl/certs/ca-certificates.crt && echo $SSL_CERT_FILE") == (
        "mine\n/run/space/ca-bundle.pem\n"
    )


def test_the_authoritys_key_is_the_gateways_alone(installation: Installation) -> None:
    directory = installation.settings.gateway_dir
    key, certificate = (directory / "ca.key").stat(), (directory / "ca.crt").stat()
    assert (key.st_mode & 0o777, certificate.st_mode & 0o777, directory.stat().st_mode & 0o777) == (0o600, 0o644, 0o711)
    assert key.st_uid not in {0, certificate.st_uid, Path(installation.settings.node_dir).stat().st_uid}
