"""The code interpreter: contexts over HTTP on port 49999, as E2B's clients speak with it.

``POST /execute`` answers with a line of JSON for each thing that happens. Who goes away before the last one has the cell
interrupted. Whoever reaches the port may do everything: who that is the platform in front decides.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from tornado.iostream import StreamClosedError
from tornado.web import Application, RequestHandler

import languages
from contexts import Contexts, Refused
from executions import Execution

PORT = 49999
BODY_BYTES_MAX = 16 * 1024 * 1024
TIMEOUT_S_MAX = 24 * 3600


class Handler(RequestHandler):
    """What all paths share."""

    @property
    def contexts(self) -> Contexts:
        return self.application.settings["contexts"]

    def body(self) -> dict[str, Any]:
        """Return the body, a JSON object; nothing is an empty one."""
        try:
            body = json.loads(self.request.body or b"{}")
        except (ValueError, RecursionError) as error:
            raise Refused(400, "The body is not JSON") from error
        if not isinstance(body, dict):
            raise Refused(400, "The body is not an object")
        return body

    def text(self, body: dict[str, Any], name: str) -> str | None:
        value = body.get(name)
        if value is not None and not isinstance(value, str):
            raise Refused(400, f"{name} is not a text")
        return _encodable(name, value) or None

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        error = kwargs.get("exc_info", (None, None, None))[1]
        if isinstance(error, Refused):
            self.set_status(error.status)
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(str(error) if isinstance(error, Refused) else self._reason)

    def log_exception(self, typ: Any, value: Any, tb: Any) -> None:
        if not isinstance(value, Refused | StreamClosedError):
            super().log_exception(typ, value, tb)


class Health(Handler):
    async def get(self) -> None:
        await self.contexts.default()
        self.write('"OK"')


class All(Handler):
    async def get(self) -> None:
        await self.contexts.begin()
        self.set_header("Content-Type", "application/json")
        self.write(json.dumps([context.shown() for context in self.contexts.all()]))

    async def post(self) -> None:
        body = self.body()
        context = await self.contexts.create(self.text(body, "language"), self.text(body, "cwd"))
        self.write(context.shown())


class One(Handler):
    async def get(self, context_id: str) -> None:
        self.write((await self.contexts.find(context_id)).shown())

    async def delete(self, context_id: str) -> None:
        await self.contexts.delete(context_id)
        self.set_status(204)


class Restart(Handler):
    async def post(self, context_id: str) -> None:
        context = await self.contexts.find(context_id)
        await context.restart()
        self.write(context.shown())


class Interrupt(Handler):
    async def post(self, context_id: str) -> None:
        context = await self.contexts.find(context_id)
        await context.interrupt()
        self.write(context.shown())


class Execute(Handler):
    execution: Execution | None = None

    async def post(self) -> None:
        body = self.body()
        code = body.get("code")
        if not isinstance(code, str):
            raise Refused(400, "code is not a text")
        _encodable("code", code)
        context_id, language = self.text(body, "context_id"), self.text(body, "language")
        if context_id and language:
            raise Refused(400, "Only one of context_id and language can be named")
        env, timeout_s = _environment(body.get("env_vars")), _timeout(body.get("timeout_s"))
        context = await self.contexts.find(context_id) if context_id else await self.contexts.default(language)
        self.execution = context.start(code, env, timeout_s)
        self.set_header("Content-Type", "application/x-ndjson")
        try:
            async for line in self.execution.told():
                self.write(line)
                await self.flush()
        finally:
            self.execution.give_up()

    def on_connection_close(self) -> None:
        if self.execution is not None:
            self.execution.give_up()
        super().on_connection_close()


def _environment(given: Any) -> dict[str, str]:
    if given is None:
        return {}
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        raise Refused(400, "env_vars is not an object of texts")
    if not all(languages.NAME.fullmatch(name) for name in given) or any("\0" in value for value in given.values()):
        raise Refused(400, "env_vars has what cannot be a variable")
    for value in given.values():
        _encodable("env_vars", value)
    return given


def _encodable(name: str, text: str | None) -> str | None:
    """Return a text that kernels can be sent; JSON can tell of halves of characters, which nothing can encode."""
    try:
        (text or "").encode()
    except UnicodeEncodeError as error:
        raise Refused(400, f"{name} is not a text: it has half a character") from error
    return text


def _timeout(given: Any) -> float | None:
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given <= TIMEOUT_S_MAX:
        raise Refused(400, f"timeout_s is not a number up to {TIMEOUT_S_MAX}")
    return float(given)


async def main() -> None:
    with tempfile.TemporaryDirectory(prefix="code-interpreter-") as private:
        os.environ["JUPYTER_RUNTIME_DIR"] = private
        contexts = Contexts()
        one = "/contexts/([A-Za-z0-9-]{1,64})"
        paths = [
            ("/health", Health),
            ("/execute", Execute),
            ("/contexts", All),
            (one, One),
            (f"{one}/restart", Restart),
            (f"{one}/interrupt", Interrupt),
        ]
        app = Application(paths, contexts=contexts, compress_response=False, log_function=lambda _handler: None)
        # Clients keep connections for minutes; one that is closed under them costs them a request.
        app.listen(PORT, max_body_size=BODY_BYTES_MAX, max_buffer_size=2 * BODY_BYTES_MAX, idle_connection_timeout=640)
        await contexts.begin()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
