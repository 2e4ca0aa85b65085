"""Errors on the way between parts: status and class agree, and any answer at all becomes an error of ours."""

import pytest

from space import error_wire, errors
from space.errors import HostError, MachineLost, NotFound, SpaceError

CLASSES = sorted(error_wire.CLASS_BY_CODE.values(), key=lambda cls: cls.__name__)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_class_survives_the_wire(cls: type[SpaceError]) -> None:
    sent = cls("why", field="x")
    came = error_wire.parse(error_wire.answer(sent, "req1")["error"], SpaceError)
    assert type(came) is cls
    assert (came.code, came.message, came.details) == (sent.code, "why", {"field": "x"})


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_status_leads_back_to_the_family_that_must_act(cls: type[SpaceError]) -> None:
    """So that a client that does not know a newer code still knows whether it, or the operator, has to do something."""
    status = error_wire.status_of(cls(code="something-new"))
    back = error_wire.class_of_status(status)
    if status < 500:
        assert issubclass(back, errors.RequestError | errors.LimitExceeded)
    else:
        assert not issubclass(back, errors.RequestError)


def test_a_status_without_a_row_is_the_callers_or_the_hosts() -> None:
    assert error_wire.class_of_status(418) is errors.RequestError
    assert error_wire.class_of_status(599) is HostError


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_class_survives_the_wire_also_under_a_more_particular_code(cls: type[SpaceError]) -> None:
    came = error_wire.parse(error_wire.render(cls("why", code="something-new")), SpaceError)
    assert (type(came), came.code) == (cls, "something-new")


@pytest.mark.parametrize("kind", ["Exception", "SystemExit", "parse", "", None, 7, ["HostFull"], {"HostFull": 1}])
def test_a_kind_that_is_none_of_ours_gets_the_fallback(kind: object) -> None:
    assert type(error_wire.parse({"code": "something-new", "kind": kind}, HostError)) is HostError


def test_a_class_that_is_not_of_the_tree_travels_as_the_one_above_it() -> None:
    class Particular(errors.HostFull):
        """No room."""

    assert error_wire.render(Particular("why"))["kind"] == "HostFull"


def test_a_code_that_no_class_owns_gets_the_fallback_and_is_kept() -> None:
    error = error_wire.parse({"code": "oom-killed", "message": "m", "details": {}}, NotFound)
    assert (type(error), error.code) == (NotFound, "oom-killed")
    assert type(error_wire.parse({"code": "oom-killed"}, NotFound, {"oom-killed": MachineLost})) is MachineLost


@pytest.mark.parametrize(
    "described", [None, [], "x", {}, {"code": 7}, {"code": "", "details": [1]}, {"message": ["m"]}]
)
def test_anything_at_all_is_an_error(described: object) -> None:
    assert type(error_wire.parse(described, HostError)) is HostError


def test_details_cannot_overwrite_what_is_ours() -> None:
    spoofed = {"code": "conflict", "message": "m", "details": {"message": "no", "code": "no", "result": "no", "a": 1}}
    error = error_wire.parse(spoofed, SpaceError)
    assert (error.code, error.message, error.details) == ("conflict", "m", {"a": 1})


def test_only_harmless_request_ids_are_taken_over() -> None:
    assert error_wire.request_id("abc-1.2_3") == "abc-1.2_3"
    for odd in (None, "", "a b", "x" * 65, "a\n", "é"):
        assert error_wire.request_id(odd).startswith("req")
