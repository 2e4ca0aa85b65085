"""Policies: what may leave sandboxes."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

from space.sdk._async.operations import pages
from space.sdk._async.transport import AsyncTransport
from space.sdk.egress import Policy, PolicyCheck, PolicyInForce, PolicyReference
from space.sdk.requests import Request, present


class AsyncPolicies:
    """``client.policies``: those with names, and the project's default."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def list(self) -> AsyncIterator[Policy]:
        """Yield the project's policies, newest first."""
        async for item in pages(self._transport, "/v1/policies", {}):
            yield Policy.parse(item)

    async def get(self, name: str) -> Policy:
        """Return a policy."""
        return Policy.parse(await self._transport.call(Request(method="GET", path=f"/v1/policies/{name}")))

    async def set(self, name: str, document: Mapping[str, Any]) -> Policy:
        """Give a policy this document, or make it. When this returns, it holds for every sandbox that follows it."""
        request = Request(method="PUT", path=f"/v1/policies/{name}", body={"document": dict(document)})
        return Policy.parse(await self._transport.call(request))

    async def delete(self, name: str) -> None:
        """Delete a policy that nobody follows."""
        await self._transport.call(Request(method="DELETE", path=f"/v1/policies/{name}"))

    async def default(self) -> PolicyInForce:
        """Return the policy of the project's sandboxes that have none of their own, nor their template."""
        return PolicyInForce.parse(await self._transport.call(Request(method="GET", path="/v1/project/policy")))

    async def set_default(self, policy: PolicyReference | None) -> PolicyInForce:
        """Choose that policy; None: the installation's. When this returns, it holds."""
        request = Request(method="PUT", path="/v1/project/policy", body={"policy": policy})
        return PolicyInForce.parse(await self._transport.call(request))


class AsyncSandboxPolicy:
    """``sandbox.policy``: what may leave this sandbox."""

    def __init__(self, transport: AsyncTransport, sandbox_id: str) -> None:
        self._transport = transport
        self._path = f"/v1/sandboxes/{sandbox_id}/policy"

    async def get(self) -> PolicyInForce:
        """Return the policy that the sandbox has, and who says so."""
        return PolicyInForce.parse(await self._transport.call(Request(method="GET", path=self._path)))

    async def set(self, policy: PolicyReference | None) -> PolicyInForce:
        """Give the sandbox a policy of its own; None: its template's or project's again. When this returns, it holds.

        It does for requests on connections that are open already, too.
        """
        request = Request(method="PUT", path=self._path, body={"policy": policy})
        return PolicyInForce.parse(await self._transport.call(request))

    async def check(
        self, host: str, method: str = "GET", path: str = "/", *, port: int | None = None, scheme: str = "https"
    ) -> PolicyCheck:
        """Return what the policy says to such a request, and why; none is made."""
        body = {"host": host, "method": method, "path": path, "scheme": scheme, **present(port=port)}
        request = Request(method="POST", path=f"{self._path}/check", body=body, harmless=True)
        return PolicyCheck.parse(await self._transport.call(request))

    async def suggest(self) -> dict[str, Any]:
        """Return rules that would have allowed what was denied lately, as a policy's document."""
        return await self._transport.call(Request(method="GET", path=f"{self._path}/suggest"))
