"""The connection to one API: what is not about one sandbox, and what many sandboxes share."""

import json
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Self

import httpx

from space.sdk._async.builds import AsyncBuilds
from space.sdk._async.egress import AsyncEgress
from space.sdk._async.keys import AsyncKeys
from space.sdk._async.operations import AsyncOperations, pages
from space.sdk._async.policies import AsyncPolicies
from space.sdk._async.projects import AsyncProjects
from space.sdk._async.secrets import AsyncSecrets
from space.sdk._async.snapshots import AsyncSnapshots
from space.sdk._async.templates import AsyncTemplates
from space.sdk._async.transport import AsyncTransport, lost
from space.sdk._async.uploads import AsyncUploads
from space.sdk._async.volumes import AsyncVolumes
from space.sdk._async.webhooks import AsyncWebhooks
from space.sdk.admin import Pool, Stray
from space.sdk.config import e2b_environment, find_credentials
from space.sdk.requests import Request, present
from space.sdk.types import CommandInfo, Event, SandboxInfo, State

GC_READ_S = 300.0


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
        self.snapshots = AsyncSnapshots(self.transport, self.operations)
        self.uploads = AsyncUploads(self.transport)
        self.builds = AsyncBuilds(self.transport, self.uploads)
        self.templates = AsyncTemplates(self.transport, self.builds)
        self.projects = AsyncProjects(self.transport)
        self.keys = AsyncKeys(self.transport)
        self.webhooks = AsyncWebhooks(self.transport)
        self.policies = AsyncPolicies(self.transport)
        self.secrets = AsyncSecrets(self.transport)
        self.volumes = AsyncVolumes(self.transport)
        self.egress = AsyncEgress(self.transport)
        self._holders: set[int] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self.transport.close()

    # A client that belongs to handles, a sandbox's and those of its forks, is closed with the last of them.

    def hold(self, holder: object) -> None:
        self._holders.add(id(holder))

    async def let_go(self, holder: object) -> None:
        self._holders.discard(id(holder))
        if not self._holders:
            await self.close()

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

    async def e2b_environment(self) -> dict[str, str]:
        """Return the environment by which E2B's clients use this installation with this client's key.

        Raises ``NotFound`` (``no-e2b``) when they are not served here.
        """
        told = await self.transport.call(Request(method="GET", path="/v1/e2b"))
        return e2b_environment(told["url"], told["domain"], self.api_key)

    async def pool(self) -> Pool:
        """Return the machines that are kept ready, and how many were of use. Needs an admin's key."""
        return Pool.parse(await self.transport.call(Request(method="GET", path="/v1/pool")))

    async def gc(
        self,
        *,
        dry_run: bool = False,
        untagged_s: float | None = None,
        cache_age_s: float | None = None,
        cache_bytes_max: int | None = None,
    ) -> list[Stray]:
        """Remove what on the host is nobody's, and return it; with ``dry_run`` only look. Needs an admin's key.

        Besides, where it is given: releases that no tag has pointed to for ``untagged_s`` seconds and nothing is made
        from, kept steps of builds not used for ``cache_age_s``, and of these what is over ``cache_bytes_max``.
        """
        older = present(untagged_s=untagged_s, cache_age_s=cache_age_s, cache_bytes_max=cache_bytes_max)
        request = Request(method="POST", path="/v1/gc", body={"dry_run": dry_run, **older}, read_s=GC_READ_S)
        return [Stray.parse(stray) for stray in (await self.transport.call(request))["strays"]]

    async def events(self) -> AsyncIterator[Event]:
        """Yield state changes of the project's sandboxes, and ends of its builds, as they happen, without end."""
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
