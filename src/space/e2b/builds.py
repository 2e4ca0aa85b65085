"""E2B's builds of templates on ours: asked for by name, then begun with their steps, then looked at until they end."""

from collections import deque
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

from space.control import asked_builds, buildlog, builds, templates
from space.control.builds import NewBuild
from space.control.creation import check_resources
from space.e2b import build_ids, contexts, logs, shapes
from space.e2b import query as queries
from space.e2b.bodies import read
from space.e2b.build_bodies import AwsRegistry, BuildStart, GcpRegistry, GeneralRegistry, NewTemplate
from space.e2b.call import Call
from space.e2b.network import INTERNET
from space.e2b.steps import BASE, SHELL, Steps, command_of, user_of
from space.e2b.templates import DEFAULT, found_by_name, split
from space.errors import InvalidRequest, NotFound
from space.model.build import AskedBuild, Build, BuildState
from space.model.sandbox import Failure, Resources
from space.model.template import OURS, TAG_DEFAULT

ENTRY_S = 150
LOGS_MAX = 100
STATUS = {
    BuildState.PENDING: "building",
    BuildState.RUNNING: "building",
    BuildState.SUCCEEDED: "ready",
    BuildState.FAILED: "error",
    BuildState.CANCELLED: "error",
}
NOTHING = ["/bin/true"]
ENTRY_FAILED = "entry-failed"


async def request(call: Call) -> None:
    """Promise a build an id, which is all that happens."""
    body = await read(call, NewTemplate)
    name, tags = _names(body)
    resources = _resources(call, body)
    # What a name alone means is `default` to E2B's clients, and `latest` to everybody else.
    ours = [*tags, *([TAG_DEFAULT] if tags == [DEFAULT] else [])]
    asked = await asked_builds.ask(call.control, call.project_id, name, ours, resources)
    told = {
        "templateID": name,
        "buildID": build_ids.shown(asked.id),
        "public": False,
        "names": [name],
        "aliases": [name],
        "tags": tags,
    }
    await call.answer(told, 202)


async def start(call: Call) -> None:
    """Begin a build that was promised."""
    asked, body = await _asked(call), await read(call, BuildStart)
    source, auth, user = await _source(call, body)
    hashes = {step.filesHash for step in body.steps if step.type == "COPY" and step.filesHash is not None}
    steps = Steps(user, await contexts.of_steps(call.control, call.project_id, hashes))
    if source["kind"] == "image":
        steps.prepare_image()
    steps.take(body.steps)
    wanted = NewBuild(
        id=asked.id,
        name=asked.name,
        tag=asked.tags[0],
        more_tags=tuple(asked.tags[1:]),
        source=source,
        auth=auth,
        rest={
            "shell": SHELL,
            "steps": steps.ours,
            "no_cache": bool(body.force) or any(step.force for step in body.steps),
            "defaults": {"resources": asked.resources, **_entry(body)},
        },
        policy=INTERNET,
    )
    await builds.request_build(call.control, call.project_id, wanted)
    # Behind it: they are those of the one that has begun, and of none that was refused because it has.
    await asked_builds.note_numbers(call.control, asked.id, steps.numbers)
    await call.answer_empty(202)


async def status(call: Call) -> None:
    """How far a build is, and its log from an entry on."""
    asked = await _asked(call)
    offset, limit = queries.number(call.query, "logsOffset") or 0, queries.limit(call.query, LOGS_MAX, least=0)
    levels = logs.levels_of(call.query)
    told: dict[str, Any] = {
        "templateID": asked.name,
        "buildID": build_ids.shown(asked.id),
        "status": "waiting",
        "logs": [],
        "logEntries": [],
    }
    try:
        build = await builds.get(call.control, call.project_id, asked.id)
    except NotFound:
        await call.answer(told)
        return
    told |= {"status": STATUS[build.state], "logEntries": await _log(call, build, (offset, limit), levels)}
    if STATUS[build.state] == "error":
        told["reason"] = _reason(build, asked)
    await call.answer(told)


async def log(call: Call) -> None:
    """The log of a build from ``cursor`` on, or the newest of it, the newest first."""
    asked, query = await _asked(call), call.query
    cursor, back, levels = logs.cursor_ms(query, "cursor"), logs.backwards(query), logs.levels_of(query)
    limit = queries.limit(query, LOGS_MAX, least=0)
    # Forwards those that are met first are kept, backwards those that are met last.
    kept: deque[dict[str, Any]] = deque(maxlen=limit if back else None)
    try:
        build = await builds.get(call.control, call.project_id, asked.id)
    except NotFound:
        await call.answer({"logs": []})
        return
    async with aclosing(buildlog.read(call.control, build, 0, follow=False)) as lines:
        async for line in lines:
            if not back and len(kept) >= limit:
                break
            if line is None or line["type"] != "log":
                continue
            ms, entry = _at(line) * 1000, _logged(line)
            if cursor is not None and (ms > cursor if back else ms < cursor):
                continue
            if entry["level"] in levels:
                kept.append(entry)
    await call.answer({"logs": list(reversed(kept)) if back else list(kept)})


async def _asked(call: Call) -> AskedBuild:
    asked = await asked_builds.get(call.control, call.project_id, build_ids.of(call.params["build"]))
    if asked.name != call.params["template"]:
        raise NotFound("There is no such build.")
    return asked


