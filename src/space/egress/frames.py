"""Where frames of HTTP/2 begin, to refuse too large ones there: h2 collects a frame before it looks at its size.

They are counted, too: each costs some microseconds, however small it is, and thousands of them may come at once.
"""

from __future__ import annotations

import h2.exceptions

from space.egress.messages import HEAD_BYTES_MAX

FRAME_BYTES_MAX = 256 * 1024
AT_ONCE = 32
"""After so many frames it is somebody else's turn."""
_PREFACE_BYTES, _FRAME_HEAD_BYTES = 24, 9
_HEADERS, _PUSH_PROMISE, _CONTINUATION = 1, 5, 9
_PARTS_OF_HEADS = frozenset({_HEADERS, _PUSH_PROMISE, _CONTINUATION})


class Frames:
    """Follows the frames in what comes; with ``preface`` a client's first words are before them."""

    def __init__(self, *, preface: bool) -> None:
        self._left = _PREFACE_BYTES if preface else 0
        """How much of a frame, or of the preface, is still to come."""
        self._head = b""
        self._block = 0
        self._begun = 0

    def follow(self, data: bytes) -> list[int]:
        """Take notice of the next bytes; raise h2's ``ProtocolError`` for a frame, or a head in parts, too large.

        Returns the places in them at which another `AT_ONCE` frames have begun.
        """
        at, places = 0, list[int]()
        while at < len(data):
            if self._left:
                step = min(self._left, len(data) - at)
                self._left -= step
            else:
                step = min(_FRAME_HEAD_BYTES - len(self._head), len(data) - at)
                self._head += data[at : at + step]
                if len(self._head) == _FRAME_HEAD_BYTES:
                    self._begin(int.from_bytes(self._head[:3]), self._head[3])
                    self._head = b""
                    self._begun = (self._begun + 1) % AT_ONCE
                    if not self._begun:
                        places.append(at + step)
            at += step
        return places

    def _begin(self, size: int, kind: int) -> None:
        self._left = size
        if kind in _PARTS_OF_HEADS:
            self._block = size + (self._block if kind == _CONTINUATION else 0)
        if size > FRAME_BYTES_MAX or self._block > HEAD_BYTES_MAX:
            raise h2.exceptions.FrameTooLargeError("more than was agreed on")
