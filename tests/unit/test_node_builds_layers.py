"""Compressed layers: what is wrong with them is found in time."""

import bz2
import gzip
import lzma
import time
from pathlib import Path
from typing import Any

import pytest

from space.errors import RequestError
from space.node.builds.layers import plain_tar


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
async def test_parts_without_end_in_which_there_is_nothing_are_given_up(tmp_path: Path, compress: Any) -> None:
    path = tmp_path / "layer"
    path.write_bytes(compress(b"") * 50_000)
    began = time.monotonic()
    with pytest.raises(RequestError) as refused:
        async for _ in plain_tar(path):
            pass
    assert refused.value.code == "layer-damaged"
    assert time.monotonic() - began < 5
    # An empty part here and there is how some programs end a file.
    path.write_bytes((compress(b"x") + compress(b"") * 3) * 5)
    assert b"".join([piece async for piece in plain_tar(path)]) == b"x" * 5
