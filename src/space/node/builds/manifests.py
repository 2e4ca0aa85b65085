"""What an image's manifests and configuration say, as far as a build needs it. JSON of bounded size from strangers."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from space.errors import RequestError

MANIFEST_BYTES_MAX = 1024 * 1024
CONFIG_BYTES_MAX = 2 * 1024 * 1024
LAYERS_MAX = 256
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_LISTS = {"application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json"}
_CONFIGS = {"application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json"}
_LAYER = re.compile(
    r"application/vnd\.(?:oci\.image\.layer\.v1\.tar(?:\+(?:gzip|zstd))?"
    r"|docker\.image\.rootfs\.diff\.tar(?:\.gzip|\.zstd)?)"
)


@dataclass(frozen=True, slots=True)
class Layer:
    """``digest`` names the blob, ``diff_id`` what it is once it is decompressed."""

    digest: str
    diff_id: str


@dataclass(frozen=True, slots=True)
class ImageContent:
    """One image: its layers, the lowest first, and what its configuration says of a container (``config``)."""

    layers: tuple[Layer, ...]
    config: dict[str, Any]


def choose_platform(raw: bytes) -> str | None:
    """Return the digest of the manifest for linux/amd64 in a list of manifests; None when it is no list."""
    manifest = _object(raw, "manifest")
    listed = manifest.get("manifests")
    if manifest.get("mediaType") not in _LISTS and not isinstance(listed, list):
        return None
    for one in listed if isinstance(listed, list) else []:
        platform = one.get("platform") if isinstance(one, dict) else None
        if isinstance(platform, dict) and (platform.get("os"), platform.get("architecture")) == ("linux", "amd64"):
            return _digest(one.get("digest"))
    raise _unsupported("The image has no variant for linux/amd64.")


def content_of(layout: Path, blobs: Path) -> ImageContent:
    """Read the one image of an OCI layout whose blobs are in ``blobs``."""
    listed = _object(_read(layout / "index.json", MANIFEST_BYTES_MAX), "index").get("manifests")
    if not isinstance(listed, list) or len(listed) != 1 or not isinstance(listed[0], dict):
        raise _unsupported("The archive must hold one image.")
    manifest = _object(_blob(blobs, _digest(listed[0].get("digest")), MANIFEST_BYTES_MAX), "manifest")
    described, layers = manifest.get("config"), manifest.get("layers")
    if not isinstance(described, dict) or described.get("mediaType") not in _CONFIGS or not isinstance(layers, list):
        raise _unsupported("That is no image of a container.")
    config = _object(_blob(blobs, _digest(described.get("digest")), CONFIG_BYTES_MAX), "configuration")
    if config.get("os", "linux") != "linux" or config.get("architecture", "amd64") != "amd64":
        raise _unsupported("The image is not for linux/amd64.")
    return ImageContent(_layers(layers, config), _container(config.get("config")))


def blob_path(blobs: Path, digest: str) -> Path:
    return blobs / "sha256" / digest.removeprefix("sha256:")


def _layers(layers: list[Any], config: dict[str, Any]) -> tuple[Layer, ...]:
    rootfs = config.get("rootfs")
    diff_ids = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
    if not isinstance(diff_ids, list) or len(diff_ids) != len(layers):
        raise _unsupported("The image's configuration does not name its layers.")
    if len(layers) > LAYERS_MAX:
        raise _unsupported(f"The image has more than {LAYERS_MAX} layers.")
    found: list[Layer] = []
    for layer, diff_id in zip(layers, diff_ids, strict=True):
        if not isinstance(layer, dict) or _LAYER.fullmatch(str(layer.get("mediaType"))) is None:
            raise _unsupported("The image has a layer of a kind that is not supported: foreign, or encrypted.")
        if layer.get("urls"):
            raise _unsupported("The image has a layer that is to be fetched from elsewhere.")
        found.append(Layer(_digest(layer.get("digest")), _digest(diff_id)))
    return tuple(found)


def _container(config: Any) -> dict[str, Any]:
    """Return what matters of a container's configuration, each of its kind; what is not is left out."""
    given = config if isinstance(config, dict) else {}
    env = [text for text in _texts(given.get("Env")) if "=" in text[1:]]
    ports = given.get("ExposedPorts")
    labels = given.get("Labels")
    return {
        "env": {name: value for name, _, value in (text.partition("=") for text in env)},
        "workdir": _text(given.get("WorkingDir")),
        "user": _text(given.get("User")),
        "shell": _texts(given.get("Shell")) or None,
        "entrypoint": _texts(given.get("Entrypoint")) or None,
        "cmd": _texts(given.get("Cmd")) or None,
        "ports": sorted(map(str, ports)) if isinstance(ports, dict) else [],
        "labels": {str(k): v for k, v in labels.items() if isinstance(v, str)} if isinstance(labels, dict) else {},
        "onbuild": _texts(given.get("OnBuild")),
    }


def _texts(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _blob(blobs: Path, digest: str, most: int) -> bytes:
    return _read(blob_path(blobs, digest), most)


def _read(path: Path, most: int) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(most + 1)
    except OSError as error:
        raise _unsupported("A part of the image is missing.") from error
    if len(raw) > most:
        raise _unsupported("The image's description is too large.")
    return raw


def _object(raw: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _unsupported(f"The image's {what} is not JSON.") from error
    if not isinstance(value, dict):
        raise _unsupported(f"The image's {what} is no object.")
    return value


def _digest(value: Any) -> str:
    if not isinstance(value, str) or _DIGEST.fullmatch(value) is None:
        raise _unsupported("The image names its parts by other digests than SHA-256.")
    return value


def _unsupported(why: str) -> RequestError:
    return RequestError(why, code="image-not-supported")
