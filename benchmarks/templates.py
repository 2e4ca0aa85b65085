"""Templates: how fast an image becomes one, beside the tools that only fetch and unpack; and first starts from it."""

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.raw import RawRunsc, run
from benchmarks.report import Report, Row
from benchmarks.suite import Api

ROUNDS = 3
PARTS = ("etc", "usr/bin", "usr/lib/python3", "usr/lib/python3.11", "usr/lib/x86_64-linux-gnu", "usr/share/nodejs")
BUILD_S = 300.0
MB = 1_000_000


def measure_templates(report: Report, api: Api, raw: RawRunsc) -> None:
    """Images of part of a Debian system, each with content of its own so that nothing of it is there already."""
    missing = [tool for tool in ("skopeo", "umoci", "docker-registry") if shutil.which(tool) is None]
    if missing:
        report.say(f"templates: not measured, for want of {', '.join(missing)}")
        return
    ours, raws, first, second = [], [], [], []
    with tempfile.TemporaryDirectory(prefix="space-bench-") as name, _registry(Path(name)) as registry:
        work = Path(name)
        for number in range(ROUNDS):
            size, reference = _push_image(raw.rootfs, work / f"image{number}", registry)
            raws.append(size / MB / _fetch_and_unpack(reference, work / "raw"))
            os.sync()
            began = time.perf_counter()
            digest = _build(api, f"bench-{secrets.token_hex(4)}", reference)
            ours.append(size / MB / (time.perf_counter() - began))
            first.append(_start(api, digest))
            second.append(_start(api, digest))
            api.http.delete(f"/v1/templates/{digest}").raise_for_status()
    report.add(Row("image to template", "MB/s", ours, raws, "skopeo copy + umoci unpack"))
    report.add(Row("create from a fresh template, first time", "ms", first))
    report.add(Row("create from a fresh template, second time", "ms", second))


@contextlib.contextmanager
def _registry(work: Path) -> Iterator[str]:
    """A real image registry on a port of this host."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = {
        "version": "0.1",
        "log": {"level": "error"},
        "storage": {"filesystem": {"rootdirectory": str(work / "registry")}},
        "http": {"addr": f"127.0.0.1:{port}", "secret": secrets.token_hex(16)},
    }
    path = work / "registry.json"
    path.write_text(json.dumps(config))  # JSON is YAML
    with subprocess.Popen(
        ["docker-registry", "serve", path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as one:
        try:
            deadline = time.monotonic() + 20
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                if time.monotonic() > deadline:
                    raise RuntimeError("the registry does not start")
                time.sleep(0.05)
            yield f"127.0.0.1:{port}"
        finally:
            one.kill()


def _push_image(rootfs: Path, directory: Path, registry: str) -> tuple[int, str]:
    """Make an image of one layer and push it; return the layer's plain bytes and the image's reference."""
    directory.mkdir()
    (directory / "unique").write_bytes(os.urandom(1024))
    layer = directory / "layer.tar"
    parts = [part for part in PARTS if (rootfs / part).exists()]
    run("tar", "-cf", str(layer), "-C", str(rootfs), *parts, "-C", str(directory), "unique")
    layout = f"{directory / 'layout'}"
    run("umoci", "init", f"--layout={layout}")
    run("umoci", "new", f"--image={layout}:x")
    run("umoci", "raw", "add-layer", f"--image={layout}:x", str(layer))
    reference = f"{registry}/bench:{directory.name}"
    run("skopeo", "copy", "--dest-tls-verify=false", f"oci:{layout}:x", f"docker://{reference}")
    return layer.stat().st_size, reference


def _fetch_and_unpack(reference: str, directory: Path) -> float:
    """Return the seconds that the tools take by themselves, as root, without a boundary."""
    directory.mkdir()
    took = run("skopeo", "copy", "--src-tls-verify=false", f"docker://{reference}", f"oci:{directory / 'layout'}:x")
    took += run("umoci", "unpack", f"--image={directory / 'layout'}:x", str(directory / "bundle"))
    shutil.rmtree(directory)
    return took


def _build(api: Api, name: str, reference: str) -> str:
    """Return the digest of the template that an image has become."""
    wanted = {"name": name, "source": {"kind": "image", "reference": reference}}
    answer = api.http.post("/v1/templates/builds", json=wanted).raise_for_status().json()
    build = answer.get("build", answer)["id"]
    deadline = time.monotonic() + BUILD_S
    while (shown := api.http.get(f"/v1/builds/{build}").raise_for_status().json())["state"] in {"pending", "running"}:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the build of {reference} does not end")
        time.sleep(0.05)
    if shown["state"] != "succeeded":
        raise RuntimeError(f"the build of {reference}: {shown}")
    return str(shown["digest"])


def _start(api: Api, digest: str) -> float:
    began = time.perf_counter()
    sandbox = api.create(template=digest)
    took = (time.perf_counter() - began) * 1000
    api.delete(sandbox)
    return took
