"""``python -m space.api bootstrap --key-file PATH``: the first project and key. Run it as the user of the api."""

import argparse
import asyncio
import sys
from pathlib import Path

from space import settings as settings_module
from space.api.server import bootstrap
from space.errors import SpaceError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m space.api")
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("bootstrap", help="make the default project and an admin key, once")
    first.add_argument("--key-file", type=Path, required=True, help="where the key is written, mode 0600")
    key_file: Path = parser.parse_args().key_file
    try:
        made = asyncio.run(bootstrap(settings_module.load(), key_file))
    except (SpaceError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stderr.write("A key was made.\n" if made else "There is a key already; nothing was changed.\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
