"""What E2B's clients call a template: one of ours, or a snapshot."""

import re

from space.control import snapshots, templates
from space.control.control import Control
from space.errors import InvalidRequest, NotFound
from space.model.ids import is_id
from space.model.snapshot import REFERENCE_PREFIX, Snapshot, SnapshotState
from space.model.template import Reference, parse_reference

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
DEFAULT = "default"
"""The tag that E2B's clients mean by a name alone."""
DEFAULT_TAG = f":{DEFAULT}"


async def reference(control: Control, project_id: str, template_id: str) -> str:
    """Return our reference for what E2B's clients call a template: one of ours, or a snapshot by its id or name."""
    named_so = await found_by_name(control, project_id, template_id)
    if named_so is not None:
        return named_so
    found = await named(control, project_id, template_id)
    if found is None:
        raise NotFound(f"Template {template_id[:200]} not found")
    return f"{REFERENCE_PREFIX}{found.id}"


async def found_by_name(control: Control, project_id: str, text: str) -> str | None:
    """Return the reference of the template that is called that, by name or ``name:tag``; None when there is none.

    A name alone means its tag ``default`` where the project has that, and else what it means to everybody.
    """
    parsed = parse_reference(text)
    if parsed is None:
        return None
    if parsed.name == text:
        wanted = Reference(name=text, tag=DEFAULT)
        if await control.store.read(lambda connection: templates.look_up(connection, project_id, wanted)) is not None:
            return str(wanted)
    return text if await templates.find(control, project_id, parsed) is not None else None


def split(text: str) -> tuple[str, str | None]:
    """Return name and tag of ``name`` or ``name:tag``, or raise ``InvalidRequest`` for what is neither."""
    parsed = parse_reference(text)
    if parsed is None or parsed.name is None:
        raise InvalidRequest(
            "A template's name has 1 to 63 of the characters `a-z 0-9 . _ -`, a letter or digit first, and may be "
            "followed by : and a tag.",
            field="name",
        )
    return parsed.name, parsed.tag if ":" in text else None


async def named(control: Control, project_id: str, text: str) -> Snapshot | None:
    """Return the snapshot of that id, or the newest of that name; None when there is none."""
    if is_id("snp", text):
        try:
            found = await snapshots.get(control, project_id, text)
        except NotFound:
            return None
        return found if found.state == SnapshotState.READY else None
    if NAME.fullmatch(bare(text)) is None:
        return None
    page = await snapshots.page(
        control, project_id, sandbox_id=None, name=bare(text), states=(SnapshotState.READY,), after=None, limit=1
    )
    return page[0] if page else None


def bare(text: str) -> str:
    """Return the name of a snapshot without the tag that all of them have."""
    return text.removesuffix(DEFAULT_TAG)
