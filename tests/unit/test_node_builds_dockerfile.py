"""What a Dockerfile is taken to say."""

import contextlib
from typing import Any

import pytest

from space.node.builds import dockerfile
from space.node.builds.refusals import Refusal
from space.node.builds.stages import Config

BASE = {"env": {"PATH": "/bin", "HOME": "/h"}, "workdir": "/w", "user": "u", "labels": {"a": "1"}, "ports": ["80/tcp"]}


def evaluate(text: str, args: dict[str, str] | None = None, target: str | None = None) -> list[dict[str, Any]]:
    """The stages, each image and template saying ``BASE`` of itself."""
    whole = dockerfile.outline(text, args or {}, target)
    references = whole.references()
    configs = dict.fromkeys([*references["images"], *references["templates"]], BASE)
    return dockerfile.evaluate(whole, configs, args or {})


def last(text: str, args: dict[str, str] | None = None) -> dict[str, Any]:
    return evaluate(text, args)[-1]


def steps(text: str, args: dict[str, str] | None = None) -> list[dict[str, Any]]:
    return last(text, args)["steps"]


def refused(text: str, args: dict[str, str] | None = None, target: str | None = None) -> tuple[str, int | None]:
    with pytest.raises(Refusal) as caught:
        evaluate(text, args, target)
    return caught.value.code, caught.value.line


# --- stages


def test_a_stage_goes_on_with_what_its_image_says() -> None:
    config = last("FROM x\n")["config"]
    assert (config["env"], config["workdir"], config["user"]) == (BASE["env"], "/w", "u")
    assert (config["labels"], config["ports"]) == ({"a": "1"}, [80])


def test_a_stage_upon_a_stage_goes_on_with_that_ones_configuration() -> None:
    stages = evaluate("FROM x AS one\nENV A=1\nUSER v\nFROM one\nRUN true\n")
    assert stages[-1]["base"] == {"kind": "stage", "stage": 0}
    assert stages[-1]["steps"][0]["env"]["A"] == "1"
    assert stages[-1]["steps"][0]["user"] == "v"


def test_only_the_stages_that_the_target_needs_are_there() -> None:
    text = "FROM a AS one\nFROM b AS two\nFROM c AS three\nCOPY --from=one /x /\nFROM d AS four\n"
    assert [stage["number"] for stage in evaluate(text, target="three")] == [0, 2]
    assert [stage["number"] for stage in evaluate(text, target="THREE")] == [0, 2]
    assert [stage["number"] for stage in evaluate(text, target="1")] == [1]
    assert dockerfile.outline(text, {}, "three").references()["images"] == ["a", "c"]


def test_what_is_copied_from_may_be_a_stage_a_number_an_image_or_one_of_ours() -> None:
    text = "FROM a AS one\nFROM b\nCOPY --from=one x /\nCOPY --from=0 x /\nCOPY --from=r.example/c x /\nCOPY --from=space:t x /\n"
    assert [step["from"] for step in steps(text)] == [
        {"kind": "stage", "stage": 0},
        {"kind": "stage", "stage": 0},
        {"kind": "image", "ref": "r.example/c"},
        {"kind": "template", "ref": "t"},
    ]
    assert dockerfile.outline(text, {}, None).references() == {"images": ["a", "b", "r.example/c"], "templates": ["t"]}


def test_arguments_before_the_first_stage_hold_in_from_and_where_they_are_declared_again() -> None:
    text = "ARG V=1\nARG N=x\nFROM $N:${V} AS s\nRUN a\nARG V\nRUN b\n"
    stage = last(text, {"V": "2"})
    assert stage["base"] == {"kind": "image", "ref": "x:2"}
    first, second = stage["steps"]
    assert "V" not in first["env"]
    assert second["env"]["V"] == "2"
    assert "N" not in second["env"]


# --- variables


def test_variables_are_put_in_where_docker_does_and_left_to_the_shell_elsewhere() -> None:
    text = """FROM x
ENV A=one B="two words" C=${A:-no}-${NONE:-default}
ENV A=changed OLD=$A
WORKDIR /$A
COPY $C /to/${B}/
RUN echo $A
LABEL l=$A
EXPOSE $PORT 81-83/udp
USER ${NOBODY:-me}
"""
    stage = last(text.replace("EXPOSE $PORT", "ENV PORT=90\nEXPOSE $PORT"))
    env = stage["config"]["env"]
    assert (env["B"], env["C"], env["A"], env["OLD"]) == ("two words", "no-default", "changed", "one")
    workdir, copy, run = stage["steps"]
    assert workdir["path"] == "/changed"
    assert (copy["sources"], copy["to"], copy["into"]) == (["no-default"], "/to/two words", True)
    assert run["argv"] == ["/bin/sh", "-c", "echo $A"]
    assert stage["config"]["labels"]["l"] == "changed"
    assert stage["config"]["ports"] == [80, 81, 82, 83, 90]
    assert stage["config"]["user"] == "me"


