"""References, manifests, layers and what skopeo says: bytes from strangers, read in the node itself or its threads."""

import contextlib
import gzip
import hashlib
import json
import os
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest
import zstandard

from space.errors import Forbidden, InvalidRequest, RequestError
from space.node.builds import layers
from space.node.builds.children import Finished
from space.node.builds.layers import PIECE_BYTES, decompressed_file, plain_tar
from space.node.builds.manifests import choose_platform, content_of
from space.node.builds.packages import find_packages
from space.node.builds.references import check_trusted, parse_reference
from space.node.builds.refused_pulls import failure_of_registry
from tests.images import Image, Layout, compressed, tar_of

DIGEST = "sha256:" + "a" * 64
PLAIN = {"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": DIGEST}
MIB = 1024 * 1024

# --- references


@pytest.mark.parametrize(
    ("text", "host", "source"),
    [
        ("debian", None, "docker://debian:latest"),
        ("library/debian:12", None, "docker://library/debian:12"),
        ("r.example/a/b:c", "r.example", "docker://r.example/a/b:c"),
        ("R.Example:5000/a", "r.example:5000", "docker://r.example:5000/a:latest"),
        ("localhost/a", "localhost", "docker://localhost/a:latest"),
        ("127.0.0.1:5000/a", "127.0.0.1:5000", "docker://127.0.0.1:5000/a:latest"),
        ("[::1]:5000/a", "[::1]:5000", "docker://[::1]:5000/a:latest"),
        (f"r.example/a@{DIGEST}", "r.example", f"docker://r.example/a@{DIGEST}"),
        (f"r.example/a:tag@{DIGEST}", "r.example", f"docker://r.example/a@{DIGEST}"),
    ],
)
def test_a_reference_is_read_as_everybody_reads_it(text: str, host: str | None, source: str) -> None:
    reference = parse_reference(text)
    assert (reference.host, reference.source) == (host, source)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-option",
        "--src-tls-verify=false",
        "a b",
        "UPPER",
        "a:",
        "a:b:c",
        "a/../b",
        "/etc/passwd",
        "r.example/",
        "r.example//a",
        "user:password@r.example/a",
        "docker://a",
        "dir:/etc",
        "a@sha256:abc",
        "a@md5:abc",
        "r.example:port/a",
        "a\n--option",
        "a" * 600,
        "a" + "_" * 400 + "!",
        "ä",
    ],
)
def test_what_is_no_reference_never_comes_to_be_a_word_of_a_command_line(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_reference(text)
    assert caught.value.code == "invalid-reference"


def test_a_registry_is_trusted_by_its_exact_name_and_port() -> None:
    trusted = ("r.example", "R.example:5000")
    for good in ("r.example/a", "r.example:5000/a"):
        check_trusted(parse_reference(good), trusted)
    for bad in ("r.example:443/a", "r.example.evil/a", "x.r.example/a", "a", "localhost/r.example/a"):
        with pytest.raises(Forbidden) as caught:
            check_trusted(parse_reference(bad), trusted)
        assert caught.value.code == "registry-not-trusted"
    check_trusted(parse_reference("any.example/a"), None)


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("localhost", True),
        ("localhost:5", True),
        ("127.8.9.1:5", True),
        ("[::1]:5", True),
        ("127.0.0.1.example", False),
    ],
)
def test_only_this_hosts_own_addresses_may_be_spoken_with_in_the_clear(host: str, local: bool) -> None:
    assert parse_reference(f"{host}/a").on_loopback is local


