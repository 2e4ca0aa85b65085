"""Uploads: what a build reads comes in pieces, each behind the one before, so that a lost connection costs little."""

import contextlib
from datetime import timedelta

import structlog
from sqlalchemy import Connection

from space.control import once
from space.control.control import Control
from space.control.once import Once
from space.errors import Conflict, InvalidRequest, LimitExceeded, NotFound, SpaceError
from space.model.ids import is_id, new_id
from space.model.upload import Upload
from space.store import projects, uploads

log = structlog.get_logger(__name__)

UPLOADS_MAX = 64
"""Of one project."""
KEPT = timedelta(hours=24)
"""After the last piece."""
DROPPED_AT_ONCE = 50
MIB = 1024 * 1024


async def request_upload(control: Control, project_id: str, size: int, asked_once: Once | None = None) -> Upload:
    """Make room for ``size`` bytes. Raises ``LimitExceeded`` when that is more than there may be."""
    settings, now = control.settings, control.now()
    if size > settings.upload_mib_max * MIB:
        raise InvalidRequest(
            f"size: An upload may have at most {settings.upload_mib_max} MiB here.",
            code="upload-too-large",
            field="size",
            limit_bytes=settings.upload_mib_max * MIB,
        )
    upload = Upload(new_id("upl"), project_id, size, created_at=now, expires_at=now + KEPT)

    def record(connection: Connection) -> Upload:
        earlier = once.first(connection, asked_once, project_id, subject_id=upload.id, now=now)
        if earlier is not None:
            return owned(uploads.get(connection, earlier.subject_id), project_id)
        projects.lock(connection, project_id)
        count, taken = uploads.taken(connection, project_id)
        most = settings.project_uploads_mib_max * MIB
        if count >= UPLOADS_MAX or taken + size > most:
            raise LimitExceeded(
                f"A project may have {UPLOADS_MAX} uploads, of {settings.project_uploads_mib_max} MiB together. Delete "
                "one first.",
                code="uploads-max",
                limit=UPLOADS_MAX,
                limit_bytes=most,
                used_bytes=taken,
            )
        uploads.add(connection, upload)
        return upload

    return await control.store.write(record)


async def request_upload_of_files(control: Control, project_id: str, size: int) -> Upload:
    """As ``request_upload``; where there is no room, files that were used longest ago and can come again go first."""
    for _ in range(UPLOADS_MAX):
        try:
            return await request_upload(control, project_id, size)
        except LimitExceeded:
            unused = await control.store.read(lambda connection: uploads.longest_unused(connection, project_id))
            if unused is None:
                raise
            with contextlib.suppress(NotFound):  # Another who needs room has just deleted it.
                await delete(control, project_id, unused)
    return await request_upload(control, project_id, size)


async def keep_files(control: Control, upload: Upload, files_hash: str) -> None:
    """Note what files an upload, all of which has come, has in it; it takes the place of earlier ones."""

    def record(connection: Connection) -> None:
        for earlier in uploads.of_files(connection, upload.project_id, files_hash):
            uploads.change(connection, earlier.id, deleted=True)
        uploads.change(connection, upload.id, files_hash=files_hash)

    await control.store.write(record)


async def of_files(control: Control, project_id: str, files_hash: str) -> Upload | None:
    """Return the project's upload of those files, kept for another day from now; None when it is to come again."""
    found = await control.store.read(lambda connection: uploads.of_files(connection, project_id, files_hash))
    if not found or await control.node.upload_bytes(found[0].id) != found[0].size:
        return None
    upload, expires_at = found[0], control.now() + KEPT
    await control.store.write(lambda connection: uploads.change(connection, upload.id, expires_at=expires_at))
    return upload


async def get(control: Control, project_id: str, upload_id: str) -> tuple[Upload, int]:
    """Return one of the project's uploads and how much of it has come, or raise ``NotFound``."""
    found = await _get(control, project_id, upload_id)
    return found, await control.node.upload_bytes(upload_id)


async def admit_piece(control: Control, project_id: str, upload_id: str, offset: int, length: int) -> Upload:
    """Let a piece come; it may not go beyond what was announced. Raises ``NotFound`` or ``InvalidRequest``."""
    found = await _get(control, project_id, upload_id)
    if offset + length > found.size:
        raise InvalidRequest(
            f"The upload was announced with {found.size} bytes, and this would be {offset + length}.",
            code="upload-too-large",
            field="content-length",
            limit_bytes=found.size,
        )
    expires_at = control.now() + KEPT
    await control.store.write(lambda connection: uploads.change(connection, upload_id, expires_at=expires_at))
    return found


async def delete(control: Control, project_id: str, upload_id: str) -> None:
    """Let an upload go once no build reads it. Raises ``NotFound``."""

    def record(connection: Connection) -> None:
        owned(uploads.get(connection, upload_id, lock=True), project_id)
        uploads.change(connection, upload_id, deleted=True)

    if not is_id("upl", upload_id):
        raise not_found()
    await control.store.write(record)
    await drop_unwanted(control)


async def drop_unwanted(control: Control) -> None:
    """Have the node drop what is deleted or expired and read by no build. What fails comes again."""
    now = control.now()
    for unwanted in await control.store.write(lambda connection: uploads.unwanted(connection, now, DROPPED_AT_ONCE)):
        try:
            await control.node.drop_upload(unwanted)
        except SpaceError as error:
            log.warning("upload-not-dropped", upload=unwanted, code=error.code)
            continue
        await control.store.write(lambda connection, gone=unwanted: uploads.remove(connection, gone))


async def check_whole(control: Control, project_id: str, upload_id: str) -> None:
    """Raise when a build cannot read an upload: ``InvalidRequest`` if there is none, ``Conflict`` if not all came."""
    found = await control.store.read(lambda connection: usable(connection, project_id, upload_id))
    came = await control.node.upload_bytes(upload_id)
    if came != found.size:
        raise Conflict(
            f"The upload is not whole: {came} of its {found.size} bytes have come.",
            code="upload-incomplete",
            upload=upload_id,
            bytes=came,
            size=found.size,
        )


def usable(connection: Connection, project_id: str, upload_id: str) -> Upload:
    """Return an upload that a build can read, locked where the transaction writes; else raise ``InvalidRequest``."""
    found = uploads.get(connection, upload_id, lock=True) if is_id("upl", upload_id) else None
    if found is None or found.project_id != project_id or found.deleted:
        raise InvalidRequest("There is no such upload.", code="unknown-upload", field="upload")
    return found


def owned(found: Upload | None, project_id: str) -> Upload:
    if found is None or found.project_id != project_id or found.deleted:
        raise not_found()
    return found


def not_found() -> NotFound:
    return NotFound("There is no such upload.")


async def _get(control: Control, project_id: str, upload_id: str) -> Upload:
    found = None
    if is_id("upl", upload_id):
        found = await control.store.read(lambda connection: uploads.get(connection, upload_id))
    return owned(found, project_id)
