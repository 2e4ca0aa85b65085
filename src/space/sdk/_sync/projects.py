# Generated from ../_async/projects.py by scripts/sync-sdk; change that one.
"""Projects: what they may use together, and what they use."""

from typing import Any

from space.sdk._sync.transport import Transport
from space.sdk.admin import Project, Quota
from space.sdk.requests import Request, creating


class Projects:
    """``client.projects``."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def own(self) -> Project:
        """Return the project of the key in use."""
        return self._call(Request(method="GET", path="/v1/project"))

    def get(self, project_id: str) -> Project:
        """Return a project. Needs an admin's key."""
        return self._call(Request(method="GET", path=f"/v1/projects/{project_id}"))

    def create(self, name: str) -> Project:
        """Make a project. Its first key is in ``key`` of this answer and nowhere else, ever. Needs an admin's key."""
        return self._call(Request(method="POST", path="/v1/projects", body={"name": name}, headers=creating()))

    def limit(self, project_id: str, **limits: float | None) -> Project:
        """Change the limits that are given (`Quota` has their names); None takes one away. Needs an admin's key."""
        for name in limits:
            if name not in Quota.__slots__:
                raise TypeError(f"There is no limit {name!r}; there are {', '.join(Quota.__slots__)}.")
        body = {"quota": limits}
        return self._call(Request(method="PATCH", path=f"/v1/projects/{project_id}", body=body))

    def _call(self, request: Request) -> Project:
        answer: dict[str, Any] = self._transport.call(request)
        return Project.parse(answer)
