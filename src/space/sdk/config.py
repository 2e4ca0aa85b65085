"""Where the API is and with which key: arguments, then SPACE_URL and SPACE_API_KEY, then the credentials file."""

import base64
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from space.errors import InvalidRequest, NotFound, Unauthenticated

DEFAULT_URL = "http://127.0.0.1:8700"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True, slots=True)
class Credentials:
    """An API's address and a key for it. The key is in no ``repr``."""

    url: str
    api_key: str = field(repr=False)


def credentials_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where the local user's credentials lie: ``$XDG_CONFIG_HOME/space/credentials``."""
    base = environ.get("XDG_CONFIG_HOME") or str(Path(environ.get("HOME") or "~").expanduser() / ".config")
    return Path(base) / "space" / "credentials"


def find_credentials(
    url: str | None = None, api_key: str | None = None, environ: Mapping[str, str] = os.environ
) -> Credentials:
    """Return the credentials to use.

    A key from the file goes only to the address in the file. Raises ``Unauthenticated`` (code ``no-credentials``) when
    there is no key, and ``InvalidRequest`` when an address or the file is not usable.
    """
    url = url or environ.get("SPACE_URL") or None
    api_key = api_key or environ.get("SPACE_API_KEY") or None
    if api_key:
        return Credentials(_checked(url or DEFAULT_URL), api_key)
    path = credentials_file(environ)
    stored = _read(path)
    if stored is None:
        raise Unauthenticated(
            f"No API key: set SPACE_URL and SPACE_API_KEY, or run scripts/up, which writes {path}.",
            code="no-credentials",
        )
    if url and _checked(url) != stored.url:
        raise Unauthenticated(
            f"No API key for {url}: {path} has one for {stored.url} only. Set SPACE_API_KEY.", code="no-credentials"
        )
    return stored


def e2b_environment(url: str | None, domain: str | None, api_key: str) -> dict[str, str]:
    """Return the environment of E2B's clients. Older ones want a key of another form: the same bytes in hexadecimal."""
    if url is None:
        raise NotFound("E2B's clients are not served here: the setting e2b_port is 0.", code="no-e2b")
    text = api_key.removeprefix("sk_")
    key = {"E2B_API_KEY": f"e2b_{base64.urlsafe_b64decode(text + '=' * (-len(text) % 4)).hex()}"}
    if domain is not None:
        return {**key, "E2B_DOMAIN": domain}
    return {**key, "E2B_API_URL": url, "E2B_SANDBOX_URL": url, "E2B_VOLUME_API_URL": url}


def _read(path: Path) -> Credentials | None:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & _OTHERS:
                raise InvalidRequest(
                    f"{path} may be read by other users; run: chmod 600 {path}", code="credentials-not-private"
                )
            document: Any = json.loads(file.read())
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise InvalidRequest(f"{path} cannot be read by this user.", code="credentials-not-readable") from error
    except ValueError as error:
        raise InvalidRequest(f"{path} is not JSON.", code="credentials-malformed") from error
    if not isinstance(document, dict) or not document.get("api_key"):
        raise InvalidRequest(f'{path} must hold {{"url": …, "api_key": …}}.', code="credentials-malformed")
    return Credentials(_checked(str(document.get("url") or DEFAULT_URL)), str(document["api_key"]))


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname)
    except ValueError:
        usable = False
    if not usable:
        raise InvalidRequest(f"{url!r} is not an http or https address.", code="invalid-url", field="url")
    return url.rstrip("/")
