"""What an upload is: bytes that a client sends for a build, kept at the node until they are no longer needed."""

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class Upload:
    """``size`` is how many bytes are to come, of which the node knows how many have. ``deleted``: they may go."""

    id: str
    project_id: str
    size: int
    created_at: datetime
    expires_at: datetime
    deleted: bool = False
    files_hash: str | None = None
    """What its owner's client calls its content; known once all of it has come."""
