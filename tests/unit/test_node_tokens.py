"""Tokens of the data plane: only what the api signed, only for what it names."""

import time

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from space.errors import InvalidRequest, Unauthenticated
from space.model.ids import new_id
from space.node.tokens import TokenVerifier

SANDBOX = new_id("sbx")
COMMAND = new_id("cmd")


def public_pem(key) -> bytes:
    return key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def sign(key, **claims) -> str:
    claims = {"sub": SANDBOX, "scope": "sandbox", "exp": time.time() + 60, **claims}
    return jwt.encode({k: v for k, v in claims.items() if v is not None}, key, algorithm="EdDSA")


@pytest.fixture
def key():
    return Ed25519PrivateKey.generate()


@pytest.fixture
def verifier(tmp_path, key):
    verifier = TokenVerifier(tmp_path / "token.pub")
    verifier.set_key(public_pem(key))
    return verifier


def test_a_sandbox_token_names_its_sandbox(verifier, key):
    grant = verifier.verify(sign(key))
    assert (grant.sandbox_id, grant.command_id, grant.expired) == (SANDBOX, None, False)


def test_a_command_token_names_its_command(verifier, key):
    grant = verifier.verify(sign(key, scope="command", cmd=COMMAND))
    assert (grant.sandbox_id, grant.command_id) == (SANDBOX, COMMAND)


def test_expiry_is_reported(verifier, key):
    assert verifier.verify(sign(key, exp=time.time() - 60)).expired


@pytest.mark.parametrize(
    "claims",
    [
        {"sub": "other"},
        {"sub": None},
        {"exp": None},
        {"scope": None},
        {"scope": "node"},
        {"scope": "command"},
        {"scope": "command", "cmd": "cmd1"},
        {"scope": "sandbox", "cmd": COMMAND},
        {"exp": "tomorrow"},
    ],
)
def test_claims_that_are_not_exactly_right_are_refused(verifier, key, claims):
    with pytest.raises(Unauthenticated):
        verifier.verify(sign(key, **claims))


def test_tokens_of_another_key_unsigned_and_symmetric_ones_are_refused(verifier, key):
    claims = {"sub": SANDBOX, "scope": "sandbox", "exp": time.time() + 60}
    other = sign(Ed25519PrivateKey.generate())
    unsigned = jwt.encode(claims, None, algorithm="none")
    symmetric = jwt.encode(claims, "k" * 32, algorithm="HS256")
    for token in (other, unsigned, symmetric, "", "a.b.c", "x" * 5000, sign(key)[:-4] + "AAAA"):
        with pytest.raises(Unauthenticated):
            verifier.verify(token)


def test_without_a_key_nothing_is_valid(tmp_path, key):
    with pytest.raises(Unauthenticated):
        TokenVerifier(tmp_path / "token.pub").verify(sign(key))


def test_the_key_survives_a_restart(tmp_path, verifier, key):
    assert TokenVerifier(tmp_path / "token.pub").verify(sign(key)).sandbox_id == SANDBOX


def test_only_ed25519_public_keys_are_taken(verifier, key):
    wrong = public_pem(rsa.generate_private_key(65537, 2048))
    for pem in (b"", b"nonsense", wrong, b"x" * 10_000):
        with pytest.raises(InvalidRequest):
            verifier.set_key(pem)
    assert verifier.verify(sign(key)).sandbox_id == SANDBOX


@pytest.mark.parametrize("spoiled", [b"", b"\0" * 100, b"-----BEGIN PUBLIC KEY-----\n"])
def test_a_kept_key_that_is_damaged_does_not_keep_the_node_from_starting(tmp_path, key, spoiled):
    (tmp_path / "token.pub").write_bytes(spoiled)
    verifier = TokenVerifier(tmp_path / "token.pub")
    assert not verifier.has_key
    verifier.set_key(public_pem(key))
    assert verifier.verify(sign(key)).sandbox_id == SANDBOX
