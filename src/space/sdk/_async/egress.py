"""Records of what left sandboxes, or was refused."""

import builtins
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

from space.errors import Unavailable
from space.sdk._async.transport import AsyncTransport, lost
from space.sdk.backends.asyncio import sleep
from space.sdk.egress import Decision, EgressRecord
from space.sdk.errors import from_wire
from space.sdk.requests import Patience, Request, present


class AsyncEgress:
    """``sandbox.egress``, or ``client.egress`` for all the project's sandboxes, also deleted ones, and its builds."""

    def __init__(self, transport: AsyncTransport, sandbox_id: str | None = None) -> None:
        self._transport = transport
        self._path = "/v1/egress" if sandbox_id is None else f"/v1/sandboxes/{sandbox_id}/egress"

    async def list(
        self,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int = 100,
        decision: Decision | None = None,
        host: str | None = None,
        secret: str | None = None,
    ) -> builtins.list[EgressRecord]:
        """Return the latest records, or with ``after`` (a record's ``n``) the first ones behind that; newest last."""
        params = present(before=before, decision=decision, host=host, secret=secret) | {"after": after, "limit": limit}
        return [EgressRecord.parse(line) async for line in self._lines(params)]

    async def follow(
        self,
        *,
        after: int = 0,
        decision: Decision | None = None,
        host: str | None = None,
        secret: str | None = None,
    ) -> AsyncIterator[EgressRecord]:
        """Yield records as they come, without end; a lost connection is made again. With ``after`` those before, too.

        Whoever reads too slowly misses some.
        """
        params = present(decision=decision, host=host, secret=secret) | {"follow": "true"}
        patience = Patience()
        while True:
            reason = "it broke off"
            try:
                async for line in self._lines({**params, "after": after}):
                    patience.worked()
                    if "n" in line:
                        after = line["n"]
                        yield EgressRecord.parse(line)
            except Unavailable as error:
                reason = error.message
            patience.failed(reason, "the records")
            await sleep(patience.delay_s)

    async def _lines(self, params: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        texts = {name: str(value) for name, value in params.items()}
        request = Request(method="GET", path=self._path, params=texts, read_s=None)
        response = await self._transport.start(request)
        try:
            async for text in response.aiter_lines():
                line: dict[str, Any] = json.loads(text) if text else {}
                if line.get("type") == "error":
                    raise from_wire(line["error"])
                if line.get("type") != "end" and line:
                    yield line
        except httpx.TransportError as error:
            raise lost(request, error) from error
        finally:
            await response.aclose()
