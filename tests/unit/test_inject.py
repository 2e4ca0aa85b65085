"""Secrets are placed where they were granted, and placeholders go nowhere else."""

import base64
from typing import Any
from urllib.parse import quote

import pytest

from space.egress.inject import PLACED_MAX, Injected, Misplaced, RequestHead, inject, placeholders
from space.model.grant import Grant, new_placeholder, parse_grant

NOW = 1_700_000_000.0
VALUE = "t0p/s3cr3t+v4lue="
MARK = new_placeholder()
OTHER = new_placeholder()


def grant(**fields: Any) -> Grant:
    value = fields.pop("value", {"kind": "text", "value": VALUE})
    terms = {"id": "gnt1", "secret": "token", "hosts": ["api.good.example"], "placement": "bearer"}
    return parse_grant({**terms, "value": value, **fields})


def head(*headers: tuple[str, str], **fields: Any) -> RequestHead:
    first = {"method": "GET", "scheme": "https", "host": "api.good.example", "port": 443, "target": "/a?b=c"}
    return RequestHead(**{**first, **fields}, headers=[(n.encode(), v.encode()) for n, v in headers])


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def sent(injected: Injected, name: str) -> list[str]:
    return [value.decode() for key, value in injected.head.headers if key == name.encode()]


@pytest.mark.parametrize(
    ("granted", "name", "value"),
    [
        (grant(), "authorization", f"Bearer {VALUE}"),
        (grant(placement="header", name="X-Api-Key"), "x-api-key", VALUE),
        (grant(placement="header", name="authorization", template="token {}"), "authorization", f"token {VALUE}"),
        (
            grant(placement="basic", value={"kind": "basic", "username": "me", "password": VALUE}),
            "authorization",
            f"Basic {b64(f'me:{VALUE}')}",
        ),
        (
            grant(placement="basic", template="x-access-token:{}"),
            "authorization",
            f"Basic {b64(f'x-access-token:{VALUE}')}",
        ),
    ],
)
def test_a_header_is_placed_and_whatever_the_guest_had_there_is_gone(granted: Grant, name: str, value: str):
    given = head((name, "mine"), ("accept", "*/*"), (name, "mine too"), ("x-other", "stays"))
    injected = inject(given, [granted], NOW)
    assert sent(injected, name) == [value]
    assert sent(injected, "accept") == ["*/*"]
    assert sent(injected, "x-other") == ["stays"]
    assert injected.secrets == ("token",)
    assert sent(inject(head(), [granted], NOW), name) == [value]
    assert (b"accept", b"*/*") in given.headers
    assert VALUE not in repr(injected) + repr(injected.head)


@pytest.mark.parametrize(
    ("target", "placed"),
    [
        ("/a", "/a?key={}"),
        ("/a?b=c", "/a?b=c&key={}"),
        ("/a?key=mine&b=c&key=mine", "/a?b=c&key={}"),
        ("/a?%6bey=mine", "/a?key={}"),
        ("/a?key", "/a?key={}"),
        ("/a?keys=mine&KEY=mine", "/a?keys=mine&KEY=mine&key={}"),
        ("/a?b=c?key=x", "/a?b=c?key=x&key={}"),
    ],
)
def test_a_query_parameter_is_placed_instead_of_the_guests(target: str, placed: str):
    injected = inject(head(target=target), [grant(placement="query", name="key")], NOW)
    assert injected.head.target == placed.format(quote(VALUE, safe=""))


@pytest.mark.parametrize(
    "given",
    [
        head(host="evil.example"),
        head(host="api.good.example.evil.example"),
        head(host="a.api.good.example"),
        head(port=8443),
        head(method="POST"),
        head(method="TRACE"),
        head(target="/b"),
        head(target="/a/../b"),
        head(target="/a%2f..%2fb"),
        head(scheme="http"),
        head(scheme="http", port=80),
    ],
)
def test_nothing_is_placed_into_a_request_that_the_grant_is_not_for(given: RequestHead):
    granted = grant(methods=["GET", "TRACE"], paths=["/a/**"], placeholder=MARK)
    injected = inject(given, [granted], NOW)
    assert injected.head == given
    assert (injected.secrets, injected.masks, injected.sign) == ((), (), None)


def test_nothing_is_placed_once_a_grant_has_expired():
    granted = grant(expires_at=NOW, placeholder=MARK)
    assert inject(head(), [granted], NOW - 1).secrets == ("token",)
    assert inject(head(), [granted], NOW).secrets == ()
    with pytest.raises(Misplaced) as caught:
        inject(head(("authorization", f"Bearer {MARK}")), [granted], NOW)
    assert (caught.value.reason, caught.value.secret) == ("grant-expired", "token")


