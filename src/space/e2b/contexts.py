"""The files of E2B's builds: each COPY step's archive, known by a hash, is sent to a URL that is good for it alone."""

import asyncio
import re
import time
from collections.abc import AsyncIterator

from space.control import asked_builds, uploads
from space.control.control import Control
from space.control.peers import answer_of
from space.e2b.call import Call, ClientGone
from space.e2b.uploads import in_pieces
from space.errors import InvalidRequest, NotFound, RequestError, SpaceError
from space.model.upload import Upload

URL_S = 3600
"""How long a URL is good for."""
UPLOAD_S = 3600.0
_HASH = re.compile("[0-9a-f]{64}")
_HOST = re.compile(r"[A-Za-z0-9.:\[\]_-]{1,255}")


async def link(call: Call) -> None:
    """Say whether the files are here, and where they may be sent."""
    name, files_hash = call.params["template"], call.params["hash"]
    if _HASH.fullmatch(files_hash) is None:
        raise InvalidRequest("The hash of files must be 64 hexadecimal digits, lower case.")
    if not await asked_builds.has_name(call.control, call.project_id, name):
        raise NotFound(f"Template {name[:200]} not found")
    found = await uploads.of_files(call.control, call.project_id, files_hash)
    token = call.parts.tokens.upload(call.key_id, files_hash, int(time.time()) + URL_S)
    await call.answer({"present": found is not None, "url": f"{_origin(call)}/templates/files/{token}"}, 201)


async def receive(call: Call) -> None:
    """Take an archive; without an API key, as the URL says whose it is."""
    key_id, files_hash = call.parts.tokens.check_upload(call.params["token"])
    key = await call.control.keyring.unrevoked(key_id)
    length = call.headers.get("content-length", "")
    if not (length.isascii() and length.isdigit() and len(length) <= 15):
        raise InvalidRequest("An upload needs its Content-Length.")
    upload = await uploads.request_upload_of_files(call.control, key.project_id, int(length))
    try:
        async with asyncio.timeout(UPLOAD_S):
            await _store(call, upload)
    except BaseException as error:
        await uploads.delete(call.control, upload.project_id, upload.id)
        if isinstance(error, TimeoutError):
            raise RequestError("The upload did not come in time.", code="body-timeout") from error
        raise
    await uploads.keep_files(call.control, upload, files_hash)
    await call.answer_empty(200)


async def of_steps(control: Control, project_id: str, hashes: set[str]) -> dict[str, str]:
    """Return the ids of the uploads of these hashes, or raise ``InvalidRequest`` when one is not here."""
    found: dict[str, str] = {}
    for files_hash in sorted(hashes):
        upload = await uploads.of_files(control, project_id, files_hash)
        if upload is None:
            raise InvalidRequest(f"steps: The files of hash {files_hash} were not uploaded.", field="steps")
        found[files_hash] = upload.id
    return found


async def _store(call: Call, upload: Upload) -> None:
    """Pass the body on to the node, which must have all of it then."""
    broke: list[Exception] = []

    async def pieces() -> AsyncIterator[bytes]:
        try:
            async for piece in in_pieces(call.chunks()):
                yield piece
        except (SpaceError, ClientGone) as error:
            broke.append(error)
            raise

    try:
        headers = {"content-length": str(upload.size)}
        async with call.control.node.pass_on("PUT", f"/uploads/{upload.id}?offset=0", headers, pieces()) as response:
            answer = await answer_of(call.control.node, response)
    except SpaceError as error:
        raise (broke[0] if broke else error) from error
    if answer["bytes"] != upload.size:
        raise InvalidRequest(f"The upload has not the {upload.size} bytes that its Content-Length says.")


def _origin(call: Call) -> str:
    """Return the origin that the client has asked, as it may have many names."""
    host, domain = call.headers.get("host", ""), call.control.settings.e2b_domain
    if _HOST.fullmatch(host) is None:
        raise InvalidRequest("The request names no host.")
    # Where there is a domain its clients speak TLS, whoever ends that.
    by_domain = domain is not None and host.endswith(f".{domain}")
    return f"{'https' if by_domain else call.scope['scheme']}://{host}"
