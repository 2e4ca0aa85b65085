"""An echo of a secret does not come back, in any usual form, however the answer is cut."""

import base64
import html
import json
import time
from urllib.parse import quote, quote_plus

import pytest

from space.egress.scrub import Scrubber, masks_of
from space.model.grant import SecretValue

VALUE = "t0p/s3cr3t+v4l&e <\"'>="
TEXT = SecretValue("text", {"value": VALUE})


def scrubbed(data: bytes, *masks: bytes) -> bytes:
    scrubber = Scrubber(masks)
    return scrubber.feed(data) + scrubber.end()


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


FORMS = {
    "itself": VALUE,
    "in a URL": quote(VALUE, safe=""),
    "in a URL, slashes left": quote(VALUE),
    "in a form": quote_plus(VALUE),
    "in a URL, small letters": quote(VALUE, safe="").replace("%2B", "%2b").replace("%3C", "%3c").replace("%2F", "%2f").replace("%3E", "%3e").replace("%3D", "%3d"),
    "in JSON": json.dumps(VALUE)[1:-1],
    "in JSON, slashes escaped": json.dumps(VALUE)[1:-1].replace("/", "\\/"),
    "in JSON for scripts": json.dumps(VALUE)[1:-1].replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"),
    "in HTML": html.escape(VALUE),
    "in HTML, numbers": html.escape(VALUE).replace("&#x27;", "&#39;").replace("&quot;", "&#34;"),
    "in HTML, quotes left": html.escape(VALUE, quote=False),
    "in base64": b64(VALUE),
    "in base64 for URLs": b64(VALUE).translate(str.maketrans("+/", "-_")),
    "in base64, without padding": b64(VALUE).rstrip("="),
}  # fmt: skip


@pytest.mark.parametrize(("name", "form"), FORMS.items(), ids=FORMS.keys())
def test_every_usual_form_of_a_value_is_taken_out(name: str, form: str):
    masks = masks_of(TEXT, VALUE)
    answer = f'{{"you sent": "{form}"}}'.encode()
    form = form.rstrip("=") if name.startswith("in base64") else form
    assert scrubbed(answer, *masks) == answer.replace(form.encode(), b"*" * len(form))


@pytest.mark.parametrize("before", ["", "a", "ab", "user:", "x-access-token:"])
@pytest.mark.parametrize("after", ["", "z", ":", "zz"])
def test_a_value_within_something_in_base64_is_taken_out(before: str, after: str):
    """A letter at either end may be left: it holds bits of what stands beside it."""
    text = b64(before + VALUE + after)
    found = scrubbed(text.encode(), *masks_of(TEXT, VALUE)).decode()
    assert len(found) == len(text)
    visible = base64.b64decode(found.replace("*", "A") + "==")
    assert not any(VALUE[n : n + 3].encode() in visible for n in range(len(VALUE) - 3))


def test_what_a_header_was_made_of_is_taken_out_whole():
    basic = SecretValue("basic", {"username": "me", "password": "pass-w0rd"})
    header = b64("me:pass-w0rd").rstrip("=").encode()
    assert scrubbed(b"Basic " + header, *masks_of(basic, "me:pass-w0rd")) == b"Basic " + b"*" * len(header)
    assert scrubbed(b"me says pass-w0rd", *masks_of(basic, "me:pass-w0rd")) == b"me says *********"


def test_of_a_clouds_keys_only_the_token_goes_out_and_is_taken_out():
    keys = {"access_key_id": "AKIDEXAMPLE", "secret_access_key": "wJalrXUtnFEMI"}
    assert masks_of(SecretValue("aws", keys), "") == ()
    with_token = masks_of(SecretValue("aws", {**keys, "session_token": "FwoGZXIvYXdz/token"}), "")
    assert scrubbed(b"<FwoGZXIvYXdz/token>", *with_token) == b"<" + b"*" * 18 + b">"


