# Generated from ../_async/keys.py by scripts/sync-sdk; change that one.
"""API keys of the project."""

from collections.abc import Iterator

from space.sdk._sync.operations import pages
from space.sdk._sync.transport import Transport
from space.sdk.admin import ApiKey
from space.sdk.requests import Request, creating, present


class Keys:
    """``client.keys``."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(self, name: str | None = None) -> ApiKey:
        """Make a key. Its secret is in ``key`` of this answer and nowhere else, ever."""
        request = Request(method="POST", path="/v1/keys", body=present(name=name), headers=creating())
        return ApiKey.parse(self._transport.call(request))

    def list(self) -> Iterator[ApiKey]:
        """Yield the project's keys, without their secrets."""
        for item in pages(self._transport, "/v1/keys", {}):
            yield ApiKey.parse(item)

    def revoke(self, key_id: str) -> None:
        """Make a key worthless at once."""
        self._transport.call(Request(method="DELETE", path=f"/v1/keys/{key_id}"))