def test_cleartext_is_for_those_who_asked_for_it():
    granted = grant(cleartext=True, ports=[80])
    assert inject(head(scheme="http", port=80), [granted], NOW).secrets == ("token",)


def test_the_first_of_two_grants_for_one_place_has_it():
    second = grant(id="gnt2", secret="second", value={"kind": "text", "value": "another-value"})
    injected = inject(head(), [grant(), second], NOW)
    assert sent(injected, "authorization") == [f"Bearer {VALUE}"]
    assert injected.secrets == ("token",)


def test_two_grants_for_two_places_are_both_placed():
    injected = inject(head(), [grant(), grant(id="gnt2", secret="key", placement="query", name="key")], NOW)
    assert injected.secrets == ("token", "key")
    assert sent(injected, "authorization")
    assert "key=" in injected.head.target


def test_a_request_is_given_no_more_secrets_than_its_answer_can_be_looked_through_for():
    some = [grant(id=f"g{n}", secret=f"s{n}", placement="header", name=f"x-{n}") for n in range(PLACED_MAX + 1)]
    assert len(inject(head(), some[:-1], NOW).secrets) == PLACED_MAX
    with pytest.raises(Misplaced) as caught:
        inject(head(), some, NOW)
    assert caught.value.reason == "too-many-secrets"


@pytest.mark.parametrize("method", ["GET", "get"])
def test_what_is_placed_can_be_read_in_the_answer_so_that_it_can_be_taken_out(method: str):
    given = head(("accept-encoding", "gzip, br"), ("sec-websocket-extensions", "permessage-deflate"), method=method)
    injected = inject(given, [grant()], NOW)
    assert sent(injected, "accept-encoding") == ["identity"]
    assert sent(injected, "sec-websocket-extensions") == []
    assert VALUE.encode() in injected.masks
    assert b64(VALUE).rstrip("=").encode() in injected.masks


def test_an_answer_that_is_not_to_be_scrubbed_may_come_in_any_form():
    injected = inject(head(("accept-encoding", "gzip")), [grant(scrub=False)], NOW)
    assert sent(injected, "accept-encoding") == ["gzip"]
    assert injected.masks == ()


SWAPPED = grant(placement="placeholder", placeholder=MARK)


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        (head(("authorization", f"Bearer {MARK}")), "authorization", f"Bearer {VALUE}"),
        (head(("authorization", f"token {MARK}")), "authorization", f"token {VALUE}"),
        (head(("x-one", f"{MARK},{MARK}")), "x-one", f"{VALUE},{VALUE}"),
        (head(("cookie", f"a=b; c={MARK}")), "cookie", f"a=b; c={VALUE}"),
        (head(("authorization", f"Basic {b64(f'git:{MARK}')}")), "authorization", f"Basic {b64(f'git:{VALUE}')}"),
        (head(("authorization", f"basic   {b64(f'{MARK}:')}")), "authorization", f"Basic {b64(f'{VALUE}:')}"),
    ],
)
def test_a_placeholder_is_swapped_where_the_guest_put_it(given: RequestHead, name: str, value: str):
    injected = inject(given, [SWAPPED], NOW)
    assert sent(injected, name) == [value]
    assert injected.secrets == ("token",)
    assert sent(injected, "accept-encoding") == ["identity"]


def test_a_basic_authorization_that_was_swapped_is_taken_out_of_the_answer_whole():
    injected = inject(head(("authorization", f"Basic {b64(f'git:{MARK}')}")), [SWAPPED], NOW)
    assert b64(f"git:{VALUE}").encode() in injected.masks


def test_a_placeholder_in_path_or_query_is_swapped_and_cannot_lead_to_another_path():
    injected = inject(head(target=f"/bot{MARK}/send?key={MARK}&x=1"), [SWAPPED], NOW)
    value = quote(VALUE, safe="")
    assert injected.head.target == f"/bot{value}/send?key={value}&x=1"


def test_a_password_can_stand_for_its_placeholder():
    granted = grant(
        placement="placeholder", placeholder=MARK, value={"kind": "basic", "username": "u", "password": VALUE}
    )
    assert sent(inject(head(("x-password", MARK)), [granted], NOW), "x-password") == [VALUE]


def test_a_grant_whose_placeholder_is_not_there_changes_nothing():
    given = head(("accept-encoding", "gzip"))
    injected = inject(given, [SWAPPED], NOW)
    assert injected.head == given
    assert (injected.secrets, injected.masks) == ((), ())


def test_a_placeholder_in_pieces_is_not_put_together():
    given = head(("x-a", MARK[:20]), ("x-b", MARK[20:]), ("x-c", f"{MARK[:20]} {MARK[20:]}"), ("x-d", MARK[:-1]))
    injected = inject(given, [SWAPPED], NOW)
    assert injected.head == given


