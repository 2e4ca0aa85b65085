"""Identifiers: a prefix that names the kind and 16 random base32 characters, `^[a-z0-9]+$`, one length per kind.

One length matters beyond looks: some tools (runsc) accept any unambiguous prefix of an id.
"""

import base64
import re
import secrets

PREFIXES = ("sbx", "op", "cmd", "tpl", "snp", "prj", "key", "whk", "dlv", "bld", "upl", "pol", "sec", "grt", "vol")
RANDOM_BYTES = 10
_PATTERNS = {prefix: re.compile(rf"{prefix}[a-z2-7]{{16}}") for prefix in PREFIXES}


def new_id(prefix: str) -> str:
    """Return a fresh id, e.g. ``sbxk5mzx2…``; 80 random bits, so it cannot be guessed."""
    return prefix + base64.b32encode(secrets.token_bytes(RANDOM_BYTES)).decode().lower()


def is_id(prefix: str, text: str) -> bool:
    """Whether ``text`` is a well-formed id of that kind."""
    return _PATTERNS[prefix].fullmatch(text) is not None
