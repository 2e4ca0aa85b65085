# Generated from ../_async/egress.py by scripts/sync-sdk; change that one.
"""Records of what left sandboxes, or was refused."""

import builtins
import json
from collections.abc import Iterator
from typing import Any

import httpx

from space.errors import Unavailable
from space.sdk._sync.transport import Transport, lost
from space.sdk.backends.threads import sleep
from space.sdk.egress import Decision, EgressRecord
from space.sdk.errors import from_wire
from space.sdk.requests import Patience, Request, present


class Egress:
    """``sandbox.egress``, or ``client.egress`` for all the project's sandboxes, also deleted ones, and its builds."""

    def __init__(self, transport: Transport, sandbox_id: str | None = None) -> None:
        self._transport = transport
        self._path = "/v1/egress" if sandbox_id is None else f"/v1/sandboxes/{sandbox_id}/egress"

    def list(
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
        return [EgressRecord.parse(line) for line in self._lines(params)]

    def follow(
        self,
        *,
        after: int = 0,
        decision: Decision | None = None,
        host: str | None = None,
        secret: str | None = None,
    ) -> Iterator[EgressRecord]:
        """Yield records as they come, without end; a lost connection is made again. With ``after`` those before, too.

        Whoever reads too slowly misses some.
        """
        params = present(decision=decision, host=host, secret=secret) | {"follow": "true"}
        patience = Patience()
        while True:
            reason = "it broke off"
            try:
                for line in self._lines({**params, "after": after}):
                    patience.worked()
                    if "n" in line:
                        after = line["n"]
                        yield EgressRecord.parse(line)
            except Unavailable as error:
                reason = error.message
            patience.failed(reason, "the records")
            sleep(patience.delay_s)

    def _lines(self, params: dict[str, Any]) -> Iterator[dict[str, Any]]:
        texts = {name: str(value) for name, value in params.items()}
        request = Request(method="GET", path=self._path, params=texts, read_s=None)
        response = self._transport.start(request)
        try:
            for text in response.iter_lines():
                line: dict[str, Any] = json.loads(text) if text else {}
                if line.get("type") == "error":
                    raise from_wire(line["error"])
                if line.get("type") != "end" and line:
                    yield line
        except httpx.TransportError as error:
            raise lost(request, error) from error
        finally:
            response.close()
