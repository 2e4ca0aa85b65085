"""The table of E2B's control plane: method, path, and the function that answers."""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import unquote

from space.e2b import builds, catalog, content, contexts, logs, metrics, sandboxes, secrets, snapshots, volumes
from space.e2b.call import Call

Function = Callable[[Call], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Row:
    """One path and method. A ``public`` one needs no API key, or asks for a token itself."""

    method: str
    path: str
    function: Function
    public: bool = False


async def _alive(call: Call) -> None:
    await call.answer_empty(204)


ROUTES: tuple[Row, ...] = (
    Row("GET", "/health", _alive, public=True),
    Row("POST", "/v2/sandboxes", sandboxes.create),
    Row("POST", "/sandboxes", sandboxes.create),
    Row("GET", "/v2/sandboxes", sandboxes.list_),
    Row("GET", "/sandboxes", sandboxes.list_),
    Row("GET", "/sandboxes/metrics", metrics.latest),
    Row("GET", "/sandboxes/{sandbox}", sandboxes.get),
    Row("DELETE", "/sandboxes/{sandbox}", sandboxes.kill),
    Row("POST", "/sandboxes/{sandbox}/timeout", sandboxes.set_timeout),
    Row("POST", "/v2/sandboxes/{sandbox}/connect", sandboxes.connect),
    Row("POST", "/sandboxes/{sandbox}/connect", sandboxes.connect),
    Row("POST", "/sandboxes/{sandbox}/resume", sandboxes.resume),
    Row("POST", "/sandboxes/{sandbox}/refreshes", sandboxes.refresh),
    Row("POST", "/sandboxes/{sandbox}/pause", sandboxes.pause),
    Row("GET", "/sandboxes/{sandbox}/logs", logs.v1),
    Row("GET", "/v2/sandboxes/{sandbox}/logs", logs.v2),
    Row("GET", "/sandboxes/{sandbox}/metrics", metrics.history),
    Row("PUT", "/sandboxes/{sandbox}/network", sandboxes.update_network),
    Row("POST", "/sandboxes/{sandbox}/fork", snapshots.fork),
    Row("POST", "/sandboxes/{sandbox}/snapshots", snapshots.create),
    Row("GET", "/snapshots", snapshots.list_),
    Row("POST", "/volumes", volumes.create),
    Row("GET", "/volumes", volumes.list_),
    Row("GET", "/volumes/{volume}", volumes.get),
    Row("DELETE", "/volumes/{volume}", volumes.delete),
    Row("GET", "/volumecontent/{volume}/path", content.stat, public=True),
    Row("PATCH", "/volumecontent/{volume}/path", content.change, public=True),
    Row("DELETE", "/volumecontent/{volume}/path", content.remove, public=True),
    Row("GET", "/volumecontent/{volume}/dir", content.list_, public=True),
    Row("POST", "/volumecontent/{volume}/dir", content.make_dir, public=True),
    Row("GET", "/volumecontent/{volume}/file", content.read, public=True),
    Row("PUT", "/volumecontent/{volume}/file", content.write, public=True),
    Row("POST", "/v3/templates", builds.request),
    Row("GET", "/templates", catalog.list_),
    Row("GET", "/default-templates", catalog.defaults),
    Row("GET", "/v2/templates", catalog.page),
    Row("GET", "/templates/aliases/{alias}", catalog.alias),
    Row("POST", "/templates/tags", catalog.add_tags),
    Row("DELETE", "/templates/tags", catalog.remove_tags),
    Row("PUT", "/templates/files/{token}", contexts.receive, public=True),
    Row("GET", "/templates/{template}", catalog.get),
    Row("DELETE", "/templates/{template}", catalog.delete),
    Row("PATCH", "/templates/{template}", catalog.change_v1),
    Row("PATCH", "/v2/templates/{template}", catalog.change),
    Row("GET", "/templates/{template}/tags", catalog.tags),
    Row("GET", "/templates/{template}/files/{hash}", contexts.link),
    Row("POST", "/v2/templates/{template}/builds/{build}", builds.start),
    Row("GET", "/templates/{template}/builds/{build}/status", builds.status),
    Row("GET", "/templates/{template}/builds/{build}/logs", builds.log),
    Row("POST", "/secrets", secrets.create),
    Row("GET", "/secrets", secrets.list_),
    Row("GET", "/secrets/{secret}", secrets.get),
    Row("POST", "/secrets/{secret}", secrets.update),
    Row("DELETE", "/secrets/{secret}", secrets.delete),
)


def _pattern(path: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path))


_COMPILED = tuple((row, _pattern(row.path)) for row in ROUTES)


def find(call: Call) -> tuple[str, Row | None]:
    """Return the name of the route for the log, and the row; fills the call's ``params``, unescaped."""
    path = call.scope.get("raw_path", b"").decode("latin-1").partition("?")[0] or call.path
    for row, pattern in _COMPILED:
        if row.method == call.method and (match := pattern.fullmatch(path)) is not None:
            call.params = {name: unquote(value, errors="surrogateescape") for name, value in match.groupdict().items()}
            return f"{row.method} {row.path}", row
    return "none", None