def test_what_is_too_short_to_be_told_from_other_text_is_left():
    assert scrubbed(b"abcdeabcde", *masks_of(SecretValue("text", {"value": "abcde"}), "abcde")) == b"abcdeabcde"


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 11, 1000])
def test_a_secret_is_found_wherever_an_answer_is_cut(size: int):
    data = b"sec secre secret-value secret-valu secret-valuesecret-value-secret-"
    scrubber = Scrubber([b"secret-value", b"value-sec"])
    out = b"".join(scrubber.feed(data[at : at + size]) for at in range(0, len(data), size)) + scrubber.end()
    assert out == b"sec secre ************ secret-valu " + b"*" * 28 + b"ret-"


def test_secrets_that_overlap_are_both_taken_out():
    assert scrubbed(b"-secret-value-more-", b"secret-value", b"value-more") == b"-*****************-"


def test_what_cannot_be_the_beginning_of_a_secret_is_not_held_back():
    """Events that a server sends one by one arrive one by one."""
    scrubber = Scrubber([b"secret-value", b"z" * 5000])
    for event in (b"data: 1\n\n", b"data: the secret\n\n", b"data: secret-valu\n\n", b"s-e-c-r-e-t\n"):
        assert scrubber.feed(event) == event
    assert scrubber.feed(b"data: secret-va") == b"data: "
    assert scrubber.feed(b"r") == b"secret-var"
    assert scrubber.end() == b""


def test_what_is_held_back_at_the_end_is_told():
    scrubber = Scrubber([b"secret-value"])
    assert scrubber.feed(b"the secret-va") == b"the "
    assert scrubber.end() == b"secret-va"
    assert scrubber.end() == b""


def test_a_header_is_scrubbed_by_itself_in_the_midst_of_a_body():
    scrubber = Scrubber([b"secret-value"])
    assert scrubber.feed(b"the secret-") == b"the "
    assert scrubber.whole(b"a=secret-value; b=value") == b"a=************; b=value"
    assert scrubber.whole(b"secret-va") == b"secret-va"
    assert scrubber.feed(b"value") + scrubber.end() == b"************"


def test_nothing_to_take_out_changes_nothing():
    data = bytes(range(256)) * 10
    assert scrubbed(data) == data
    assert scrubbed(data, b"") == data
    assert scrubbed(b"", b"secret-value") == b""


@pytest.mark.parametrize(
    ("mask", "chunk"),
    [
        (b"abcd" * 2000, b"abcd" * 16000),
        (b"abcd" * 2000 + b"!", b"abcd" * 16000),
        (b"abcdef" * 1300, b"abcde"),
        (b"abcd" * 2000, b"a"),
        (b"a" * 8000, b"a" * 64000),
        (b"a" * 6, b"a" * 64000),
        (b"a" * 8000 + b"b", b"a" * 64000),
        (b"b" + b"a" * 8000, b"a" * 64000),
        (b"a" * 4000 + b"b" + b"a" * 4000, b"a" * 64000),
    ],
)
def test_a_server_cannot_make_scrubbing_slow(mask: bytes, chunk: bytes):
    scrubber = Scrubber([mask, mask[1:], mask[2:]])
    began = time.thread_time()
    out = sum(len(scrubber.feed(chunk)) for _ in range(5)) + len(scrubber.end())
    assert time.thread_time() - began < 2
    assert out == 5 * len(chunk)


def test_what_is_held_back_is_less_than_the_longest_secret():
    scrubber = Scrubber([b"abcdefgh" * 100, b"abcdefgx"])
    told = 0
    for n in range(1, 2000):
        told += len(scrubber.feed(b"abcdefgh"))
        assert n * 8 - told < 800


def test_an_answer_without_secrets_costs_little():
    masks = masks_of(SecretValue("text", {"value": "ghp_abcDEF0123456789abcDEF0123456789abcd"}), "x")
    data = (b"some ordinary text, of the kind that servers send. " * 1400)[:65536]
    scrubber = Scrubber(masks)
    began = time.thread_time()
    for _ in range(100):
        scrubber.feed(data)
    assert time.thread_time() - began < 1, "less than 65 MB/s"
