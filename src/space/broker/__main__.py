"""Commands of root for one installation: ``python -m space.broker import-template | templates | unmount``.

They work on the same directories as the broker, so they may run before it does; `unmount` wants it stopped.
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path

from space import logs
from space.broker import setup
from space.broker.defaults import Defaults
from space.errors import SpaceError
from space.settings import load


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m space.broker")
    verbs = parser.add_subparsers(dest="verb", required=True)
    adding = verbs.add_parser(
        "import-template", help="make a template from a tar archive or a directory; prints its digest"
    )
    adding.add_argument("source", type=Path)
    adding.add_argument("--name", required=True)
    adding.add_argument("--tag", default="latest")
    adding.add_argument("--defaults", type=Path, help="JSON file with env, workdir, user and the other defaults")
    verbs.add_parser("templates", help="list the templates as JSON")
    verbs.add_parser(
        "unmount", help="end all machines, remove links, cgroups and rules, unmount the disk store; disks stay"
    )
    arguments = parser.parse_args()
    logs.configure("warning")
    try:
        asyncio.run(_carry_out(arguments))
    except SpaceError as error:
        sys.exit(f"{error.message} ({error.code})")


async def _carry_out(arguments: argparse.Namespace) -> None:
    settings = load()
    match arguments.verb:
        case "import-template":
            defaults = (
                Defaults.model_validate_json(arguments.defaults.read_bytes()) if arguments.defaults else Defaults()
            )
            template = await setup.import_template(settings, arguments.source, arguments.name, arguments.tag, defaults)
            _print(template.digest)
        case "templates":
            found = await setup.list_templates(settings)
            _print(json.dumps([one.model_dump(exclude={"imported_at"}, exclude_none=True) for one in found], indent=2))
        case _:
            await setup.unmount(settings)


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    main()
