"""Commands of an installation's operator; run them as the api's user.

python -m space.api bootstrap --key-file PATH    the first project and key
python -m space.api stop-all [--wait-s N]        stop every sandbox that has a machine, before SPACE is taken down
python -m space.api openapi                      print the API's document
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path

from space import logs
from space import settings as settings_module
from space.api.app import document
from space.api.server import bootstrap
from space.api.stopping import stop_all
from space.errors import SpaceError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m space.api")
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("bootstrap", help="make the default project and an admin key, once")
    first.add_argument("--key-file", type=Path, required=True, help="where the key is written, mode 0600")
    everything = commands.add_parser("stop-all", help="stop every sandbox that runs or is paused; disks stay")
    everything.add_argument("--wait-s", type=float, default=60, help="how long to wait for them")
    commands.add_parser("openapi", help="print the OpenAPI document")
    arguments = parser.parse_args()
    if arguments.command == "openapi":
        sys.stdout.write(json.dumps(document(), indent=1, ensure_ascii=False) + "\n")
        return 0
    logs.configure("warning")
    try:
        settings = settings_module.load()
        if arguments.command == "stop-all":
            stopped, left = asyncio.run(stop_all(settings, arguments.wait_s))
            sys.stderr.write(f"{stopped} sandboxes stopped, {left} not.\n")
            return 1 if left else 0
        key_file: Path = arguments.key_file
        made = asyncio.run(bootstrap(settings, key_file))
    except (SpaceError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stderr.write("A key was made.\n" if made else "There is a key already; nothing was changed.\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
