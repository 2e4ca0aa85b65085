"""Ids of builds as E2B's clients know them: UUIDs, and the same 80 bits as our ids. Pure."""

import base64
import uuid

from space.control.catalog import Shown
from space.model.ids import RANDOM_BYTES

PREFIX = "bld"
_VERSION, _VARIANT = b"\x80\x00", b"\x80"
"""Of a UUID whose other bits are its maker's (RFC 9562, version 8)."""
_SPLIT = 6
_REST = b"\0\0\0"


def shown(build_id: str) -> str:
    """Return the UUID for an id of ours."""
    bits = base64.b32decode(build_id.removeprefix(PREFIX).upper())
    return str(uuid.UUID(bytes=bits[:_SPLIT] + _VERSION + _VARIANT + bits[_SPLIT:] + _REST))


def of(text: str) -> str:
    """Return our id for a UUID; empty, which is nobody's, for what cannot be one of ours."""
    try:
        whole = uuid.UUID(text).bytes
    except ValueError:
        return ""
    bits = whole[:_SPLIT] + whole[_SPLIT + 3 : RANDOM_BYTES + 3]
    build_id = PREFIX + base64.b32encode(bits).decode().lower()
    return build_id if shown(build_id) == str(uuid.UUID(bytes=whole)) else ""


def of_template(template: Shown) -> str:
    """Return the UUID of the build that a template is from; of one that was not built, one for its content."""
    if template.build_id is not None:
        return shown(template.build_id)
    return str(uuid.uuid5(uuid.NAMESPACE_OID, template.digest))
