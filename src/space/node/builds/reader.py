"""Reads what strangers have sent with a build: contexts, Dockerfiles, lists of packages. Run as a child of the node.

    python -I -m space.node.builds.reader VERB

One JSON object on standard input asks; the answer is one on standard output, of ``emit`` a tar. What cannot be used
ends it with status 3 and ``{code, message, line}`` on standard error. The node starts it with limits of memory, time
and file size, and ends it as it likes: nothing is kept here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from e2b_dockerfile_utils import PatternMatcher

from space.node.builds import dockerfile
from space.node.builds.contexts import DIRECTORY, FILE, Context, make_plain
from space.node.builds.emission import Emission, Placing, is_tar
from space.node.builds.packages import find_packages
from space.node.builds.refusals import Refusal

REFUSED = 3
_TEXT_BYTES_MAX = 1024 * 1024


def outline(asked: dict[str, Any]) -> dict[str, Any]:
    """Make the context plain and say what the Dockerfile needs: ``{archive, images, templates}``."""
    archive = make_plain(Path(asked["upload"]), Path(asked["plain"]), asked["bytes_max"])
    text = _dockerfile(Context(archive, asked["bytes_max"]), asked)
    whole = dockerfile.outline(text, asked["build_args"], asked["target"])
    return {"archive": str(archive), **whole.references()}


def plan(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the evaluated stages, with the digests of what their steps copy from the context."""
    context = Context(Path(asked["archive"]))
    whole = dockerfile.outline(_dockerfile(context, asked), asked["build_args"], asked["target"])
    stages = dockerfile.evaluate(whole, asked["configs"], asked["build_args"])
    _ignore(context, asked["ignore"])
    for stage in stages:
        for step in stage["steps"]:
            if step["kind"] == "copy" and step["from"] is None:
                _settle(context, step)
    return {"stages": stages}


def select(asked: dict[str, Any]) -> dict[str, Any]:
    """Make an upload plain and return a ``copy`` step with what it copies: ``{archive, step}``."""
    archive = make_plain(Path(asked["upload"]), Path(asked["plain"]), asked["bytes_max"])
    step = asked["step"]
    _settle(Context(archive, asked["bytes_max"]), step)
    return {"archive": str(archive), "step": step}


def emit(asked: dict[str, Any]) -> None:
    """Write the tar that brings a step's files to their place."""
    step, placing = asked["step"], Placing.of(asked["placing"])
    emission = Emission(sys.stdout.buffer, placing)
    exclude = PatternMatcher(step["exclude"]) if step["exclude"] else None
    contexts = {archive: Context(Path(archive)) for archive, _ in asked["tops"]}
    for context in contexts.values():
        _ignore(context, asked["ignore"])
    tops = [(contexts[archive], path) for archive, path in asked["tops"]]
    directories = [context.entries[path] for context, path in tops if context.entries[path].kind == DIRECTORY]
    emission.begin(directories[0] if len(tops) == 1 and directories else None)
    for context, path in tops:
        if path in step.get("archives", ()):
            emission.add_archive(context, path)
        else:
            emission.add(context, path, exclude)
    for file in step["files"]:
        emission.add_text(file["name"], file["text"])
    emission.end()


def packages(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the packages that files of a system's own lists name."""
    return {"packages": find_packages(asked)}


def _settle(context: Context, step: dict[str, Any]) -> None:
    """Put into a step which files it copies, and their digest."""
    found: list[str] = []
    for source in step["sources"]:
        paths = context.find(source, follow=not step.get("keep_links"))
        if not paths:
            raise Refusal(
                "copy-source-missing",
                f"There is no {source[:200]!r} in the context (or .dockerignore leaves it out).",
                step.get("line"),
            )
        found += [path for path in paths if path not in found]
    try:
        exclude = PatternMatcher(step["exclude"]) if step["exclude"] else None
    except ValueError as error:
        raise Refusal("dockerfile-invalid", str(error)[:500], step.get("line")) from error
    step["sources"] = found
    step["into"] = step["into"] or len(found) > 1
    files = [path for path in found if context.entries[path].kind == FILE]
    step["directories"] = [path for path in found if context.entries[path].kind == DIRECTORY]
    step["archives"] = [path for path in files if step["unpack"] and is_tar(context, path)]
    step["digest"] = context.digest(found, exclude)


def _dockerfile(context: Context, asked: dict[str, Any]) -> str:
    text = context.read(asked["dockerfile"], _TEXT_BYTES_MAX)
    if text is None:
        raise Refusal("dockerfile-invalid", f"There is no {asked['dockerfile'][:200]} in the context.")
    return text


def _ignore(context: Context, names: list[str]) -> None:
    """Leave out what the first of these files that is there excludes."""
    for name in names:
        if (text := context.read(name, _TEXT_BYTES_MAX)) is not None:
            context.ignore(text)
            return


VERBS = {"outline": outline, "plan": plan, "select": select, "emit": emit, "packages": packages}


def main() -> None:
    try:
        answer = VERBS[sys.argv[1]](json.load(sys.stdin))
    except Refusal as refusal:
        told = {"code": refusal.code, "message": refusal.message, "line": refusal.line}
        sys.stderr.write(json.dumps(told) + "\n")
        sys.exit(REFUSED)
    if answer is not None:
        json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
