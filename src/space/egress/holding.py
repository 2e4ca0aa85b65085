"""How much memory each connection of a guest holds, so that one sandbox has so much of it and no more.

What is held waits for somebody to read it; each buffer is bounded, and a sandbox may open many.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Protocol, TypeVar
from weakref import WeakSet

HELD_BYTES_MAX = 256 * 1024 * 1024
"""Of one sandbox, in all its connections."""
FEW = 24
"""As many connections hold less than that, whatever is done with them, and need not be added up."""

_Key = TypeVar("_Key")


class Holder(Protocol):
    """Something with a buffer."""

    @property
    def held(self) -> int: ...


class Account:
    """What one connection of a guest, and all that is done for it, holds."""

    def __init__(self) -> None:
        self._holders: WeakSet[Holder] = WeakSet()

    @property
    def held(self) -> int:
        return sum(holder.held for holder in self._holders)

    def note(self, holder: Holder) -> None:
        self._holders.add(holder)


_account: ContextVar[Account | None] = ContextVar("account", default=None)


def charge(account: Account) -> None:
    """Have an account stand for what the current task, and those that it begins, will hold."""
    _account.set(account)


def note(holder: Holder) -> None:
    """Add something to the account of the current task, if it has one."""
    account = _account.get()
    if account is not None:
        account.note(holder)


def too_much(accounts: Mapping[_Key, Holder]) -> list[_Key]:
    """Return those that hold most, as many as must go for the rest to be within `HELD_BYTES_MAX`."""
    if len(accounts) < FEW:
        return []
    held = {key: account.held for key, account in accounts.items()}
    excess, found = sum(held.values()) - HELD_BYTES_MAX, list[_Key]()
    for key in sorted(held, key=lambda one: held[one], reverse=True):
        if excess <= 0:
            break
        excess -= held[key]
        found.append(key)
    return found