def test_an_environment_variable_wins_over_an_argument_of_its_name() -> None:
    (run,) = steps("FROM x\nARG A=arg\nENV A=env\nRUN true\n", {"A": "given"})
    assert run["env"]["A"] == "env"


def test_a_default_holds_unless_another_value_is_given() -> None:
    text = "FROM x\nARG A=default\nARG B\nRUN true\n"
    assert steps(text)[0]["env"]["A"] == "default"
    assert "B" not in steps(text)[0]["env"]
    given = steps(text, {"A": "1", "B": "2", "C": "3", "HTTP_PROXY": "p"})[0]["env"]
    assert (given["A"], given["B"], given["HTTP_PROXY"]) == ("1", "2", "p")
    assert "C" not in given, "not declared"


def test_archives_and_caches_are_told_one_time_unless_another_is_given() -> None:
    text = "FROM x\nRUN true\n"
    assert steps(text)[0]["env"]["SOURCE_DATE_EPOCH"] == "315532800"
    assert steps(text, {"SOURCE_DATE_EPOCH": "7"})[0]["env"]["SOURCE_DATE_EPOCH"] == "7"


def test_the_machine_is_known_by_the_usual_names() -> None:
    (run,) = steps("FROM --platform=$BUILDPLATFORM x\nARG TARGETARCH\nRUN true\n")
    assert run["env"]["TARGETARCH"] == "amd64"


# --- commands


def test_a_shell_is_used_for_text_and_none_for_a_list() -> None:
    text = 'FROM x\nRUN a "b  c" \\\n  # comment\n\n  && d\nRUN ["a", "$B"]\nSHELL ["/bin/bash", "-ec"]\nRUN e\nCMD f\n'
    first, second, third = steps(text)
    assert first["argv"] == ["/bin/sh", "-c", 'a "b  c"   && d']
    assert second["argv"] == ["a", "$B"]
    assert third["argv"] == ["/bin/bash", "-ec", "e"]
    assert last(text)["config"]["cmd"] == ["/bin/bash", "-ec", "f"]


def test_a_here_document_is_a_script_or_a_programs_input() -> None:
    alone, shebang, fed = steps(
        "FROM x\nRUN <<EOF\na\nb $C\nEOF\nRUN <<-EOF\n\t#!/usr/bin/env python3\n\tprint()\n\tEOF\nRUN cat <<A 3<<B\n1\nA\n2\nB\n"
    )
    assert alone["argv"] == ["/bin/sh", "-c", "a\nb $C\n"]
    assert shebang["script"] == "#!/usr/bin/env python3\nprint()\n"
    assert fed["argv"] == ["/bin/sh", "-c", "cat <<A 3<<B\n1\nA\n2\nB"]


def test_files_may_stand_in_the_dockerfile_itself() -> None:
    text = "FROM x\nENV A=1\nCOPY <<one <<'two' file /to/\n$A\none\n$A\ntwo\n"
    (copy,) = steps(text)
    assert copy["files"] == [{"name": "one", "text": "1\n"}, {"name": "two", "text": "$A\n"}]
    assert (copy["sources"], copy["into"]) == (["file"], True)


def test_a_relative_place_is_below_the_working_directory() -> None:
    text = "FROM x\nWORKDIR a\nCOPY f ../b\nWORKDIR ../../..\nCOPY f .\n"
    first, copy, second, dot = steps(text)
    assert (first["path"], copy["to"], copy["into"]) == ("/w/a", "/w/b", False)
    assert (second["path"], dot["to"], dot["into"]) == ("/", "/", True)


def test_add_unpacks_and_copy_does_not() -> None:
    add, copy = steps("FROM x\nADD a /\nCOPY a /\n")
    assert (add["unpack"], copy["unpack"]) == (True, False)


# --- refused


