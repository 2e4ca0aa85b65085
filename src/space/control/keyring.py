"""The keys that values of secrets are sealed with (AES-256-GCM): kept in a file of the api's, or told by a command.

The file has a line ``<id>:<32 bytes in base64>`` for each key; the first one seals, every one opens. A sealed value can
be opened only as what it was sealed as: project, secret and version are bound into it.
"""

import asyncio
import base64
import binascii
import hmac
import os
import re
import secrets
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from space import children
from space.control.keyfile import kept
from space.errors import HostError

KEY_BYTES = 32
NONCE_BYTES = 12
KEYS_MAX = 64
TEXT_BYTES_MAX = 64 * 1024
COMMAND_S = 10.0
_LINE = re.compile(r"([a-z0-9]{1,32}):([A-Za-z0-9+/]{43}=)")


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys by id, the one that seals first. Never shown."""

    by_id: dict[str, bytes] = field(repr=False)

    @property
    def first(self) -> str:
        return next(iter(self.by_id))

    def seal(self, value: bytes, bound: str) -> tuple[str, bytes]:
        """Return the id of the key, and the sealed value."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        return self.first, nonce + AESGCM(self.by_id[self.first]).encrypt(nonce, value, bound.encode())

    def open(self, key_id: str, sealed: bytes, bound: str) -> bytes:
        """Return what was sealed as ``bound``. Raises ``HostError`` when the key is not there, or is another one."""
        key = self.by_id.get(key_id)
        if key is None:
            raise HostError(
                f"The key {key_id} that secrets are sealed with is gone. Put its line back where the keys are kept.",
                code="secrets-key-missing",
                key=key_id,
            )
        try:
            return AESGCM(key).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], bound.encode())
        except (InvalidTag, ValueError):
            raise HostError(
                f"A secret cannot be opened with the key {key_id}: that is not the one it was sealed with. Put the "
                "right one back where the keys are kept.",
                code="secrets-key-wrong",
                key=key_id,
            ) from None

    def digest(self, value: bytes) -> str:
        """Return what stands for a value where it is only to be known again: nobody without the key can guess it."""
        return hmac.digest(self.by_id[self.first], b"space digest of a value\0" + value, "sha256").hex()


class KeyStore:
    """Where the keys are. They are read again when the file is another one, or a key is asked for that is not known."""

    def __init__(self, path: Path, command: str | None = None) -> None:
        self._path = path
        self._command = command
        self._known: Keys | None = None
        self._seen: tuple[int, int, int] | None = None

    async def opening(self, key_id: str | None = None) -> Keys:
        """Return the keys, for opening; freshly read if the one that is named is not among those known."""
        if self._known is None or (key_id is not None and key_id not in self._known.by_id):
            self._known = await self._load()
        return self._known

    async def sealing(self, *, make: bool) -> Keys:
        """Return the keys, for sealing, as they are now; with ``make`` the first one is made if there is none.

        Not ``make`` where something is sealed already: then the key is lost, not yet to be made.
        """
        if self._command is not None:
            return await self.opening()
        seen = await asyncio.to_thread(self._stat)
        if seen is None and make:
            await asyncio.to_thread(kept, self._path, lambda: _line(*_new_key()).encode())
        if seen is None or self._known is None or seen != self._seen:
            self._known = await self._load()
        return self._known

    async def renew(self, in_use: set[str]) -> Keys:
        """Put a new key first and leave out those that nothing is sealed with; a command's keys are only asked anew."""
        if self._command is not None:
            self._known = await self._load()
            return self._known
        old = await self._load()
        new_id, key = _new_key()
        keep = {key_id: kept_key for key_id, kept_key in old.by_id.items() if key_id in in_use | {old.first}}
        text = "".join(_line(*pair) for pair in {new_id: key, **keep}.items())
        await asyncio.to_thread(_replace, self._path, text)
        self._known = await self._load()
        return self._known

    async def _load(self) -> Keys:
        if self._command is not None:
            return _parse(await _told(self._command), "secrets_key_command")
        return await asyncio.to_thread(self._read)

    def _read(self) -> Keys:
        """SAFETY: the file is the api's own, and refused when anybody else may read it."""
        seen = self._stat()
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                text = file.read(TEXT_BYTES_MAX + 1)
        except FileNotFoundError:
            raise HostError(
                f"The keys that secrets are sealed with are gone: put {self._path} back from where it was kept.",
                code="secrets-key-missing",
            ) from None
        except OSError as error:
            message = f"{self._path} cannot be read: {error.strerror}."
            raise HostError(message, code="secrets-key-unreadable") from None
        if status.st_mode & 0o077:
            raise HostError(
                f"{self._path} may be read by others than its owner: `chmod 600` it.", code="secrets-key-unreadable"
            )
        self._seen = seen
        return _parse(text, str(self._path))

    def _stat(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return None
        except OSError as error:
            message = f"{self._path} cannot be read: {error.strerror}."
            raise HostError(message, code="secrets-key-unreadable") from None
        return status.st_ino, status.st_mtime_ns, status.st_size


def _parse(text: bytes, where: str) -> Keys:
    found: dict[str, bytes] = {}
    lines = text.decode("ascii", "replace").splitlines() if len(text) <= TEXT_BYTES_MAX else [""]
    for line in lines:
        match = _LINE.fullmatch(line.strip())
        try:
            key = base64.b64decode(match[2], validate=True) if match else b""
        except binascii.Error:
            key = b""
        if match is None or len(key) != KEY_BYTES or match[1] in found or len(found) >= KEYS_MAX:
            found.clear()
            break
        found[match[1]] = key
    if not found:
        raise HostError(
            f"{where} gives no keys: it must have lines `<id>:<32 bytes in base64>`, each id once, the key that seals "
            "first.",
            code="secrets-key-unreadable",
        )
    return Keys(found)


async def _told(command: str) -> bytes:
    """Run the operator's command and return what it writes; not what it complains of, which may have keys in it."""
    try:
        # SAFETY: the command is the operator's setting, run without a shell as the api's user, which reads the store.
        process = await asyncio.create_subprocess_exec(
            *shlex.split(command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
    except (OSError, ValueError):
        raise HostError("secrets_key_command cannot be run.", code="secrets-key-unreadable") from None
    text, status = b"", None
    try:
        async with asyncio.timeout(COMMAND_S):
            stdout = process.stdout
            while stdout is not None and len(text) <= TEXT_BYTES_MAX and (more := await stdout.read(TEXT_BYTES_MAX)):
                text += more
            status = await process.wait() if len(text) <= TEXT_BYTES_MAX else None
    except TimeoutError:
        pass
    finally:
        if process.returncode is None:
            await children.end(process)
    if status != 0:
        how = "did not end in time, or wrote too much" if status is None else f"ended with status {status}"
        raise HostError(f"secrets_key_command {how}.", code="secrets-key-unreadable")
    return text


def _new_key() -> tuple[str, bytes]:
    return f"k{secrets.token_hex(4)}", secrets.token_bytes(KEY_BYTES)


def _line(key_id: str, key: bytes) -> str:
    return f"{key_id}:{base64.b64encode(key).decode()}\n"


def _replace(path: Path, text: str) -> None:
    """Write a file anew, whole and synced or not at all, readable by its owner alone."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)  # before anything is sealed with the new key
    finally:
        os.close(directory)
