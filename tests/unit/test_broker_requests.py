"""The broker's door: what it takes for a request, and what it does not."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from space import error_wire
from space.broker import requests
from space.broker.defaults import Defaults, EntryPoint, Wanted
from space.broker.requests import Boot, Claim, Gc, Keep, OfHost, OfMachine, OfSnapshot, OfTemplate, Publish
from space.errors import InvalidRequest, SpaceError

MACHINE = "sbxabcdefgh234567ab"
DIGEST = "sha256:" + "0" * 64
BOOT: dict[str, Any] = {
    "id": 1,
    "verb": "boot",
    "machine": MACHINE,
    "template": DIGEST,
    "driver": "gvisor",
    "resources": {"cpus": 1.5, "memory_mib": 512, "disk_mib": 1024, "pids": 100},
    "hostname": "a-host",
}
SNAPSHOT = "snpabcdefgh234567ab"
CLAIM = {
    "id": 1,
    "verb": "claim",
    "machine": MACHINE,
    "spare": MACHINE,
    "resources": BOOT["resources"],
    "hostname": "h",
}
PUBLISH: dict[str, Any] = {"id": 1, "verb": "publish", "machine": MACHINE, "defaults": {}}
KEEP = {"id": 1, "verb": "snapshot", "machine": MACHINE, "snapshot": SNAPSHOT, "kind": "full"}


def parsed(fields: dict[str, Any]) -> requests.Request:
    return requests.parse(json.dumps(fields).encode())


def test_every_verb_of_the_contract_is_understood() -> None:
    assert isinstance(parsed(BOOT), Boot)
    for verb in ("pause", "resume", "suspend", "wake", "stop", "start", "destroy", "inspect"):
        assert parsed({"id": 0, "verb": verb, "machine": MACHINE}) == OfMachine(id=0, verb=verb, machine=MACHINE)  # type: ignore[arg-type]
    for verb in ("machines", "templates", "snapshots", "doctor"):
        assert isinstance(parsed({"id": 0, "verb": verb}), OfHost)
    assert isinstance(parsed({**BOOT, "snapshot": SNAPSHOT, "spare": True}), Boot)
    assert isinstance(parsed(CLAIM), Claim)
    assert isinstance(parsed(KEEP), Keep)
    assert parsed({"id": 0, "verb": "drop-snapshot", "snapshot": SNAPSHOT}) == OfSnapshot(
        id=0, verb="drop-snapshot", snapshot=SNAPSHOT
    )
    assert parsed({"id": 0, "verb": "gc", "dry_run": True}) == Gc(id=0, verb="gc", dry_run=True)
    assert isinstance(parsed(PUBLISH), Publish)
    assert parsed({"id": 0, "verb": "drop-template", "template": DIGEST}) == OfTemplate(
        id=0, verb="drop-template", template=DIGEST
    )


def test_defaults_may_have_what_templates_have_and_nothing_need_be_there() -> None:
    told = {
        "env": {"PATH": "/bin", "EMPTY": ""},
        "workdir": "/work",
        "user": "1000:1000",
        "entry": {"start": ["/bin/server", ""], "ready": "curl localhost", "timeout_s": 5},
        "resources": {"cpus": 2, "memory_mib": 512},
        "ports": [8080, 80],
        "labels": {"a.b": "c"},
    }
    request = parsed({**PUBLISH, "defaults": told})
    assert isinstance(request, Publish)
    assert request.defaults == Defaults(
        env=told["env"],
        workdir="/work",
        user="1000:1000",
        entry=EntryPoint(start=["/bin/server", ""], ready="curl localhost", timeout_s=5),
        resources=Wanted(cpus=2, memory_mib=512),
        ports=[80, 8080],
        labels={"a.b": "c"},
    )
    assert isinstance(parsed({**PUBLISH, "defaults": {}}), Publish)


@pytest.mark.parametrize(
    "told",
    [
        *({"env": {"": "x"}}, {"env": {"A=B": "x"}}, {"env": {"A": "\0"}}, {"env": {"A": 1}}, {"env": {"A\0": "x"}}),
        {"env": {f"A{number}": "" for number in range(1025)}},
        *({"workdir": "relative"}, {"workdir": ""}, {"workdir": "/" + "a" * 4095}, {"user": ""}, {"user": "u" * 300}),
        *({"entry": {}}, {"entry": {"start": ""}}, {"entry": {"start": []}}, {"entry": {"start": "x", "timeout_s": 0}}),
        *({"entry": {"start": "x", "timeout_s": 1e9}}, {"entry": {"start": "x", "more": 1}}),
        *({"resources": {"cpus": 0}}, {"resources": {"memory_mib": "5"}}, {"resources": {"gpus": 1}}),
        *({"ports": [0]}, {"ports": [65536]}, {"ports": ["80"]}, {"labels": {"a": "b" * 40_000}}, {"more": 1}),
    ],
)
def test_defaults_that_make_no_sense_are_refused(told: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parsed({**PUBLISH, "defaults": told})
    assert caught.value.details["field"].startswith("publish.defaults")


def test_a_whole_number_of_cpus_is_a_number_of_cpus() -> None:
    request = parsed({**BOOT, "resources": {**BOOT["resources"], "cpus": 2}})
    assert isinstance(request, Boot)
    assert request.resources.resources().cpus == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("machine", "../../etc"),
        ("machine", MACHINE + "a"),
        ("machine", MACHINE[:-1]),
        ("machine", MACHINE.upper()),
        ("machine", MACHINE + "\n"),
        ("machine", None),
        ("template", "sha256:" + "G" * 64),
        ("template", "base:latest"),
        ("template", DIGEST + "/.."),
        ("driver", "../gvisor"),
        ("driver", ""),
        ("hostname", "-x"),
        ("hostname", "a b"),
        ("hostname", "x" * 64),
        ("hostname", "a\x00b"),
        ("id", -1),
        ("id", "1"),
        ("id", 1.5),
        ("id", True),
        ("verb", "shell"),
        ("extra", 1),
    ],
)
def test_a_field_that_is_not_as_it_must_be_is_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest):
        parsed({**BOOT, field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cpus", 0),
        ("cpus", -1),
        ("cpus", "1"),
        ("cpus", float("inf")),
        ("cpus", float("nan")),
        ("memory_mib", 0),
        ("memory_mib", 1.5),
        ("memory_mib", 1 << 60),
        ("disk_mib", True),
        ("pids", None),
        ("gpus", 1),
    ],
)
def test_resources_that_are_not_as_they_must_be_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parsed({**BOOT, "resources": {**BOOT["resources"], field: value}})
    assert field in caught.value.details["field"]


@pytest.mark.parametrize(
    ("request_", "field", "value"),
    [
        (BOOT, "snapshot", "../snapshots"),
        (BOOT, "snapshot", MACHINE),
        (BOOT, "snapshot", SNAPSHOT + ".tmp"),
        (BOOT, "spare", 1),
        (CLAIM, "spare", SNAPSHOT),
        (CLAIM, "hostname", "a/b"),
        (CLAIM, "resources", {}),
        (KEEP, "snapshot", SNAPSHOT.upper()),
        (KEEP, "snapshot", SNAPSHOT + "\n"),
        (KEEP, "kind", "warm"),
        ({"id": 1, "verb": "drop-snapshot", "snapshot": SNAPSHOT}, "snapshot", "snp/../../x"),
        ({"id": 1, "verb": "gc", "dry_run": True}, "dry_run", "yes"),
    ],
)
def test_a_field_of_a_newer_verb_that_is_not_as_it_must_be_is_refused(
    request_: dict[str, Any], field: str, value: object
) -> None:
    parsed(request_)
    with pytest.raises(InvalidRequest):
        parsed({**request_, field: value})


@pytest.mark.parametrize("field", sorted(BOOT))
def test_a_missing_field_is_refused(field: str) -> None:
    with pytest.raises(InvalidRequest):
        parsed({key: value for key, value in BOOT.items() if key != field})


@given(st.binary(max_size=300))
def test_any_bytes_are_a_request_or_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        requests.parse(data)
    assert requests.number_of(data) is None or isinstance(requests.number_of(data), int)


def test_a_refused_request_is_answered_under_its_number_when_it_has_one() -> None:
    assert requests.number_of(b'{"id": 7, "verb": "no such"}') == 7
    assert requests.number_of(b'{"id": "7"}') is None
    assert requests.number_of(b"[]") is None


def test_a_refusal_does_not_repeat_what_was_sent() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parsed({**BOOT, "hostname": "very secret value"})
    assert "very secret value" not in json.dumps(error_wire.render(caught.value))


def test_an_error_keeps_its_code_and_details() -> None:
    error = SpaceError("No.", code="some-code", field="x")
    assert error_wire.render(error) == {
        "code": "some-code",
        "message": "No.",
        "kind": "SpaceError",
        "details": {"field": "x"},
    }
