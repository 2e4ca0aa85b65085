"""Sessions where only a domain is known: every name below it leads to one address, found in /etc/hosts.

``domain.py session|session_async`` prints what it saw as JSON. Whoever runs this gives it a hosts file of its own. The
client may read that once, so what comes after the sandbox's name is known is another process.
"""

import asyncio
import importlib
import json
import os
import pathlib
import sys
import urllib.request
from typing import Any

from e2b import AsyncSandbox, Sandbox, Volume
from session import OPTIONS

DOMAIN = os.environ["E2B_DOMAIN"]
NAME = DOMAIN.partition(":")[0]


def lead_here(*names: str) -> None:
    with pathlib.Path("/etc/hosts").open("a") as hosts:
        hosts.writelines(f"127.0.0.1 {name}\n" for name in names)


def create(which: str) -> None:
    lead_here(f"api.{NAME}")
    made = Sandbox.create(**OPTIONS)
    lead_here(f"49983-{made.sandbox_id}.{NAME}", f"8000-{made.sandbox_id}.{NAME}")
    os.execv(sys.executable, [sys.executable, __file__, which, made.sandbox_id])


def look(sandbox: Sandbox, seen: dict[str, Any]) -> None:
    """See by which names everything is found."""
    host = sandbox.get_host(49983)
    seen["host"] = host == f"49983-{sandbox.sandbox_id}.{DOMAIN}"
    seen["url"] = sandbox.download_url("f").startswith(f"https://{host}/files?")
    sandbox.files.write("served/page", "a page")
    serving = sandbox.commands.run("python3 -u -m http.server 8000 2>&1", background=True, cwd="/home/user/served")
    next(iter(serving))
    seen["port"] = urllib.request.urlopen(f"https://{sandbox.get_host(8000)}/page").read().decode()
    serving.kill()
    volume = Volume.create(f"by-name-{sandbox.sandbox_id}")
    volume.write_file("/note", "kept")
    seen["volume"] = [volume.read_file("/note"), Volume.destroy(volume.volume_id)]


def use(which: str, sandbox_id: str) -> None:
    seen: dict[str, Any] = {}
    sandbox = Sandbox.connect(sandbox_id)
    try:
        look(sandbox, seen)
        session = importlib.import_module(which).session
        seen["session"] = session(sandbox) if which == "session" else asyncio.run(awaited(session, sandbox_id))
    finally:
        sandbox.kill()
    print(json.dumps(seen))


async def awaited(session: Any, sandbox_id: str) -> Any:
    return await session(await AsyncSandbox.connect(sandbox_id))


if len(sys.argv) > 2:
    use(*sys.argv[1:])
else:
    create(sys.argv[1])
