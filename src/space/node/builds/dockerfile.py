"""What a Dockerfile says: its stages, what each begins with, and its steps with everything put in for variables.

Pure, but fed by strangers: patterns and substitutions may take long, so this runs in a child of the node (`reader.py`).
Reading goes in two turns, because variables of an image are known only once the image is there: ``outline`` names the
images that are needed, ``evaluate`` is told what they say of themselves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from e2b_dockerfile_utils import (
    DockerfileAst,
    DockerfileInstruction,
    DockerfileSyntaxError,
    ShellLex,
    parse_dockerfile_ast,
)

from space.model.template import OURS
from space.node.builds.refusals import Refusal
from space.node.builds.stages import Config, Evaluation

DOCKERFILE_BYTES_MAX = 1024 * 1024
INSTRUCTIONS_MAX = 1024
STAGES_MAX = 64
SCRATCH = "scratch"
PLATFORM = {
    f"{where}{what}": value
    for where in ("TARGET", "BUILD")
    for what, value in (("PLATFORM", "linux/amd64"), ("OS", "linux"), ("ARCH", "amd64"), ("VARIANT", ""))
}
_NAME = re.compile(r"[a-z][a-z0-9-_.]*")


@dataclass(slots=True)
class Stage:
    """``base`` is ``{"kind": scratch | template | image | stage, "ref" | "stage"}``."""

    name: str
    base: dict[str, Any]
    line: int
    instructions: list[DockerfileInstruction] = field(default_factory=list)


@dataclass(slots=True)
class Outline:
    """The stages that the target needs, by their place in the file; the target is the last of them."""

    stages: dict[int, Stage]
    target: int
    escape: str
    args: dict[str, str]
    """What was declared before the first stage."""

    def references(self) -> dict[str, list[str]]:
        """Return what the stages begin with, or copy from, that is no stage: ``images`` and ``templates``."""
        found: dict[str, list[str]] = {"image": [], "template": []}
        for stage in self.stages.values():
            for base in (stage.base, *(source for _, source in _copies(stage, self))):
                if base["kind"] in found and base["ref"] not in found[base["kind"]]:
                    found[base["kind"]].append(base["ref"])
        return {"images": found["image"], "templates": found["template"]}


def outline(text: str, build_args: Mapping[str, str], target: str | None) -> Outline:
    """Read a Dockerfile as far as that can be without its images."""
    ast = _parse(text)
    lex = ShellLex(ast.escape_token, env=(globals_ := _Globals(build_args)).values, skip_unset_env=False)
    stages: list[Stage] = []
    for instruction in ast.instructions:
        if instruction.name == "FROM":
            stages.append(_stage(instruction, lex, stages))
        elif stages:
            stages[-1].instructions.append(instruction)
        elif instruction.name == "ARG":
            globals_.declare(instruction, lex)
        else:
            raise Refusal("dockerfile-invalid", f"{instruction.name} comes before FROM.", instruction.start_line)
    if not stages:
        raise Refusal("dockerfile-invalid", "The Dockerfile has no FROM.")
    if len(stages) > STAGES_MAX:
        raise Refusal("dockerfile-invalid", f"The Dockerfile has more than {STAGES_MAX} stages.")
    everything = Outline(dict(enumerate(stages)), len(stages) - 1, ast.escape_token, dict(globals_.declared))
    everything.target = _find_target(stages, target)
    everything.stages = {number: stages[number] for number in sorted(_needed(everything))}
    return everything


def evaluate(
    whole: Outline, configs: Mapping[str, Mapping[str, Any]], build_args: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return the stages that are needed, each ``{number, name, base, steps, config}``, the target last.

    ``configs`` has, by reference, what images and templates say of themselves.
    """
    done: dict[int, Config] = {}
    found: list[dict[str, Any]] = []
    for number in _order(whole):
        stage = whole.stages[number]
        base = stage.base
        if base["kind"] == "stage":
            config = done[base["stage"]].copy()
        else:
            config = Config.of(configs.get(base.get("ref", ""), {}))
        if config.onbuild:
            raise Refusal(
                "instruction-not-supported",
                f"{base['ref']} has ONBUILD triggers, which are not carried out.",
                stage.line,
            )
        evaluation = Evaluation(config, whole.escape, {**PLATFORM, **whole.args}, build_args)
        sources = dict(_copies(stage, whole))
        steps = [
            step
            for place, instruction in enumerate(stage.instructions)
            for step in evaluation.take(instruction, sources.get(place))
        ]
        done[number] = evaluation.config
        found.append(
            {"number": number, "name": stage.name, "base": base, "steps": steps, "config": evaluation.config.told()}
        )
    return found


class _Globals:
    """ARGs before the first FROM; they hold in FROMs, and in stages that declare them again."""

    def __init__(self, build_args: Mapping[str, str]) -> None:
        self._given = build_args
        self.declared: dict[str, str] = {}
        self.values: dict[str, str] = dict(PLATFORM)

    def declare(self, instruction: DockerfileInstruction, lex: ShellLex) -> None:
        for word in instruction.args:
            name, equals, value = word.partition("=")
            known = self._given.get(name, expand(lex, value, instruction.start_line) if equals else None)
            if known is not None:
                self.declared[name] = self.values[name] = known


