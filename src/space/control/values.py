"""Values of secrets: as they are sealed, and as the gateway is told them. Nothing here is logged or shown."""

import json
from collections.abc import Mapping
from typing import Any, cast

from space.control.keyring import Keys
from space.store.secrets import Secret

OAUTH = "oauth"
"""The kind of a secret whose value is a token that is fetched: sealed are what fetches it, and the token."""
TOKEN = "access_token"  # noqa: S105 - the name of a field


def sealed(keys: Keys, secret: Secret, value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a secret that hold ``value``, sealed as that version of that secret of that project."""
    key_id, box = keys.seal(json.dumps(value).encode(), _bound(secret))
    return {"key_id": key_id, "sealed": box}


def opened(keys: Keys, secret: Secret) -> dict[str, Any]:
    """Return the value. Raises ``HostError`` when it cannot be opened."""
    return cast("dict[str, Any]", json.loads(keys.open(secret.key_id, secret.sealed, _bound(secret))))


def placed(keys: Keys, secret: Secret) -> dict[str, Any] | None:
    """Return what is placed into requests, ``{kind, …}``; None while a token has not been fetched."""
    value = opened(keys, secret)
    if secret.kind != OAUTH:
        return {"kind": secret.kind, **value}
    token = value.get(TOKEN)
    return {"kind": "text", "value": token} if isinstance(token, str) else None


def _bound(secret: Secret) -> str:
    return f"{secret.project_id}/{secret.id}/{secret.version}"
