"""Who owns things: a project, and the API keys that act for it."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum


class Role(StrEnum):
    """What a key may do. An admin may also create projects; neither sees into another project."""

    MEMBER = "member"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Project:
    id: str
    name: str
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Key:
    """One API key as the store knows it: never the key itself, only its SHA-256."""

    id: str
    project_id: str
    name: str
    role: Role
    hash: str
    created_at: datetime
    last_used_at: datetime | None = None
    revoked_at: datetime | None = None