def _names(body: NewTemplate) -> tuple[str, list[str]]:
    """Return the name, and the tags as E2B's clients know them: those that are named, or `default`."""
    name, tag = split(body.name)
    tags = list(dict.fromkeys([*body.tags] if tag is None else [tag, *body.tags]))
    return name, tags or [DEFAULT]


def _resources(call: Call, body: NewTemplate) -> dict[str, Any]:
    """Return what sandboxes of the template get; raise for more than one may have here."""
    named: dict[str, Any] = {}
    if body.cpuCount is not None:
        named["cpus"] = float(body.cpuCount)
    if body.memoryMB is not None:
        named["memory_mib"] = body.memoryMB
    if body.minFreeDiskMb:
        # Best effort, as with E2B.
        named["disk_mib"] = min(max(Resources().disk_mib, body.minFreeDiskMb), call.control.settings.disk_mib_max)
    check_resources(call.control, Resources(**named))
    return named


async def _source(call: Call, body: BuildStart) -> tuple[dict[str, Any], dict[str, Any] | None, str]:
    """Return what a build begins with, the credentials for its registry, and who runs its first step."""
    if (body.fromImage is None) == (body.fromTemplate is None):
        raise InvalidRequest("A build needs one of fromImage and fromTemplate.")
    name = body.fromTemplate
    if body.fromImage is not None and body.fromImage.startswith(OURS):
        name = body.fromImage.removeprefix(OURS)
    elif body.fromImage is not None:
        name = call.control.settings.e2b_images.get(body.fromImage.removesuffix(":latest"))
    if name is None:
        return {"kind": "image", "reference": body.fromImage}, _auth(body), ""
    reference = await found_by_name(call.control, call.project_id, name)
    if reference is None:
        raise InvalidRequest(f"There is no template {name!r} to begin with.", field="fromTemplate")
    found = await templates.resolve(call.control, call.project_id, reference)
    return {"kind": "template", "template": reference}, None, str(found.defaults.get("user") or "")


def _auth(body: BuildStart) -> dict[str, Any] | None:
    match body.fromImageRegistry:
        case GeneralRegistry() as given:
            return {"username": given.username, "password": given.password}
        case GcpRegistry() as given:
            # How Google's registries take the key of a service account.
            return {"username": "_json_key", "password": given.serviceAccountJson}
        case AwsRegistry():
            raise InvalidRequest(
                "fromImageRegistry: Nobody signs in to AWS here. Give the user name AWS, and the password that "
                "`aws ecr get-login-password` prints.",
                field="fromImageRegistry",
            )
        case None:
            return None


def _entry(body: BuildStart) -> dict[str, Any]:
    """Return what runs in every sandbox of the template, where something is to."""
    if not body.startCmd and not body.readyCmd:
        return {}
    entry: dict[str, Any] = {"start": [*SHELL, body.startCmd] if body.startCmd else NOTHING, "timeout_s": ENTRY_S}
    if body.readyCmd:
        entry["ready"] = [*SHELL, body.readyCmd]
    return {"entry": entry}


async def _log(call: Call, build: Build, part: tuple[int, int], levels: frozenset[str]) -> list[dict[str, Any]]:
    """Return entries of the log, of those that are of these levels."""
    offset, limit = part
    entries: list[dict[str, Any]] = []
    # Every line is of the level info or above.
    every = "info" in levels
    skip = 0 if every else offset
    async with aclosing(buildlog.read(call.control, build, offset if every else 0, follow=False)) as lines:
        async for line in lines:
            if len(entries) >= limit:
                break
            if line is None or line["type"] != "log":
                continue
            entry = _logged(line)
            if entry["level"] not in levels:
                continue
            if skip:
                skip -= 1
                continue
            entries.append(entry)
    return entries


def _at(line: dict[str, Any]) -> float:
    return line["at"] if isinstance(line["at"], int | float) else 0


def _logged(line: dict[str, Any]) -> dict[str, Any]:
    return {
        "timestamp": shapes.time(datetime.fromtimestamp(_at(line), UTC)),
        "message": line["text"],
        "level": "warn" if line["stream"] == "stderr" else "info",
    }


def _reason(build: Build, asked: AskedBuild) -> dict[str, Any]:
    """Return why a build has failed, and at which of the client's steps."""
    failure = build.failure
    if failure is None:
        return {"message": "The build was cancelled."}
    at = failure.details.get("asked")
    if isinstance(at, int) and 0 <= at < len(asked.numbers):
        step = "base" if asked.numbers[at] == BASE else str(asked.numbers[at])
        return {"message": _message(build, failure, at), "step": step}
    early = (build.step or 0) <= 1 and failure.code != ENTRY_FAILED
    return {"message": failure.message, "step": "base" if early else "finalize"}


def _message(build: Build, failure: Failure, at: int) -> str:
    """Return a failure in the words of E2B, where a command did not run or did not succeed."""
    steps = build.spec["steps"]
    command, user = command_of(steps, at), user_of(steps, at)
    if command is None:
        return failure.message
    said = f"failed to run command '{command}'"
    if user is not None and failure.details.get("field") == "user":
        return f"{said}: command failed: unauthenticated: invalid username: '{user}'"
    ended: Any = failure.details.get("exit")
    if isinstance(ended, dict) and ended.get("kind") == "exited":
        return f"{said}: exit status {ended.get('code')}"
    return f"{said}: {failure.message}"
