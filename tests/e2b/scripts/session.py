"""A session as a user of E2B writes one; runs with whatever version of the client the interpreter has.

Returns, or prints as JSON, what it saw. Nothing here is of SPACE.
"""

import importlib.metadata
import json
import urllib.error
import urllib.request

from e2b import CommandExitException, NotFoundException, PtySize, Sandbox, SandboxQuery


def session(sandbox: Sandbox) -> dict:
    """Use a new sandbox that has ``COLOR`` in its environment, and end it."""
    seen: dict = {"client": importlib.metadata.version("e2b")}
    try:
        seen["output"] = sandbox.commands.run("echo $COLOR; id -un; pwd").stdout
        try:
            sandbox.commands.run("echo to stderr >&2; exit 3")
        except CommandExitException as error:
            seen["exit"] = [error.exit_code, error.stderr]
        handle = sandbox.commands.run("sleep 60", background=True)
        seen["listed"] = handle.pid in [process.pid for process in sandbox.commands.list()]
        seen["killed"] = [handle.kill(), handle.kill()]
        seen["gone"] = sandbox.commands.run(f"kill -0 {handle.pid} 2>/dev/null || echo gone").stdout
        handle = sandbox.commands.run("read line; echo got $line", background=True, stdin=True)
        sandbox.commands.send_stdin(handle.pid, "typed\n")
        seen["stdin"] = handle.wait().stdout
        watcher = sandbox.files.watch_dir(".")
        sandbox.files.write("new.txt", "content")
        seen["events"] = [[event.type.value, event.name] for event in watcher.get_new_events()]
        watcher.stop()
        seen["read"] = sandbox.files.read("new.txt")
        seen["entries"] = [entry.path for entry in sandbox.files.list("/home/user") if entry.name == "new.txt"]
        seen["moved"] = sandbox.files.rename("new.txt", "sub/dir/moved.txt").path
        seen["made"] = [sandbox.files.make_dir("made"), sandbox.files.make_dir("made"), sandbox.files.exists("made")]
        sandbox.files.remove("made")
        try:
            sandbox.files.read("made/nothing")
        except NotFoundException:
            seen["missing"] = True
        seen["signed"] = urllib.request.urlopen(sandbox.download_url("sub/dir/moved.txt")).read().decode()
        try:
            urllib.request.urlopen(sandbox.download_url("sub/dir/moved.txt", use_signature_expiration=-10))
        except urllib.error.HTTPError as error:
            seen["expired"] = [error.code, json.loads(error.read())]
        terminal, screen = sandbox.pty.create(PtySize(rows=30, cols=90)), []
        sandbox.pty.send_stdin(terminal.pid, b"stty size; exit\n")
        terminal.wait(on_pty=screen.append)
        seen["terminal"] = b"30 90" in b"".join(screen)
        query = SandboxQuery(metadata={"a b": "c&d"})
        found = Sandbox.list(query=query).next_items()
        seen["found"] = [one.sandbox_id for one in found].count(sandbox.sandbox_id)
        sandbox.commands.run("sleep 600", background=True)
        sandbox.beta_pause() if hasattr(sandbox, "beta_pause") else sandbox.pause()
        seen["paused"] = sandbox.is_running()
        sandbox.connect()
        seen["resumed"] = sandbox.commands.run("pgrep -c sleep").stdout
        handle = sandbox.commands.run("sleep 60", background=True)
    finally:
        seen["end"] = [sandbox.kill(), sandbox.kill(), sandbox.is_running()]
    try:
        handle.wait()
    except Exception as error:  # noqa: BLE001 - its class and words are what is looked at
        seen["cut"] = [type(error).__name__, str(error)]
    return seen


OPTIONS = {"timeout": 120, "metadata": {"a b": "c&d"}, "envs": {"COLOR": "blue"}}
if __name__ == "__main__":
    print(json.dumps(session(Sandbox.create(**OPTIONS))))
