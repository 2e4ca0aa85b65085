"""Projects: what they may use together, and what they use."""

from typing import Any

from space.sdk._async.transport import AsyncTransport
from space.sdk.admin import Project, Quota
from space.sdk.requests import Request, creating


class AsyncProjects:
    """``client.projects``."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def own(self) -> Project:
        """Return the project of the key in use."""
        return await self._call(Request(method="GET", path="/v1/project"))

    async def get(self, project_id: str) -> Project:
        """Return a project. Needs an admin's key."""
        return await self._call(Request(method="GET", path=f"/v1/projects/{project_id}"))

    async def create(self, name: str) -> Project:
        """Make a project. Its first key is in ``key`` of this answer and nowhere else, ever. Needs an admin's key."""
        return await self._call(Request(method="POST", path="/v1/projects", body={"name": name}, headers=creating()))

    async def limit(self, project_id: str, **limits: float | None) -> Project:
        """Change the limits that are given (`Quota` has their names); None takes one away. Needs an admin's key."""
        for name in limits:
            if name not in Quota.__slots__:
                raise TypeError(f"There is no limit {name!r}; there are {', '.join(Quota.__slots__)}.")
        body = {"quota": limits}
        return await self._call(Request(method="PATCH", path=f"/v1/projects/{project_id}", body=body))

    async def _call(self, request: Request) -> Project:
        answer: dict[str, Any] = await self._transport.call(request)
        return Project.parse(answer)
