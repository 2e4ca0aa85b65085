"""What the api has said about each sandbox: its policy and what it was granted. In memory alone, and gone with it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from space.errors import InvalidRequest
from space.model.grant import Grant, parse_grant
from space.model.policy import Policy, PolicyInvalid, parse_policy


@dataclass(frozen=True, slots=True, repr=False)
class Attachment:
    """One generation of a sandbox's policy and grants; a request sees one."""

    project: str
    generation: int
    policy: Policy
    grants: tuple[Grant, ...]


NOTHING = Attachment("", 0, Policy(), ())
"""What holds for a sandbox of which the api has said nothing."""


class Attachments:
    """By sandbox. ``changed`` is called with every sandbox whose attachment is another one now, and waited for."""

    def __init__(self, changed: Callable[[str, Attachment], Awaitable[None]]) -> None:
        self._changed = changed
        self._known: dict[str, Attachment] = {}

    def __len__(self) -> int:
        return len(self._known)

    def of(self, sandbox: str) -> Attachment:
        return self._known.get(sandbox, NOTHING)

    async def put(self, sandbox: str, attachment: Attachment) -> None:
        if self._known.get(sandbox) == attachment:
            return  # told again, as all are when either side was restarted
        self._known[sandbox] = attachment
        await self._changed(sandbox, attachment)

    async def remove(self, sandbox: str) -> None:
        if self._known.pop(sandbox, None) is not None:
            await self._changed(sandbox, NOTHING)

    async def keep(self, sandboxes: Collection[str]) -> None:
        """Hold what is known of these and of no others."""
        for sandbox in self._known.keys() - set(sandboxes):
            await self.remove(sandbox)


def parse_attachment(told: Mapping[str, Any]) -> Attachment:
    """Read what the api tells; raise ``InvalidRequest`` without repeating any value."""
    try:
        return Attachment(
            project=str(told["project"]),
            generation=int(told["generation"]),
            policy=parse_policy(told["policy"]),
            grants=tuple(parse_grant(one) for one in told["grants"]),
        )
    except PolicyInvalid as error:
        raise InvalidRequest(str(error), field=error.field) from None
    except (KeyError, TypeError, ValueError):
        raise InvalidRequest("The attachment is not complete.", field="attachment") from None
