"""The session of ``session.py`` without blocking: this client watches by a stream."""

import asyncio
import importlib.metadata
import json
import urllib.error
import urllib.request

from e2b import AsyncSandbox, CommandExitException, NotFoundException, PtySize, SandboxQuery
from session import OPTIONS

EVENTS_S = 20


async def session(sandbox: AsyncSandbox) -> dict:
    """Use a new sandbox that has ``COLOR`` in its environment, and end it."""
    seen: dict = {"client": importlib.metadata.version("e2b")}
    try:
        await _commands(sandbox, seen)
        await _files(sandbox, seen)
        await _life(sandbox, seen)
        handle = await sandbox.commands.run("sleep 60", background=True)
    finally:
        seen["end"] = [await sandbox.kill(), await sandbox.kill(), await sandbox.is_running()]
    try:
        await handle.wait()
    except Exception as error:  # noqa: BLE001 - its class and words are what is looked at
        seen["cut"] = [type(error).__name__, str(error)]
    return seen


async def _commands(sandbox: AsyncSandbox, seen: dict) -> None:
    commands = sandbox.commands
    seen["output"] = (await commands.run("echo $COLOR; id -un; pwd")).stdout
    try:
        await commands.run("echo to stderr >&2; exit 3")
    except CommandExitException as error:
        seen["exit"] = [error.exit_code, error.stderr]
    handle = await commands.run("sleep 60", background=True)
    seen["listed"] = handle.pid in [process.pid for process in await commands.list()]
    seen["killed"] = [await handle.kill(), await handle.kill()]
    seen["gone"] = (await commands.run(f"kill -0 {handle.pid} 2>/dev/null || echo gone")).stdout
    handle = await commands.run("read line; echo got $line", background=True, stdin=True)
    await commands.send_stdin(handle.pid, "typed\n")
    seen["stdin"] = (await handle.wait()).stdout
    screen: list[bytes] = []
    terminal = await sandbox.pty.create(PtySize(rows=30, cols=90), on_data=screen.append)
    await sandbox.pty.send_stdin(terminal.pid, b"stty size; exit\n")
    await terminal.wait()
    seen["terminal"] = b"30 90" in b"".join(screen)


async def _files(sandbox: AsyncSandbox, seen: dict) -> None:
    files, events = sandbox.files, asyncio.Queue()
    watcher = await files.watch_dir(".", on_event=events.put_nowait)
    await files.write("new.txt", "content")
    told = [await asyncio.wait_for(events.get(), EVENTS_S) for _ in range(3)]
    seen["events"] = [[event.type.value, event.name] for event in told]
    await watcher.stop()
    seen["read"] = await files.read("new.txt")
    seen["entries"] = [entry.path for entry in await files.list("/home/user") if entry.name == "new.txt"]
    seen["moved"] = (await files.rename("new.txt", "sub/dir/moved.txt")).path
    seen["made"] = [await files.make_dir("made"), await files.make_dir("made"), await files.exists("made")]
    await files.remove("made")
    try:
        await files.read("made/nothing")
    except NotFoundException:
        seen["missing"] = True
    url = sandbox.download_url("sub/dir/moved.txt")
    seen["signed"] = (await asyncio.to_thread(urllib.request.urlopen, url)).read().decode()
    try:
        late = sandbox.download_url("sub/dir/moved.txt", use_signature_expiration=-10)
        await asyncio.to_thread(urllib.request.urlopen, late)
    except urllib.error.HTTPError as error:
        seen["expired"] = [error.code, json.loads(error.read())]


async def _life(sandbox: AsyncSandbox, seen: dict) -> None:
    query = SandboxQuery(metadata={"a b": "c&d"})
    found = await AsyncSandbox.list(query=query).next_items()
    seen["found"] = [one.sandbox_id for one in found].count(sandbox.sandbox_id)
    await sandbox.commands.run("sleep 600", background=True)
    await (sandbox.beta_pause() if hasattr(sandbox, "beta_pause") else sandbox.pause())
    seen["paused"] = await sandbox.is_running()
    await sandbox.connect()
    seen["resumed"] = (await sandbox.commands.run("pgrep -c sleep")).stdout


async def main() -> None:
    print(json.dumps(await session(await AsyncSandbox.create(**OPTIONS))))


if __name__ == "__main__":
    asyncio.run(main())
