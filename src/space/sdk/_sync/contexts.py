# Generated from ../_async/contexts.py by scripts/sync-sdk; change that one.
"""Code cells in a sandbox of the template ``code-interpreter-v1``: contexts that remember what earlier cells left."""

import builtins
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from space.errors import OutcomeUnknown
from space.sdk._sync.transport import Transport, lost
from space.sdk.cells import Cell, CellEvent, Lines
from space.sdk.requests import CONNECTION_LOST, Request, present

DEFAULT = "default"
CALL_S = 150.0
SILENCE_S = 90.0
"""A cell that runs gives signs of life far more often."""


class Context:
    """One context: a kernel in the sandbox, which runs one cell at a time."""

    def __init__(
        self, transport: Transport, path: str, context_id: str, language: str = "python", cwd: str = ""
    ) -> None:
        self._transport = transport
        self._path = f"{path}/{context_id}"
        self.id = context_id
        self.language = language
        self.cwd = cwd

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.language}>"

    def run(
        self,
        code: str,
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        check: bool = False,
    ) -> Cell:
        """Run a cell to its end and return what came of it; an exception in it is the result's ``error``.

        ``env`` is for this cell alone. After ``timeout_s`` it is interrupted, as by `interrupt`. ``check`` raises
        ``CommandFailed`` when it fails. Cells wait for those before them.
        """
        result = Cell.of([event for event in self.stream(code, env=env, timeout_s=timeout_s)])
        return result.check() if check else result

    def stream(
        self, code: str, *, env: Mapping[str, str] | None = None, timeout_s: float | None = None
    ) -> Iterator[CellEvent]:
        """Run a cell and yield what comes of it as it comes. Who stops listening before the end has it interrupted."""
        body = {"code": code, **present(env=None if env is None else dict(env), timeout_s=timeout_s)}
        request = Request(method="POST", path=f"{self._path}/execute", body=body, read_s=SILENCE_S)
        response = self._transport.start(request)
        lines = Lines()
        try:
            for chunk in response.iter_bytes():
                for event in lines.feed(chunk):
                    yield event
        except httpx.TransportError as error:
            raise lost(request, error) from error
        finally:
            response.close()
        if not lines.ended:
            raise OutcomeUnknown("The sandbox stopped telling of the cell before its end.", code=CONNECTION_LOST)

    def interrupt(self) -> None:
        """Interrupt the cell that runs, if one does: it fails with ``KeyboardInterrupt``, and nothing is forgotten."""
        self._transport.call(Request(method="POST", path=f"{self._path}/interrupt", harmless=True))

    def restart(self) -> None:
        """Begin anew, with nothing remembered, whatever the context is at."""
        self._transport.call(Request(method="POST", path=f"{self._path}/restart", read_s=CALL_S))

    def delete(self) -> None:
        """End the context, and what runs in it."""
        self._transport.call(Request(method="DELETE", path=self._path))


class Contexts:
    """``sandbox.contexts``. ``default`` is a Python context that is there from the start."""

    def __init__(self, transport: Transport, sandbox_id: str) -> None:
        self._transport = transport
        self._path = f"/v1/sandboxes/{sandbox_id}/contexts"
        self.default = Context(transport, self._path, DEFAULT)

    def create(self, language: str = "python", *, cwd: str | None = None) -> Context:
        """Start a context for ``python``, ``javascript``, ``typescript`` or ``bash``, at ``cwd`` or the user's home."""
        body = {"language": language, **present(cwd=cwd)}
        made = self._transport.call(Request(method="POST", path=self._path, body=body, read_s=CALL_S))
        return self._context(made)

    def get(self, context_id: str) -> Context:
        """Return one context by its id."""
        return self._context(self._transport.call(Request(method="GET", path=f"{self._path}/{context_id}")))

    def list(self) -> builtins.list[Context]:
        """Return the contexts there are, oldest first."""
        answer = self._transport.call(Request(method="GET", path=self._path))
        return [self._context(item) for item in answer["items"]]

    def _context(self, told: dict[str, Any]) -> Context:
        return Context(self._transport, self._path, told["id"], told["language"], told["cwd"])
