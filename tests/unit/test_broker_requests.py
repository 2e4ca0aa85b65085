"""The broker's door: what it takes for a request, and what it does not."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from space import error_wire
from space.broker import requests
from space.broker.requests import Boot, OfHost, OfMachine
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


def parsed(fields: dict[str, Any]) -> requests.Request:
    return requests.parse(json.dumps(fields).encode())


def test_every_verb_of_the_contract_is_understood() -> None:
    assert isinstance(parsed(BOOT), Boot)
    for verb in ("pause", "resume", "suspend", "wake", "stop", "start", "destroy", "inspect"):
        assert parsed({"id": 0, "verb": verb, "machine": MACHINE}) == OfMachine(id=0, verb=verb, machine=MACHINE)  # type: ignore[arg-type]
    for verb in ("machines", "templates", "doctor"):
        assert isinstance(parsed({"id": 0, "verb": verb}), OfHost)


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
