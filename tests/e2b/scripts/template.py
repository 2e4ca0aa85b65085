"""A template built as a user of E2B builds one; runs with whatever version of the client the interpreter has.

Arguments: what to begin with, and the new one's name. Prints what it saw as JSON. Nothing here is of SPACE.
"""

import json
import sys
from pathlib import Path

from e2b import BuildException, Sandbox, Template

base, name = sys.argv[1:]
seen: dict = {}
log: list[str] = []
template = (
    Template(file_context_path=Path.cwd())
    .from_template(base)
    .copy("folder", "copied")
    .run_cmd(f"echo {name} by $(id -un)")
)
Template.build(template, alias=name, on_build_logs=lambda entry: log.append(entry.message))
seen["exists"] = [Template.alias_exists(name), Template.alias_exists(f"{name}-not")]
sandbox = Sandbox.create(name, timeout=60)
seen["seen"] = sandbox.commands.run("cat copied/a.txt; stat -c %U copied/a.txt").stdout
sandbox.kill()
seen["logged"] = f"{name} by user" in log
try:
    Template.build(template.run_cmd("exit 4"), alias=name)
except BuildException as error:
    seen["failed"] = str(error)
seen["deleted"] = [Sandbox.delete_snapshot(name), Sandbox.delete_snapshot(name)]
print(json.dumps(seen))