def expand(lex: ShellLex, text: str, line: int) -> str:
    """Put in variables and take quotes away."""
    try:
        return lex.process_word(text)
    except ValueError as error:
        raise Refusal("dockerfile-invalid", str(error)[:500], line) from error


def _parse(text: str) -> DockerfileAst:
    if len(text) > DOCKERFILE_BYTES_MAX:
        raise Refusal("dockerfile-invalid", f"The Dockerfile is larger than {DOCKERFILE_BYTES_MAX} bytes.")
    try:
        ast = parse_dockerfile_ast(text)
    except DockerfileSyntaxError as error:
        message = re.sub(r"^Dockerfile parse error(?: on line \d+)?: ", "", str(error))[:500]
        raise Refusal("dockerfile-invalid", message[:1].upper() + message[1:] + ".", error.line) from error
    except (ValueError, RecursionError) as error:
        raise Refusal("dockerfile-invalid", str(error)[:500]) from error
    if len(ast.instructions) > INSTRUCTIONS_MAX:
        raise Refusal("dockerfile-invalid", f"The Dockerfile has more than {INSTRUCTIONS_MAX} instructions.")
    return ast


def _stage(instruction: DockerfileInstruction, lex: ShellLex, before: list[Stage]) -> Stage:
    line, words = instruction.start_line, instruction.args
    for flag in instruction.flags:
        name, _, value = flag.partition("=")
        if name != "--platform" or expand(lex, value, line) not in {"linux/amd64", "linux", "amd64"}:
            raise Refusal("instruction-not-supported", f"FROM {flag}: machines are linux/amd64.", line)
    named = len(words) == 3 and words[1].upper() == "AS"
    if len(words) != 1 and not named:
        raise Refusal("dockerfile-invalid", "FROM needs an image, and may go on with AS and a name.", line)
    name = words[2].lower() if named else ""
    if name and _NAME.fullmatch(name) is None:
        raise Refusal("dockerfile-invalid", f"{name[:100]!r} is no name for a stage.", line)
    reference = expand(lex, words[0], line)
    if not reference:
        raise Refusal("dockerfile-invalid", f"FROM {words[0]}: that is empty.", line)
    return Stage(name, _base(reference, before), line)


def _base(reference: str, before: list[Stage]) -> dict[str, Any]:
    for number, stage in reversed(list(enumerate(before))):
        if stage.name and stage.name == reference.lower():
            return {"kind": "stage", "stage": number}
    if reference == SCRATCH:
        return {"kind": SCRATCH}
    if reference.startswith(OURS):
        return {"kind": "template", "ref": reference.removeprefix(OURS)}
    return {"kind": "image", "ref": reference}


def _copies(stage: Stage, whole: Outline) -> list[tuple[int, dict[str, Any]]]:
    """Return for each COPY --from of a stage, by its place, what it copies from."""
    number = next(n for n, one in whole.stages.items() if one is stage)
    found: list[tuple[int, dict[str, Any]]] = []
    for place, instruction in enumerate(stage.instructions):
        for flag in instruction.flags if instruction.name == "COPY" else ():
            key, _, value = flag.partition("=")
            if key == "--from":
                found.append((place, _copied_from(value, number, whole, instruction.start_line)))
    return found


def _copied_from(value: str, number: int, whole: Outline, line: int) -> dict[str, Any]:
    earlier = {n: stage for n, stage in whole.stages.items() if n < number}
    for n, stage in reversed(list(earlier.items())):
        if stage.name and stage.name == value.lower():
            return {"kind": "stage", "stage": n}
    if value.isascii() and value.isdecimal():
        if int(value[:6]) not in earlier:
            raise Refusal("dockerfile-invalid", f"There is no stage {value[:20]} before this one.", line)
        return {"kind": "stage", "stage": int(value[:6])}
    if not value or value == SCRATCH:
        raise Refusal("dockerfile-invalid", "COPY --from names nothing that could be copied from.", line)
    return _base(value, [])


def _find_target(stages: list[Stage], target: str | None) -> int:
    if target is None:
        return len(stages) - 1
    for number, stage in enumerate(stages):
        if stage.name == target.lower() or target == str(number):
            return number
    raise Refusal("dockerfile-invalid", f"The Dockerfile has no stage {target[:100]!r}.")


def _needed(whole: Outline) -> set[int]:
    needed: set[int] = set()
    waiting = [whole.target]
    while waiting:
        number = waiting.pop()
        if number in needed:
            continue
        needed.add(number)
        stage = whole.stages[number]
        bases = [stage.base, *(source for _, source in _copies(stage, whole))]
        waiting += [base["stage"] for base in bases if base["kind"] == "stage"]
    return needed


def _order(whole: Outline) -> list[int]:
    """A stage only ever needs earlier ones; the target comes last because it needs all others."""
    return sorted(whole.stages)