def escaped(text: str) -> str:
    return "".join(f"%{ord(character):02x}" for character in text)


HIDDEN = {
    "bearer": head(("authorization", f"Bearer {MARK}")),
    "other header": head(("x-anything", f"a {MARK} b")),
    "second of two headers": head(("x-a", "b"), ("x-a", MARK)),
    "header's name": head((MARK, "x")),
    "cookie": head(("cookie", f"a={MARK}")),
    "path": head(target=f"/{MARK}"),
    "query": head(target=f"/?a={MARK}"),
    "name in query": head(target=f"/?{MARK}"),
    "host": head(host=f"{MARK}.good.example"),
    "method": head(method=MARK),
    "escaped path": head(target=f"/{escaped(MARK)}"),
    "one escaped letter": head(target=f"/?a=%73{MARK[1:]}"),
    "escaped twice": head(target=f"/?a={escaped(escaped(MARK))}"),
    "escaped header": head(("cookie", f"a={escaped(MARK)}")),
    "capitals": head(("x-a", MARK.upper())),
    "referer": head(("referer", f"https://api.good.example/?a={MARK}")),
    "basic": head(("authorization", f"Basic {b64(f'u:{MARK}')}")),
    "basic, as the user": head(("authorization", f"Basic {b64(f'{MARK}:p')}")),
    "basic, small": head(("authorization", f"bAsIc  {b64(f'u:{MARK}')} ")),
    "basic, without padding": head(("authorization", f"Basic {b64(f'u:{MARK}').rstrip('=')}")),
    "basic, for urls": head(("authorization", f"Basic {b64(f'ÿ?>u:{MARK}').translate(str.maketrans('+/', '-_'))}")),
    "basic, with too much padding": head(("authorization", f"Basic {b64(f'u:{MARK}')}====")),
    "basic, with an odd letter": head(("authorization", f"Basic {b64(f'uu:{MARK}').rstrip('=')}A")),
    "basic, escaped inside": head(("authorization", f"Basic {b64(f'u:{escaped(MARK)}')}")),
    "basic, escaped outside": head(("authorization", escaped(f"Basic {b64(f'u:{MARK}')}"))),
    "basic elsewhere": head(("x-authorization", f"Basic {b64(f'u:{MARK}')}")),
}


@pytest.mark.parametrize("given", HIDDEN.values(), ids=HIDDEN.keys())
@pytest.mark.parametrize("placement", ["bearer", "placeholder"])
def test_a_placeholder_that_leaves_for_a_wrong_host_is_refused_however_it_is_written(
    given: RequestHead, placement: str
):
    elsewhere = grant(hosts=["other.good.example"], placeholder=MARK, placement=placement)
    with pytest.raises(Misplaced) as caught:
        inject(given, [elsewhere, grant(id="gnt2", secret="second")], NOW)
    assert (caught.value.reason, caught.value.secret) == ("placeholder-misplaced", "token")
    assert "token" in str(caught.value)
    assert VALUE not in str(caught.value)


@pytest.mark.parametrize("given", HIDDEN.values(), ids=HIDDEN.keys())
def test_a_placeholder_of_a_grant_that_was_revoked_is_refused_however_it_is_written(given: RequestHead):
    with pytest.raises(Misplaced) as caught:
        inject(given, [grant(placeholder=OTHER)], NOW)
    assert (caught.value.reason, caught.value.secret) == ("placeholder-unknown", None)


@pytest.mark.parametrize("given", [one for name, one in HIDDEN.items() if name not in {"host", "method"}])
def test_what_is_hidden_from_a_grant_that_covers_it_is_not_refused(given: RequestHead):
    inject(given, [SWAPPED], NOW)


def test_a_placeholder_is_good_where_any_grant_with_it_covers_the_request():
    elsewhere = grant(hosts=["other.good.example"], placeholder=MARK, placement="placeholder")
    assert sent(inject(head(("x-a", MARK)), [elsewhere, SWAPPED], NOW), "x-a") == [VALUE]


@pytest.mark.parametrize(
    "given",
    [
        head(),
        head(("authorization", "Basic")),
        head(("authorization", "Basic !!!!")),
        head(("authorization", "Basic A")),
        head(("authorization", f"Basic {'=' * 100}")),
        head(target="/%"),
        head(target="/%zz%2"),
        head(target="/" + "%25" * 5000),
        head(("x", "space-placeholder-")),
        head(("x", "space-placeholder-" * 3000)),
        head(("x", "%73%70" * 10_000)),
        head(("authorization", "basic " + " " * 50_000)),
        head(host="\udcff", target="/\udcff\u1234"),
    ],
)
def test_there_is_no_placeholder_in_what_only_looks_like_one(given: RequestHead):
    assert placeholders(given) == set()
    assert inject(given, [SWAPPED], NOW).secrets == ()
