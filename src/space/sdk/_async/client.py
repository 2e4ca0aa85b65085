"""The connection to one API: what is not about one sandbox, and what many sandboxes share."""

import json
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any, Self

import httpx

from space.sdk._async.keys import AsyncKeys
from space.sdk._async.operations import AsyncOperations, pages
from space.sdk._async.transport import AsyncTransport, lost
from space.sdk.config import find_credentials
from space.sdk.requests import Request, present
from space.sdk.types import CommandInfo, Event, SandboxInfo, State


class AsyncClient:
    """Connections to one API with one key.

    Without arguments it uses ``SPACE_URL`` and ``SPACE_API_KEY``, else ``~/.config/space/credentials``. Close it, or
    use it as a context manager. The form without ``await`` may be shared between threads.
    """

    def __init__(self, url: str | None = None, api_key: str | None = None) -> None:
        credentials = find_credentials(url, api_key)
        self.url = credentials.url
        self.api_key = credentials.api_key
        self.transport = AsyncTransport(credentials)
        self.operations = AsyncOperations(self.transport)
        self.keys = AsyncKeys(self.transport)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self.transport.close()

    async def sandbox_info(self, sandbox_id: str) -> SandboxInfo:
        """Return a sandbox as it is now."""
        answer = await self.transport.call(Request(method="GET", path=f"/v1/sandboxes/{sandbox_id}"))
        return SandboxInfo.parse(answer.get("sandbox", answer))

    async def sandboxes(
        self, *, state: State | None = None, name: str | None = None, metadata: Mapping[str, str] | None = None
    ) -> AsyncIterator[SandboxInfo]:
        """Yield the project's sandboxes that match all that is given."""
        params: dict[str, str] = present(state=state)
        params |= {f"metadata.{key}": value for key, value in (metadata or {}).items()}
        async for item in pages(self.transport, "/v1/sandboxes", params):
            info = SandboxInfo.parse(item)
            if name is None or info.name == name:
                yield info

    async def command_info(self, command_id: str) -> CommandInfo:
        """Return a command as it is now; its ``sandbox_id`` says where it runs."""
        answer = await self.transport.call(Request(method="GET", path=f"/v1/commands/{command_id}"))
        return CommandInfo.parse(answer)

    async def templates(self) -> list[dict[str, Any]]:
        """Return the templates that sandboxes can be made from."""
        answer = await self.transport.call(Request(method="GET", path="/v1/templates"))
        return answer["items"]

    async def events(self) -> AsyncIterator[Event]:
        """Yield state changes of the project's sandboxes as they happen, without end."""
        request = Request(method="GET", path="/v1/events", headers={"accept": "text/event-stream"}, read_s=None)
        response = await self.transport.start(request)
        fields: dict[str, list[str]] = {}
        try:
            async for line in response.aiter_lines():
                if line:
                    name, _, value = line.partition(":")
                    fields.setdefault(name, []).append(value.removeprefix(" "))
                elif fields:
                    if "data" in fields:
                        yield _event(fields)
                    fields = {}
        except httpx.TransportError as error:
            raise lost(request, error) from error
        finally:
            await response.aclose()


def _event(fields: dict[str, list[str]]) -> Event:
    return Event(
        type=fields.get("event", ["message"])[-1],
        id=fields.get("id", [None])[-1],
        data=json.loads("\n".join(fields["data"])),
    )
