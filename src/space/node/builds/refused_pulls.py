"""What skopeo's complaint means, as one of our errors. Pure.

What it says (it, its libraries, and the registries they speak with) is matched here and goes no further.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from space.errors import Forbidden, HostFull, NotFound, RequestError, SpaceError, Unavailable
from space.node.builds.children import Finished
from space.node.builds.references import ImageReference

_SIGXFSZ = -25


def failure_of_registry(finished: Finished, reference: ImageReference) -> SpaceError:
    """Return why an image could not be had of its registry."""
    if failure := failure_of_host(finished):
        return failure
    for pattern, explained in _SAID:
        if re.search(pattern, finished.complaint):
            return explained(reference)
    return _unreachable(reference)


def failure_of_host(finished: Finished) -> SpaceError | None:
    """Return what has to do with this host and its limits; None: nothing has."""
    if "no space left on device" in finished.complaint:
        return HostFull("The host has no room for the image.")
    if "file too large" in finished.complaint or finished.status == _SIGXFSZ:
        return too_large()
    return None


def too_large() -> RequestError:
    return RequestError(
        "The image is larger than this installation takes (build_image_mib_max).", code="image-too-large"
    )


def _where(reference: ImageReference) -> str:
    return reference.host or "the registry"


def _certificate(reference: ImageReference) -> SpaceError:
    return RequestError(
        f"The certificate of {_where(reference)} is signed by nobody that is known here: give its authority as ca_pem.",
        code="registry-untrusted-certificate",
        registry=reference.host,
    )


def _plain(reference: ImageReference) -> SpaceError:
    return Unavailable(
        f"{_where(reference)} speaks HTTP without TLS, which is taken from this host's own addresses alone.",
        code="registry-unreachable",
        registry=reference.host,
    )


def _unsupported(reference: ImageReference) -> SpaceError:
    return RequestError(
        f"{reference.text} is no image for linux/amd64 of a kind that is supported.", code="image-not-supported"
    )


def _missing(reference: ImageReference) -> SpaceError:
    return NotFound(f"There is no image {reference.text}.", code="image-not-found", registry=reference.host)


def _unauthorised(reference: ImageReference) -> SpaceError:
    return Forbidden(
        f"{_where(reference)} does not give {reference.text} to this user: with other credentials it may.",
        code="registry-unauthorised",
        registry=reference.host,
    )


def _damaged(reference: ImageReference) -> SpaceError:
    return RequestError(f"What {_where(reference)} sent is not what its manifest says.", code="layer-damaged")


def _unreachable(reference: ImageReference) -> SpaceError:
    hint = "" if reference.host else f" (A template of this installation is named space:{reference.path}.)"
    return Unavailable(
        f"{reference.text}: {_where(reference)} cannot be reached, or did not answer as a registry does.{hint}",
        code="registry-unreachable",
        registry=reference.host,
    )


_SAID: tuple[tuple[str, Callable[[ImageReference], SpaceError]], ...] = (
    (r"x509:|certificate signed by unknown authority|tls: failed to verify|bad certificate", _certificate),
    (r"HTTP response to HTTPS client", _plain),
    (
        r"no image found in (?:manifest list|image index)|unsupported (?:MIME type|manifest|schema)|encrypted",
        _unsupported,
    ),
    (r"(?i)manifest unknown|name unknown|repository name not known|404 \(Not Found\)|name invalid", _missing),
    (r"(?i)unauthorized|authentication required|invalid username/password|denied|403 \(forbidden\)", _unauthorised),
    (r"unable to retrieve auth token", _unauthorised),
    (r"(?i)no such host|connection (?:refused|reset)|timeout|deadline exceeded|unreachable|EOF$", _unreachable),
    (r"(?i)does not match|digest|size mismatch|corrupt", _damaged),
)
"""From the most telling to the least."""
