"""Takes what a request was given for its way out again of the answer: every form of a secret becomes as many asterisks.

Lengths stay as they are. An answer that was transformed in some other way (reversed, encrypted, compressed) is not seen
through: this keeps echoes away, not a server that works with the guest.
"""

import base64
import html
import json
from collections.abc import Iterable
from urllib.parse import quote, quote_plus

from space.model.grant import SecretValue

MASK_BYTES_MIN = 6
"""Shorter ones would be found where they are not meant."""
_CANDIDATES = 16
_HEAD_BYTES = 6


def masks_of(value: SecretValue, sent: str) -> tuple[bytes, ...]:
    """Return every form in which a value may come back; ``sent`` is what a header or parameter was made to hold."""
    if value.kind == "aws":
        # The keys do not go out, only what was signed with them.
        token = value.fields.get("session_token")
        return _fit(_forms(token)) if token else ()
    whole = base64.b64encode(sent.encode()).rstrip(b"=")
    return _fit({*_forms(value.text), whole, whole.translate(_URL_SAFE)})


class Scrubber:
    """Scrubs one stream, however it is cut: what a mask is found at becomes asterisks.

    Each mask is looked for from the left, and again behind where it was found; different ones may overlap. Takes time
    in proportion to the stream, whatever is in it.
    """

    def __init__(self, masks: Iterable[bytes]) -> None:
        self._masks = tuple(dict.fromkeys(mask for mask in masks if mask))
        self._held = b""
        self._told = 0
        """How many of the bytes that are held were given out already."""
        self._done = [0] * len(self._masks)
        """For each mask: how many of the bytes that are held belong to one that was found."""

    def feed(self, chunk: bytes) -> bytes:
        """Return what can be told of the stream so far. Held back is at most what could be the beginning of a mask."""
        data = self._held + chunk if self._held else chunk
        return self._fresh(
            self._release(data, min((_beginning(data, mask) for mask in self._masks), default=len(data)))
        )

    def prompt(self) -> bytes:
        """Return what is held back, too, if that is little: whoever waits for the end of a message would wait for it.

        So of a value whose first bytes come by themselves these few are seen, and the rest of it is not.
        """
        if not self._told < len(self._held) < MASK_BYTES_MIN:
            return b""
        starred = min(len(self._held), max(self._done, default=0))
        told, self._told = self._told, len(self._held)
        return (b"*" * starred + self._held[starred:])[told:]

    def end(self) -> bytes:
        """Return the rest of the stream."""
        return self._fresh(self._release(self._held, len(self._held)))

    def _fresh(self, released: bytes) -> bytes:
        """Return what of the released bytes was not told by `prompt` before."""
        told = min(self._told, len(released))
        self._told -= told
        return released[told:] if told else released

    def whole(self, value: bytes) -> bytes:
        """Scrub a value by itself, such as a header's; the stream is not concerned."""
        if not any(mask in value for mask in self._masks):
            return value  # as nearly all are
        other = Scrubber(self._masks)
        return other.feed(value) + other.end()

    def _release(self, data: bytes, end: int) -> bytes:
        """Return the first bytes, scrubbed, and hold the others. A mask that begins among the first is there whole."""
        spans = [(0, done) for done in self._done if done]
        for number, mask in enumerate(self._masks):
            done = self._done[number]
            at = data.find(mask, done)
            while 0 <= at < end:
                done = at + len(mask)
                spans.append((at, done))
                at = data.find(mask, done)
            self._done[number] = max(0, done - end)
        self._held = data[end:]
        if not spans:
            return data if end == len(data) else data[:end]
        out = bytearray(data[:end])
        done = 0
        for first, last in sorted(spans):
            begin, done = max(first, done), max(done, min(last, end))
            if begin < done:
                out[begin:done] = b"*" * (done - begin)
        return bytes(out)


def _beginning(data: bytes, mask: bytes) -> int:
    """Return where the mask may have begun that goes on behind the data; its length where none has.

    After some tries the next place that might be one is taken for one: holding more back is never wrong.
    """
    size = len(data)
    at = max(0, size - len(mask) + 1)
    head = mask[:_HEAD_BYTES]
    for _ in range(_CANDIDATES):
        at = data.find(head, at)
        if at < 0:
            break
        if mask.startswith(data[at:]):
            return at
        at += 1
    else:
        return at
    at = max(0, size - len(mask) + 1, size - len(head) + 1)
    return next((place for place in range(at, size) if mask.startswith(data[place:])), size)


_URL_SAFE = bytes.maketrans(b"+/", b"-_")


def _forms(text: str) -> set[bytes]:
    plain = json.dumps(text)[1:-1]
    in_urls = {quote(text), quote(text, safe=""), quote_plus(text)}
    in_json = {plain, plain.replace("/", "\\/"), _escaped_for_scripts(plain)}
    in_html = html.escape(text)
    written = {
        text,
        *in_urls,
        *(_with_small_hex(form) for form in in_urls),
        *in_json,
        in_html,
        in_html.replace("&#x27;", "&#39;").replace("&quot;", "&#34;"),
        html.escape(text, quote=False),
    }
    return {form.encode() for form in written} | _in_base64(text.encode())


def _escaped_for_scripts(text: str) -> str:
    for character in "&<>":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _with_small_hex(form: str) -> str:
    first, *rest = form.split("%")
    return "%".join([first, *(part[:2].lower() + part[2:] for part in rest)])


def _in_base64(value: bytes) -> set[bytes]:
    """Return the characters that a value becomes by itself, and wherever in a longer one it stands. Padding is left."""
    found = {base64.b64encode(value).rstrip(b"=")}
    for before, first in ((0, 0), (1, 2), (2, 3)):
        encoded = base64.b64encode(b"\0" * before + value)
        found.add(encoded[first : (before + len(value)) * 8 // 6])
    return found | {form.translate(_URL_SAFE) for form in found}


def _fit(forms: Iterable[bytes]) -> tuple[bytes, ...]:
    return tuple(sorted(form for form in forms if len(form) >= MASK_BYTES_MIN))
