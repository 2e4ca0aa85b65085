# Generated from ../_async/ports.py by scripts/sync-sdk; change that one.
"""Ports of a sandbox: addresses for its servers, and raw connections to them."""

import builtins
from collections.abc import Generator
from contextlib import contextmanager

from space.sdk._sync.connection import Connection
from space.sdk._sync.dataplane import DataPlane
from space.sdk._sync.transport import Transport
from space.sdk.requests import Request, present
from space.sdk.types import Port


class Ports:
    """``sandbox.ports``."""

    def __init__(self, transport: Transport, plane: DataPlane, sandbox_id: str) -> None:
        self._transport = transport
        self._plane = plane
        self._sandbox_id = sandbox_id
        self._path = f"/v1/sandboxes/{sandbox_id}/ports"

    def expose(
        self,
        port: int,
        *,
        public: bool | None = None,
        host: str | None = None,
        expires_in_s: int | None = None,
    ) -> Port:
        """Expose a port and return its addresses, with a token for it that is good for ``expires_in_s`` (a day).

        With ``public`` everybody may ask it, without a token. ``host`` is what its server sees as ``Host``. Asked
        again, what is named changes, and earlier tokens stay good.
        """
        body = present(public=public, host=host, expires_in_s=expires_in_s)
        request = Request(method="POST", path=f"{self._path}/{port}", body=body, harmless=True)
        return Port.parse(self._transport.call(request))

    def url(self, port: int, *, public: bool | None = None) -> str:
        """Expose a port and return an address that a browser gets in by: it has the token, unless the port is public.

        Programs had better use `expose`, and send its ``token`` as ``X-Space-Token`` to its ``url`` or ``api_url``.
        """
        opened = self.expose(port, public=public)
        return opened.browser_url or opened.url

    def list(self) -> builtins.list[Port]:
        """Return the exposed ports, by number."""
        answer = self._transport.call(Request(method="GET", path=self._path))
        return [Port.parse(item) for item in answer["items"]]

    def hide(self, port: int) -> None:
        """Expose a port no longer. When this returns, all tokens for it are void."""
        self._transport.call(Request(method="DELETE", path=f"{self._path}/{port}"))

    @contextmanager
    def connect(self, port: int) -> Generator[Connection]:
        """Connect to a port, exposed or not: bytes both ways, whatever its server speaks."""
        path = f"/v1/sandboxes/{self._sandbox_id}/tunnels/{port}"
        connection = Connection(self._plane.tunnel(path))
        try:
            connection.opened()
            yield connection
        finally:
            connection.close()
