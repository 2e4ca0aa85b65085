"""What requests and answers about contexts look like."""

from typing import Annotated

from fastapi import Path
from pydantic import AfterValidator, Field, StringConstraints

from space.api.bodies import ENV_VARIABLES_MAX, Body, without_nul
from space.api.schemas import Out

ContextPath = Annotated[str, Path(pattern=r"^[A-Za-z0-9-]{1,64}$")]
_PATH_CHARS_MAX = 4096
_DAY_S = 24 * 3600

Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256)]
Value = Annotated[str, AfterValidator(without_nul)]


class ContextBody(Body):
    """A context to be made."""

    language: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9+#.-]{1,32}$")] = "python"
    """`python`, `javascript`, `typescript` or `bash`."""
    cwd: Annotated[str, StringConstraints(min_length=1, max_length=_PATH_CHARS_MAX), AfterValidator(without_nul)] = "."
    """Where its cells begin; a relative path begins in the user's home."""


class CellBody(Body):
    """Code to be run in a context."""

    code: Annotated[str, AfterValidator(without_nul)]
    env: Annotated[dict[Variable, Value] | None, Field(max_length=ENV_VARIABLES_MAX)] = None
    """Variables for this cell alone: afterwards they are as they were."""
    timeout_s: Annotated[float | None, Field(gt=0, le=_DAY_S, allow_inf_nan=False)] = None
    """After so many seconds it is interrupted; null: only when the client goes away."""


class ContextOut(Out):
    """A context: a kernel that remembers what its cells leave."""

    id: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9-]{1,64}$")]
    language: Annotated[str, StringConstraints(max_length=64)]
    cwd: Annotated[str, StringConstraints(max_length=_PATH_CHARS_MAX)]


class ContextPage(Out):
    items: list[ContextOut]
    next_cursor: str | None
