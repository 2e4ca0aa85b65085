"""What comes of a code cell, as values; read leniently, because a sandbox has written it."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Self, cast

from space.errors import CommandFailed, GuestError

Json = dict[str, Any]
LINE_BYTES_MAX = 64 * 1024 * 1024
_TEXTS = ("text", "html", "markdown", "svg", "png", "jpeg", "pdf", "latex", "javascript")
_OBJECTS = ("data", "chart", "extra")


@dataclass(frozen=True, slots=True)
class CellOutput:
    """A piece of what a cell printed."""

    stream: Literal["stdout", "stderr"]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Display:
    """One thing that a cell showed, in all forms that it has. Pictures are base64."""

    main: bool = False
    """Whether it is the value of the cell's last expression."""
    text: str | None = None
    html: str | None = None
    markdown: str | None = None
    svg: str | None = None
    png: str | None = None
    jpeg: str | None = None
    pdf: str | None = None
    latex: str | None = None
    javascript: str | None = None
    json: Any = None
    data: Json | None = None
    """A table's columns, each a list."""
    chart: Json | None = None
    """What a figure plots."""
    extra: Json = field(default_factory=dict)
    """Other forms by their media types."""

    @classmethod
    def parse(cls, told: Json) -> Self:
        texts = {name: told[name] for name in _TEXTS if isinstance(told.get(name), str)}
        objects = {name: told[name] for name in _OBJECTS if isinstance(told.get(name), dict)}
        return cls(main=told.get("is_main_result") is True, json=told.get("json"), **texts, **objects)


@dataclass(frozen=True, slots=True)
class CellError:
    """How a cell failed: the exception's name, its value, and where it was raised."""

    name: str
    value: str
    traceback: str


CellEvent = CellOutput | Display | CellError


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A cell that has been run to its end."""

    stdout: str = ""
    stderr: str = ""
    displays: tuple[Display, ...] = ()
    error: CellError | None = None

    @property
    def text(self) -> str | None:
        """The value of the last expression, as text; None when it has none."""
        return next((one.text for one in self.displays if one.main), None)

    def check(self) -> Self:
        """Return this, or raise ``CommandFailed`` with what the cell failed with."""
        if self.error is not None:
            raise CommandFailed(f"The cell failed: {self.error.name}: {self.error.value}", result=self)
        return self

    @classmethod
    def of(cls, events: Iterable[CellEvent]) -> Self:
        """Return all that was told of a cell as one value."""
        printed: dict[str, list[str]] = {"stdout": [], "stderr": []}
        displays: list[Display] = []
        error: CellError | None = None
        for event in events:
            match event:
                case CellOutput():
                    printed[event.stream].append(event.text)
                case Display():
                    displays.append(event)
                case CellError():
                    error = error or event
        texts = {stream: "".join(pieces) for stream, pieces in printed.items()}
        return cls(stdout=texts["stdout"], stderr=texts["stderr"], displays=tuple(displays), error=error)


class Lines:
    """Bytes as they come, as lines of JSON. ``ended``: the last one has come, so that the cell was told whole."""

    def __init__(self) -> None:
        self.ended = False
        self._rest = bytearray()

    def feed(self, chunk: bytes) -> Iterator[CellEvent]:
        """Yield what the lines say that are complete now."""
        complete: list[bytes] = []
        self._rest += chunk
        if b"\n" in chunk:
            *complete, rest = bytes(self._rest).split(b"\n")
            self._rest = bytearray(rest)
        if len(self._rest) > LINE_BYTES_MAX:
            raise GuestError("The sandbox sent a line without end.", code="bad-answer")
        for line in complete:
            if (event := self._event(line)) is not None:
                yield event

    def _event(self, line: bytes) -> CellEvent | None:
        try:
            said: Any = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise GuestError("The sandbox sent what is not JSON.", code="bad-answer") from error
        told = cast("Json", said) if isinstance(said, dict) else {}
        match told.get("type"):
            case "stdout" | "stderr" as stream:
                return CellOutput(stream, str(told.get("text", "")))
            case "result":
                return Display.parse(told)
            case "error":
                return CellError(str(told.get("name")), str(told.get("value")), str(told.get("traceback", "")))
            case "end_of_execution":
                self.ended = True
            case _:
                pass  # Signs of life, and what later interpreters say.
        return None
