"""The body of an upload: files of a form, or one file as it is, compressed or not; taken apart as it comes."""

import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from urllib.parse import unquote

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from space.errors import InvalidRequest

PIECE_BYTES = 256 * 1024
"""Files are passed on in pieces of this size: a small one is written at once, whatever it came in."""
HEADER_BYTES_MAX = 16 * 1024
PARTS_MAX = 10_000


async def in_pieces(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the same bytes in fewer chunks."""
    held = bytearray()
    async for chunk in chunks:
        held += chunk
        if len(held) >= PIECE_BYTES:
            yield bytes(held)
            held.clear()
    if held:
        yield bytes(held)


async def unzipped(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield what gzip has compressed, in bounded pieces. Raises ``InvalidRequest`` for what is damaged or cut off."""
    inflate = zlib.decompressobj(wbits=31)
    try:
        async for chunk in chunks:
            data = chunk
            while data and not inflate.eof:
                yield inflate.decompress(data, PIECE_BYTES)
                data = inflate.unconsumed_tail
    except zlib.error as error:
        raise InvalidRequest("The body is not gzip, as its Content-Encoding says.") from error
    if not inflate.eof:
        raise InvalidRequest("The body ends before what gzip has compressed does.")


@dataclass(frozen=True, slots=True)
class Head:
    """One file of a form: the name of its field, and of the file, whole, with its directories."""

    field: str
    filename: str | None


class Form:
    """A form's parts, one after the other: ``next``, and then ``data`` until it ends."""

    def __init__(self, content_type: str, chunks: AsyncIterator[bytes]) -> None:
        """Raises ``InvalidRequest`` when it is no form with files."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary or len(boundary) > 256:
            raise InvalidRequest("The Content-Type must be multipart/form-data with a boundary.")
        self._chunks = chunks
        self._events: list[tuple[str, bytes]] = []
        self._at = 0
        self._count = 0
        names = ("part_begin", "part_data", "part_end", "header_field", "header_value", "headers_finished")
        with_data = {"part_data", "header_field", "header_value"}
        callbacks = {f"on_{name}": self._taking(name, data=name in with_data) for name in names}
        self._parser = MultipartParser(boundary, callbacks)  # type: ignore[arg-type]

    async def next(self) -> Head | None:
        """Return the next part, or None when there is none."""
        headers: dict[str, bytes] = {}
        name = value = b""
        while (event := await self._event()) is not None:
            kind, data = event
            match kind:
                case "header_field":
                    if value:
                        headers[name.decode("latin-1").lower()] = value
                        name = value = b""
                    name += data
                case "header_value":
                    value += data
                case "headers_finished":
                    headers[name.decode("latin-1").lower()] = value
                    return _head(headers.get("content-disposition", b""))
                case _:
                    continue
            if len(name) + len(value) + sum(map(len, headers.values())) > HEADER_BYTES_MAX:
                raise InvalidRequest("A part of the form has too long a head.")
        return None

    async def data(self) -> AsyncIterator[bytes]:
        """Yield the bytes of the part that ``next`` has returned."""
        while (event := await self._event()) is not None:
            if event[0] == "part_end":
                return
            if event[0] == "part_data":
                yield event[1]
        raise InvalidRequest("The form ends within a file.")

    async def _event(self) -> tuple[str, bytes] | None:
        while self._at >= len(self._events):
            self._events.clear()
            self._at = 0
            chunk = await anext(self._chunks, None)
            if chunk is None:
                return None
            try:
                self._parser.write(chunk)
            except FormParserError as error:
                raise InvalidRequest("The body is not the form that its Content-Type says.") from error
        event = self._events[self._at]
        self._at += 1
        return event

    def _taking(self, kind: str, *, data: bool) -> object:
        def take(*given: object) -> None:
            if kind == "part_begin":
                self._count += 1
                if self._count > PARTS_MAX:
                    raise InvalidRequest(f"A form may have at most {PARTS_MAX} files.")
            piece = b""
            if data:
                buffer, first, last = given
                piece = bytes(buffer[first:last])  # type: ignore[index]
            self._events.append((kind, piece))

        return take


def _head(disposition: bytes) -> Head:
    """Read a part's Content-Disposition. Names are UTF-8; quotes and line ends in them are escaped as in URLs."""
    text = disposition.decode("utf-8", "surrogateescape")
    fields = dict(_parameters(text))
    if "filename*" in fields:
        return Head(fields.get("name", ""), unquote(fields["filename*"].split("'", 2)[-1], errors="surrogateescape"))
    filename = fields.get("filename")
    if filename is not None:
        for escaped, character in (("%22", '"'), ("%0A", "\n"), ("%0a", "\n"), ("%0D", "\r"), ("%0d", "\r")):
            filename = filename.replace(escaped, character)
    return Head(fields.get("name", ""), filename)


def _parameters(text: str) -> list[tuple[str, str]]:
    """Return the parameters behind the first semicolon; in quotes a backslash protects what follows it."""
    found: list[tuple[str, str]] = []
    at = text.find(";")
    while 0 <= at < len(text):
        name, equals, _ = text[at + 1 :].partition("=")
        if not equals:
            break
        at += 1 + len(name) + 1
        value, at = _value(text, at)
        found.append((name.strip().lower(), value))
        at = text.find(";", at)
    return found


def _value(text: str, at: int) -> tuple[str, int]:
    if at >= len(text) or text[at] != '"':
        stop = text.find(";", at)
        stop = len(text) if stop < 0 else stop
        return text[at:stop].strip(), stop
    taken: list[str] = []
    at += 1
    while at < len(text) and text[at] != '"':
        if text[at] == "\\" and at + 1 < len(text) and text[at + 1] in '"\\':
            at += 1
        taken.append(text[at])
        at += 1
    return "".join(taken), at + 1
