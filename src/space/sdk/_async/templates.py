"""Templates: build one, look at them, let tags point elsewhere, delete, prepare."""

from collections.abc import AsyncIterator, Callable
from typing import Unpack

from space.sdk._async.builds import AsyncBuilds
from space.sdk._async.operations import pages
from space.sdk._async.transport import AsyncTransport
from space.sdk.requests import Request, present
from space.sdk.templates import Audited, BuildOptions, LogLine, TagMove, Template

WARM_READ_S = 360.0


class AsyncTemplates:
    """``client.templates``."""

    def __init__(self, transport: AsyncTransport, builds: AsyncBuilds) -> None:
        self._transport = transport
        self._builds = builds

    async def build(
        self, name: str, *, on_log: Callable[[LogLine], None] | None = None, **options: Unpack[BuildOptions]
    ) -> Template:
        """Build a template from one source, wait for it, and return it. ``name`` may be ``name:tag``.

        ``on_log`` is told of each line of the log. Raises what the build failed with.
        """
        started = await self._builds.start(name, **options)
        if on_log is not None:
            async for line in self._builds.log(started):
                on_log(line)
        ended = await self._builds.wait(started)
        return await self.get(str(ended.digest))

    async def list(self, *, name: str | None = None, untagged: bool = False) -> AsyncIterator[Template]:
        """Yield the project's templates and those that the installation brings along, by name and tag.

        With ``untagged`` those of the project instead that no tag points to.
        """
        params = present(name=name, untagged="true" if untagged else None)
        async for item in pages(self._transport, "/v1/templates", params):
            yield Template.parse(item)

    async def get(self, template: str) -> Template:
        """Return a template by ``name``, ``name:tag`` or digest, with its lineage and packages."""
        return Template.parse(await self._transport.call(Request(method="GET", path=f"/v1/templates/{template}")))

    async def tag(self, template: Template | str, to: str) -> Template:
        """Let ``to`` (``name`` or ``name:tag``) point to one of the project's releases."""
        found = template if isinstance(template, Template) else await self.get(template)
        path, body = _tag_path(to), {"digest": found.digest}
        return Template.parse(await self._transport.call(Request(method="PUT", path=path, body=body)))

    async def untag(self, name: str) -> None:
        """Take a tag away. What it pointed to can be had by its digest."""
        await self._transport.call(Request(method="DELETE", path=_tag_path(name)))

    async def delete(self, template: Template | str) -> Template:
        """Delete a release: by digest with all its tags, by name the tag, and the release with its last one.

        Sandboxes and snapshots that were made from it live on.
        """
        reference = template.digest if isinstance(template, Template) else template
        answer = await self._transport.call(Request(method="DELETE", path=f"/v1/templates/{reference}"))
        return Template.parse(answer)

    async def history(self, name: str) -> AsyncIterator[TagMove]:
        """Yield what became of a name's tags, newest first."""
        async for item in pages(self._transport, f"/v1/templates/{name}/history", {}):
            yield TagMove.parse(item)

    async def warm(self, template: Template | str, *, memory_mib: int | None = None) -> None:
        """Prepare a template on the host, so that the first sandbox starts as fast as any; returns when it is."""
        reference = template.digest if isinstance(template, Template) else template
        path, body = f"/v1/templates/{reference}/warm", present(memory_mib=memory_mib)
        await self._transport.call(Request(method="POST", path=path, body=body, read_s=WARM_READ_S, harmless=True))

    async def audit(self) -> AsyncIterator[Audited]:
        """Yield every release with the images that it came from, and which of them are not trusted now."""
        answer = await self._transport.call(Request(method="GET", path="/v1/templates/audit"))
        for item in answer["items"]:
            yield Audited.parse(item)


def _tag_path(text: str) -> str:
    name, _, tag = text.partition(":")
    return f"/v1/templates/{name}/tags/{tag or 'latest'}"
