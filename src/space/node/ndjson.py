"""Output as lines of JSON: text where the bytes are UTF-8 (never cut within a character), else base64."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from space import error_wire
from space.errors import SpaceError
from space.node.call import NDJSON_TYPE, Call
from space.node.readers import Chunk, Exited, Gap, Item, StdinSafe


class Lines:
    """Turns what a command says into lines. Holds back at most the first bytes of a character that is not whole yet."""

    def __init__(self) -> None:
        self._held: dict[str, Chunk] = {}

    def encode(self, item: Item) -> bytes:
        """Return the lines for one item; may be empty."""
        match item:
            case Chunk():
                return self._output(item)
            case Gap():
                gap = {"type": "gap", "stream": item.stream, "from": item.start, "to": item.end}
                return self.rest(item.stream) + _line(gap)
            case Exited():
                return self.rest() + _line(exit_message(item) | {"duration_s": round(item.duration_s, 6)})
            case StdinSafe():
                return b""

    def fail(self, error: SpaceError) -> bytes:
        """Return the last lines of a body that cannot be completed."""
        return self.rest() + _line(error_message(error))

    def rest(self, stream: str | None = None) -> bytes:
        """Return what is held back, as it is: nothing that completes it will come."""
        names = list(self._held) if stream is None else [stream]
        chunks = [self._held.pop(name) for name in names if name in self._held]
        return b"".join(_binary(chunk) for chunk in chunks)

    def _output(self, chunk: Chunk) -> bytes:
        held = self._held.pop(chunk.stream, None)
        if held is not None:
            chunk = Chunk(chunk.stream, held.offset, held.data + chunk.data)
        try:
            return _text(chunk, chunk.data.decode())
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data" or error.end != len(chunk.data):
                return _binary(chunk)
            whole, cut = chunk.data[: error.start], chunk.data[error.start :]
            self._held[chunk.stream] = Chunk(chunk.stream, chunk.offset + len(whole), cut)
            return _text(chunk, whole.decode()) if whole else b""


@asynccontextmanager
async def answering(call: Call) -> AsyncGenerator[Lines]:
    """Answer with lines: what is held back comes before the end, and an error that ends them early is the last one."""
    lines = Lines()
    await call.begin(200, {"content-type": NDJSON_TYPE})
    try:
        yield lines
    except SpaceError as error:
        await call.write(lines.fail(error))
        await call.finish()
        raise
    await call.write(lines.rest())
    await call.finish()


def exit_message(item: Exited) -> dict[str, Any]:
    return {"type": "exit", "exit": asdict(item.exit), "produced": item.produced}


def error_message(error: SpaceError) -> dict[str, Any]:
    return {"type": "error", "error": error_wire.render(error)}


def _text(chunk: Chunk, text: str) -> bytes:
    return _line({"type": "output", "stream": chunk.stream, "offset": chunk.offset, "data": text, "encoding": "utf-8"})


def _binary(chunk: Chunk) -> bytes:
    text = base64.b64encode(chunk.data).decode()
    return _line({"type": "output", "stream": chunk.stream, "offset": chunk.offset, "data": text, "encoding": "base64"})


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
