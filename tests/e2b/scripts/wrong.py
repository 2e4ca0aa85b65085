"""Calls that cannot succeed, and what each ends with; runs with whatever version of the client the interpreter has.

Prints the exceptions' names as JSON. Nothing here is of SPACE.
"""

import json
from collections.abc import Callable

from e2b import Sandbox

UNKNOWN = "sbx" + "a" * 16
NOBODYS = "e2b_" + "0" * 64


def ended(call: Callable[[], object]) -> str:
    try:
        return f"returned {call()}"
    except Exception as error:  # noqa: BLE001 - its class is what is looked at
        return type(error).__name__


paused, killed, live = (Sandbox.create(timeout=120) for _ in range(3))
paused.beta_pause() if hasattr(paused, "beta_pause") else paused.pause()
killed.kill()
calls = {
    "unknown connect": lambda: Sandbox.connect(UNKNOWN),
    "unknown kill": lambda: Sandbox.kill(UNKNOWN),
    "unknown info": lambda: Sandbox.get_info(UNKNOWN),
    "unknown timeout": lambda: Sandbox.set_timeout(UNKNOWN, 10),
    "unknown key": lambda: Sandbox.list(api_key=NOBODYS).next_items(),
    "unknown template": lambda: Sandbox.create("nothing-of-that-name"),
    "unknown user": lambda: live.commands.run("true", user="nobody-of-that-name"),
    "unknown user's file": lambda: live.files.read("x", user="nobody-of-that-name"),
    "unknown cwd": lambda: live.commands.run("true", cwd="/nowhere"),
    "unknown file": lambda: live.files.read("/nowhere"),
    "unknown directory": lambda: live.files.list("/nowhere"),
    "a directory's bytes": lambda: live.files.read("/home/user"),
    "too long": lambda: live.commands.run("sleep 30", timeout=0.3),
    "a name denied": lambda: Sandbox.create(network={"deny_out": ["a.test"]}),
    "paused running": paused.is_running,
    "paused run": lambda: paused.commands.run("true"),
    "paused file": lambda: paused.files.read("/etc/hostname"),
    "paused list": lambda: paused.files.list("/"),
    "paused watch": lambda: paused.files.watch_dir("/"),
    "killed running": killed.is_running,
    "killed kill": killed.kill,
    "killed connect": lambda: Sandbox.connect(killed.sandbox_id),
    "killed run": lambda: killed.commands.run("true"),
    "killed file": lambda: killed.files.read("/etc/hostname"),
    "killed write": lambda: killed.files.write("x", "x"),
}
try:
    seen = {name: ended(call) for name, call in calls.items()}
finally:
    paused.kill()
    live.kill()
print(json.dumps(seen))