@pytest.mark.parametrize(
    ("complaint", "code"),
    [
        ("reading manifest x in r/y: manifest unknown: manifest unknown", "image-not-found"),
        ("name unknown: repository name not known to registry", "image-not-found"),
        ("x509: certificate signed by unknown authority", "registry-untrusted-certificate"),
        ("x509: certificate is valid for a, not b", "registry-untrusted-certificate"),
        ("unauthorized: authentication required", "registry-unauthorised"),
        ("requested access to the resource is denied", "registry-unauthorised"),
        ("unable to retrieve auth token: invalid username/password: unauthorized", "registry-unauthorised"),
        ("dial tcp: lookup h: no such host", "registry-unreachable"),
        ("connect: connection refused", "registry-unreachable"),
        ("http: server gave HTTP response to HTTPS client", "registry-unreachable"),
        ("toomanyrequests: slow down", "registry-unreachable"),
        ("no image found in manifest list for architecture amd64", "image-not-supported"),
        ("blob digest does not match", "layer-damaged"),
        ("write /x: file too large", "image-too-large"),
        ("write /x: no space left on device", "host-full"),
        ("", "registry-unreachable"),
    ],
)
def test_what_skopeo_says_is_reduced_to_a_code_and_not_repeated(complaint: str, code: str) -> None:
    said = f"time=now level=fatal msg=secret-{complaint}"
    error = failure_of_registry(Finished(1, b"", said), parse_reference("r.example/y:x"))
    assert error.code == code
    assert "secret" not in error.message + json.dumps(error.details)


# --- manifests


def layout(tmp_path: Path, image: Image, **changes: Any) -> Path:
    one = Layout(tmp_path / "layout")
    return one.close(one.add(image, **changes))


def test_an_images_layers_and_configuration_are_read(tmp_path: Path) -> None:
    tar = tar_of({"a": "1"})
    config = {"Env": ["A=1=2", "bad", "=x"], "User": "u", "ExposedPorts": {"80/tcp": {}}, "Labels": {"l": "1", "m": 2}}
    path = layout(tmp_path, Image([tar], config))
    content = content_of(path, path / "blobs")
    assert content.layers[0].diff_id == f"sha256:{hashlib.sha256(tar).hexdigest()}"
    assert content.config["env"] == {"A": "1=2"}
    assert (content.config["user"], content.config["ports"], content.config["labels"]) == ("u", ["80/tcp"], {"l": "1"})


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": "x"},
        {"layers": []},
        {"layers": [{"mediaType": "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip", "digest": DIGEST}]},
        {"layers": [{**PLAIN, "urls": ["https://elsewhere.example/layer"]}]},
        {"layers": [{"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": "../../etc/passwd"}]},
        {"config": {"mediaType": "application/vnd.cncf.helm.config.v1+json", "digest": DIGEST}},
        {"config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": DIGEST}},
        {"config": None},
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = layout(tmp_path, Image([tar_of({"a": "1"})]), **changes)
    with pytest.raises(RequestError) as caught:
        content_of(path, path / "blobs")
    assert caught.value.code == "image-not-supported"


def test_a_configuration_of_any_kind_is_taken_or_refused_and_nothing_else(tmp_path: Path) -> None:
    odd = {"Env": "x", "User": 7, "WorkingDir": ["/"], "ExposedPorts": [], "Labels": "x", "Cmd": {"a": 1}, "Shell": [1]}
    path = layout(tmp_path, Image([tar_of({"a": "1"})], odd))
    config = content_of(path, path / "blobs").config
    assert (config["env"], config["user"], config["workdir"], config["cmd"], config["ports"]) == (
        {},
        None,
        None,
        None,
        [],
    )


