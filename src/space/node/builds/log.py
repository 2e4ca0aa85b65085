"""The log of a build: lines of JSON in a bounded file, which readers may follow while it is written.

Line ``n`` of the file is ``{n, at, stream, text}``.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import os
import time
from collections.abc import AsyncGenerator
from pathlib import Path

TEXT_CHARS_MAX = 4096
"""A longer line is cut into several."""
_READ_BYTES = 256 * 1024
_LAST_BYTES = 512
"""Room for the line that says that the rest was dropped."""
_DROPPED = "The log is full: what follows was dropped."

STEP, STDOUT, STDERR, INFO = "step", "stdout", "stderr", "info"


class BuildLog:
    """One log. ``write`` it from the event loop's thread; ``close`` it when the build has ended."""

    def __init__(self, path: Path, bytes_max: int) -> None:
        self.lines = 0
        self.bytes = 0
        self.truncated = False
        self._path = path
        self._bytes_max = bytes_max
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._changed = asyncio.Event()
        self._partial = {stream: _Partial() for stream in (STDOUT, STDERR)}

    @property
    def closed(self) -> bool:
        return self._file < 0

    def write(self, stream: str, text: str) -> None:
        """Add text, a line of the log for each of its lines."""
        for line in text.split("\n"):
            for start in range(0, max(1, len(line)), TEXT_CHARS_MAX):
                self._add(stream, line[start : start + TEXT_CHARS_MAX])
        self._tell()

    def feed(self, stream: str, data: bytes) -> None:
        """Add what a program has written; a line that is not complete yet waits for its end."""
        for line in self._partial[stream].lines(data):
            self._add(stream, line)
        self._tell()

    def end_line(self) -> None:
        """The program has ended: what waits for the end of its line is a line."""
        for stream, partial in self._partial.items():
            if rest := partial.rest():
                self._add(stream, rest)
        self._tell()

    def close(self) -> None:
        if not self.closed:
            self.end_line()
            os.close(self._file)
            self._file = -1
            self._tell()

    async def read(self, start: int, *, follow: bool) -> AsyncGenerator[bytes]:
        """Yield whole lines from number ``start`` on; with ``follow`` until the log is closed."""
        with self._path.open("rb") as file:
            skip, rest = start, b""
            while True:
                changed, closed = self._changed, self.closed
                while data := file.read(_READ_BYTES):
                    complete, newline, rest = (rest + data).rpartition(b"\n")
                    lines = (complete + newline).splitlines(keepends=True)
                    skip, wanted = max(0, skip - len(lines)), lines[skip:]
                    if wanted:
                        yield b"".join(wanted)
                if closed or not follow:
                    return
                await changed.wait()

    def _add(self, stream: str, text: str) -> None:
        if self.truncated or self.closed:
            return
        line = self._line(stream, text)
        if self.bytes + len(line) > self._bytes_max - _LAST_BYTES:
            self.truncated = True
            line = self._line(INFO, _DROPPED)
        os.write(self._file, line)
        self.lines += 1
        self.bytes += len(line)

    def _line(self, stream: str, text: str) -> bytes:
        fields = {"n": self.lines, "at": round(time.time(), 3), "stream": stream, "text": text}
        return json.dumps(fields).encode() + b"\n"

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class _Partial:
    """Bytes of one stream on their way to lines of text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""

    def lines(self, data: bytes) -> list[str]:
        *whole, rest = (self._text + self._decoder.decode(data)).split("\n")
        cut = [piece for line in whole for piece in _pieces(line)]
        *full, self._text = _pieces(rest)
        return cut + full

    def rest(self) -> str:
        text, self._text = self._text + self._decoder.decode(b"", final=True), ""
        self._decoder.reset()
        return text


def _pieces(line: str) -> list[str]:
    return [line[start : start + TEXT_CHARS_MAX] for start in range(0, max(1, len(line)), TEXT_CHARS_MAX)]


async def read_closed(path: Path, start: int) -> AsyncGenerator[bytes]:
    """Yield the bytes of a log that nobody writes any more, from line ``start`` on."""
    with path.open("rb") as file:
        for _ in range(start):
            if not file.readline():
                return
        while data := file.read(_READ_BYTES):
            yield data
