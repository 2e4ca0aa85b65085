"""Secrets that SPACE keeps, and the grants by which they are placed into sandboxes' requests."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Unpack

from space.sdk._async.operations import pages
from space.sdk._async.transport import AsyncTransport
from space.sdk.egress import Grant, GrantTerms, Secret, SecretKind
from space.sdk.options import given
from space.sdk.requests import Request, creating


class AsyncSecrets:
    """``client.secrets``. Values go in and never come out."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def list(self) -> AsyncIterator[Secret]:
        """Yield the project's secrets, newest first, without their values."""
        async for item in pages(self._transport, "/v1/secrets", {}):
            yield Secret.parse(item)

    async def get(self, name: str) -> Secret:
        """Return a secret, without its value."""
        return Secret.parse(await self._transport.call(Request(method="GET", path=f"/v1/secrets/{name}")))

    async def set(self, name: str, value: str | Mapping[str, str], *, kind: SecretKind = "text") -> Secret:
        """Give a secret its next value, or make it. When this returns, every request to come gets that value.

        ``text`` is a text, ``basic`` has ``username`` and ``password``, ``aws`` has ``access_key_id``,
        ``secret_access_key`` and perhaps ``session_token``; ``oauth`` has what fetches a token.
        """
        told = value if isinstance(value, str) else dict(value)
        request = Request(method="PUT", path=f"/v1/secrets/{name}", body={"kind": kind, "value": told})
        return Secret.parse(await self._transport.call(request))

    async def delete(self, name: str) -> None:
        """Delete a secret and revoke its grants. When this returns, no request to come gets it."""
        await self._transport.call(Request(method="DELETE", path=f"/v1/secrets/{name}"))

    async def rotate_key(self) -> dict[str, Any]:
        """Seal everybody's secrets with a new key; return ``{key_id, sealed, failed}``. Needs an admin's key."""
        return await self._transport.call(Request(method="POST", path="/v1/secret-keys/rotate"))


class AsyncGrants:
    """``sandbox.grants``: the secrets that are placed into this sandbox's requests."""

    def __init__(self, transport: AsyncTransport, sandbox_id: str) -> None:
        self._transport = transport
        self._path = f"/v1/sandboxes/{sandbox_id}/grants"

    async def list(self) -> AsyncIterator[Grant]:
        """Yield the grants that are in force, newest first."""
        async for item in pages(self._transport, self._path, {}):
            yield Grant.parse(item)

    async def add(self, secret: str, hosts: Sequence[str], **terms: Unpack[GrantTerms]) -> Grant:
        """Have a secret placed into requests to these hosts. When this returns, the next requests get it.

        Terms: see `GrantTerms`. Its ``placeholder`` is what programs in the sandbox are to be given.
        """
        body = {"secret": secret, "hosts": [*hosts], **given(terms, GrantTerms)}
        request = Request(method="POST", path=self._path, body=body, headers=creating())
        return Grant.parse(await self._transport.call(request))

    async def revoke(self, grant_id: str) -> None:
        """Revoke a grant. When this returns, no request gets the secret, on open connections neither."""
        await self._transport.call(Request(method="DELETE", path=f"{self._path}/{grant_id}"))