def test_an_image_for_another_machine_is_refused(tmp_path: Path) -> None:
    path = layout(tmp_path, Image([tar_of({"a": "1"})], architecture="arm64"))
    with pytest.raises(RequestError, match="amd64"):
        content_of(path, path / "blobs")


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"[" * 100_000, b'{"manifests": [{}]}', b'{"manifests": [1]}'])
def test_a_list_of_manifests_that_makes_no_sense_is_refused(raw: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        choose_platform(raw)
    assert caught.value.code == "image-not-supported"


def test_a_single_manifest_is_no_list() -> None:
    assert choose_platform(b'{"layers": []}') is None


# --- layers

DATA = os.urandom(300_000) + bytes(3 * MIB) + os.urandom(1000)


def packed(data: bytes, how: str) -> bytes:
    match how:
        case "members":
            return gzip.compress(data[: len(data) // 2]) + gzip.compress(data[len(data) // 2 :]) + bytes(512)
        case "frames":
            one = zstandard.ZstdCompressor()
            return one.compress(data[: len(data) // 2]) + one.compress(data[len(data) // 2 :])
        case "bzip2":
            import bz2

            return bz2.compress(data)
        case "xz":
            import lzma

            return lzma.compress(data, preset=0)
        case _:
            return compressed(data, how)


@pytest.mark.parametrize("how", ["none", "gzip", "zstd", "members", "frames", "bzip2", "xz"])
async def test_whatever_it_was_packed_with_the_bytes_come_out_in_bounded_pieces(tmp_path: Path, how: str) -> None:
    path = tmp_path / "layer"
    path.write_bytes(packed(DATA, how))
    digest = f"sha256:{hashlib.sha256(DATA).hexdigest()}"
    pieces = [piece async for piece in plain_tar(path, digest=digest)]
    assert b"".join(pieces) == DATA
    assert max(map(len, pieces)) <= PIECE_BYTES


@pytest.mark.parametrize("how", ["gzip", "bzip2", "xz", "zstd"])
async def test_what_is_cut_off_or_another_than_said_is_refused(tmp_path: Path, how: str) -> None:
    path = tmp_path / "layer"
    digest = f"sha256:{hashlib.sha256(DATA).hexdigest()}"
    whole = packed(DATA, how)
    for data in (whole[: len(whole) // 2], packed(DATA[:-1], how), whole[:100] + b"damage" + whole[106:]):
        path.write_bytes(data)
        with pytest.raises(RequestError) as caught:
            _ = [piece async for piece in plain_tar(path, digest=digest)]
        assert caught.value.code == "layer-damaged"


@pytest.mark.parametrize("how", ["gzip", "zstd"])
def test_a_bomb_takes_no_memory(tmp_path: Path, how: str) -> None:
    path = tmp_path / "bomb"
    path.write_bytes(_bomb(how))
    size = 0
    tracemalloc.start()
    try:
        for piece in decompressed_file(path):
            size += len(piece)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size == 256 * MIB
    assert peak < 16 * MIB


def _bomb(how: str) -> bytes:
    zeros = bytes(MIB)
    if how == "gzip":
        packer: Any = zlib.compressobj(9, wbits=31)
    else:
        packer = zstandard.ZstdCompressor(level=3).compressobj()
    return b"".join(packer.compress(zeros) for _ in range(256)) + packer.flush()


async def test_a_reader_that_stops_early_leaves_no_thread_and_no_open_file(tmp_path: Path) -> None:
    path = tmp_path / "layer"
    path.write_bytes(bytes(8 * MIB))
    pieces = plain_tar(path)
    await anext(pieces)
    await pieces.aclose()
    assert str(path) not in open_files()


def open_files() -> set[str]:
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(str(link.readlink()))
    return found


def test_a_window_that_would_take_gigabytes_is_refused(tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=30, enable_ldm=True)
    path = tmp_path / "layer"
    with zstandard.ZstdCompressor(compression_params=parameters).stream_writer(path.open("wb")) as writer:
        writer.write(bytes(4 * MIB))
    with pytest.raises(layers.BROKEN):
        list(decompressed_file(path))


# --- packages


def test_the_packages_of_a_system_are_those_its_own_lists_name(tmp_path: Path) -> None:
    deb, apk = tmp_path / "deb", tmp_path / "apk"
    deb.write_text(
        "Package: a\nStatus: install ok installed\nVersion: 1\n\n"
        "Package: gone\nStatus: deinstall ok config-files\nVersion: 2\n\n"
        "Version: 3\n\n\xff\n"
    )
    apk.write_text("P:b\nV:2-r0\n\nC:x\n\nP:c\nV:3\n")
    python = ["requests-2.1.dist-info", "my-tool-1.0.egg-info", "other"]
    found = find_packages({"deb": str(deb), "apk": str(apk), "python": python})
    assert [(one["manager"], one["name"], one["version"]) for one in found] == [
        ("apk", "b", "2-r0"),
        ("apk", "c", "3"),
        ("deb", "a", "1"),
        ("python", "my-tool", "1.0"),
        ("python", "requests", "2.1"),
    ]