@pytest.mark.parametrize(
    ("text", "code", "line"),
    [
        ("", "dockerfile-invalid", None),
        ("# nothing\n", "dockerfile-invalid", None),
        ("FROM\n", "dockerfile-invalid", 1),
        ("FROM x AS\n", "dockerfile-invalid", 1),
        ("FROM x AS 1a\n", "dockerfile-invalid", 1),
        ("FROM $NONE\n", "dockerfile-invalid", 1),
        ("FROM --platform=linux/arm64 x\n", "instruction-not-supported", 1),
        ("RUN x\nFROM y\n", "dockerfile-invalid", 1),
        ("FROM x\n\nFOO\n", "dockerfile-invalid", 3),
        ("FROM x\nFOO bar\n", "dockerfile-invalid", 2),
        ("FROM x\nRUN\n", "dockerfile-invalid", 2),
        ("FROM x\nRUN --mount=type=secret,id=a true\n", "instruction-not-supported", 2),
        ("FROM x\nRUN --network=host true\n", "instruction-not-supported", 2),
        ("FROM x\nCOPY a\n", "dockerfile-invalid", 2),
        ("FROM x\nCOPY --parents a /\n", "instruction-not-supported", 2),
        ("FROM x\nCOPY --chmod=u+x a /\n", "instruction-not-supported", 2),
        ("FROM x\nCOPY --from=1 a /\n", "dockerfile-invalid", 2),
        ("FROM x\nCOPY --from=0 a /\n", "dockerfile-invalid", 2),
        ("FROM x\nCOPY --from=scratch a /\n", "dockerfile-invalid", 2),
        ("FROM x\nADD --from=x a /\n", "instruction-not-supported", 2),
        ("FROM x\nADD https://h/x /\n", "instruction-not-supported", 2),
        ("FROM x\nADD git@h:x.git /\n", "instruction-not-supported", 2),
        ("FROM x\nENV a\n", "dockerfile-invalid", 2),
        ("FROM x\nENV a=${b\n", "dockerfile-invalid", 2),
        ("FROM x\nENV a=${b:?missing}\n", "dockerfile-invalid", 2),
        ("FROM x\nUSER a b\n", "dockerfile-invalid", 2),
        ("FROM x\nUSER ../x\n", "dockerfile-invalid", 2),
        ("FROM x\nEXPOSE 70000\n", "dockerfile-invalid", 2),
        ("FROM x\nEXPOSE 1-60000\n", "dockerfile-invalid", 2),
        ("FROM x\nSHELL /bin/sh\n", "dockerfile-invalid", 2),
        ("FROM x\nWORKDIR\n", "dockerfile-invalid", 2),
        ("FROM x\nONBUILD RUN y\n", "instruction-not-supported", 2),
        ("FROM x\nRUN <<E\n", "dockerfile-invalid", 2),
        ("# escape=x\nFROM x\n", "dockerfile-invalid", 1),
        ("FROM x\n" + "RUN y\n" * 2000, "dockerfile-invalid", None),
        ("FROM x\n" * 100, "dockerfile-invalid", None),
    ],
)
def test_what_cannot_be_carried_out_is_refused_with_its_line(text: str, code: str, line: int | None) -> None:
    assert refused(text) == (code, line)


def test_a_target_that_is_not_there_is_refused() -> None:
    assert refused("FROM x AS a\n", target="b")[0] == "dockerfile-invalid"


def test_triggers_of_an_image_are_not_passed_over_in_silence() -> None:
    whole = dockerfile.outline("FROM x\n", {}, None)
    with pytest.raises(Refusal, match="ONBUILD") as caught:
        dockerfile.evaluate(whole, {"x": {**BASE, "onbuild": ["RUN y"]}}, {})
    assert caught.value.code == "instruction-not-supported"


def test_instructions_without_a_meaning_here_are_taken() -> None:
    text = "FROM x\nMAINTAINER m\nSTOPSIGNAL 9\nVOLUME /v\nHEALTHCHECK --interval=1s CMD true\n"
    assert steps(text) == []


@pytest.mark.parametrize(
    "text", ["FROM ${" + "{" * 5000, "FROM x\nENV a=" + "${b:-" * 5000, "FROM x\nRUN " + '"' * 99999]
)
def test_what_is_nested_without_end_is_refused_or_taken_and_nothing_worse(text: str) -> None:
    with contextlib.suppress(Refusal):
        evaluate(text)


def test_another_user_than_the_templates_gets_none_of_its_variables_about_that_one() -> None:
    base = {"user": "user", "account": "user", "env": {"HOME": "/home/user", "A": "b"}, "about": {"HOME": "/home/user"}}
    config = Config.of(base)
    assert config.environment() == base["env"]
    config.user = "root"
    assert config.environment() == {"A": "b"}
    config = Config.of(config.told())
    config.env["HOME"] = "/elsewhere"
    assert config.environment() == {"HOME": "/elsewhere", "A": "b"}, "what was said since counts"
