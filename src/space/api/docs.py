"""The page at /docs: the OpenAPI document as plain HTML. It loads nothing from anywhere."""

import html
from typing import Any

HEAD = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>SPACE API</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1a1a1a}
details{border-top:1px solid #ddd;padding:.5rem 0}summary{cursor:pointer}code{font:14px ui-monospace,monospace}
.m{display:inline-block;min-width:4.5rem;font-weight:600}.p{color:#666}table{border-collapse:collapse}
td{padding:.1rem .8rem .1rem 0;vertical-align:top}h2{margin-top:2rem;text-transform:capitalize}
</style></head><body><h1>SPACE API</h1><p>Send <code>Authorization: Bearer sk_…</code>.
The same as a document: <a href="/openapi.json">/openapi.json</a>.</p>"""


def render(document: dict[str, Any]) -> str:
    """Return the page for an OpenAPI document."""
    by_tag: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            by_tag.setdefault(operation["tags"][0], []).append(_operation(method, path, operation))
    sections = [f"<h2>{html.escape(tag)}</h2>{''.join(entries)}" for tag, entries in by_tag.items()]
    schemas = [_schema(name, schema) for name, schema in document["components"]["schemas"].items()]
    return f"{HEAD}{''.join(sections)}<h2>Objects</h2>{''.join(schemas)}</body></html>"


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td><code>{html.escape(p['name'])}</code></td><td class=p>{html.escape(p['in'])}</td>"
        f"<td>{html.escape(p.get('description', ''))}</td></tr>"
        for p in operation.get("parameters", ())
    )
    bodies = operation.get("requestBody", {}).get("content", {})
    wanted = "".join(
        f"<p>Body: <code>{_type(content.get('schema')) or kind}</code></p>" for kind, content in bodies.items()
    )
    answers = "".join(
        f"<tr><td><code>{html.escape(status)}</code></td><td>{html.escape(answer['description'])}</td>"
        f"<td><code>{_content(answer.get('content', {}))}</code></td></tr>"
        for status, answer in operation["responses"].items()
    )
    about = html.escape(operation.get("description", ""))
    head = f"<summary><span class=m>{method.upper()}</span><code>{html.escape(path)}</code> {about}</summary>"
    return f"<details>{head}{wanted}<table>{rows}</table><table>{answers}</table></details>"


def _content(kinds: dict[str, Any]) -> str:
    return " ".join(_type(content.get("schema")) or html.escape(kind) for kind, content in kinds.items())


def _schema(name: str, schema: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td><code>{html.escape(field)}</code></td><td><code>{_type(of)}</code></td>"
        f"<td>{html.escape(of.get('description', ''))}</td></tr>"
        for field, of in schema.get("properties", {}).items()
    )
    about, name = html.escape(schema.get("description", "")), html.escape(name)
    head = f"<summary><code>{name}</code> {about}</summary>"
    return f'<details id="{name}">{head}<table>{rows}</table></details>'


def _type(schema: dict[str, Any] | None) -> str:
    """Return a schema's type in a few words of HTML."""
    if not schema:
        return ""
    if "$ref" in schema:
        name = html.escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for word in ("anyOf", "oneOf"):
        if word in schema:
            return " | ".join(_type(choice) for choice in schema[word])
    if "enum" in schema:
        return " | ".join(html.escape(str(value)) for value in schema["enum"])
    if schema.get("type") == "array":
        return f"[{_type(schema.get('items'))}]"
    return html.escape(str(schema.get("format") or schema.get("type") or schema.get("title") or "any"))
